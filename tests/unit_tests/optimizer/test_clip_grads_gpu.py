"""The table of promised behaviour on a GPU, with Transformer Engine's own kernels."""

import contextlib
import math
import types

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.unit_tests.optimizer.test_clip_grads_table import parameters, scaled

pytestmark = pytest.mark.gpu

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
INF = math.inf
DTYPES = [BF16, FP32, FP16]


@pytest.fixture(scope="module", autouse=True)
def group(world):
    """An NCCL group of one."""
    return torch.distributed.new_group([0], backend="nccl")


@pytest.fixture(autouse=True)
def free_memory():
    """Some tests take much of the GPU."""
    yield
    torch.cuda.empty_cache()


@pytest.fixture(params=[True, False], ids=["scale_tensor", "no_scale_tensor"])
def scale_tensor(request, clip_grads, monkeypatch):
    """With TE's tensor scale, and as with a TE before 2.14."""
    if not request.param:
        monkeypatch.setattr(clip_grads, "multi_tensor_scale_tensor_impl", None)
    return request.param


@pytest.fixture
def shipped(shipped_source):
    """Megatron-Core's own file, with the same kernels."""
    module = types.ModuleType("megatron.core.optimizer._shipped")
    module.__package__ = "megatron.core.optimizer"
    exec(compile(shipped_source, "shipped clip_grads.py", "exec"), module.__dict__)
    return module


def random(shape, dtype=FP32, seed=0, device="cuda"):
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def norm64(grads, norm_type=2.0):
    """The reference in float64, a piece at a time."""
    norms = [
        torch.linalg.vector_norm(piece.double(), norm_type).cpu()
        for grad in grads
        for piece in grad.reshape(-1).split(2**27)
    ]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type).item() if norms else 0.0


def close(norm, expected):
    return float(norm) == pytest.approx(expected, rel=1e-6)


@contextlib.contextmanager
def no_sync():
    """Any host synchronization is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def little_memory(most=2**20):
    """No more than `most` bytes of GPU memory on top of what there is."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield
    assert torch.cuda.max_memory_allocated() - before <= most


def deepseek(order):
    """295 bf16 of 7168x2048 and 7 fp32 of 24x7168: 8.7 GB."""
    made = {BF16: [(7168, 2048)] * 295, FP32: [(24, 7168)] * 7}
    return [random(shape, dtype, i) for dtype in order for i, shape in enumerate(made[dtype])]


# --- the norm


@pytest.mark.parametrize("norm_type", [2, INF, 3, 1])
@pytest.mark.parametrize("order", [DTYPES, DTYPES[::-1], [FP32, FP16, BF16]], ids=str)
def test_norm_of_mixed_dtypes(clip_grads, group, order, norm_type):
    """Relative to float64 at most 1e-6."""
    grads = [random((1000 + i, 97), dtype, i) for i, dtype in enumerate(order * 40)]
    grads.append(random((70000,), order[0], 1)[1:])  # an odd address
    assert close(clip_grads.get_grad_norm_fp32(grads, norm_type, group), norm64(grads, norm_type))


@pytest.mark.parametrize("order", [(BF16, FP32), (FP32, BF16)], ids=["bf16_first", "fp32_first"])
def test_norm_and_clip_of_the_list_that_ended_jobs(clip_grads, group, order):
    """With the scratch that both take."""
    grads = deepseek(order)
    with little_memory():
        norm = clip_grads.get_grad_norm_fp32(grads, 2, group)
        clip_grads.clip_grad_by_total_norm_fp32(parameters(grads), 1.0, norm, True)
    fresh = deepseek(order)
    assert close(norm, norm64(fresh))
    for grad, old in zip(grads, fresh, strict=True):
        assert torch.equal(grad, scaled(old, norm, 1.0))


def test_norm_and_clip_of_30_000_grads(clip_grads, group, scale_tensor):
    """More than TE 2.17 takes in one launch, which raises from 20,322 tensors on."""
    grads = [random((64,), FP32 if i % 10 == 0 else BF16, seed=i) for i in range(30_000)]
    norm = clip_grads.get_grad_norm_fp32(grads, 2, group)
    expected = torch.cat(grads).double().norm().item()  # the fp32 of cat() holds all of them
    assert close(norm, expected)
    wanted = [scaled(grad, norm, 5.0) for grad in grads]
    clip_grads.clip_grad_by_total_norm_fp32(parameters(grads), 5.0, norm, True)
    assert all(map(torch.equal, grads, wanted))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_dtype_has_the_bits_of_the_shipped_file(clip_grads, shipped, group, dtype):
    """Norm and clipped gradients, with many sizes."""
    sizes = torch.randint(1, 200_000, (400,), generator=torch.Generator().manual_seed(5)).tolist()
    grads = [random((size,), dtype, i) for i, size in enumerate(sizes)]
    ours = clip_grads.get_grad_norm_fp32(grads, 2, group)
    theirs = shipped.get_grad_norm_fp32(list(grads), 2, group)
    assert type(ours) is type(theirs)
    assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))
    assert close(ours, norm64(grads))
    if dtype == FP16:
        return  # whose gradients the shipped file does not clip
    copies = [grad.clone() for grad in grads]
    clip_grads.clip_grad_by_total_norm_fp32(parameters(grads), 1.0, ours, True)
    shipped.clip_grad_by_total_norm_fp32(parameters(copies), 1.0, theirs, True)
    assert all(torch.equal(grad, copy) for grad, copy in zip(grads, copies, strict=True))


@pytest.mark.parametrize("norm_type", [2, INF, 3])
def test_norm_without_elements(clip_grads, group, norm_type):
    """0.0 for no gradients and for empty ones."""
    empty = torch.empty(0, dtype=BF16, device="cuda")
    for grads in ([], [empty], [empty, empty.float()]):
        assert float(clip_grads.get_grad_norm_fp32(grads, norm_type, group)) == 0.0


@pytest.mark.parametrize("norm_type", [2, INF, 3])
@pytest.mark.parametrize("place", [0, 63, 109, 129])
def test_empty_grads_are_as_if_not_there(clip_grads, group, place, norm_type):
    """Also last, and where TE before 2.20 writes its metadata out of bounds."""
    full = [random((3000 + i,), BF16, seed=i) for i in range(129)]
    empty = torch.empty(0, dtype=BF16, device="cuda")
    grads = full[:place] + [empty] + full[place:]
    norm = clip_grads.get_grad_norm_fp32(grads, norm_type, group)
    expected = clip_grads.get_grad_norm_fp32(full, norm_type, group)
    assert torch.equal(torch.as_tensor(norm), torch.as_tensor(expected))
    assert close(norm, norm64(full, norm_type))
    old = [grad.clone() for grad in full]
    clip_grads.clip_grad_by_total_norm_fp32(parameters(grads), 1.0, 9.0, True)
    assert all(torch.equal(g, scaled(o, 9.0, 1.0)) for g, o in zip(full, old, strict=True))


@pytest.mark.parametrize("norm_type", [2, INF, 3, 1])
def test_norm_of_views_scalars_and_fp64(clip_grads, group, norm_type):
    """What the kernels cannot take joins the sum."""
    gap = torch.full((64, 128), 100.0, device="cuda")
    gap[:, :64] = random((64, 64))
    grads = [
        random((40, 50), BF16, 1),
        gap[:, :64],
        random((700, 300), BF16, 2).t(),
        random((64, 64, 64), FP16, 3)[::2, :, 1::3],
        random((), FP32, 4),
        random((1000, 70), FP64, 5),
    ]
    assert close(clip_grads.get_grad_norm_fp32(grads, norm_type, group), norm64(grads, norm_type))


@pytest.mark.parametrize("bad", [math.nan, INF, -INF], ids=str)
@pytest.mark.parametrize("norm_type", [2, INF, 3])
@pytest.mark.parametrize("dtype", [*DTYPES, FP64], ids=str)
def test_one_value_that_is_not_finite_shows(clip_grads, group, dtype, norm_type, bad):
    """At the first, a middle and the last element, in any group, whatever comes before it."""
    for place in (0, 65536, 70_000, -1):
        sick = torch.ones(100_000, dtype=dtype, device="cuda")
        sick[place] = bad
        well = random((300,), FP32)
        for grads in ([sick, well], [well, sick], [well.bfloat16(), sick, well.half()]):
            norm = float(clip_grads.get_grad_norm_fp32(grads, norm_type, group))
            assert math.isnan(norm) if math.isnan(bad) else norm == INF


def test_integer_grads_raise(clip_grads, group):
    """With dtype and position."""
    grads = [random((3,)), torch.ones(3, dtype=torch.int32, device="cuda")]
    with pytest.raises(TypeError, match=r"grads_for_norm\[1\] has dtype torch.int32"):
        clip_grads.get_grad_norm_fp32(grads, 2, group)


def test_norm_is_what_the_release_returns(clip_grads, shipped, group, scale_tensor):
    """A float, or an fp32 tensor of shape (1,) on the GPU, as the file it replaces."""
    if not scale_tensor and hasattr(shipped, "multi_tensor_scale_tensor_impl"):
        shipped.multi_tensor_scale_tensor_impl = None
    grads = [random((9,), BF16)]
    for norm_type in (2, INF):
        ours = clip_grads.get_grad_norm_fp32(grads, norm_type, group)
        theirs = shipped.get_grad_norm_fp32(grads, norm_type, group)
        assert type(ours) is type(theirs)
        if torch.is_tensor(ours):
            assert (ours.shape, ours.dtype, ours.device) == ((1,), FP32, grads[0].device)


def test_gloo_group_returns_the_norm_where_the_grads_are(clip_grads, monkeypatch):
    """gloo reduces in host memory; the caller need not know."""
    monkeypatch.setattr(clip_grads, "_TENSOR_NORM_EXPECTED", True)
    group = torch.distributed.new_group([0], backend="gloo")
    grads = [random((9000,), BF16), random((9,))]
    norm = clip_grads.get_grad_norm_fp32(grads, 2, group)
    assert norm.device == grads[0].device and close(norm, norm64(grads))


def test_dtensors_on_the_gpu(clip_grads, group):
    """Sharded and replicated over a mesh of one GPU, among plain ones."""
    mesh = init_device_mesh("cuda", (1,))
    full = [random((300, 7), dtype, i) for i, dtype in enumerate([*DTYPES, FP64])]
    for norm_type in (2, INF, 3):
        for placement in (Shard(0), Replicate()):
            grads = [distribute_tensor(tensor.clone(), mesh, [placement]) for tensor in full]
            norm = clip_grads.get_grad_norm_fp32(grads + full, norm_type, group)
            assert close(norm, norm64(full + full, norm_type))
    clip_grads.clip_grad_by_total_norm_fp32(parameters(grads), 1.0, 7.0, True)
    for grad, old in zip(grads, full, strict=True):
        assert torch.equal(grad.to_local(), scaled(old, 7.0, 1.0))


# --- no host synchronization, CUDA graphs


@pytest.fixture
def tensor_norm(clip_grads, monkeypatch):
    """As from megatron-core 0.17 on, whichever release is installed."""
    monkeypatch.setattr(clip_grads, "_TENSOR_NORM_EXPECTED", True)


@pytest.mark.parametrize("norm_type", [2, 3])
def test_norm_and_clip_do_not_wait_for_the_gpu(clip_grads, group, tensor_norm, norm_type):
    """Mixed dtypes, a view and fp64 included."""
    grads = [random((5000,), dtype, 1) for dtype in (*DTYPES, FP64)] + [random((90, 9)).t()]
    params = parameters(grads)
    clip_grads.get_grad_norm_fp32(grads, norm_type, group)  # NCCL connects at its first use
    with no_sync():
        norm = clip_grads.get_grad_norm_fp32(grads, norm_type, group)
        clip_grads.clip_grad_by_total_norm_fp32(params, 1.0, norm, True)
    with no_sync(), pytest.raises(RuntimeError, match="synchroniz"):
        norm.item()  # the control


def test_clip_by_a_tensor_without_its_kernel_does_not_wait(clip_grads, scale_tensor):
    """TE before 2.14: torch multiplies in fp32."""
    grads = [random((5000,), dtype, 1) for dtype in (*DTYPES, FP64)]
    old, norm = [grad.clone() for grad in grads], torch.tensor([7.0], device="cuda")
    with no_sync(), little_memory():
        clip_grads.clip_grad_by_total_norm_fp32(parameters(grads), 1.0, norm, True)
    assert all(torch.equal(g, scaled(o, norm, 1.0)) for g, o in zip(grads, old, strict=True))


@pytest.mark.parametrize("norm_type", [2, 3])
def test_graph_replay_follows_new_values(clip_grads, group, tensor_norm, norm_type):
    """Norm and clip captured once, replayed on other gradients."""
    grads = [random((5000 + i,), dtype, i) for i, dtype in enumerate(DTYPES * 3)]
    params = parameters(grads)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        clip_grads.get_grad_norm_fp32(grads, norm_type, group)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = clip_grads.get_grad_norm_fp32(grads, norm_type, group)
        clip_grads.clip_grad_by_total_norm_fp32(params, 1.0, norm, True)
    for seed in (50, 60):
        for i, grad in enumerate(grads):
            grad.copy_(random(grad.shape, grad.dtype, seed + i))
        old = [grad.clone() for grad in grads]
        graph.replay()
        assert close(norm, norm64(old, norm_type))
        assert all(torch.equal(g, scaled(o, norm, 1.0)) for g, o in zip(grads, old, strict=True))


# --- clipping


@pytest.mark.parametrize("form", ["float", "shape_1", "0_dim"])
def test_clip_of_padded_views(clip_grads, scale_tensor, form):
    """Each element by one rounded product; the bytes around the views stay."""
    buffers, grads = [], []
    for i, dtype in enumerate([*DTYPES * 30, FP64]):
        buffers.append(random((9000,), dtype, i))
        grads.append(buffers[-1][1000 + i : 8000 - 3 * i])
    buffers.append(random((300, 256), BF16, 99))
    grads += [buffers[-1][:, 30:200], random((), FP32, 98), random((), BF16, 97)]
    copies, old = [b.clone() for b in buffers], [grad.clone() for grad in grads]
    total_norm = 7.3
    if form != "float":
        total_norm = torch.tensor([7.3] if form == "shape_1" else 7.3, device="cuda")
    clip_grads.clip_grad_by_total_norm_fp32(parameters(grads), 1.0, total_norm, True)
    for grad, before in zip(grads, old, strict=True):
        assert torch.equal(grad, scaled(before, total_norm, 1.0)), grad.dtype
    for i, (buffer, copy) in enumerate(zip(buffers[:-1], copies[:-1], strict=True)):
        copy[1000 + i : 8000 - 3 * i] = grads[i]
        assert torch.equal(buffer.view(torch.uint8), copy.view(torch.uint8))
    copies[-1][:, 30:200] = grads[len(buffers) - 1]
    assert torch.equal(buffers[-1], copies[-1])


@pytest.mark.parametrize("as_tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize(
    "max_norm, total_norm", [(1.0, math.nan), (1.0, INF), (0, 3.0), (INF, 3.0), (INF, math.nan)]
)
def test_clip_with_what_is_not_finite(clip_grads, max_norm, total_norm, as_tensor):
    """A float NaN leaves all as it is, a tensor NaN makes all NaN; inf scales nothing."""
    grads = [random((900,), dtype, 1) for dtype in (*DTYPES, FP64)]
    old = [grad.clone() for grad in grads]
    norm = torch.tensor([total_norm], device="cuda") if as_tensor else total_norm
    clip_grads.clip_grad_by_total_norm_fp32(parameters(grads), max_norm, norm, True)
    for grad, before in zip(grads, old, strict=True):
        if max_norm == INF or (math.isnan(total_norm) and not as_tensor):
            assert torch.equal(grad, before)
        elif math.isnan(total_norm):
            assert grad.isnan().all()
        else:
            assert not grad.any()


def test_grads_of_the_parameters_are_clipped_in_any_dtype(clip_grads):
    """`.grad`, with the shipped file's assertion on its type gone."""
    params = [torch.nn.Parameter(random((900,), dtype)) for dtype in DTYPES]
    for i, param in enumerate(params[:2]):
        param.grad = random((900,), param.dtype, i)
    old = [param.grad.clone() for param in params[:2]]
    clip_grads.clip_grad_by_total_norm_fp32(params, 1.0, 9.0)
    for param, before in zip(params, old, strict=False):
        assert torch.equal(param.grad, scaled(before, 9.0, 1.0))


def test_count_of_mixed_dtypes(clip_grads, group):
    """An exact int, beyond what fp32 can count."""
    grads = [torch.zeros(2**24 + 1, dtype=BF16, device="cuda"), random((900,)), random((90,)).cpu()]
    grads[1][:7] = 0
    grads[2][:5] = 0
    params = parameters(grads)
    assert clip_grads.count_zeros_fp32(params, group, True) == 2**24 + 1 + 7 + 5


# --- memory, sizes, devices


@pytest.mark.parametrize("norm_type", [2, INF, 3])
@pytest.mark.parametrize("kernels", ["te", "torch"])
@pytest.mark.parametrize("dtype", [*DTYPES, FP64], ids=str)
def test_norm_and_clip_take_no_scratch_of_a_grads_size(
    clip_grads, group, monkeypatch, kernels, dtype, norm_type
):
    """With TE's kernels and without them, contiguous and strided, in both forms."""
    if kernels == "torch":
        monkeypatch.setattr(clip_grads, "_is_fusable", lambda grad: False)
    grads = [random((4000, 2000), dtype), random((4000, 2000), dtype)[:, ::2]]
    clip_grads.get_grad_norm_fp32(grads, norm_type, group)
    with little_memory():
        norm = clip_grads.get_grad_norm_fp32(grads, norm_type, group)
        for total_norm in (9.0, torch.full((1,), 9.0, device="cuda")):
            clip_grads.clip_grad_by_total_norm_fp32(parameters(grads), 5.0, total_norm, True)
    assert float(norm) > 0


@pytest.mark.parametrize("kernels", ["te", "torch"])
@pytest.mark.parametrize("norm_type", [2, INF, 3])
def test_more_than_two_to_the_31_elements(clip_grads, group, monkeypatch, kernels, norm_type):
    """In one tensor, where torch's own foreach norm is reported to fault."""
    if kernels == "torch":
        monkeypatch.setattr(clip_grads, "_is_fusable", lambda grad: False)
    grads = [torch.full((2**31 + 8,), 2.0**-10, dtype=BF16, device="cuda"), random((90,))]
    grads[0][-1] = 900.0
    assert close(clip_grads.get_grad_norm_fp32(grads, norm_type, group), norm64(grads, norm_type))
    if norm_type == 2:
        clip_grads.clip_grad_by_total_norm_fp32(parameters(grads), 1.0, 4.0, True)
        assert grads[0][-1] == 225.0 and (grads[0][:-1] == 2.0**-12).all()


def test_cpu_grads_with_an_nccl_group(clip_grads, group):
    """The one number goes to the GPU for the reduction."""
    grads = [random((70_000,), BF16, 1, "cpu"), random((9,), FP32, 2, "cpu")]
    for norm_type in (2, INF, 3):
        norm = clip_grads.get_grad_norm_fp32(grads, norm_type, group)
        assert close(norm, norm64(grads, norm_type))
    old = [grad.clone() for grad in grads]
    clip_grads.clip_grad_by_total_norm_fp32(parameters(grads), 1.0, torch.tensor([7.0]), True)
    assert all(
        torch.equal(g, scaled(o, torch.tensor([7.0]), 1.0)) for g, o in zip(grads, old, strict=True)
    )


def test_cpu_and_gpu_grads_in_one_list_behind_a_busy_stream(clip_grads, group, tensor_norm):
    """A copy that did not wait for the GPU would clip by what memory held before."""
    grads = [random((900,), BF16, 1), random((900,), FP32, 2, "cpu"), random((9,), FP32, 3)]
    old, params = [grad.clone() for grad in grads], parameters(grads)
    busy = torch.ones(4096, 4096, device="cuda")
    for i in range(1000):
        factor = 1.0 + i % 7
        for grad, before in zip(grads, old, strict=True):
            grad.copy_(before).mul_(factor)
        start = [grad.clone() for grad in grads]
        torch.mm(busy, busy)
        norm = clip_grads.get_grad_norm_fp32(grads, 2, group)
        clip_grads.clip_grad_by_total_norm_fp32(params, 1.0, norm, True)
        assert close(norm, norm64(start))
        for grad, before in zip(grads, start, strict=True):
            assert torch.equal(grad, scaled(before, norm.to(before.device), 1.0))
