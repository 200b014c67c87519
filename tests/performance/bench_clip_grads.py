"""Times of the checkout's clip_grads.py and of the file that Megatron-Core came with, side by side.

    python tests/performance/bench_clip_grads.py [--json] [--rounds N]

Both files work in turn on the same tensors, in a process group of one; figures are medians. Host
time is until a call returns, GPU time is between two events around it. On lists of mixed dtypes,
on which the shipped file is wrong, it gets the same sizes all in bf16. Without a GPU, on which the
shipped file insists, small lists are compared with torch.nn.utils: that shows that the benchmark
works, and nothing else.
"""

import argparse
import contextlib
import gc
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import statistics
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.clip_grads_patch.target import Target, our_file  # noqa: E402

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
BF16, FP32 = torch.bfloat16, torch.float32
# (number of tensors, elements) in bf16, then the same for those that are fp32 where dtypes mix.
LISTS = {
    "A": [(295, 7168 * 2048), (7, 24 * 7168)],
    "B": [(300, 2**20), (7, 4096)],
    "C": [(3000, 4096), (300, 4096)],
    "D": [(97, 2**18), (1, 4096)],
    "300 x 1 Mi": [(300, 2**20), (0, 0)],
}
SMALL = {"A": 2**14, "B": 2**8, "C": 2**6, "D": 2**8, "300 x 1 Mi": 2**8}


def make_list(name: str, mixed: bool) -> list[torch.Tensor]:
    """Random gradients of the named list, all bf16 or the second part fp32."""
    (many, size), (few, other) = LISTS[name]
    if not ON_GPU:
        many, size, other = many // 10, size // SMALL[name], other // SMALL[name]
    grads = [torch.randn(size, device=DEVICE, dtype=BF16) for _ in range(many)]
    dtype = FP32 if mixed else BF16
    return grads + [torch.randn(other, device=DEVICE, dtype=dtype) for _ in range(few)]


def as_parameters(grads: list[torch.Tensor]) -> list[torch.nn.Parameter]:
    """Parameters that carry them as `.grad` and as `.decoupled_grad`."""
    params = [torch.nn.Parameter(torch.empty_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = param.decoupled_grad = grad
    return params


def load(path: Path, name: str):
    """The file at `path` as a module of its own beside Megatron-Core's."""
    location = importlib.machinery.SourceFileLoader(f"megatron.core.optimizer.{name}", str(path))
    spec = importlib.util.spec_from_loader(location.name, location)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class TorchInstead:
    """In the shipped file's place on a CPU."""

    @staticmethod
    def get_grad_norm_fp32(grads, norm_type=2):
        return torch.nn.utils.get_total_norm(grads, norm_type)

    @staticmethod
    def clip_grad_by_total_norm_fp32(params, max_norm, total_norm, _):
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, torch.as_tensor(total_norm))


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def time_in_turn(works: list, rounds: int) -> list[dict]:
    """Medians of host and GPU ms for each of the works, and the most bytes that it took more."""
    samples = [{"host": [], "gpu": [], "bytes": []} for _ in works]
    for number in range(rounds + 3):
        for work, sample in zip(works, samples, strict=True):
            synchronize()
            if ON_GPU:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
            began = time.perf_counter()
            work()
            host = 1e3 * (time.perf_counter() - began)
            gpu, extra = host, 0
            if ON_GPU:
                end.record()
                synchronize()
                gpu = start.elapsed_time(end)
                extra = torch.cuda.max_memory_allocated() - before
            if number >= 3:  # the first ones warm up
                sample["host"].append(host)
                sample["gpu"].append(gpu)
                sample["bytes"].append(extra)
    return [
        {
            "host": statistics.median(sample["host"]),
            "gpu": statistics.median(sample["gpu"]),
            "bytes": max(sample["bytes"]),
        }
        for sample in samples
    ]


class Table:
    """Rows of the comparison, printed as they come unless it is to be JSON."""

    def __init__(self, rounds: int, quiet: bool):
        self.rounds, self.quiet, self.rows = rounds, quiet, []
        self.say(f"{'work':58} {'ours ms':>9} {'other ms':>9} {'ratio':>6} {'at most':>8}")

    def say(self, line: str) -> None:
        if not self.quiet:
            print(line, flush=True)

    def add(self, work: str, ours, other, limits: dict) -> None:
        """Compare two callables; limits holds the ratio at most for host or gpu time."""
        gc.collect()
        gc.disable()  # as a collection would hit one of the two
        mine, theirs = time_in_turn([ours, other], self.rounds)
        gc.enable()
        for kind, limit in limits.items():
            ratio = mine[kind] / theirs[kind]
            row = {"work": f"{work}, {kind} time", "ours_ms": mine[kind], "other_ms": theirs[kind]}
            row |= {"ratio": ratio, "at_most": limit, "extra_bytes": mine["bytes"]}
            self.rows.append(row)
            self.say(
                f"{row['work']:58} {mine[kind]:9.3f} {theirs[kind]:9.3f} {ratio:6.3f} {limit:8.2f}"
                + (" MISSED" if ON_GPU and ratio > limit else "")
            )


def compare(table: Table, ours, shipped) -> None:
    """Norm and clip on lists A to D."""
    limits = {
        ("norm", "A", False): {"gpu": 0.92},
        ("norm", "A", True): {"gpu": 0.95},
        ("norm", "C", False): {"host": 0.45},
        ("norm", "C", True): {"host": 0.48},
        ("norm", "B", True): {"host": 0.60},
        ("norm", "D", True): {"host": 0.68},
        ("clip", "C", True): {"host": 0.42},
        ("clip", "B", True): {"host": 0.55},
        ("clip", "D", True): {"host": 0.52},
        ("clip", "A", True): {"gpu": 0.78},
    }
    total = torch.ones(1, device=DEVICE) if ours.multi_tensor_scale_tensor_impl else 1.0
    for (work, name, mixed), limit in limits.items():
        plain = make_list(name, mixed=False)
        grads = make_list(name, mixed=True) if mixed else plain
        label = f"{work}, list {name}, {'mixed' if mixed else 'one dtype'}"
        if work == "norm":
            table.add(
                label,
                partial(ours.get_grad_norm_fp32, grads),
                partial(shipped.get_grad_norm_fp32, plain),
                limit,
            )
        else:  # by 1.0 for a tensor norm and 0.999998 for a float: nothing fades away
            mine, theirs = as_parameters(grads), as_parameters(plain)
            table.add(
                label,
                partial(ours.clip_grad_by_total_norm_fp32, mine, 1.0, total, True),
                partial(shipped.clip_grad_by_total_norm_fp32, theirs, 1.0, total, True),
                limit,
            )
            del mine, theirs
        del plain, grads


def compare_other_norms(table: Table, ours, shipped) -> None:
    """inf- and p-norm, with the error of the latter."""
    grads = make_list("300 x 1 Mi", mixed=False)
    for norm_type, limit in ((float("inf"), 0.10), (3, 0.15)):
        table.add(
            f"norm {norm_type}, 300 x 1 Mi bf16",
            partial(ours.get_grad_norm_fp32, grads, norm_type),
            partial(shipped.get_grad_norm_fp32, grads, norm_type),
            {"host" if norm_type == float("inf") else "gpu": limit},
        )
    norms = torch.stack([torch.linalg.vector_norm(grad.double(), 3) for grad in grads])
    error = float(ours.get_grad_norm_fp32(grads, 3)) / torch.linalg.vector_norm(norms, 3) - 1.0
    table.rows[-1]["relative_error"] = abs(error.item())
    table.say(f"relative error of norm 3 against float64: {abs(error.item()):.1e}")


def compare_with_torch(table: Table, ours) -> None:
    """Norm and clip against the function of torch that does both."""
    for name in ("B", "C", "D"):
        params = as_parameters(make_list(name, mixed=True))
        grads = [param.grad for param in params]

        def norm_and_clip(params=params, grads=grads):
            norm = ours.get_grad_norm_fp32(grads)
            ours.clip_grad_by_total_norm_fp32(params, 1e9, norm, True)

        def by_torch(params=params):
            torch.nn.utils.clip_grad_norm_(params, 1e9, foreach=True)

        table.add(
            f"norm and clip, list {name}, mixed, other: torch",
            norm_and_clip,
            by_torch,
            {"host": 0.40},
        )


def show_growth(table: Table, ours) -> None:
    """Host time of ours by the number of tensors."""
    for count in (100, 1000, 10_000, 30_000) if ON_GPU else (10, 100):
        dtypes = (BF16,) * 9 + (FP32,)
        grads = [torch.randn(64, device=DEVICE).to(dtypes[i % 10]) for i in range(count)]
        params = as_parameters(grads)
        total = torch.ones(1, device=DEVICE) if ours.multi_tensor_scale_tensor_impl else 1.0
        norm, clip = time_in_turn(
            [
                partial(ours.get_grad_norm_fp32, grads),
                partial(ours.clip_grad_by_total_norm_fp32, params, 1.0, total, True),
            ],
            table.rounds,
        )
        row = {"tensors": count, "norm_us_each": 1e3 * norm["host"] / count}
        row["clip_us_each"] = 1e3 * clip["host"] / count
        table.rows.append(row)
        table.say(
            f"{count:6} tensors, every tenth fp32: host time of norm {row['norm_us_each']:.2f} us "
            f"a tensor, of clip {row['clip_us_each']:.2f} us"
        )
        del params, grads


def load_both(original: Path, suffix: str) -> tuple:
    """Our file and the shipped one; with a suffix as they are under TE 2.9 to 2.13."""
    name = "transformer_engine.pytorch.optimizers"
    patch = contextlib.nullcontext()
    if suffix and name in sys.modules:
        patch = mock.patch.object(sys.modules[name], "multi_tensor_scale_tensor")
    with patch:
        if suffix and name in sys.modules:
            del sys.modules[name].multi_tensor_scale_tensor
        ours = load(our_file(), "_ours" + suffix)
        return ours, load(original, "_shipped" + suffix) if ON_GPU else TorchInstead


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="a median is over so many")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args()

    warnings.simplefilter("ignore")
    target = Target(None)
    original = target.file if target.state == "upstream" else target.original
    if original is None and ON_GPU:
        sys.exit(
            "error: the installed Megatron-Core's own clip_grads.py is not there\n"
            "hint: install megatron-core anew, or put its file back by `revert`"
        )
    importlib.import_module("megatron.core.optimizer")
    torch.distributed.init_process_group(
        "nccl" if ON_GPU else "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    ours, shipped = load_both(original, "")
    kernels = "torch's operations"
    if ours.l2_norm_impl is not None:
        kernels = "Transformer Engine " + importlib.metadata.version("transformer-engine")
    machine = {
        "device": torch.cuda.get_device_name() if ON_GPU else "CPU",
        "torch": torch.__version__,
        "megatron_core": target.version,
        "kernels": kernels,
    }
    table = Table(options.rounds, options.json)
    table.say(str(machine))
    compare(table, ours, shipped)
    compare_other_norms(table, ours, shipped)

    old_ours, old_shipped = load_both(original, "_old")
    grads = make_list("B", mixed=False)
    table.add(
        "norm, list B, TE without multi_tensor_scale_tensor",
        partial(old_ours.get_grad_norm_fp32, grads),
        partial(old_shipped.get_grad_norm_fp32, grads),
        {"gpu": 0.20},
    )
    del grads
    compare_with_torch(table, ours)
    show_growth(table, ours)
    most = max(row.get("extra_bytes", 0) for row in table.rows)
    table.say(f"device memory that ours took beyond the gradients: at most {most} bytes")
    if options.json:
        print(json.dumps({"machine": machine, "rows": table.rows}, indent=1))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
