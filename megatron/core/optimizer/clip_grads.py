# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

"""Norm, clipping and zero count of gradients that need not share a dtype, device or sharding."""

import inspect
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.tensor import DTensor

from ..package_info import MAJOR, MINOR
from ..tensor_parallel import param_is_not_tensor_parallel_duplicate
from ..transformer.module import param_is_not_shared

# Other packages read both names from here.
from ..utils import get_data_parallel_group_if_dtensor, to_local_if_dtensor  # pylint: disable=W0611

try:
    from ..tensor_parallel import param_is_not_gtp_duplicate
except ImportError:  # before 0.19 and on the dev branch: a filter that filters nothing more
    param_is_not_gtp_duplicate = param_is_not_shared

# Looked up at every call, so that they can be replaced; None where there is no such kernel.
multi_tensor_applier = l2_norm_impl = multi_tensor_scale_impl = None
multi_tensor_scale_tensor_impl = None
try:
    from transformer_engine.pytorch import optimizers as _te

    multi_tensor_applier, l2_norm_impl = _te.multi_tensor_applier, _te.multi_tensor_l2norm
    multi_tensor_scale_impl = _te.multi_tensor_scale
    multi_tensor_scale_tensor_impl = getattr(_te, "multi_tensor_scale_tensor", None)  # TE >= 2.14
except (ImportError, AttributeError):
    try:
        import amp_C
        from apex.multi_tensor_apply import multi_tensor_applier

        l2_norm_impl, multi_tensor_scale_impl = amp_C.multi_tensor_l2norm, amp_C.multi_tensor_scale
    except ImportError:
        warnings.warn("No Transformer Engine and no apex: gradient norms and clipping use torch.")

logger = logging.getLogger(__name__)
_seen_compositions: set[str] = set()
_FUSABLE = (torch.float32, torch.bfloat16, torch.float16)
_MOST_IN_A_LAUNCH = 20_000  # TE 2.17 has room for 20,321 tensors, those of all lists together
_TENSOR_NORM_EXPECTED = (MAJOR, MINOR) >= (0, 17)  # Megatron-Core expects a float before


def _is_fusable(grad: torch.Tensor) -> bool:
    """Whether the fused kernels, which see a bare pointer and a size, may handle this tensor."""
    return grad.is_cuda and grad.dtype in _FUSABLE and grad.numel() > 0 and grad.is_contiguous()


def _sharding_of(grad: DTensor, name: str, position: int) -> tuple:
    """(mesh, dim) pairs over which its shards add up; none where it counts once."""
    if grad.device_mesh.get_coordinate() is None:
        return ()  # a rank outside the mesh holds no part and has no process group there
    if any(placement.is_partial() for placement in grad.placements):
        raise ValueError(
            f"{name % position} has placements {grad.placements}; a DTensor gradient must be "
            f"sharded or replicated: redistribute() it first."
        )
    # Not is_shard(), which is false for the strided shards of FSDP2 over tensor parallelism.
    sharded = [dim for dim, place in enumerate(grad.placements) if not place.is_replicate()]
    return tuple((grad.device_mesh, dim) for dim in sharded)


def _launch_groups(grads: Iterable, name: str, by_sharding: bool) -> dict[tuple, list]:
    """Local tensors by (sharding, device, dtype, fusable), keys in order of first appearance.

    Only a group that is not fusable can be empty; it stays for its sharding's collectives.
    """
    groups, group, latest = {}, [], None
    for position, grad in enumerate(grads):
        sharding = ()
        if type(grad) is not torch.Tensor:  # spares most of them the slow isinstance()
            if grad is None:
                continue
            if isinstance(grad, DTensor):
                sharding = _sharding_of(grad, name, position) if by_sharding else ()
                grad = grad.to_local()
        fusable = _is_fusable(grad)
        # Empty or not: a shard may be empty on this rank and not on the next.
        if not (fusable or (grad.is_floating_point() and grad.itemsize > 1)):
            raise TypeError(
                f"{name % position} has dtype {grad.dtype}; gradients must be floating point, of "
                f"16 bits or more: leave it out of this call."
            )
        kind = (sharding, grad.get_device(), grad.dtype, fusable)
        if kind != latest:  # a device takes longer to hash than all else
            latest, group = kind, groups.setdefault((sharding, grad.device, *kind[2:]), [])
        if fusable or grad.numel() > 0:
            group.append(grad)
    if logger.isEnabledFor(logging.DEBUG):
        _log_composition(groups)
    return groups


def _log_composition(groups: dict[tuple, list]) -> None:
    """Log how many gradients of which dtype there are, once for each new composition."""
    counts = Counter(str(dtype) for (_, _, dtype, _), group in groups.items() for _ in group)
    composition = f"groups={dict(counts)}"
    if composition not in _seen_compositions:
        _seen_compositions.add(composition)
        logger.debug(composition)


def _pieces(grad: torch.Tensor) -> list[torch.Tensor]:
    """Views of one or more dimensions that cover `grad`, each fit for one operation of torch."""
    # A CPU copies the operand whose dtype it promotes; GPU reductions may fault from 2^31 elements.
    if grad.numel() <= (2**16 if grad.device.type == "cpu" else 2**30):
        return [grad if grad.dim() else grad.view(1)]
    if grad.is_contiguous():
        grad = grad.view(-1)
    halves = grad.chunk(2, max(range(grad.dim()), key=grad.size))
    return [piece for half in halves for piece in _pieces(half)]


def _group_norm(grads: list, norm_type: float, device: torch.device, fused: bool) -> torch.Tensor:
    """Norm of a launch group as a tensor of one element on `device`, in fp32 or better."""
    if not grads:
        return torch.zeros(1, device=device)
    if norm_type == 2.0 and fused and l2_norm_impl is not None:
        with torch.cuda.device_of(grads[0]):
            noop_flag = torch.zeros(1, dtype=torch.int, device=device)
            return multi_tensor_applier(l2_norm_impl, noop_flag, [grads], False)[0]
    pieces = [piece for grad in grads for piece in _pieces(grad)]
    if device.type != "cpu":
        dtype = torch.promote_types(grads[0].dtype, torch.float32)
        norms = torch.stack(torch._foreach_norm(pieces, norm_type, dtype=dtype))
    else:
        # Fp32 sums of a million elements miss 1e-6; results allocated one by one split the heap.
        norms = torch.empty(len(pieces), dtype=torch.float64)
        for piece, norm in zip(pieces, norms):
            torch.linalg.vector_norm(piece, norm_type, dtype=torch.float64, out=norm)
    return torch.linalg.vector_norm(norms, norm_type)


def _reduction_device(group: ProcessGroup | None) -> torch.device:
    """Where the group's backend reduces: the same kind of device on every rank, grads or none."""
    try:
        config = torch.distributed.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
    except (TypeError, ValueError):  # torch made no such group, or left this rank out of it
        config = "cuda:unknown"
    backend = dict(pair.split(":") for pair in config.split(",")).get("cuda", "gloo")
    if backend == "gloo" or not torch.cuda.is_available():  # gloo reduces in host memory
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _all_reduce(
    partials: Iterable[tuple], dtype: torch.dtype, op: ReduceOp, group: ProcessGroup | None
) -> torch.Tensor:
    """Reduce (sharding, value) pairs over their mesh dimensions, then all once over `group`."""
    device = _reduction_device(group)
    combine = torch.maximum if op == ReduceOp.MAX else torch.add
    zero = torch.zeros(1, dtype=dtype, device=device)
    sums = {}
    for sharding, value in partials:
        sums[sharding] = combine(sums.get(sharding, zero), value.to(device, dtype))
    total = sums.pop((), zero)
    # By mesh, not as listed: two ranks that meet in two meshes must take them in one order.
    for sharding in sorted(
        sums, key=lambda key: str([(m.mesh.tolist(), m.mesh_dim_names, dim) for m, dim in key])
    ):
        value = sums[sharding]
        for mesh, dim in sharding:
            value = value.to(_reduction_device(mesh.get_group(dim)))
            torch.distributed.all_reduce(value, op=op, group=mesh.get_group(dim))
        total = combine(total, value.to(device))
    torch.distributed.all_reduce(total, op=op, group=group)
    return total


@torch.no_grad()
def get_grad_norm_fp32(
    grads_for_norm: torch.Tensor | Iterable[torch.Tensor],
    norm_type: int | float | str = 2,
    grad_stats_parallel_group: ProcessGroup | None = None,
) -> torch.Tensor | float:
    """Norm of the gradients of all ranks, taken as one vector.

    Every rank does one all-reduce over `grad_stats_parallel_group`, whatever it holds. Before it,
    for each way in which its DTensors are sharded, it does one for each mesh dimension of that way.
    An L2 norm is the root of the sum of squared norms, one fused launch a (sharding, device,
    dtype), added in fp32: right as long as squares fit fp32, from about 1e-19 to 1.8e19.

    Args:
        grads_for_norm: Of any shape, also empty, any floating dtype, on any device; DTensors and
            plain tensors in any order.
        norm_type: p of the p-norm, as in `torch.linalg.vector_norm`, above 0; also inf or 'inf'.
        grad_stats_parallel_group: The default group if None.

    Returns:
        In megatron-core 0.17 and later, for a finite `norm_type`, with a kernel that scales by a
        tensor: fp32 tensor of shape (1,) on the gradients' GPU (if none, where the group reduces),
        no host synchronization as long as gradients and group are on that GPU. Otherwise: float.

    Raises:
        TypeError: A gradient is integer or complex, or has 8 bits an element.
        ValueError: `norm_type` is not above 0, or a DTensor is partial. Both errors come from the
            model's definition; with pipeline stages they can still hit one rank alone.
    """
    norm_type = float(norm_type)
    if not norm_type > 0.0:
        raise ValueError(f"norm_type is {norm_type}; it must be above 0: pass 2, or inf.")
    if isinstance(grads_for_norm, torch.Tensor):
        grads_for_norm = [grads_for_norm]
    groups = _launch_groups(grads_for_norm, "grads_for_norm[%d]", by_sharding=True)
    norms = [
        (sharding, _group_norm(grads[start:][:_MOST_IN_A_LAUNCH], norm_type, device, fusable))
        for (sharding, device, _, fusable), grads in groups.items()
        for start in range(0, len(grads) or 1, _MOST_IN_A_LAUNCH)
    ]
    if norm_type == torch.inf:
        # A MAX of floats may lose a NaN. The bits of fp32 numbers without sign order as integers
        # do, NaN above inf.
        bits = [(sharding, norm.float().abs().view(torch.int32)) for sharding, norm in norms]
        total = _all_reduce(bits, torch.int32, ReduceOp.MAX, grad_stats_parallel_group)
        return total.view(torch.float32).item()
    powers = [(sharding, norm.pow(norm_type)) for sharding, norm in norms]
    total = _all_reduce(powers, torch.float32, ReduceOp.SUM, grad_stats_parallel_group)
    if not _TENSOR_NORM_EXPECTED or multi_tensor_scale_tensor_impl is None:
        return total.item() ** (1.0 / norm_type)
    gpus = [device for _, device, _, _ in groups if device.type == "cuda"]
    return total.pow(1.0 / norm_type).to(gpus[0] if gpus else total.device)


def _scale(grads: list, scale_impl: Callable, coeff: torch.Tensor | float) -> None:
    """One fused launch; no bit depends on its chunks, but the time of gigabytes does."""
    in_large_chunks = sum(map(torch.Tensor.numel, grads)) > 2**31
    kernel = (lambda size, *rest: scale_impl(16 * size, *rest)) if in_large_chunks else scale_impl
    with torch.cuda.device_of(grads[0]):
        noop_flag = torch.zeros(1, dtype=torch.int, device=grads[0].device)
        multi_tensor_applier(kernel, noop_flag, [grads, grads], coeff)


@torch.no_grad()
def clip_grad_by_total_norm_fp32(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: int | float,
    total_norm: torch.Tensor | float,
    use_decoupled_grad: bool = False,
) -> None:
    """Scale gradients in place by min(1, max_norm / (total_norm + 1e-6)).

    The formula is that of `torch.nn.utils.clip_grad_norm_`. Each element is multiplied in fp32
    (fp64 ones in fp64) and rounded once; one fused launch a (device, dtype), no collective.

    Args:
        parameters: Those without a gradient are passed over.
        max_norm: Inf scales nothing.
        total_norm: A float gives a coefficient in double, rounded once to fp32; NaN leaves grads as
            they are. A tensor of one element gives one in fp32 on its device, with no host
            synchronization for gradients there; NaN makes them NaN.
        use_decoupled_grad: Scale `.decoupled_grad`, not `.grad`.

    Raises:
        TypeError: A gradient is integer or complex, or has 8 bits an element.
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    if max_norm == torch.inf:
        return
    clip_coeff = max_norm / (total_norm + 1.0e-6)
    is_tensor = isinstance(clip_coeff, torch.Tensor)
    if is_tensor:
        clip_coeff = clip_coeff.clamp(max=1.0).to(torch.float32).view(1)
    elif not clip_coeff < 1.0:
        return
    scale_impl = multi_tensor_scale_tensor_impl if is_tensor else multi_tensor_scale_impl

    attribute = "decoupled_grad" if use_decoupled_grad else "grad"
    grads = (getattr(param, attribute, None) for param in parameters)
    groups = _launch_groups(grads, f"parameters[%d].{attribute}", by_sharding=False)
    for (_, device, _, fusable), group in groups.items():
        coeff = clip_coeff.to(device) if is_tensor else clip_coeff
        if fusable and scale_impl is not None:
            for start in range(0, len(group), _MOST_IN_A_LAUNCH // 2):
                _scale(group[start:][: _MOST_IN_A_LAUNCH // 2], scale_impl, coeff)
            continue
        coeff = coeff if is_tensor else torch.full((1,), coeff, dtype=torch.float32, device=device)
        for grad in group:
            for piece in _pieces(grad):
                # A GPU would round a coefficient of no dimensions to the gradient's dtype first.
                piece.mul_(coeff)


def _duplicate_filters(*groups: ProcessGroup | None) -> list[Callable]:
    """Filters that are false for a shared parameter and for a duplicate on another rank."""
    names, filters = ("tp_group", "expert_tp_group", "gtp_group", "expert_gtp_group"), []
    for keep in (param_is_not_tensor_parallel_duplicate, param_is_not_gtp_duplicate):
        taken = inspect.signature(keep).parameters  # others in each release
        keywords = {name: group for name, group in zip(names, groups) if name in taken}
        filters.append(partial(keep, **keywords))
    return [param_is_not_shared, *filters]


@torch.no_grad()
def count_zeros_fp32(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    grad_stats_parallel_group: ProcessGroup | None,
    use_decoupled_grad: bool = False,
    tp_group: ProcessGroup | None = None,
    expert_tp_group: ProcessGroup | None = None,
    gtp_group: ProcessGroup | None = None,
    expert_gtp_group: ProcessGroup | None = None,
) -> int:
    """Number of zeros in the gradients of all ranks, summed in int64.

    Shared parameters and (generalized) tensor-parallel duplicates count once; a parameter that
    Megatron-FSDP manages counts by its local shards, as plain tensors. Collectives as in the norm.

    Args:
        parameters: Those without a gradient are passed over.
        grad_stats_parallel_group: The default group if None.
        use_decoupled_grad: Count in `.decoupled_grad`, not in `.grad`.
        tp_group, expert_tp_group, gtp_group, expert_gtp_group: Tell duplicates apart, in releases
            whose filters take them; None for the groups of `parallel_state`.

    Returns:
        The count, an int; one host synchronization.

    Raises:
        ValueError: A DTensor gradient is partial.
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    attribute = "decoupled_grad" if use_decoupled_grad else "grad"
    filters = _duplicate_filters(tp_group, expert_tp_group, gtp_group, expert_gtp_group)
    counts = {}
    for position, param in enumerate(parameters):
        grad, sharding = getattr(param, attribute, None), ()
        is_fsdp = getattr(param, "__fsdp_param__", False)
        if grad is None and is_fsdp:
            grad = param.grad  # where Megatron-FSDP before 0.19 leaves it in any case
        if grad is None or not (is_fsdp or all(keep(param) for keep in filters)):
            continue
        padding = 0 if is_fsdp else getattr(param, "gtp_pad_zeros", 0)
        if isinstance(grad, DTensor) and not is_fsdp:
            sharding = _sharding_of(grad, f"parameters[%d].{attribute}", position)
        grad = getattr(grad, "_local_tensor", grad)
        key = (sharding, grad.device)
        counts[key] = counts.get(key, 0) + grad.numel() - padding - torch.count_nonzero(grad)
    partials = [(sharding, count) for (sharding, _), count in counts.items()]
    return _all_reduce(partials, torch.int64, ReduceOp.SUM, grad_stats_parallel_group).item()
