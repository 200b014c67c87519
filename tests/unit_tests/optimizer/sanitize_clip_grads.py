"""A short norm and clip of a mixed list, for compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \\
        python tests/unit_tests/optimizer/sanitize_clip_grads.py [ORIGINAL]

Without an argument it runs the checkout's clip_grads.py, else the file that is named.
"""

import importlib
import sys
import tempfile
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from megatron.clip_grads_patch.demo import MODULE, UseFile  # noqa: E402
from megatron.clip_grads_patch.target import our_file  # noqa: E402

warnings.simplefilter("ignore")
path = sys.argv[1] if len(sys.argv) > 1 else str(our_file())
sys.meta_path.insert(0, UseFile(path))
clip_grads = importlib.import_module(MODULE)
torch.distributed.init_process_group(
    # NCCL probes for kernels that the device lacks, which the sanitizer reports as API errors.
    "gloo",
    init_method=f"file://{tempfile.mkdtemp()}/store",
    rank=0,
    world_size=1,
)
grads = [
    torch.full((4096,), 1 / 64, dtype=dtype, device="cuda")
    for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16)
]
params = [torch.nn.Parameter(torch.empty(0, device="cuda")) for _ in grads]
for param, grad in zip(params, grads, strict=True):
    param.decoupled_grad = grad
norm = clip_grads.get_grad_norm_fp32(grads)
print(f"{path}: norm {float(norm)}, in truth 2.0", flush=True)
for total_norm in (norm, float(norm)):
    clip_grads.clip_grad_by_total_norm_fp32(params, 0.5, total_norm, use_decoupled_grad=True)
torch.cuda.synchronize()
print([grad.double().mean().item() for grad in grads])
torch.distributed.destroy_process_group()
