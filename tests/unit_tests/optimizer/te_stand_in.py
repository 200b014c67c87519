"""A CPU stand-in for Transformer Engine's multi-tensor kernels, strict about their contract.

It models what was measured of TE 2.17.0: every tensor's memory is read as the first tensor's
dtype, whatever is pending when the last tensor is empty is lost, strides are ignored. What a GPU
may survive or not, such as a read beyond a tensor's memory, is an error here.
"""

import torch

CHUNK = 65536
MAX_CHUNKS = 320
MAX_NORM_TENSORS = 110
MAX_SCALE_TENSORS = 64


class IllegalMemoryAccess(RuntimeError):
    """What a GPU answers with a fault, or with silence."""


def _memory(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`numel` elements of another dtype from where the tensor's memory begins."""
    start = tensor.storage_offset() * tensor.element_size()
    size = tensor.numel() * dtype.itemsize
    storage = tensor.untyped_storage()
    if start + size > storage.nbytes():
        raise IllegalMemoryAccess(f"{size} bytes at {start} of {storage.nbytes()}")
    return torch.empty(0, dtype=torch.uint8).set_(storage, start, (size,))


def _read(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _memory(tensor, dtype).clone().view(dtype).float()


def _launched(tensors: list[torch.Tensor], most: int) -> set[int]:
    """Positions of the tensors that some launch handles."""
    pending, launched, in_launch = [], set(), 0
    for position, tensor in enumerate(tensors):
        if in_launch == most:
            raise IllegalMemoryAccess(f"tensor {position} has no place in the launch's metadata")
        in_launch += 1
        chunks = -(-tensor.numel() // CHUNK)
        for chunk in range(chunks):
            pending.append(position)
            complete = chunk == chunks - 1
            full = len(pending) == MAX_CHUNKS or (in_launch == most and complete)
            if full or (complete and position == len(tensors) - 1):
                launched.update(pending)
                pending, in_launch = [], 0 if complete else 1
    return launched


def l2norm(chunk_size, noop_flag, tensor_lists, per_tensor):
    """`multi_tensor_l2norm`: the norm, shape (1,), of one list."""
    (tensors,) = tensor_lists
    assert chunk_size == CHUNK and noop_flag.dtype == torch.int and per_tensor is False
    total = torch.zeros(1)
    for position in sorted(_launched(tensors, MAX_NORM_TENSORS)):
        values = _read(tensors[position], tensors[0].dtype)
        total += values.double().square().sum().float()
    return total.sqrt(), torch.empty(0)


def scale(chunk_size, noop_flag, tensor_lists, factor):
    """`multi_tensor_scale`: list 0 times a number into list 1."""
    assert not isinstance(factor, torch.Tensor)
    _scale(chunk_size, noop_flag, tensor_lists, torch.tensor(factor, dtype=torch.float32))


def scale_tensor(chunk_size, noop_flag, tensor_lists, factor):
    """`multi_tensor_scale_tensor`: the factor is an fp32 tensor of one element."""
    assert factor.dtype == torch.float32 and factor.numel() == 1
    assert factor.device == tensor_lists[0][0].device
    _scale(chunk_size, noop_flag, tensor_lists, factor)


def _scale(chunk_size, noop_flag, tensor_lists, factor):
    sources, targets = tensor_lists
    assert chunk_size == CHUNK and noop_flag.dtype == torch.int
    for position in _launched(sources, MAX_SCALE_TENSORS):
        values = _read(sources[position], sources[0].dtype) * factor
        memory = _memory(targets[position], targets[0].dtype)
        memory.copy_(values.to(targets[0].dtype).view(torch.uint8))


class Applier:
    """`multi_tensor_applier`; `launches` has (op, dtypes) of each call."""

    def __init__(self):
        self.launches = []

    def __call__(self, op, noop_flag, tensor_lists, *args):
        assert all(tensor_lists), "TE dies on an empty list"
        for tensors in tensor_lists:
            assert all(tensor.is_contiguous() for tensor in tensors), "TE ignores strides"
        self.launches.append((op, [tensor.dtype for tensor in tensor_lists[0]]))
        result = op(CHUNK, noop_flag, tensor_lists, *args)
        for tensors in tensor_lists:
            tensors[:] = [None] * len(tensors)  # TE edits the lists: nobody may use them again
        return result


def is_fusable(grad: torch.Tensor) -> bool:
    """The module's predicate with the condition on the device left out."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return grad.dtype in dtypes and grad.numel() > 0 and grad.is_contiguous()
