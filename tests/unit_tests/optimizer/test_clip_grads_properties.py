"""Properties over random lists: dtypes, sizes from zero, views, order."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit_tests.optimizer.test_clip_grads_table import norm64, parameters, scaled

DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64)
PLENTY = settings(
    max_examples=150,
    derandomize=True,  # what passes today passes tomorrow; the fuzz run is for new lists
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@st.composite
def buffers(draw):
    """(buffer, view of it): the view is the gradient, the rest is padding."""
    dtype = draw(st.sampled_from(DTYPES))
    size = draw(st.one_of(st.integers(0, 40), st.integers(0, 4000)))
    offset = draw(st.integers(0, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    buffer = torch.randn(2 * size + offset + 5, generator=generator).to(dtype)
    view = buffer[offset : offset + size]
    layout = draw(st.sampled_from(["contiguous", "every_other", "column", "matrix"]))
    if layout == "every_other":
        view = buffer[offset : offset + 2 * size : 2]
    elif layout == "column" and size > 1:
        view = buffer[: size // 2 * 2].view(-1, 2)[:, 1]
    elif layout == "matrix" and size > 3:
        view = buffer[: size // 4 * 4].view(-1, 4).t()
    return buffer, view


LISTS = st.lists(buffers(), max_size=12)


@pytest.fixture(params=["torch", "stand_in"], autouse=True)
def kernels(request, world):
    """Torch's operations, then the stand-in's kernels."""
    if request.param == "stand_in":
        request.getfixturevalue("stand_in")


@PLENTY
@given(drawn=LISTS, norm_type=st.sampled_from([2, 2.0, math.inf, 1, 3]))
def test_norm_is_that_of_float64(clip_grads, drawn, norm_type):
    """Whatever the list."""
    grads = [view for _, view in drawn]
    norm = float(clip_grads.get_grad_norm_fp32(grads, norm_type))
    assert norm == pytest.approx(norm64(grads, norm_type), rel=1e-6, abs=0)


@PLENTY
@given(drawn=LISTS, rank_of=st.lists(st.integers(0, 3), min_size=12, max_size=12))
def test_norm_does_not_depend_on_the_split(clip_grads, drawn, rank_of):
    """Norms of any four parts of a list combine to that of the whole."""
    grads = [view for _, view in drawn]
    parts = [[g for g, r in zip(grads, rank_of, strict=False) if r == rank] for rank in range(4)]
    norms = [float(clip_grads.get_grad_norm_fp32(part)) for part in parts]
    assert math.hypot(*norms) == pytest.approx(norm64(grads), rel=1e-6, abs=0)


@PLENTY
@given(drawn=LISTS, data=st.data(), as_tensor=st.booleans())
def test_clip_changes_the_views_and_nothing_else(clip_grads, drawn, data, as_tensor):
    """Each element by one rounded product, padding by nothing."""
    total_norm = data.draw(st.floats(1e-3, 1e4))
    total_norm = torch.tensor([total_norm]) if as_tensor else total_norm
    expected = []
    for buffer, view in drawn:
        copy = buffer.clone()
        target = copy.as_strided(view.size(), view.stride(), view.storage_offset())
        target.copy_(scaled(view, total_norm, 1.0) if clipped(total_norm) else view)
        expected.append(copy)
    clip_grads.clip_grad_by_total_norm_fp32(
        parameters([view for _, view in drawn]), 1.0, total_norm, True
    )
    for (buffer, _), copy in zip(drawn, expected, strict=True):
        assert torch.equal(buffer, copy)


def clipped(total_norm):
    """A tensor coefficient scales always (by 1 at most), a float only below 1."""
    return isinstance(total_norm, torch.Tensor) or 1.0 / (total_norm + 1.0e-6) < 1.0


@PLENTY
@given(drawn=LISTS)
def test_count_is_the_number_of_zeros(clip_grads, drawn):
    """Over all dtypes and views."""
    for _, view in drawn:
        view[..., ::3] = 0
    zeros = sum(int((view == 0).sum()) for _, view in drawn)
    assert clip_grads.count_zeros_fp32(parameters([v for _, v in drawn]), None, True) == zeros
