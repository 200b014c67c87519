"""The stand-in gives the numbers that TE 2.17.0 gave on an H200, and today's file fails on it."""

import importlib.util
import sys

import pytest
import torch

from tests.unit_tests.optimizer import te_stand_in as te

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def norm(tensors):
    """One launch over a list, as it is."""
    return te.Applier()(te.l2norm, torch.zeros(1, dtype=torch.int), [tensors], False)[0].item()


def padded(values):
    """The same values as a view of a buffer with zeros behind them."""
    buffer = torch.zeros(4 * values.numel(), dtype=values.dtype)
    buffer[: values.numel()] = values
    return buffer[: values.numel()]


def sixty_fourths(dtype):
    return torch.full((128,), 1 / 64, dtype=dtype)


@pytest.mark.parametrize(
    "tensors, measured",
    [
        pytest.param([sixty_fourths(BF16), sixty_fourths(FP32)], 0.21650634, id="bf16-fp32"),
        pytest.param(
            [sixty_fourths(FP32), padded(sixty_fourths(BF16))], 0.21663967, id="fp32-padded_bf16"
        ),
        pytest.param(
            [torch.ones(128, dtype=FP16), torch.ones(128, dtype=BF16)], 24.0416, id="fp16-bf16"
        ),
        pytest.param([torch.ones(1000), torch.ones(0)], 0.0, id="empty_last"),
        pytest.param([torch.ones(1000), torch.ones(0), torch.ones(24)], 32.0, id="empty_within"),
    ],
)
def test_l2norm_of_one_launch_is_what_the_gpu_measured(tensors, measured):
    """The stand-in is wrong in the same way and by the same amount as the real kernel."""
    assert norm(tensors) == pytest.approx(measured, rel=2e-5)


def test_scale_of_one_mixed_launch_leaves_half_of_the_wider_tensor():
    """As measured: half the fp32 elements behind bf16 ones stay 1.0."""
    narrow, wide = torch.ones(128, dtype=BF16), torch.ones(128)
    lists = [[narrow, wide], [narrow, wide]]
    te.Applier()(te.scale, torch.zeros(1, dtype=torch.int), lists, 0.5)
    assert (narrow == 0.5).all() and (wide == 1.0).sum() == 64


@pytest.mark.parametrize(
    "tensors, error",
    [
        pytest.param([], AssertionError, id="empty_list"),
        pytest.param([torch.ones(64, 128)[:, :64]], AssertionError, id="strided"),
        pytest.param([torch.ones(8), torch.ones(8, dtype=BF16)], te.IllegalMemoryAccess, id="past"),
        pytest.param(
            [torch.ones(4)] * 109 + [torch.ones(0)] + [torch.ones(4)] * 20,
            te.IllegalMemoryAccess,
            id="empty_in_the_110th_place",
        ),
    ],
)
def test_l2norm_outside_its_contract_fails(tensors, error):
    """What may fault on a GPU is an error here."""
    with pytest.raises(error):
        norm(tensors)


@pytest.fixture
def shipped(shipped_source, monkeypatch):
    """Megatron-Core's own file, working on the CPU with the stand-in's kernels."""
    source = shipped_source.replace("'cuda'", "'cpu'").replace("cuda.FloatTensor", "FloatTensor")
    spec = importlib.util.spec_from_loader("megatron.core.optimizer._shipped", loader=None)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    exec(compile(source, "shipped clip_grads.py", "exec"), module.__dict__)
    module.multi_tensor_applier, module.l2_norm_impl = te.Applier(), te.l2norm
    # With both, releases from 0.17 on return a tensor.
    module.multi_tensor_scale_impl = te.scale
    module.multi_tensor_scale_tensor_impl = te.scale_tensor
    return module


def test_shipped_norm_of_a_mixed_list_is_wrong(shipped, world):
    """The bug, on today's file: a wrong number and nothing said."""
    grads = [sixty_fourths(BF16), sixty_fourths(FP32)]
    assert float(shipped.get_grad_norm_fp32(grads)) == pytest.approx(0.21650634)


def test_shipped_norm_of_fp32_before_bf16_reads_out_of_bounds(shipped, world):
    """The bug, on today's file: what ends a job with an illegal memory access."""
    with pytest.raises(te.IllegalMemoryAccess):
        shipped.get_grad_norm_fp32([sixty_fourths(FP32), sixty_fourths(BF16)])


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=["fp32", "bf16", "fp16"])
def test_norm_of_one_dtype_has_the_bits_of_the_shipped_file(
    shipped, clip_grads, world, stand_in, dtype
):
    """A list of one dtype gives, with the same kernels, the same bits as today."""
    generator = torch.Generator().manual_seed(7)
    sizes = torch.randint(1, 3000, (150,), generator=generator).tolist() + [70000]
    grads = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    ours, theirs = clip_grads.get_grad_norm_fp32(grads), shipped.get_grad_norm_fp32(grads)
    assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))
    # The comparison can fail: the order of the list shows in the last bits of some dtype's sum.
    assert any(
        clip_grads.get_grad_norm_fp32(grads[shift:] + grads[:shift]) != ours for shift in range(50)
    )
