"""A real GPT of bf16 and natively fp32 parameters, with Megatron's own optimizers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.clip_grads_patch.demo import MAX_NORM
from megatron.clip_grads_patch.target import Target, our_file

pytestmark = pytest.mark.gpu

STEPS = 20
TRAIN = Path(__file__).with_name("train.py")
REFUSAL = "can't optimize a non-leaf Tensor"
ADAM_REFUSAL = "has dtype=BFloat16, but expected dtype=Float32"


def train(path, **more):
    """Run it in a process of its own: a kernel that faults takes its process with it."""
    call = [sys.executable, str(TRAIN), str(path), str(STEPS), json.dumps(more)]
    return subprocess.run(call, capture_output=True, text=True)


def rows_of(done):
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def original(tmp_path_factory, shipped_source):
    """The file that Megatron-Core came with."""
    path = tmp_path_factory.mktemp("shipped") / "clip_grads.py"
    path.write_text(shipped_source)
    return path


def check(rows, dtypes):
    """Every norm that of float64, every list of these dtypes, every gradient clipped."""
    assert len(rows) == STEPS
    for _, norm, reference, clipped, groups in rows:
        assert set(groups) == dtypes
        assert norm == pytest.approx(reference, rel=1e-6)
        assert reference > MAX_NORM and clipped == pytest.approx(MAX_NORM, rel=1e-3)
    assert rows[-1][0] < 0.5 * rows[0][0]


def test_every_norm_of_a_mixed_model_is_right_and_the_loss_falls():
    """bf16 gradient buffers and natively fp32 parameters."""
    check(rows_of(train(our_file())), {"torch.bfloat16", "torch.float32"})


def test_the_shipped_file_fails_on_the_same_model(original):
    """It dies, or some norm is off by more than a hundredth or not finite."""
    done = train(original)
    if done.returncode == 0:
        norms = [(norm, reference) for _, norm, reference, _, _ in rows_of(done)]
        assert any(not abs(norm / reference - 1.0) < 0.01 for norm, reference in norms)


def test_all_bf16_model_has_the_losses_of_the_shipped_file(original):
    """Bit for bit, over all steps; and not those of another seed or file that scales otherwise."""
    ours = rows_of(train(our_file(), native_fp32=False))
    theirs = rows_of(train(original, native_fp32=False))
    check(ours, {"torch.bfloat16"})
    assert [row[:2] for row in ours] == [row[:2] for row in theirs]


def test_optimizer_on_the_cpu():
    """`optimizer_cpu_offload`, where the release's optimizer takes natively fp32 parameters."""
    done = train(our_file(), optimizer_cpu_offload=True, optimizer_offload_fraction=1.0)
    if REFUSAL in done.stderr:
        pytest.skip(f"megatron-core {Target(None).version}'s offloading optimizer: {REFUSAL}")
    check(rows_of(done), {"torch.bfloat16", "torch.float32"})


@pytest.mark.parametrize("native_fp32", [True, False])
def test_megatron_fsdp(native_fp32):
    """Every norm of Megatron-FSDP's shards is that of float64."""
    done = train(our_file(), fsdp=True, native_fp32=native_fp32)
    if ADAM_REFUSAL in done.stderr:
        pytest.skip(f"megatron-core {Target(None).version}: TE's Adam takes no mixed grads")
    rows = rows_of(done)
    assert len(rows) == STEPS
    for _, norm, reference, _, _ in rows:
        assert reference > 0.0 and norm == pytest.approx(reference, rel=1e-6)
