"""Tests run the checkout's clip_grads.py in the installed Megatron-Core, applied there or not.

`pytest --noconftest FILE` tests the file that is installed instead.
"""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.clip_grads_patch.demo import MODULE, UseFile  # noqa: E402
from megatron.clip_grads_patch.target import RELATIVE, Target  # noqa: E402

assert MODULE not in sys.modules
sys.meta_path.insert(0, UseFile(str(ROOT / RELATIVE)))


def pytest_collection_modifyitems(items):
    """Skip what needs a GPU, with the reason, where there is none."""
    reason = None
    if not torch.cuda.is_available():
        reason = "needs a CUDA device"
    elif importlib.util.find_spec("transformer_engine") is None:
        reason = "needs Transformer Engine"
    for item in items:
        if reason and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def clip_grads():
    """The module under test."""
    return importlib.import_module(MODULE)


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """A default process group of one, over gloo, and on a GPU machine over NCCL as well."""
    from megatron.core import parallel_state

    store = tmp_path_factory.mktemp("world") / "store"
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(
        backend, init_method=f"file://{store}", rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def shipped_source():
    """Source of the clip_grads.py that the installed Megatron-Core came with."""
    target = Target(None)
    path = target.file if target.state == "upstream" else target.original
    if path is None:
        pytest.skip("the installed Megatron-Core's own clip_grads.py is neither in place nor kept")
    return path.read_text()


@pytest.fixture
def stand_in(clip_grads, monkeypatch):
    """The module with the stand-in's kernels; returns the applier, which counts launches."""
    from tests.unit_tests.optimizer import te_stand_in as te

    applier = te.Applier()
    monkeypatch.setattr(clip_grads, "multi_tensor_applier", applier)
    monkeypatch.setattr(clip_grads, "l2_norm_impl", te.l2norm)
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_impl", te.scale)
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_tensor_impl", te.scale_tensor)
    monkeypatch.setattr(clip_grads, "_is_fusable", te.is_fusable)
    return applier
