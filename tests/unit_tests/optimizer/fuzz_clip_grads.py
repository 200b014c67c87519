"""Random gradient lists against float64: norm, clip, and every byte around the gradients.

    python tests/unit_tests/optimizer/fuzz_clip_grads.py --lists 2000 [--seed N]

On a GPU with Transformer Engine it runs TE's kernels, else torch's operations on the CPU. It runs
the checkout's clip_grads.py in the installed Megatron-Core; exit code 1 after a mismatch.
"""

import argparse
import importlib
import math
import random
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from megatron.clip_grads_patch.demo import MODULE, UseFile  # noqa: E402
from megatron.clip_grads_patch.target import our_file  # noqa: E402

DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64)


def draw_list(draw: random.Random, largest: int, device: str) -> list[tuple]:
    """(buffer, view) pairs: the views are the gradients."""
    pairs = []
    dtypes = draw.sample(DTYPES, draw.randint(1, 4)) + [torch.bfloat16] * draw.randint(0, 2)
    for _ in range(draw.randint(0, 12 if draw.random() < 0.9 else 250)):
        size = int(largest ** draw.random()) if draw.random() < 0.9 else draw.randint(0, 3)
        offset, dtype = draw.randint(0, 3), draw.choice(dtypes)
        scale = 10.0 ** draw.uniform(-3, 2)
        generator = torch.Generator(device).manual_seed(draw.getrandbits(40))
        buffer = torch.randn(2 * size + 8, generator=generator, device=device) * scale
        buffer = buffer.to(dtype)
        view = buffer[offset : offset + size]
        layout = draw.random()
        if layout < 0.1:
            view = buffer[offset : offset + 2 * size : 2]
        elif layout < 0.2 and size >= 6:
            view = buffer[: size // 6 * 6].view(-1, 6)[:, 1:5]
        elif layout < 0.3 and size >= 6:
            view = buffer[: size // 6 * 6].view(6, -1).t()
        pairs.append((buffer, view))
    return pairs


def check_list(clip_grads, draw: random.Random, pairs: list[tuple], device: str) -> str | None:
    """Compare one list by norm and clip; the mismatch in words, or None."""
    grads = [view for _, view in pairs]
    norm_type = draw.choice([2, 2, 2, math.inf, 3, 1])
    norms = [torch.linalg.vector_norm(grad.double(), norm_type) for grad in grads if grad.numel()]
    expected = torch.linalg.vector_norm(torch.stack(norms), norm_type).item() if norms else 0.0
    norm = clip_grads.get_grad_norm_fp32(grads, norm_type)
    if not abs(float(norm) - expected) <= 1e-6 * expected:
        return f"norm {float(norm)!r} is not {expected!r} (norm_type {norm_type})"

    total_norm = expected if draw.random() < 0.5 else torch.full((1,), expected, device=device)
    max_norm = draw.uniform(0.1, 1.5) * expected
    coeff = max_norm / (total_norm + 1.0e-6)
    coeff = coeff.clamp(max=1.0) if torch.is_tensor(coeff) else min(coeff, 1.0)
    coeff = torch.as_tensor(coeff, dtype=torch.float32, device=device)
    wanted = []
    for buffer, view in pairs:
        copy = buffer.clone()
        target = copy.as_strided(view.size(), view.stride(), view.storage_offset())
        wide = view.double() if view.dtype == torch.float64 else view.float()
        target.copy_((wide * coeff.to(wide.dtype)).to(view.dtype))
        wanted.append(copy)
    params = [torch.nn.Parameter(torch.empty(0, device=device)) for _ in grads]
    for param, grad in zip(params, grads, strict=True):
        param.decoupled_grad = grad
    clip_grads.clip_grad_by_total_norm_fp32(params, max_norm, total_norm, True)
    for position, ((buffer, _), copy) in enumerate(zip(pairs, wanted, strict=True)):
        if not torch.equal(buffer.view(torch.uint8), copy.view(torch.uint8)):
            return f"clipping of gradient {position}, {buffer.dtype}"
    return None


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lists", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=None, help="default: the time")
    parser.add_argument("--largest", type=int, default=1_000_000, help="elements of a gradient")
    options = parser.parse_args()
    seed = int(time.time()) if options.seed is None else options.seed
    device = "cuda" if torch.cuda.is_available() else "cpu"

    warnings.simplefilter("ignore")
    sys.meta_path.insert(0, UseFile(str(our_file())))
    clip_grads = importlib.import_module(MODULE)
    torch.distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{tempfile.mkdtemp()}/store",
        rank=0,
        world_size=1,
    )
    kernels = "Transformer Engine's kernels" if clip_grads.l2_norm_impl else "torch's operations"
    print(f"{options.lists} lists, seed {seed}, {kernels} on {device}", flush=True)
    mismatches = 0
    for number in range(options.lists):
        draw = random.Random(f"{seed}/{number}")
        pairs = draw_list(draw, options.largest, device)
        mismatch = check_list(clip_grads, draw, pairs, device)
        if mismatch:
            mismatches += 1
            print(f"list {number} of seed {seed}: {mismatch}", flush=True)
    print(f"{mismatches} mismatches")
    torch.distributed.destroy_process_group()
    return int(mismatches > 0)


if __name__ == "__main__":
    sys.exit(main())
