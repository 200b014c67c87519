"""Real collectives: four gloo processes whose lists differ, and DTensors."""

import math

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from megatron.clip_grads_patch.target import our_file
from tests.unit_tests.optimizer.gloo_ranks import Ranks

SIZE = 4
BF16, FP32 = torch.bfloat16, torch.float32
MIXED, NARROW, WIDE, NONE = (BF16, FP32, BF16), (BF16, BF16), (FP32,), ()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Four processes, for all tests of this file."""
    store = tmp_path_factory.mktemp("gloo") / "store"
    pool = Ranks(SIZE, str(store), str(our_file()))
    yield pool
    pool.close()


def random(shape, dtype=FP32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm64(grads, norm_type=2.0):
    flat = torch.cat([grad.double().flatten() for grad in grads])
    return torch.linalg.vector_norm(flat, float(norm_type)).item()


def lists_of(kinds):
    """One list a rank, alike wherever it is made."""
    return [
        [random((100 + 10 * i, 7), dtype, seed=10 * rank + i) for i, dtype in enumerate(kind)]
        for rank, kind in enumerate(kinds)
    ]


class Reductions:
    """Records the group of each all-reduce."""

    def __enter__(self):
        self.groups, self.real = [], torch.distributed.all_reduce
        torch.distributed.all_reduce = self._all_reduce
        return self

    def _all_reduce(self, tensor, op=torch.distributed.ReduceOp.SUM, group=None):
        self.groups.append(group)
        return self.real(tensor, op=op, group=group)

    def __exit__(self, *unused):
        torch.distributed.all_reduce = self.real


ALONE = {}


def alone(rank):
    """A group of this rank, as the model-parallel group is with data parallelism only."""
    if not ALONE:
        ALONE.update({r: torch.distributed.new_group([r]) for r in range(SIZE)})
    return ALONE[rank]


# --- plain tensors


def unequal_lists(clip_grads, rank, kinds, norm_type):
    lists = lists_of(kinds)
    with Reductions() as reductions:
        norm = clip_grads.get_grad_norm_fp32(lists[rank], norm_type, torch.distributed.group.WORLD)
    assert reductions.groups == [torch.distributed.group.WORLD]
    everything = [grad for grads in lists for grad in grads]
    assert norm == pytest.approx(norm64(everything, norm_type), rel=1e-6)


@pytest.mark.parametrize("norm_type", [2, math.inf, 3])
@pytest.mark.parametrize(
    "kinds",
    [
        (MIXED, NARROW, WIDE, NONE),
        (NONE, WIDE, NARROW, MIXED),
        (NONE, NONE, MIXED, NONE),
        (NARROW, NARROW, WIDE, WIDE),
    ],
    ids=["mixed-bf16-fp32-none", "none-fp32-bf16-mixed", "one_rank", "bf16-bf16-fp32-fp32"],
)
def test_norm_over_ranks_that_hold_different_dtypes(ranks, kinds, norm_type):
    """Every rank returns the norm of the whole after exactly one all-reduce."""
    ranks(unequal_lists, kinds, norm_type)


def resplit(clip_grads, rank):
    everything = [random((50 + i,), (BF16, FP32)[i % 2], seed=i) for i in range(23)]
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        owners = torch.randint(SIZE, (23,), generator=generator).tolist()
        mine = [grad for grad, owner in zip(everything, owners, strict=True) if owner == rank]
        assert clip_grads.get_grad_norm_fp32(mine) == pytest.approx(norm64(everything), rel=1e-6)


def test_norm_does_not_depend_on_the_split_over_ranks(ranks):
    """The same gradients, split in twenty ways."""
    ranks(resplit)


def poisoned(clip_grads, rank, norm_type, sick):
    grads = lists_of((MIXED, NARROW, WIDE, WIDE))[rank]
    if rank == sick:
        grads[-1][3, 2] = math.nan
    assert math.isnan(clip_grads.get_grad_norm_fp32(grads, norm_type))


@pytest.mark.parametrize("norm_type", [2, math.inf, 3])
@pytest.mark.parametrize("sick", range(SIZE))
def test_nan_on_one_rank_is_nan_on_every_rank(ranks, norm_type, sick):
    """Whichever rank it is; a MAX of floats may lose it."""
    ranks(poisoned, norm_type, sick)


def counted(clip_grads, rank):
    params = []
    for grad in lists_of((MIXED, NARROW, WIDE, NONE))[rank]:
        grad[:rank] = 0
        params.append(torch.nn.Parameter(torch.zeros(())))
        params[-1].decoupled_grad = grad
        params[-1].tensor_model_parallel = True
    with Reductions() as reductions:
        count = clip_grads.count_zeros_fp32(params, torch.distributed.group.WORLD, True)
    assert reductions.groups == [torch.distributed.group.WORLD]
    assert count == 2 * 7 * 1 + 1 * 7 * 2


def test_count_over_ranks_that_hold_different_dtypes(ranks):
    """The sum over all, after exactly one all-reduce."""
    ranks(counted)


# --- DTensors


def sharded_and_plain(clip_grads, rank, norm_type, order):
    mesh = init_device_mesh("cpu", (SIZE,))
    full = [random((9, 5), FP32, 1), random((3, 4), BF16, 2), random((40,), BF16, 3)]
    plain = [random((6,), FP32, 4), random((7,), BF16, 5)]
    sharded = [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in full[:2]]
    # 3 rows over 4 ranks: the last rank has a shard without elements.
    assert (sharded[1].to_local().numel() == 0) == (rank == 3)
    replicated = [distribute_tensor(full[2], mesh, [Replicate()])]
    grads = sharded + replicated + plain
    grads = {"dtensors_first": grads, "plain_first": grads[::-1], "between": grads[1:] + grads[:1]}
    with Reductions() as reductions:
        norm = clip_grads.get_grad_norm_fp32(grads[order], norm_type, alone(rank))
    assert type(norm) is float and norm == pytest.approx(norm64(full + plain, norm_type), rel=1e-6)
    assert reductions.groups == [mesh.get_group(0), alone(rank)]
    only = clip_grads.get_grad_norm_fp32(sharded[0], norm_type, alone(rank))
    assert only == pytest.approx(norm64(full[:1], norm_type), rel=1e-6)


@pytest.mark.parametrize("norm_type", [2, math.inf, 3])
@pytest.mark.parametrize("order", ["dtensors_first", "plain_first", "between"])
def test_dtensors_among_plain_tensors_on_one_mesh(ranks, norm_type, order):
    """Sharded squares add up over the mesh; replicated and plain tensors count once."""
    ranks(sharded_and_plain, norm_type, order)


def two_dimensions(clip_grads, rank):
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    full = random((13, 6), BF16, 1)
    for placements in (
        [Replicate(), Shard(0)],
        [Shard(1), Replicate()],
        [Shard(0), Shard(1)],
        [Replicate(), Replicate()],
    ):
        grad = distribute_tensor(full, mesh, placements)
        norm = clip_grads.get_grad_norm_fp32([torch.ones(2), grad], 2, alone(rank))
        assert norm == pytest.approx(norm64([full, torch.ones(2)]), rel=1e-6), placements
    # FSDP2 over tensor parallelism: its placement is no Shard.
    local = random((3, 6), FP32, 5 + rank)
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    grad = DTensor.from_local(local, mesh, placements, run_check=False)
    norm = clip_grads.get_grad_norm_fp32([grad], 2, alone(rank))
    everything = [random((3, 6), FP32, 5 + r) for r in range(SIZE)]
    assert norm == pytest.approx(norm64(everything), rel=1e-6)


def test_dtensors_on_a_mesh_of_two_dimensions(ranks):
    """Summed over the dimensions on which each is sharded, and those only."""
    ranks(two_dimensions)


def several_meshes(clip_grads, rank):
    dense = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("dp",))
    expert = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("ep", "expert_dp"))
    crossed = DeviceMesh("cpu", [3, 2, 1, 0])
    # Unlike in their names only, and two ways of sharding over one mesh.
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "cp"))
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    layouts = [
        (dense, [Shard(0)]),
        (expert, [Replicate(), Shard(0)]),
        (crossed, [Shard(0)]),
        (expert["expert_dp"], [Shard(0)]),
        (named["cp"], [Shard(0)]),
        (other["y"], [Shard(0)]),
        (named, [Shard(0), Replicate()]),
        (named, [Replicate(), Shard(0)]),
    ]
    full = [random((8, 3), (BF16, FP32)[i % 2], seed=i) for i in range(len(layouts))]
    grads = [distribute_tensor(f, *layout) for f, layout in zip(full, layouts, strict=True)]
    grads.append(torch.ones(3))
    for seed in range(12):
        # Each rank has an order of its own: collectives met in list order would deadlock.
        generator = torch.Generator().manual_seed(SIZE * seed + rank)
        mine = [grads[i] for i in torch.randperm(len(grads), generator=generator)]
        norm = clip_grads.get_grad_norm_fp32(mine, 2, alone(rank))
        assert norm == pytest.approx(norm64(full + [torch.ones(3)]), rel=1e-6)


def test_dtensors_on_several_meshes_in_any_order_on_each_rank(ranks):
    """Dense and expert parameters; the collectives are in one order on all ranks."""
    ranks(several_meshes)


def launches_by_sharding(clip_grads, rank):
    from tests.unit_tests.optimizer import te_stand_in as te

    mesh = init_device_mesh("cpu", (SIZE,))
    placements = [[Shard(0)], [Replicate()], [Partial()]]
    grads = [
        DTensor.from_local(torch.ones(4), mesh, place, run_check=False) for place in placements
    ]
    params = [torch.nn.Parameter(torch.zeros(())) for _ in grads]
    for param, grad in zip(params, grads, strict=True):
        param.decoupled_grad = grad
    names = ("multi_tensor_applier", "l2_norm_impl", "multi_tensor_scale_impl", "_is_fusable")
    before = {name: getattr(clip_grads, name) for name in names}
    applier = te.Applier()
    stand_ins = (applier, te.l2norm, te.scale, te.is_fusable)
    try:
        for name, stand_in in zip(names, stand_ins, strict=True):
            setattr(clip_grads, name, stand_in)
        norm = clip_grads.get_grad_norm_fp32(grads[:2], 2, alone(rank))
        clip_grads.clip_grad_by_total_norm_fp32(params, 1.0, 2.0, True)
    finally:
        for name, value in before.items():
            setattr(clip_grads, name, value)
    assert norm == pytest.approx(math.sqrt(4 * SIZE + 4))
    assert applier.launches == [(te.l2norm, [FP32])] * 2 + [(te.scale, [FP32] * 3)]
    assert all((grad.to_local() < 0.6).all() for grad in grads)


def test_dtensors_are_clipped_by_one_launch_however_they_are_sharded(ranks):
    """The norm takes one a sharding; a partial one can be scaled, if not measured."""
    ranks(launches_by_sharding)


def outside_of_the_mesh(clip_grads, rank):
    mesh = DeviceMesh("cpu", [0, 1])
    full = random((8, 3), BF16, 1)
    grad = distribute_tensor(full, mesh, [Shard(0)])
    mine = [grad, random((5,), FP32, rank)]
    norm = clip_grads.get_grad_norm_fp32(mine, 2, torch.distributed.group.WORLD)
    squares = sum(norm64([random((5,), FP32, r)]) ** 2 for r in range(SIZE))
    # Both ranks of the mesh bring the whole tensor's square to the group over all four.
    squares += 2 * norm64([full]) ** 2
    assert norm == pytest.approx(math.sqrt(squares), rel=1e-6)


def test_rank_outside_of_a_mesh_neither_raises_nor_hangs(ranks):
    """It holds no part of the tensor, and no process group of the mesh."""
    ranks(outside_of_the_mesh)


def partial(clip_grads, rank):
    mesh = init_device_mesh("cpu", (2, 2))
    for placements in ([Partial(), Shard(0)], [Replicate(), Partial()]):
        grad = DTensor.from_local(torch.ones(3), mesh, placements, run_check=False)
        with pytest.raises(ValueError, match=r"grads_for_norm\[1\] has placements .*redistribute"):
            clip_grads.get_grad_norm_fp32([torch.ones(2), grad], 2, alone(rank))
        param = torch.nn.Parameter(torch.zeros(3))
        param.decoupled_grad = grad
        with pytest.raises(ValueError, match=r"parameters\[0\].decoupled_grad has placements"):
            clip_grads.count_zeros_fp32([param], alone(rank), True)


def test_partial_dtensor_raises_on_every_rank(ranks):
    """Its local values say nothing about its norm."""
    ranks(partial)


def outside_of_the_group(clip_grads, rank):
    group = torch.distributed.new_group([0, 1])
    norm = clip_grads.get_grad_norm_fp32([torch.ones(4)], 2, group)
    assert norm == pytest.approx(math.sqrt(8) if rank < 2 else 2.0)


def test_rank_outside_of_the_group_has_its_own_norm(ranks):
    """As in the released file: torch warns and reduces nothing there."""
    ranks(outside_of_the_group)


def clipped_and_counted(clip_grads, rank, total_norm):
    mesh = init_device_mesh("cpu", (SIZE,))
    full = [random((9, 5), FP32, 1), random((3, 4), BF16, 2), random((40,), BF16, 3)]
    for tensor in full:
        tensor.view(-1)[::4] = 0
    zeros = sum(int((tensor == 0).sum()) for tensor in full)
    placements = [[Shard(0)], [Shard(0)], [Replicate()]]
    params = []
    for tensor, placement in zip(full, placements, strict=True):
        params.append(torch.nn.Parameter(torch.zeros(())))
        params[-1].decoupled_grad = distribute_tensor(tensor.clone(), mesh, placement)
    assert clip_grads.count_zeros_fp32(params, alone(rank), True) == zeros
    clip_grads.clip_grad_by_total_norm_fp32(params, 3.5, total_norm, True)
    coeff = torch.as_tensor(3.5 / (total_norm + 1e-6))
    for param, tensor in zip(params, full, strict=True):
        expected = (tensor.float() * coeff).to(tensor.dtype)
        assert torch.equal(param.decoupled_grad.full_tensor(), expected)


@pytest.mark.parametrize("total_norm", [7.0, torch.tensor([7.0])], ids=["float", "tensor"])
def test_dtensors_are_clipped_and_counted_by_their_shards(ranks, total_norm):
    """Every shard once, a replicated tensor once."""
    ranks(clipped_and_counted, total_norm)
