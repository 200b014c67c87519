"""Train a small Megatron-Core model of bf16 and natively fp32 parameters, checking every norm.

On a GPU with Transformer Engine: a GPT with Megatron's DDP, distributed optimizer and
precision-aware optimizer. Elsewhere: Megatron's embedding and MLP on the CPU.
"""

import collections
import importlib.machinery
import importlib.util
import logging
import math
import subprocess
import sys
import warnings

import torch

from .target import Refusal, Target, transformer_engine

MODULE = "megatron.core.optimizer.clip_grads"
MAX_NORM = 0.1
MAX_ERROR = 1e-5


class UseFile:
    """Import hook that takes clip_grads from a given file, for a process of its own."""

    def __init__(self, path: str):
        self.path = path

    def find_spec(self, name: str, path=None, target=None):
        """Part of the import protocol."""
        if name == MODULE:
            loader = importlib.machinery.SourceFileLoader(name, self.path)
            return importlib.util.spec_from_file_location(name, self.path, loader=loader)
        return None


def _norm64(grads: list[torch.Tensor]) -> float:
    return math.sqrt(sum(grad.double().square().sum().item() for grad in grads))


class Record:
    """Stands before the two functions that a step calls, and prints a row for each step."""

    def __init__(self, clip_grads):
        self.get_norm = clip_grads.get_grad_norm_fp32
        self.clip = clip_grads.clip_grad_by_total_norm_fp32
        self.worst = 0.0
        self.rows = []
        self.groups, self.norm, self.reference, self.after = {}, math.nan, math.nan, math.nan
        print("step      loss        norm  float64 reference  rel. error  clipped to  groups")

    def get_grad_norm_fp32(self, grads, *args, **kwargs):
        """Like the real one."""
        counts = collections.Counter(str(grad.dtype) for grad in grads)
        self.groups, self.reference = dict(counts), _norm64(grads)
        norm = self.get_norm(grads, *args, **kwargs)
        self.norm = float(norm)
        return norm

    def clip_grad_by_total_norm_fp32(self, parameters, *args, **kwargs):
        """Like the real one."""
        self.clip(parameters, *args, **kwargs)
        grads = [getattr(param, "decoupled_grad", param.grad) for param in parameters]
        local = [getattr(grad, "_local_tensor", grad) for grad in grads if grad is not None]
        self.after = _norm64(local)

    def row(self, step: int, loss: torch.Tensor) -> None:
        """Print what one step did."""
        error = abs(self.norm - self.reference) / (self.reference or 1.0)
        self.rows.append((loss.item(), self.norm, self.reference, self.after, self.groups))
        # A NaN compares as false. What is clipped is rounded to bf16, by up to 2^-9 an element.
        bound = min(self.reference, MAX_NORM)
        clipped = abs(self.after - bound) <= 1e-2 * bound
        right = error <= MAX_ERROR and clipped
        self.worst = max(self.worst, error) if right else math.inf
        print(
            f"{step:4}  {loss.item():8.4f}  {self.norm:10.6f}  {self.reference:17.6f}  "
            f"{error:10.1e}  {self.after:10.6f}  {self.groups}",
            flush=True,
        )


def _initialize(backend: str) -> None:
    """A process group of one, and Megatron's view of it."""
    from megatron.core import parallel_state

    torch.distributed.init_process_group(
        backend, store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    torch.manual_seed(1)


def train_on_cpu(steps: int, record: Record) -> None:
    """Embedding, then x + alpha * MLP(x) + bias with alpha and bias natively fp32; SGD."""
    from megatron.core.models.common.embeddings.language_model_embedding import (
        LanguageModelEmbedding,
    )
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=64,
        num_attention_heads=4,
        hidden_dropout=0.0,
        init_method_std=0.1,
        use_cpu_initialization=True,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    model = torch.nn.Module()
    model.embedding = LanguageModelEmbedding(config, vocab_size=128, max_sequence_length=32)
    model.mlp = MLP(config, linears)
    model.bfloat16()
    model.alpha = torch.nn.Parameter(torch.ones(64))
    model.bias = torch.nn.Parameter(torch.zeros(64))
    parameters = list(model.parameters())
    masters = [param.detach().float() for param in parameters]

    tokens = torch.randint(128, (4, 33))
    positions = torch.arange(32).expand(4, 32)
    for step in range(1, steps + 1):
        hidden = model.embedding(tokens[:, :-1], positions)
        out, out_bias = model.mlp(hidden)
        hidden = hidden.float() + model.alpha * (out + out_bias).float() + model.bias
        logits = hidden @ model.embedding.word_embeddings.weight.float().t()
        loss = torch.nn.functional.cross_entropy(
            logits.transpose(0, 1).reshape(-1, 128), tokens[:, 1:].reshape(-1)
        )
        loss.backward()
        for param in parameters:  # as the precision-aware optimizer leaves them
            param.decoupled_grad, param.grad = param.grad, None
        norm = record.get_grad_norm_fp32([param.decoupled_grad for param in parameters])
        record.clip_grad_by_total_norm_fp32(parameters, MAX_NORM, norm, use_decoupled_grad=True)
        with torch.no_grad():
            for param, master in zip(parameters, masters, strict=True):
                param.copy_(master.sub_(param.decoupled_grad.float(), alpha=0.5))
        record.row(step, loss)


def train_on_gpu(
    steps: int, record: Record, native_fp32: bool = True, fsdp: bool = False, **more
) -> None:
    """A GPT whose block output is scaled by natively fp32 parameters; Megatron's own step.

    `more` are further settings of the optimizer; `fsdp` wraps the model by Megatron-FSDP.
    """
    import megatron.core.optimizer.optimizer as optimizer_module
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    warnings.simplefilter("ignore")  # TE turns its own on when it is imported
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=256,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_backend=AttnBackend.unfused,  # the fused ones depend on cuDNN's version
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
    )
    layers = get_gpt_layer_with_transformer_engine_spec()
    gpt = GPTModel(config, layers, vocab_size=1024, max_sequence_length=64).cuda().bfloat16()
    if native_fp32:
        gpt.decoder.alpha = torch.nn.Parameter(torch.ones(256, device="cuda"))
        gpt.decoder.bias = torch.nn.Parameter(torch.zeros(256, device="cuda"))
        gpt.decoder.register_forward_hook(
            lambda block, _, hidden: (block.alpha * hidden.float() + block.bias).to(hidden.dtype)
        )
    wrap, wrapping = DistributedDataParallel, DistributedDataParallelConfig()
    wrapping.use_distributed_optimizer = True
    if fsdp:
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

        wrap, wrapping.use_megatron_fsdp = FullyShardedDataParallel, True
        wrapping.megatron_fsdp_use_decoupled_grad = True  # releases that lack it ignore it
        wrapping.data_parallel_sharding_strategy = "optim_grads_params"
    model = wrap(config, wrapping, gpt)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        bf16=True,
        params_dtype=torch.bfloat16,
        clip_grad=MAX_NORM,
        use_distributed_optimizer=True,
        use_precision_aware_optimizer=True,
        main_grads_dtype=torch.bfloat16,
        **more,
    )
    optimizer = get_megatron_optimizer(settings, [model])
    optimizer_module.get_grad_norm_fp32 = record.get_grad_norm_fp32
    optimizer_module.clip_grad_by_total_norm_fp32 = record.clip_grad_by_total_norm_fp32

    tokens = torch.randint(1024, (4, 65), device="cuda")
    positions = torch.arange(64, device="cuda").expand(4, 64)
    for step in range(1, steps + 1):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:].contiguous()).mean()
        loss.backward()
        finalize_model_grads([model])
        optimizer.step()
        record.row(step, loss)


def load(original: str | None = None):
    """Import clip_grads, from the file `original` if one is named, and name what it runs on."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if original:
        sys.dont_write_bytecode = True
        sys.meta_path.insert(0, UseFile(original))
    try:
        clip_grads = importlib.import_module(MODULE)
    except Exception as error:  # a broken install may raise anything
        raise Refusal(
            f"the installed Megatron-Core does not import: {error!r}",
            "mend that first; the other verbs work without it",
        ) from error
    on_gpu = torch.cuda.is_available() and "transformer_engine.pytorch.optimizers" in sys.modules
    if on_gpu:
        version = transformer_engine()["version"]
        print(f"kernels: Transformer Engine {version} on {torch.cuda.get_device_name()}")
    else:
        print("kernels: none; torch's operations on the CPU, so this says nothing about a GPU")
    print(f"file: {clip_grads.__file__}; torch {torch.__version__}", flush=True)
    _initialize("nccl" if on_gpu else "gloo")
    return clip_grads, on_gpu


def run(steps: int, original: str | None = None) -> int:
    """Train and print; `original` takes clip_grads from that file. Returns the exit code."""
    clip_grads, on_gpu = load(original)
    record = Record(clip_grads)
    (train_on_gpu if on_gpu else train_on_cpu)(steps, record)
    torch.distributed.destroy_process_group()
    print(f"largest relative error: {record.worst:.1e} (allowed {MAX_ERROR:.0e})", flush=True)
    if on_gpu and not original:
        _run_original(min(steps, 3))
    return 0 if record.worst <= MAX_ERROR else 1


def _run_original(steps: int) -> None:
    """The same with the file that ours replaced, in a process that may die of it."""
    kept = Target(None).original
    if kept is None:
        print("\nthe file that ours replaced is not kept: nothing to compare with")
        return
    print("\nthe same with the file that ours replaced, in a process of its own:", flush=True)
    command = [sys.executable, "-m", "megatron.clip_grads_patch.demo", str(steps), str(kept)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
    print(f"it ended with exit code {done.returncode}", *last, sep="; ")


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), sys.argv[2]))
