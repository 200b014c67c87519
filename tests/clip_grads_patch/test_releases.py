"""Every release: apply, import, the signatures and the return type it has, status, revert."""

import __future__

import ast
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.clip_grads_patch.target import RELATIVE, our_file

ROOT = Path(__file__).resolve().parents[2]
RELEASES = ["0.12.3", "0.13.1", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2"]

PROBE = """
import inspect, json, sys, tempfile, warnings
warnings.simplefilter("ignore")
import torch
store = tempfile.mkdtemp() + "/store"
torch.distributed.init_process_group("gloo", init_method="file://" + store, rank=0, world_size=1)
from megatron.core import parallel_state
parallel_state.initialize_model_parallel()
from megatron.core.optimizer import clip_grads, optimizer
from tests.unit_tests.optimizer import te_stand_in as te

clip_grads.multi_tensor_applier, clip_grads.l2_norm_impl = te.Applier(), te.l2norm
clip_grads.multi_tensor_scale_impl = te.scale
clip_grads.multi_tensor_scale_tensor_impl = te.scale_tensor
clip_grads._is_fusable = te.is_fusable
grads = [torch.ones(3), torch.ones(13, dtype=torch.bfloat16)]
norm = clip_grads.get_grad_norm_fp32(grads)
largest = clip_grads.get_grad_norm_fp32(grads, "inf")
param = torch.nn.Parameter(torch.zeros(5))
param.grad = torch.tensor([0.0, 1.0, 0.0, 0.0, 4.0])
group = torch.distributed.group.WORLD
print(json.dumps({
    "file": clip_grads.__file__,
    "used": optimizer.get_grad_norm_fp32 is clip_grads.get_grad_norm_fp32,
    "norm": [type(norm).__name__, list(getattr(norm, "shape", [])), float(norm)],
    "inf": [type(largest).__name__, largest],
    "zeros": [clip_grads.count_zeros_fp32([param], group),
              clip_grads.count_zeros_fp32([param], group, tp_group=group)],
}))
"""


def run(root, *arguments):
    """Run Python with a release in front of everything, and this checkout behind it."""
    environment = os.environ | {"PYTHONPATH": f"{root}:{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
    call = [sys.executable, *arguments]
    return subprocess.run(call, cwd=root, env=environment, capture_output=True, text=True)


def verb(root, name, code):
    done = run(root, "-m", "megatron.clip_grads_patch", name)
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout


def functions(path):
    """Name to signature of the functions of a file, none of which is run."""
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    for node in tree.body:
        node.body, node.decorator_list = [ast.Pass(lineno=1, col_offset=0)], []
    flags = __future__.annotations.compiler_flag
    names = {}
    exec(compile(tree, str(path), "exec", flags=flags), names)
    return {node.name: inspect.signature(names[node.name]) for node in tree.body}


@pytest.fixture(scope="module", params=RELEASES)
def release(request, tmp_path_factory):
    """(version, folder) of a release as pip installs it, without what it needs."""
    version = request.param
    root = tmp_path_factory.mktemp(version)
    # The oldest have wheels for Python 3.11 at most; what is used here is the same in all.
    python = "3.11" if version < "0.14" else "3.12"
    wheel = ["--only-binary=:all:", "--python-version", python, "--ignore-requires-python"]
    call = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", *wheel]
    call += ["--target", str(root), f"megatron-core=={version}"]
    done = subprocess.run(call, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"megatron-core {version} cannot be fetched: {done.stderr.strip()[-200:]}")
    return version, root


def test_release_takes_the_file_works_with_it_and_gets_its_own_back(release):
    """One release after the other, in one process each."""
    version, root = release
    shipped = (root / RELATIVE).read_bytes()
    assert "upstream's, untouched" in verb(root, "status", 1)
    verb(root, "apply", 0)
    assert f"Megatron-Core       {version}\n" in verb(root, "status", 0)

    done = run(root, "-c", PROBE)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    tensor = [int(part) for part in version.split(".")] >= [0, 17]
    assert found == {
        "file": str(root / RELATIVE),
        "used": True,
        "norm": ["Tensor", [1], 4.0] if tensor else ["float", [], 4.0],
        "inf": ["float", 1.0],
        "zeros": [3, 3],
    }

    verb(root, "revert", 0)
    assert (root / RELATIVE).read_bytes() == shipped
    assert "upstream's, untouched" in verb(root, "status", 1)


def test_release_s_calls_fit_ours(release):
    """Its parameters, by name, position and default, begin ours."""
    _, root = release
    theirs = functions(root / RELATIVE)
    ours = functions(our_file())
    assert theirs and theirs.keys() <= ours.keys()
    for name, signature in theirs.items():
        both = zip(signature.parameters.values(), ours[name].parameters.values(), strict=False)
        for their, our in both:
            assert (their.name, their.kind, their.default) == (our.name, our.kind, our.default)
        assert len(signature.parameters) <= len(ours[name].parameters)
