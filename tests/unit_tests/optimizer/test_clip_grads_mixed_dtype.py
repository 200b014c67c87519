# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

"""Gradient norm, clipping and zero count of bf16 and fp32 gradients in one list."""

import math
import os

import pytest
import torch

from megatron.core.optimizer.clip_grads import (
    clip_grad_by_total_norm_fp32,
    count_zeros_fp32,
    get_grad_norm_fp32,
)

BF16, FP32 = torch.bfloat16, torch.float32
ORDERS = [
    pytest.param((BF16, FP32, BF16), id="bf16_first"),
    pytest.param((FP32, BF16, FP32), id="fp32_first"),
]
# What a rank may hold while another holds something else.
KINDS = [(BF16, FP32), (BF16,), (), (FP32,)]


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory):
    """The default process group: one that exists, or else one for this file."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.getenv("LOCAL_RANK", "0")))
    if torch.distributed.is_initialized():
        yield torch.distributed.group.WORLD
        return
    settings = {}
    if "RANK" not in os.environ:
        store = tmp_path_factory.mktemp("group") / "store"
        settings = {"init_method": f"file://{store}", "rank": 0, "world_size": 1}
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, **settings)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def device() -> torch.device:
    """Where this rank's gradients are."""
    cuda = torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def make_grad(dtype: torch.dtype, seed: int, size: int = 4096) -> torch.Tensor:
    """Random view within a buffer that is wide enough to be misread as another dtype."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    buffer = torch.full((4 * size,), 64.0, dtype=dtype)
    buffer[size : 2 * size] = values
    return buffer.to(device())[size : 2 * size]


def norm64(grads: list[torch.Tensor]) -> float:
    """L2 norm in float64."""
    return math.sqrt(sum(grad.double().square().sum().item() for grad in grads))


def buffer_of(grad: torch.Tensor) -> torch.Tensor:
    """All elements of the memory that a gradient is a view of."""
    return torch.empty(0, dtype=grad.dtype, device=grad.device).set_(grad.untyped_storage())


def make_params(grads: list[torch.Tensor | None], attribute: str) -> list[torch.nn.Parameter]:
    """Parameters that have these gradients."""
    params = []
    for grad in grads:
        like = torch.empty(0, device=device()) if grad is None else grad
        params.append(torch.nn.Parameter(torch.empty_like(like)))
        setattr(params[-1], attribute, grad)
    return params


@pytest.mark.parametrize("order", ORDERS)
def test_norm_of_mixed_dtypes_matches_float64(order, group):
    """The norm is that of all elements of all ranks, whichever dtype comes first."""
    per_rank = [
        [make_grad(dtype, 100 * rank + i) for i, dtype in enumerate(order)]
        for rank in range(group.size())
    ]
    total_norm = get_grad_norm_fp32(per_rank[group.rank()], grad_stats_parallel_group=group)
    assert float(total_norm) == pytest.approx(norm64(sum(per_rank, [])), rel=1e-6)


def test_norm_over_ranks_with_different_dtypes_matches_float64(group):
    """Each rank takes part in the one all-reduce, also one without any gradient."""
    per_rank = [
        [make_grad(dtype, 100 * rank + i) for i, dtype in enumerate(KINDS[rank % len(KINDS)])]
        for rank in range(group.size())
    ]
    total_norm = get_grad_norm_fp32(per_rank[group.rank()], grad_stats_parallel_group=group)
    assert float(total_norm) == pytest.approx(norm64(sum(per_rank, [])), rel=1e-6)


@pytest.mark.parametrize("norm_type", [2, math.inf])
def test_norm_of_empty_grads_is_zero(norm_type, group):
    """Zero-element gradients, as uneven shards make them, are as if they were not there."""
    empty = [torch.empty(0, dtype=dtype, device=device()) for dtype in (BF16, FP32)]
    assert float(get_grad_norm_fp32(empty, norm_type, group)) == 0.0
    grad = make_grad(BF16, 1)
    total_norm = float(get_grad_norm_fp32(empty + [grad] + empty, norm_type, group))
    expected = grad.double().abs().max().item()
    if norm_type == 2:
        expected = norm64([grad] * group.size())
    assert total_norm == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("norm_type", [2, math.inf])
def test_norm_with_nan_in_one_dtype_is_nan(norm_type, group):
    """Skipping a step depends on seeing it, in whichever group and on whichever rank it is."""
    grads = [make_grad(BF16, 1), make_grad(FP32, 2)]
    if group.rank() == group.size() - 1:
        grads[1][5] = math.nan
    assert math.isnan(get_grad_norm_fp32(grads, norm_type, group))


def test_norm_of_strided_view_leaves_out_the_gap(group):
    """The kernels know an address and a size, no strides."""
    buffer = make_grad(FP32, 3, size=64 * 128).view(64, 128)
    grads = [make_grad(BF16, 4), buffer[:, :64]]
    total_norm = get_grad_norm_fp32(grads, grad_stats_parallel_group=group)
    assert float(total_norm) == pytest.approx(norm64(grads * group.size()), rel=1e-6)


@pytest.mark.parametrize("form", ["float", "tensor"])
@pytest.mark.parametrize("attribute", ["grad", "decoupled_grad"])
def test_clip_of_mixed_dtypes_scales_every_element(attribute, form):
    """One coefficient for all; the norm becomes max_norm; nothing around the views changes."""
    grads = [make_grad(dtype, i) for i, dtype in enumerate((FP32, BF16, FP32, BF16))]
    before, max_norm = [grad.clone() for grad in grads], 2.0
    around = [buffer_of(grad).clone() for grad in grads]
    total_norm = norm64(grads)
    assert total_norm > max_norm
    if form == "tensor":
        total_norm = torch.tensor([total_norm], device=device())
    params = make_params(grads + [None], attribute)
    clip_grad_by_total_norm_fp32(params, max_norm, total_norm, attribute == "decoupled_grad")
    coeff = torch.as_tensor(max_norm / (total_norm + 1.0e-6), dtype=FP32, device=device())
    for grad, old, buffer in zip(grads, before, around, strict=True):
        assert torch.equal(grad, (old.float() * coeff).to(grad.dtype))
        buffer[grad.numel() : 2 * grad.numel()] = grad
        assert torch.equal(buffer_of(grad), buffer)
    assert norm64(grads) == pytest.approx(max_norm, rel=1e-3)  # bf16 rounds by up to 2^-9


def test_count_zeros_of_mixed_dtypes_is_exact(group):
    """Zeros of both dtypes on all ranks."""
    grads = [make_grad(BF16, 1), make_grad(FP32, 2)]
    for grad in grads:
        grad[grad == 0] = 1.0
        grad[: 10 + group.rank()] = 0.0
    params = make_params(grads + [None], "decoupled_grad")
    for param in params:
        param.tensor_model_parallel = param.is_gtp_weight_remat = True
    zeros = count_zeros_fp32(params, group, use_decoupled_grad=True)
    assert zeros == 2 * sum(10 + rank for rank in range(group.size()))
