"""The table of promised behaviour, on the CPU: by torch's operations and by the TE stand-in."""

import importlib.util
import itertools
import logging
import math
import os
import subprocess
import sys
import types
import warnings

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.clip_grads_patch.demo import MODULE
from megatron.clip_grads_patch.target import our_file
from tests.unit_tests.optimizer import te_stand_in as te

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
INF, NAN = math.inf, math.nan
NORM_TYPES = [2, INF, 3, 1, 2.5]


@pytest.fixture(params=["torch", "stand_in"])
def kernels(request, world):
    """The launches of the stand-in, or None for torch's operations."""
    return request.getfixturevalue("stand_in") if request.param == "stand_in" else None


@pytest.fixture(params=[False, True], ids=["float_norm", "tensor_norm"])
def norm_as_tensor(request, clip_grads, stand_in, world, monkeypatch):
    """The stand-in in a release from before 0.17 and in one of later."""
    monkeypatch.setattr(clip_grads, "_TENSOR_NORM_EXPECTED", request.param)
    return request.param


def random(shape, dtype=FP32, seed=0, scale=1.0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return values.to(dtype)


def norm64(grads, norm_type=2.0):
    """The reference: all elements as one float64 vector."""
    flat = [grad.double().flatten() for grad in grads if grad.numel()]
    return torch.linalg.vector_norm(torch.cat(flat), float(norm_type)).item() if flat else 0.0


def parameters(grads):
    made = [torch.nn.Parameter(torch.zeros(())) for _ in grads]
    for param, grad in zip(made, grads, strict=True):
        param.decoupled_grad = grad
    return made


class Ops(TorchDispatchMode):
    """Records each operation of torch."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


# --- the norm


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("order", list(itertools.permutations((BF16, FP32, FP16))), ids=str)
def test_norm_of_mixed_dtypes_is_that_of_float64(clip_grads, kernels, order, norm_type):
    """In any order, by any norm."""
    # Each dtype has a tenth of the norm or more; the lists are of unequal lengths.
    grads = [random((400 + 7 * i, 31), dtype, seed=i) for i, dtype in enumerate(order * 2 + order)]
    grads += [random((90001,), order[0], seed=99)]
    norm = clip_grads.get_grad_norm_fp32(grads, norm_type)
    assert float(norm) == pytest.approx(norm64(grads, norm_type), rel=1e-6)
    for dtype in order:
        without = [grad for grad in grads if grad.dtype != dtype]
        assert (
            float(norm) != pytest.approx(norm64(without, norm_type), rel=1e-6) or norm_type == INF
        )
    if kernels and norm_type == 2:
        assert [set(dtypes) for _, dtypes in kernels.launches] == [{dtype} for dtype in order]


def test_norm_of_many_small_elements_does_not_lose_them(clip_grads, kernels):
    """A plain fp32 sum of three million squares is off by more than 1e-6 on a CPU."""
    grads = [random((3_000_000,), seed=1).abs() + 0.5]
    assert float(clip_grads.get_grad_norm_fp32(grads)) == pytest.approx(norm64(grads), rel=1e-6)


@pytest.mark.parametrize("norm_type", [2, INF, 3])
@pytest.mark.parametrize(
    "grads",
    [[], [torch.empty(0)], [torch.empty(0, dtype=BF16), torch.empty(3, 0, dtype=FP64)]],
    ids=["none", "empty", "empties"],
)
def test_norm_without_elements_is_zero_after_one_all_reduce(
    clip_grads, kernels, monkeypatch, grads, norm_type
):
    """A rank that holds nothing still does what the others do."""
    calls = []
    real = torch.distributed.all_reduce
    monkeypatch.setattr(
        torch.distributed,
        "all_reduce",
        lambda tensor, op=None, group=None: (calls.append(group), real(tensor, op=op, group=group)),
    )
    group = torch.distributed.group.WORLD
    assert float(clip_grads.get_grad_norm_fp32(grads, norm_type, group)) == 0.0
    assert calls == [group]
    assert not kernels or kernels.launches == []


@pytest.mark.parametrize("norm_type", [2, INF, 3])
@pytest.mark.parametrize("place", [0, 1, 63, 109, 129])
def test_empty_grads_are_as_if_not_there(clip_grads, kernels, place, norm_type):
    """Neither the norm nor one bit of it depends on them, wherever they are."""
    full = [random((50 + i,), BF16 if i % 3 else FP32, seed=i) for i in range(129)]
    with_empty = full[:place] + [torch.empty(0, dtype=BF16), torch.empty(0)] + full[place:]
    expected = clip_grads.get_grad_norm_fp32(full, norm_type)
    got = clip_grads.get_grad_norm_fp32(with_empty, norm_type)
    assert torch.equal(torch.as_tensor(got), torch.as_tensor(expected))
    assert float(got) == pytest.approx(norm64(full, norm_type), rel=1e-6)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_norm_of_views_scalars_and_fp64_is_right(clip_grads, kernels, norm_type):
    """What the kernels cannot take goes through torch and joins the same sum."""
    gap = torch.full((300, 512), 100.0)
    gap[:, :256] = random((300, 256), seed=1)
    grads = [
        random((40, 50), BF16, seed=2),
        gap[:, :256],
        random((700, 300), seed=3).t(),
        random((1, 200_000, 2), seed=8)[..., 0],
        random((64, 64, 64), FP16, seed=4)[::2, :, 1::3],
        random((), seed=5),
        random((1000, 70), FP64, seed=6),
    ]
    norm = clip_grads.get_grad_norm_fp32(grads, norm_type)
    assert float(norm) == pytest.approx(norm64(grads, norm_type), rel=1e-6)


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str
)
@pytest.mark.parametrize("size", [3, 0])
def test_integer_and_complex_grads_raise_with_dtype_and_position(clip_grads, kernels, dtype, size):
    """Also when empty: another rank may hold a shard of the same gradient that is not."""
    grads = [torch.ones(3), torch.ones(2, dtype=BF16), torch.ones(size).to(dtype)]
    with pytest.raises(TypeError, match=rf"grads_for_norm\[2\] has dtype {dtype};"):
        clip_grads.get_grad_norm_fp32(grads)
    with pytest.raises(TypeError, match=rf"parameters\[2\]\.decoupled_grad has dtype {dtype};"):
        clip_grads.clip_grad_by_total_norm_fp32(parameters(grads), 1.0, 9.0, True)


@pytest.mark.parametrize("bad", [NAN, -NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("norm_type", [2, INF, 3])
@pytest.mark.parametrize("dtype", [BF16, FP32, FP16, FP64], ids=str)
def test_one_value_that_is_not_finite_shows_in_the_norm(clip_grads, kernels, dtype, norm_type, bad):
    """In any group, first or last: NaN gives NaN, inf gives inf."""
    for place in (0, 70_000, -1):
        poisoned = torch.ones(100_000, dtype=dtype)
        poisoned[place] = bad
        for grads in ([poisoned, torch.ones(3)], [torch.ones(3, dtype=FP16), poisoned]):
            norm = float(clip_grads.get_grad_norm_fp32(grads, norm_type))
            assert math.isnan(norm) if math.isnan(bad) else norm == INF


@pytest.mark.parametrize("norm_type", [INF, 3])
def test_norm_of_bf16_loses_nothing_to_bf16(clip_grads, kernels, norm_type):
    """Rounding to bf16 on the way would show as 1e-3."""
    grads = [random((5000,), BF16, seed=i) for i in range(40)]
    norm = clip_grads.get_grad_norm_fp32(grads, norm_type)
    assert float(norm) == pytest.approx(norm64(grads, norm_type), rel=1e-6)


@pytest.mark.parametrize("norm_type", [2, 2.0, INF, "inf", 3])
@pytest.mark.parametrize("form", [list, tuple, iter, lambda grads: (grad for grad in grads)])
def test_norm_takes_any_iterable_and_any_form_of_norm_type(clip_grads, kernels, form, norm_type):
    """A list, a tuple, an iterator, a generator."""
    grads = [random((30,), seed=1), random((40,), BF16, seed=2)]
    norm = clip_grads.get_grad_norm_fp32(form(grads), norm_type)
    assert float(norm) == pytest.approx(norm64(grads, norm_type), rel=1e-6)


def test_norm_takes_a_single_tensor(clip_grads, kernels):
    """It is one gradient, not a list of rows."""
    for grad in (random((30, 4), BF16), torch.tensor(3.0)):
        norm = clip_grads.get_grad_norm_fp32(grad)
        assert float(norm) == pytest.approx(norm64([grad]), rel=1e-6)


@pytest.mark.parametrize("norm_type", [0, -2, "-inf", NAN])
def test_norm_type_that_is_not_above_zero_raises(clip_grads, world, norm_type):
    """Before anything is launched or reduced."""
    with pytest.raises(ValueError, match="norm_type is .*above 0"):
        clip_grads.get_grad_norm_fp32([torch.ones(3)], norm_type)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_norm_has_the_type_that_the_release_returns(clip_grads, norm_as_tensor, norm_type):
    """A float before 0.17 and for inf, else an fp32 tensor of shape (1,)."""
    for grads in ([random((9,)), random((9,), BF16)], []):
        norm = clip_grads.get_grad_norm_fp32(grads, norm_type)
        assert float(norm) == pytest.approx(norm64(grads, norm_type), rel=1e-6)
        if norm_as_tensor and norm_type != INF:
            assert norm.dtype == FP32 and norm.shape == (1,) and not norm.requires_grad
        else:
            assert type(norm) is float


def test_norm_is_a_float_where_no_kernel_scales_by_a_tensor(clip_grads, stand_in, monkeypatch):
    """As every release returns it with TE before 2.14, with apex and without either."""
    monkeypatch.setattr(clip_grads, "_TENSOR_NORM_EXPECTED", True)
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_tensor_impl", None)
    assert type(clip_grads.get_grad_norm_fp32([torch.ones(4)])) is float


@pytest.mark.parametrize("norm_type, syncs", [(2, 0), (3, 0), (INF, 1)])
def test_norm_reads_no_value_on_the_host_but_the_result(
    clip_grads, stand_in, world, monkeypatch, norm_type, syncs
):
    """Whether that holds for the launches too is for the GPU tests."""
    monkeypatch.setattr(clip_grads, "_TENSOR_NORM_EXPECTED", True)
    monkeypatch.setattr(clip_grads, "l2_norm_impl", lambda *args: (torch.ones(1), None))
    grads = [random((9,), BF16), random((9,)), random((9,), FP64), random((9, 2))[:, 0]]
    with Ops() as ops:
        clip_grads.get_grad_norm_fp32(grads, norm_type)
    assert ops.names.count("_local_scalar_dense.default") == syncs


def test_names_replaced_from_outside_are_used(clip_grads, stand_in, world, monkeypatch):
    """The applier gets `l2_norm_impl` itself, exactly one list and a positional False."""
    seen = []

    def applier(*args):
        seen.append(args)
        return torch.full((1,), 3.0), None

    impl = object()
    monkeypatch.setattr(clip_grads, "multi_tensor_applier", applier)
    monkeypatch.setattr(clip_grads, "l2_norm_impl", impl)
    grad = torch.ones(4)
    assert float(clip_grads.get_grad_norm_fp32([grad])) == 3.0
    ((op, noop_flag, lists, per_tensor),) = seen
    assert op is impl and per_tensor is False and noop_flag.dtype == torch.int
    assert len(lists) == 1 and lists[0][0] is grad


# --- clipping


def scaled(grad, total_norm, max_norm):
    """float32(grad) * coefficient, rounded once; fp64 stays fp64."""
    if isinstance(total_norm, torch.Tensor):
        coeff = (max_norm / (total_norm + 1.0e-6)).clamp(max=1.0).to(FP32).reshape(())
    else:
        coeff = torch.tensor(max_norm / (total_norm + 1.0e-6), dtype=FP64).to(FP32)
    wide = grad.double() * coeff.double() if grad.dtype == FP64 else grad.float() * coeff
    return wide.to(grad.dtype)


@pytest.mark.parametrize("attribute", ["grad", "decoupled_grad"])
@pytest.mark.parametrize("scale_tensor", [True, False], ids=["scale_tensor", "no_scale_tensor"])
@pytest.mark.parametrize(
    "total_norm",
    [7.3, torch.tensor([7.3]), torch.tensor(7.3), torch.tensor([7.3], dtype=FP64)],
    ids=["float", "shape_1", "0_dim", "fp64"],
)
def test_clip_scales_each_element_in_fp32_and_rounds_once(
    clip_grads, kernels, monkeypatch, total_norm, scale_tensor, attribute
):
    """For every dtype and layout, bit for bit, and nothing around the views changes."""
    if not scale_tensor:
        monkeypatch.setattr(clip_grads, "multi_tensor_scale_tensor_impl", None)
    buffer = random((300, 512), BF16, seed=1)
    packed = random((1000,), FP32, seed=2)
    grads = [
        buffer[:, 100:400],
        random((200_003,), BF16, seed=3),
        packed[17:400],
        packed[500:900],
        random((70, 30), FP16, seed=4).t(),
        random((), FP32, seed=5),
        random((), BF16, seed=6),
        random((33, 5), FP64, seed=7),
    ]
    before, around = [grad.clone() for grad in grads], [buffer.clone(), packed.clone()]
    params = [torch.nn.Parameter(torch.empty_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        setattr(param, attribute, grad)
    clip_grads.clip_grad_by_total_norm_fp32(
        params, 1.0, total_norm, use_decoupled_grad=attribute == "decoupled_grad"
    )
    for param, grad, old in zip(params, grads, before, strict=True):
        assert getattr(param, attribute).data_ptr() == grad.data_ptr()
        assert torch.equal(grad, scaled(old, total_norm, 1.0)), grad.dtype
        assert not torch.equal(grad, old)
    assert torch.equal(buffer[:, :100], around[0][:, :100])
    assert torch.equal(buffer[:, 400:], around[0][:, 400:])
    for start, stop in ((0, 17), (400, 500), (900, 1000)):
        assert torch.equal(packed[start:stop], around[1][start:stop])


def test_clip_launches_once_for_each_dtype_there_is(clip_grads, stand_in):
    """Nothing for a group that does not exist, whichever form the norm has."""
    grads = [random((9,), dtype, seed=i) for i, dtype in enumerate([BF16, FP32, BF16])]
    clip_grads.clip_grad_by_total_norm_fp32(parameters(grads), 1.0, 9.0, True)
    clip_grads.clip_grad_by_total_norm_fp32(parameters(grads[:1]), 1.0, torch.tensor([9.0]), True)
    assert stand_in.launches == [
        (te.scale, [BF16] * 2),
        (te.scale, [FP32]),
        (te.scale_tensor, [BF16]),
    ]
    stand_in.launches.clear()
    clip_grads.clip_grad_by_total_norm_fp32([], 1.0, 9.0, True)
    clip_grads.clip_grad_by_total_norm_fp32(parameters([None]), 1.0, torch.tensor([9.0]), True)
    assert stand_in.launches == []


def test_clip_float_norm_gives_a_coefficient_in_double_rounded_once(clip_grads, kernels):
    """For this norm a coefficient formed in fp32 is another one."""
    total_norm, max_norm = 2.1, 1.0
    in_fp32 = max_norm / (torch.tensor(total_norm) + 1.0e-6)
    assert in_fp32.item() != torch.tensor(max_norm / (total_norm + 1.0e-6)).item()
    grad = torch.ones(4)
    clip_grads.clip_grad_by_total_norm_fp32(parameters([grad]), max_norm, total_norm, True)
    assert torch.equal(grad, scaled(torch.ones(4), total_norm, max_norm))


def test_clip_never_rounds_the_coefficient_to_the_grads_dtype(clip_grads, kernels):
    """In bf16 the coefficient 0.3349... would be 0.3340, and another product with 3."""
    for total_norm in (2.986, torch.tensor([2.986])):
        grad = random((5000,), BF16, seed=3)
        old, coeff = grad.clone(), torch.tensor(1.0 / 2.986)
        clip_grads.clip_grad_by_total_norm_fp32(parameters([grad]), 1.0, total_norm, True)
        assert torch.equal(grad, scaled(old, total_norm, 1.0))
        assert not torch.equal(grad, old * coeff.to(BF16))


def test_clip_tensor_norm_stays_off_the_host(clip_grads, kernels, monkeypatch):
    """No value is read, with the tensor kernel and without."""
    if kernels:
        monkeypatch.setattr(clip_grads, "multi_tensor_applier", lambda *args: None)
    grads = [random((9,), BF16), random((9,)), random((9,), FP64)]
    with Ops() as ops:
        clip_grads.clip_grad_by_total_norm_fp32(parameters(grads), 1.0, torch.tensor([9.0]), True)
    assert "_local_scalar_dense.default" not in ops.names


@pytest.mark.parametrize(
    "max_norm, total_norm, outcome",
    [
        (1.0, NAN, "untouched"),
        (1.0, INF, "zero"),
        (1.0, 0.5, "untouched"),
        (0, 3.0, "zero"),
        (INF, 3.0, "untouched"),
        (INF, INF, "untouched"),
        (INF, NAN, "untouched"),
    ],
)
def test_clip_with_a_float_that_is_not_finite(clip_grads, kernels, max_norm, total_norm, outcome):
    """As the released file does, every dtype alike."""
    grads = [random((9,), dtype, seed=1) for dtype in (BF16, FP32, FP16, FP64)]
    before = [grad.clone() for grad in grads]
    clip_grads.clip_grad_by_total_norm_fp32(parameters(grads), max_norm, total_norm, True)
    for grad, old in zip(grads, before, strict=True):
        assert torch.equal(grad, old if outcome == "untouched" else torch.zeros_like(old))


@pytest.mark.parametrize(
    "max_norm, total_norm, outcome",
    [
        (1.0, NAN, "nan"),
        (1.0, INF, "zero"),
        (1.0, 0.5, "untouched"),
        (0, 3.0, "zero"),
        (INF, 3.0, "untouched"),
        (INF, INF, "untouched"),
        (INF, NAN, "untouched"),
    ],
)
def test_clip_with_a_tensor_that_is_not_finite(clip_grads, kernels, max_norm, total_norm, outcome):
    """As the released file does, every dtype alike; and inf scales nothing."""
    grads = [random((9,), dtype, seed=1) for dtype in (BF16, FP32, FP16, FP64)]
    before = [grad.clone() for grad in grads]
    total_norm = torch.tensor([total_norm])
    clip_grads.clip_grad_by_total_norm_fp32(parameters(grads), max_norm, total_norm, True)
    for grad, old in zip(grads, before, strict=True):
        if outcome == "nan":
            assert grad.isnan().all()
        else:
            assert torch.equal(grad, old if outcome == "untouched" else torch.zeros_like(old))


@pytest.mark.parametrize("use_decoupled_grad", [True, False])
def test_clip_and_count_pass_over_parameters_without_a_grad(
    clip_grads, kernels, use_decoupled_grad
):
    """Missing, None, empty, or on some parameters only."""
    attribute = "decoupled_grad" if use_decoupled_grad else "grad"
    full = random((9,), FP32, seed=1)
    old = full.clone()
    params = [torch.nn.Parameter(torch.empty(size)) for size in (9, 9, 9, 0)]
    for param, grad in zip(params[1:], [None, full, torch.empty(0)], strict=True):
        setattr(param, attribute, grad)
    for total_norm in (2.0, torch.tensor([2.0])):
        full.copy_(old)
        clip_grads.clip_grad_by_total_norm_fp32(params, 1.0, total_norm, use_decoupled_grad)
        assert torch.equal(full, scaled(old, total_norm, 1.0))
    full[:4] = 0
    assert clip_grads.count_zeros_fp32(iter(params), None, use_decoupled_grad) == 4
    clip_grads.clip_grad_by_total_norm_fp32(params[:2], 1.0, 2.0, use_decoupled_grad)


def test_clip_of_grads_that_are_part_of_a_graph(clip_grads, kernels):
    """As `backward(create_graph=True)` leaves them."""
    param = torch.nn.Parameter(torch.ones(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the cycle that create_graph makes
        (param**3).sum().backward(create_graph=True)
    assert param.grad.requires_grad
    norm = clip_grads.get_grad_norm_fp32([param.grad])
    assert not getattr(norm, "requires_grad", False)
    clip_grads.clip_grad_by_total_norm_fp32([param], 1.0, norm)
    assert torch.equal(param.grad, scaled(torch.full((3,), 3.0), norm, 1.0))
    param.decoupled_grad = torch.full((3,), 3.0, requires_grad=True)  # a leaf of it
    clip_grads.clip_grad_by_total_norm_fp32([param], 1.0, norm, True)
    assert torch.equal(param.decoupled_grad, param.grad)


def test_clip_takes_a_single_parameter(clip_grads, kernels):
    """It is one parameter, not a list of rows."""
    param = torch.nn.Parameter(torch.zeros(4, 3))
    param.grad = torch.ones(4, 3)
    clip_grads.clip_grad_by_total_norm_fp32(param, 1.0, 4.0)
    assert torch.equal(param.grad, scaled(torch.ones(4, 3), 4.0, 1.0))
    param.grad[0] = 0.0
    assert clip_grads.count_zeros_fp32(param, None) == 3


SCRATCH = """
import importlib, resource, sys, warnings
warnings.simplefilter("ignore")
import torch
from megatron.clip_grads_patch.demo import MODULE, UseFile
from megatron.clip_grads_patch.target import our_file
sys.meta_path.insert(0, UseFile(str(our_file())))
clip_grads = importlib.import_module(MODULE)
torch.set_num_threads(1)
torch.distributed.init_process_group(
    "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
)

def fits(work, grad):
    work(grad[:9, :9])  # what is set up at first use stays
    with open("/proc/self/statm") as sizes:
        size = int(sizes.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 15_000_000, resource.RLIM_INFINITY))
    try:
        work(grad)
        return True
    except RuntimeError as error:
        assert "allocate memory" in str(error), error
        return False
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

def clip(grad):
    param.decoupled_grad = grad
    clip_grads.clip_grad_by_total_norm_fp32([param], 5.0, total_norm, True)

param = torch.nn.Parameter(torch.empty(0))
buffer = torch.ones(8000, 4000, dtype=getattr(torch, sys.argv[1]))
grads = {"contiguous": buffer, "strided": buffer[:, ::2], "transposed": buffer.t()}
for layout, grad in grads.items():
    for norm_type in (2, "inf", 3):
        norm = lambda grad: clip_grads.get_grad_norm_fp32([grad], norm_type)
        print(layout, norm_type, fits(norm, grad))
    for total_norm in (9.0, torch.tensor([9.0])):
        print(layout, type(total_norm).__name__, fits(clip, grad))
print("control", "copy", fits(lambda grad: grad * 2.0, buffer))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux's /proc")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_norm_and_clip_take_no_scratch_of_a_grads_size(dtype):
    """Torch converts whole operands; here it gets pieces, and 15 MB of memory to spare."""
    call = [sys.executable, "-c", SCRATCH, dtype]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(call, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line.rsplit(" ", 1) for line in done.stdout.splitlines()]
    fits = {what: answer == "True" for what, answer in rows}
    assert not fits.pop("control copy")
    assert len(fits) == 15 and all(fits.values()), fits


# --- counting zeros


def test_count_of_mixed_dtypes_is_an_exact_int(clip_grads, kernels):
    """Summed in int64: fp32, in which releases before 0.17 sum, has no 2^24 + 1."""
    sparse = torch.zeros(2**24 + 1, dtype=BF16)
    grads = [sparse, torch.tensor([0.0, 1.0, -0.0, NAN]), torch.zeros(3, 4, dtype=FP64)[:, ::2]]
    count = clip_grads.count_zeros_fp32(parameters(grads), None, use_decoupled_grad=True)
    assert type(count) is int and count == 2**24 + 1 + 2 + 6


def test_count_goes_beyond_32_bits(clip_grads, world):
    """A view of one zero takes no memory."""
    zeros = torch.zeros(1, dtype=BF16).expand(2**31 + 5)
    assert clip_grads.count_zeros_fp32(parameters([zeros]), None, True) == 2**31 + 5


def test_count_leaves_out_shared_parameters_and_duplicates(clip_grads, world, monkeypatch):
    """With the filters of the release, which get the groups that they take."""
    asked = []

    def tensor_parallel(param, tp_group=None):
        asked.append(tp_group)
        return param.unique

    def generalized(param, gtp_group=None, expert_gtp_group=None):
        asked.append((gtp_group, expert_gtp_group))
        return not param.replica

    monkeypatch.setattr(clip_grads, "param_is_not_tensor_parallel_duplicate", tensor_parallel)
    monkeypatch.setattr(clip_grads, "param_is_not_gtp_duplicate", generalized)
    params = parameters([torch.zeros(2**i) for i in range(4)])
    for param in params:
        param.unique, param.replica = True, False
    params[0].shared = True
    params[1].unique = False
    params[2].replica = True
    params[3].gtp_pad_zeros = 3
    groups = {"tp_group": "t", "expert_tp_group": "e", "gtp_group": "g", "expert_gtp_group": "x"}
    assert clip_grads.count_zeros_fp32(params, None, True, **groups) == 8 - 3
    assert asked == ["t", "t", ("g", "x"), "t", ("g", "x")]


@pytest.mark.parametrize("use_decoupled_grad", [True, False])
@pytest.mark.parametrize("attribute", ["grad", "decoupled_grad"])
def test_count_of_megatron_fsdp_takes_the_local_shard(
    clip_grads, world, attribute, use_decoupled_grad
):
    """Whatever the filters say; before 0.19 it leaves the gradient in `.grad` in any case."""
    shard = types.SimpleNamespace(_local_tensor=torch.tensor([0.0, 1.0, 0.0]))
    param = types.SimpleNamespace(__fsdp_param__=True, shared=True, grad=None)
    setattr(param, attribute, shard)
    there = attribute == "grad" or use_decoupled_grad
    assert clip_grads.count_zeros_fp32([param], None, use_decoupled_grad) == (2 if there else 0)


# --- what the kernels may take, and where to reduce


@pytest.mark.parametrize(
    "change, fusable",
    [
        ({}, True),
        ({"dtype": FP16}, True),
        ({"dtype": BF16}, True),
        ({"dtype": FP64}, False),
        ({"is_cuda": False}, False),
        ({"numel": lambda: 0}, False),
        ({"is_contiguous": lambda: False}, False),
    ],
    ids=["fp32", "fp16", "bf16", "fp64", "cpu", "empty", "strided"],
)
def test_predicate_lets_to_the_kernels_what_they_can_read(clip_grads, change, fusable):
    """A stand-in for a tensor on a GPU, one property changed."""
    grad = {"is_cuda": True, "dtype": FP32, "numel": lambda: 5, "is_contiguous": lambda: True}
    assert clip_grads._is_fusable(types.SimpleNamespace(**grad | change)) is fusable


@pytest.mark.parametrize(
    "config, cuda, expected",
    [
        ("cuda:nccl", True, "cuda:3"),
        ("cpu:gloo,cuda:nccl", True, "cuda:3"),
        ("cpu:gloo,cuda:gloo", True, "cpu"),
        ("cpu:gloo", True, "cpu"),
        ("cpu:fake,cuda:fake", False, "cpu"),
        (ValueError("this rank is not in the group"), True, "cuda:3"),
        (TypeError("not a group of torch's making"), False, "cpu"),
    ],
)
def test_reduction_is_where_the_backend_reduces(clip_grads, monkeypatch, config, cuda, expected):
    """By the group alone, so that ranks with and without gradients meet in one backend."""

    def get_backend_config(group):
        if isinstance(config, Exception):
            raise config
        return config

    monkeypatch.setattr(torch.distributed, "get_backend_config", get_backend_config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert str(clip_grads._reduction_device(None)) == expected


# --- the release and the kernels around it


def load(monkeypatch, modules=None, version=None):
    """The module loaded anew beside stand-ins for the packages that it imports."""
    for name in ("transformer_engine", "apex", "amp_C"):
        monkeypatch.setitem(sys.modules, name, None)
    for name, attributes in (modules or {}).items():
        module = types.ModuleType(name)
        module.__dict__.update(attributes, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    if version:
        info = importlib.import_module("megatron.core.package_info")
        monkeypatch.setattr(info, "MAJOR", version[0])
        monkeypatch.setattr(info, "MINOR", version[1])
    spec = importlib.util.spec_from_file_location(MODULE + "_anew", our_file())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


THREE = {"multi_tensor_applier": 1, "multi_tensor_l2norm": 2, "multi_tensor_scale": 3}
FOUR = THREE | {"multi_tensor_scale_tensor": 4}
TE = ["transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers"]
APEX = {
    "apex": {},
    "apex.multi_tensor_apply": {"multi_tensor_applier": 5},
    "amp_C": {"multi_tensor_l2norm": 6, "multi_tensor_scale": 7},
}


@pytest.mark.parametrize(
    "modules, expected",
    [
        ({TE[0]: {}, TE[1]: {}, TE[2]: FOUR} | APEX, (1, 2, 3, 4)),
        ({TE[0]: {}, TE[1]: {}, TE[2]: THREE}, (1, 2, 3, None)),
        ({TE[0]: {}, TE[1]: {}, TE[2]: {}} | APEX, (5, 6, 7, None)),
        (APEX, (5, 6, 7, None)),
    ],
    ids=["te", "te_before_2.14", "te_without_kernels", "apex"],
)
def test_kernels_are_te_s_else_apex_s(clip_grads, monkeypatch, modules, expected):
    """A TE without the tensor scale keeps its other kernels."""
    module = load(monkeypatch, modules)
    assert expected == (
        module.multi_tensor_applier,
        module.l2_norm_impl,
        module.multi_tensor_scale_impl,
        module.multi_tensor_scale_tensor_impl,
    )


def test_without_kernels_there_is_a_warning_and_torch_does_the_work(clip_grads, world, monkeypatch):
    """Also for tensors that a kernel could take."""
    with pytest.warns(UserWarning, match="No Transformer Engine and no apex"):
        module = load(monkeypatch)
    monkeypatch.setattr(module, "_is_fusable", te.is_fusable)
    grads = [random((9,)), random((9,), BF16)]
    assert float(module.get_grad_norm_fp32(grads)) == pytest.approx(norm64(grads), rel=1e-6)
    old = grads[1].clone()
    for total_norm in (9.0, torch.tensor([9.0])):
        grads[1].copy_(old)
        module.clip_grad_by_total_norm_fp32(parameters(grads), 1.0, total_norm, True)
        assert torch.equal(grads[1], scaled(old, total_norm, 1.0))


@pytest.mark.parametrize("version, tensor", [((0, 16), False), ((0, 17), True), ((1, 0), True)])
def test_release_decides_about_the_norm_s_type(clip_grads, monkeypatch, version, tensor):
    """By megatron.core.package_info."""
    modules = {TE[0]: {}, TE[1]: {}, TE[2]: FOUR}
    assert load(monkeypatch, modules, version)._TENSOR_NORM_EXPECTED is tensor


def test_names_that_other_packages_read_are_there(clip_grads):
    """From this module, as today."""
    from megatron.core import utils

    for name in ("get_data_parallel_group_if_dtensor", "to_local_if_dtensor"):
        assert getattr(clip_grads, name) is getattr(utils, name)


# --- the log


def test_each_new_composition_is_logged_once_at_debug(clip_grads, kernels, monkeypatch, caplog):
    """By norm or clip, whichever sees it first; empty gradients do not count."""
    monkeypatch.setattr(clip_grads, "_seen_compositions", set())
    grads = [torch.ones(2)] * 6 + [torch.ones(2, dtype=BF16)] * 295 + [torch.ones(0, dtype=FP64)]
    grads.append(torch.ones(2, 2)[:, 0])
    with caplog.at_level(logging.DEBUG, logger=clip_grads.__name__):
        for _ in range(2):
            clip_grads.get_grad_norm_fp32(grads)
            clip_grads.clip_grad_by_total_norm_fp32(parameters(grads), 1.0, 9.0, True)
        clip_grads.get_grad_norm_fp32(grads[:7])
    assert [record.getMessage() for record in caplog.records] == [
        "groups={'torch.float32': 7, 'torch.bfloat16': 295}",
        "groups={'torch.float32': 6, 'torch.bfloat16': 1}",
    ]


def test_nothing_is_composed_while_nobody_listens(clip_grads, kernels, monkeypatch):
    """Not even the text."""
    monkeypatch.setattr(clip_grads, "_seen_compositions", None)
    logging.getLogger(clip_grads.__name__).setLevel(logging.INFO)
    assert float(clip_grads.get_grad_norm_fp32([torch.ones(4)])) == 2.0


def test_count_of_megatron_fsdp_takes_a_dtensor_as_a_plain_one(clip_grads, world, monkeypatch):
    """No collective of its mesh, and no padding to take off."""
    monkeypatch.setattr(clip_grads, "_sharding_of", None)
    mesh = init_device_mesh("cpu", (1,))
    param = parameters([distribute_tensor(torch.tensor([0.0, 1.0, 0.0]), mesh, [Shard(0)])])[0]
    param.__fsdp_param__ = True
    param.gtp_pad_zeros = 1
    assert clip_grads.count_zeros_fp32([param], None, True) == 2


# --- large lists and tensors


def test_pieces_of_a_contiguous_grad_are_contiguous(clip_grads):
    """Whichever dimension is the largest: strided ones take longer to read."""
    pieces = clip_grads._pieces(torch.arange(24.0 * 7168).view(24, 7168))
    assert len(pieces) > 1 and all(piece.is_contiguous() for piece in pieces)
    assert torch.equal(torch.cat(pieces), torch.arange(24.0 * 7168))


def test_launches_of_very_long_lists_stay_within_what_te_has_room_for(
    clip_grads, world, stand_in, monkeypatch
):
    """TE 2.17 raises beyond 20,321 tensors a launch, which two lists share in a scaling."""
    monkeypatch.setattr(clip_grads, "_MOST_IN_A_LAUNCH", 20)
    grads = [torch.full((3,), 1.0 + i, dtype=(BF16, FP32)[i % 2]) for i in range(90)]
    wanted = [scaled(grad, 9.0, 3.0) for grad in grads]
    norm = clip_grads.get_grad_norm_fp32(grads)
    assert float(norm) == pytest.approx(norm64(grads), rel=1e-6)
    assert [len(dtypes) for _, dtypes in stand_in.launches] == [20, 20, 5] * 2
    stand_in.launches.clear()
    clip_grads.clip_grad_by_total_norm_fp32(parameters(grads), 3.0, 9.0, True)
    assert all(map(torch.equal, grads, wanted))
    assert [len(dtypes) for _, dtypes in stand_in.launches] == [10, 10, 10, 10, 5] * 2


def test_scaling_of_many_gigabytes_takes_larger_chunks(clip_grads, stand_in, monkeypatch):
    """Of 16 times the applier's size from 2^31 elements on, and no larger below."""
    chunks = []
    monkeypatch.setattr(
        clip_grads, "multi_tensor_scale_impl", lambda size, noop, lists, coeff: chunks.append(size)
    )
    for elements in (2**31, 2**31 + 1):
        grad = torch.empty(elements, dtype=BF16, device="meta")
        clip_grads.clip_grad_by_total_norm_fp32(parameters([grad]), 1.0, 2.0, True)
    assert chunks == [2**16, 2**20]
