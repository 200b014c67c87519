"""The command, one test a promise."""

import base64
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from megatron.clip_grads_patch import __version__, command
from megatron.clip_grads_patch import target as target_module
from megatron.clip_grads_patch.target import RELATIVE, TE_KERNELS, our_file

ROOT = Path(__file__).resolve().parents[2]
OURS = our_file().read_bytes()
UPSTREAM = b'''"""Stands for the file of a release."""

from transformer_engine.pytorch.optimizers import multi_tensor_applier


def get_grad_norm_fp32(grads_for_norm, norm_type=2, grad_stats_parallel_group=None):
    return multi_tensor_applier(grads_for_norm)


def clip_grad_by_total_norm_fp32(parameters, max_norm, total_norm, use_decoupled_grad=False):
    for param in parameters:
        assert param.decoupled_grad.dtype is not None
    multi_tensor_applier(parameters)
'''
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as two users")


class Site:
    """A folder like site-packages, in which importing anything is an error."""

    def __init__(self, root: Path):
        self.root, self.file = root, root / RELATIVE
        self.original = self.file.with_name("clip_grads.py.orig")
        self.file.parent.mkdir(parents=True)
        (root / "megatron/core/__init__.py").write_text("raise SystemError('was imported')")
        info = "MAJOR = 0\nMINOR = 16\nPATCH = 1\nPRE_RELEASE = ''\n"
        (root / "megatron/core/package_info.py").write_text(info)
        self.install(UPSTREAM)

    def install(self, content: bytes):
        """As pip would: a new file, and its digest in RECORD."""
        self.file.unlink(missing_ok=True)
        self.file.write_bytes(content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        record = self.root / "megatron_core-0.16.1.dist-info" / "RECORD"
        record.parent.mkdir(exist_ok=True)
        record.write_text(f"{RELATIVE},sha256={digest},{len(content)}\n")

    def __call__(self, *arguments, code=0, target=False, **options):
        """Run the command on it; returns (stdout, stderr)."""
        if target:
            arguments = (*arguments, "--target", str(self.root))
        search = ROOT if target else f"{self.root}:{ROOT}"
        done = subprocess.run(
            [sys.executable, "-m", "megatron.clip_grads_patch", *arguments],
            env=os.environ | {"PYTHONPATH": str(search)},
            cwd=self.root,
            capture_output=True,
            **options,
        )
        output, errors = done.stdout.decode("latin-1"), done.stderr.decode()
        assert done.returncode == code, (output, errors)
        assert "Traceback" not in errors
        if code == 1 and arguments[0] != "status":
            assert re.fullmatch("error: [^\n]+\nhint: [^\n]+\n", errors), errors
        return output, errors

    def snapshot(self):
        """Path, kind, mode, owner, times and content of everything."""
        found = {}
        for path in sorted(self.root.rglob("*")):
            info = path.lstat()
            content = path.read_bytes() if path.is_file() else None
            link = os.readlink(path) if path.is_symlink() else None
            times = None if path.is_dir() else info.st_mtime_ns
            found[path] = (info.st_mode, info.st_uid, info.st_gid, times, content, link)
        return found


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path / "site")


@pytest.fixture(params=[False, True], ids=["installed", "target"])
def target(request):
    """Whether the command finds the file or is told where it is."""
    return request.param


# --- status


def test_status_of_an_untouched_release_is_1_and_says_what_and_where(site, target):
    output, _ = site("status", target=target, code=1)
    assert "0.16.1" in output and str(site.file) in output and "upstream's, untouched" in output
    assert str(our_file()) in output and "none kept" in output


def test_status_after_apply_is_0(site, target):
    site("apply", target=target)
    output, _ = site("status", target=target)
    assert re.search(r"clip_grads.py +ours\n", output) and str(site.original) in output


def test_status_json_has_it_all(site):
    site("apply")
    report = json.loads(site("status", "--json")[0])
    assert report == {
        "megatron_core": "0.16.1",
        "file": str(site.file),
        "state": "ours",
        "link": None,
        "original": str(site.original),
        "our_file": str(our_file()),
        "our_version": __version__,
        "transformer_engine": report["transformer_engine"],
    }


def test_status_names_te_s_kernels_without_importing_it(site):
    optimizers = site.root / "transformer_engine" / "pytorch" / "optimizers"
    optimizers.mkdir(parents=True)
    (site.root / "transformer_engine" / "__init__.py").write_text("raise SystemError('imported')")
    names = ", ".join(name for name in TE_KERNELS if name != "multi_tensor_scale_tensor")
    (optimizers / "__init__.py").write_text(f"from somewhere import {names}\n")
    info = site.root / "transformer_engine-2.9.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: transformer_engine\nVersion: 2.9.0"
    )
    report = json.loads(site("status", "--json", code=1)[0])["transformer_engine"]
    assert report["version"] == "2.9.0"
    assert {name for name, there in report["kernels"].items() if not there} == {
        "multi_tensor_scale_tensor"
    }


def test_status_of_an_edited_file_is_something_else(site):
    site.file.write_bytes(UPSTREAM + b"# edited\n")
    assert "something else" in site("status", code=1)[0]


def test_status_knows_an_older_release_of_ours(site, monkeypatch, capsys):
    older = b"# ours, of an older release\n"
    monkeypatch.setattr(target_module, "OLDER_SHA256", (hashlib.sha256(older).hexdigest(),))
    site("apply")
    site.file.write_bytes(older)
    assert command.main(["status", "--target", str(site.root)]) == 1
    assert "ours, of an older release" in capsys.readouterr().out
    assert command.main(["apply", "--target", str(site.root)]) == 0
    assert site.file.read_bytes() == OURS and site.original.read_bytes() == UPSTREAM


def test_status_without_a_megatron_core_is_1(tmp_path):
    (tmp_path / "empty").mkdir()
    call = [sys.executable, "-S", "-m", "megatron.clip_grads_patch", "status"]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "no Megatron-Core is installed" in done.stderr


# --- apply


def test_apply_puts_ours_in_place_and_says_how_to_undo_it(site, target):
    output, _ = site("apply", target=target)
    assert site.file.read_bytes() == OURS
    assert str(site.file) in output and "megatron-clip-grads revert" in output
    assert output.count("\n") == 1 and (str(site.root) in output.split("revert")[1]) == target


def test_apply_keeps_the_original_beside_it(site):
    site("apply")
    assert site.original.read_bytes() == UPSTREAM


def test_apply_twice_changes_nothing_the_second_time(site):
    site("apply")
    before = site.snapshot()
    assert "already in place" in site("apply")[0]
    assert site.snapshot() == before


@AS_ROOT
def test_apply_keeps_mode_and_owner(site):
    site.file.chmod(0o640)
    os.chown(site.file, 1234, 4321)
    site("apply")
    info = site.file.stat()
    assert (stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid) == (0o640, 1234, 4321)


def test_apply_does_not_write_through_a_hard_link(site, tmp_path):
    os.link(site.file, tmp_path / "cache_of_the_installer")
    site("apply")
    assert (tmp_path / "cache_of_the_installer").read_bytes() == UPSTREAM


def test_apply_does_not_write_through_a_symbolic_link(site, tmp_path):
    elsewhere = tmp_path / "elsewhere.py"
    site.file.rename(elsewhere)
    site.file.symlink_to(elsewhere)
    site("apply")
    assert elsewhere.read_bytes() == UPSTREAM
    assert not site.file.is_symlink() and site.file.read_bytes() == OURS
    site("revert")
    assert os.readlink(site.file) == str(elsewhere)


def test_apply_removes_stale_pyc_files(site):
    cache = site.file.parent / "__pycache__"
    cache.mkdir()
    for name in ("clip_grads.cpython-311.pyc", "clip_grads.cpython-312.opt-1.pyc", "other.pyc"):
        (cache / name).write_bytes(b"")
    site("apply")
    assert [path.name for path in cache.iterdir()] == ["other.pyc"]


@pytest.mark.parametrize("content", [UPSTREAM, UPSTREAM + b"# edited\n", OURS])
def test_dry_run_decides_as_apply_does_and_changes_nothing(site, content):
    site.file.write_bytes(content)
    before = site.snapshot()
    edited = content not in (UPSTREAM, OURS)
    site("apply", "--dry-run", code=int(edited))
    assert site.snapshot() == before
    site("apply", code=int(edited))


GROUPS = b'''
def get_grad_norm_fp32(grads_for_norm, norm_type=2, grad_stats_parallel_group=None):
    groups = {}
    for grad in grads_for_norm:
        groups.setdefault(grad.dtype, []).append(grad)
    return sum(multi_tensor_applier(group) for group in groups.values())
'''
HELPER = GROUPS.replace(b"sum(multi_tensor_applier(", b"sum(launch(") + (
    b"\n\ndef _launch(group):\n    return multi_tensor_applier(group)\n"
).replace(b"_launch", b"launch")
REFUSED = {
    "local edits": (UPSTREAM + b"# edited\n", False, "it has local edits"),
    "groups in a loop": (GROUPS, True, "it groups by dtype already"),
    "groups by a helper": (HELPER, True, "it groups by dtype already"),
    "another parameter": (
        UPSTREAM.replace(b"norm_type=2", b"norm_type=2, dp_group=None"),
        True,
        r"its get_grad_norm_fp32\(\) takes dp_group, which ours does not",
    ),
    "any keywords": (
        UPSTREAM.replace(b"use_decoupled_grad=False", b"use_decoupled_grad=False, **more"),
        True,
        r"its clip_grad_by_total_norm_fp32\(\) takes more, which ours does not",
    ),
    "another function": (
        UPSTREAM + b"\n\ndef clip_by_value(grads):\n    pass\n",
        True,
        r"it defines clip_by_value\(\), which ours does not",
    ),
    "no Python": (b"def broken(:\n", True, "it is not valid Python"),
}


@pytest.mark.parametrize("content, recorded, why", REFUSED.values(), ids=REFUSED)
def test_apply_refuses_unless_forced_and_revert_brings_that_file_back(site, content, recorded, why):
    if recorded:
        site.install(content)
    else:
        site.file.write_bytes(content)
    before = site.snapshot()
    for dry_run in ([], ["--dry-run"]):
        _, errors = site("apply", *dry_run, code=1)
        assert re.search(why, errors) and "--force" in errors
    assert site.snapshot() == before
    site("apply", "--force")
    assert site.file.read_bytes() == OURS
    site("revert")
    assert site.snapshot() == before


def test_apply_refuses_what_is_no_megatron_core(site, tmp_path):
    (site.root / "megatron/core/package_info.py").unlink()
    before = site.snapshot()
    assert "holds no Megatron-Core" in site("apply", "--force", target=True, code=1)[1]
    assert site.snapshot() == before


def test_target_that_is_no_folder_is_wrong_use(site):
    _, errors = site("apply", "--target", str(site.root / "nowhere"), code=2)
    assert errors.startswith("error: ") and "hint: " in errors


@AS_ROOT
def test_apply_refuses_what_it_may_not_write(site, capsys):
    before = site.snapshot()
    os.setresuid(65534, 0, 0)  # access(2) goes by the real user, all else by the effective one
    try:
        assert command.main(["apply", "--force", "--target", str(site.root)]) == 1
    finally:
        os.setresuid(0, 0, 0)
    errors = capsys.readouterr().err
    assert "is not writable" in errors and str(our_file()) in errors
    assert site.snapshot() == before


def test_apply_refuses_where_it_could_not_keep_the_owner(site, monkeypatch, capsys):
    owner = site.file.stat().st_uid
    before = site.snapshot()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert command.main(["apply", "--force", "--target", str(site.root)]) == 1
    assert f"belongs to user {owner}" in capsys.readouterr().err
    assert site.snapshot() == before


def test_an_original_once_kept_is_never_overwritten(site):
    site("apply")
    newer = UPSTREAM + b"# of a newer release\n"
    site.install(newer)
    site("apply")
    assert site.original.read_bytes() == newer
    assert site.original.with_name("clip_grads.py.orig.1").read_bytes() == UPSTREAM
    site("revert")
    assert site.file.read_bytes() == newer


def test_apply_keeps_a_copy_where_there_are_no_hard_links(site, monkeypatch):
    def no_links(*unused, **unused_too):
        raise PermissionError("no hard links here")

    site.file.chmod(0o640)
    before = site.snapshot()
    monkeypatch.setattr(os, "link", no_links)
    assert command.main(["apply", "--target", str(site.root)]) == 0
    assert site.original.read_bytes() == UPSTREAM and site.file.read_bytes() == OURS
    assert command.main(["revert", "--target", str(site.root)]) == 0
    assert site.snapshot() == before


KILL = """
import os, signal, sys
from megatron.clip_grads_patch.command import main
left = int(sys.argv.pop(1))
def count(event, arguments):
    global left
    if event == "open" or event.startswith(("os.", "shutil.", "tempfile.")):
        left -= 1
        if left == -1:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(count)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("options", [(), ("--link",)], ids=["file", "link"])
def test_a_kill_at_any_moment_leaves_the_old_file_or_the_new_one(site, options):
    outcomes, moment, codes = set(), -1, {}
    while codes != {"apply": 0, "revert": 0}:
        moment += 1
        for verb in ("apply", "revert"):
            arguments = [str(moment), verb, "--target", str(site.root)]
            arguments += options if verb == "apply" else ()
            done = subprocess.run(
                [sys.executable, "-c", KILL, *arguments],
                env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
                capture_output=True,
            )
            assert done.returncode in (0, -signal.SIGKILL), done.stderr
            codes[verb] = done.returncode
            content = site.file.read_bytes()
            assert content in (UPSTREAM, OURS)
            outcomes.add((verb, content == OURS, done.returncode))
            if content == OURS:
                assert site.original.read_bytes() == UPSTREAM
            # Whatever was left behind, the next run ends where it should.
            site("apply" if verb == "apply" else "revert", target=True)
            assert (site.file.read_bytes() == OURS) == (verb == "apply")
    # Both were seen killed before and after their change.
    killed = -signal.SIGKILL
    assert {("apply", False, killed), ("apply", True, killed)} <= outcomes
    assert {("revert", True, killed), ("revert", False, killed)} <= outcomes


# --- apply --link


def test_link_points_to_the_checkout_s_file(site):
    site("apply", "--link")
    assert os.readlink(site.file) == str(our_file())
    assert f"a link to {our_file()}" in site("status")[0]
    assert "already in place" in site("apply", "--link")[0]
    site("revert")
    assert not site.file.is_symlink() and site.file.read_bytes() == UPSTREAM


def test_link_replaces_a_file_of_ours(site):
    site("apply")
    site("apply", "--link")
    assert site.file.is_symlink() and site.original.read_bytes() == UPSTREAM


def test_link_that_dangles_is_named_and_can_be_mended(site):
    site("apply")
    site.file.unlink()
    site.file.symlink_to(site.root / "moved_away.py")
    output, _ = site("status", code=1)
    assert "a link that points nowhere" in output and "moved_away.py" in output
    site("apply")
    assert site.file.read_bytes() == OURS
    site.file.unlink()
    site.file.symlink_to(site.root / "moved_away.py")
    site("revert")
    assert site.file.read_bytes() == UPSTREAM


def test_link_that_dangles_without_an_original_is_left_unless_forced(site):
    site.file.unlink()
    site.file.symlink_to(site.root / "moved_away.py")
    assert "no original is kept" in site("apply", code=1)[1]
    site("apply", "--force")
    assert site.file.read_bytes() == OURS and stat.S_IMODE(site.file.stat().st_mode) & 0o400


# --- revert


def test_revert_brings_back_every_byte_mode_and_time(site, target):
    site.file.chmod(0o640)
    os.utime(site.file, (1, 1))
    before = site.snapshot()
    site("apply", target=target)
    site("revert", target=target)
    assert site.snapshot() == before


def test_revert_with_nothing_to_revert_is_0(site):
    before = site.snapshot()
    assert "nothing to revert" in site("revert")[0]
    assert site.snapshot() == before


def test_revert_refuses_a_file_that_is_not_ours(site):
    site("apply")
    site.file.write_bytes(b"# somebody else's\n")
    before = site.snapshot()
    assert "is not ours" in site("revert", code=1)[1]
    assert site.snapshot() == before


def test_revert_without_an_original_says_how_to_get_it(site):
    site("apply")
    site.original.unlink()
    assert "megatron-core==0.16.1" in site("revert", code=1)[1]
    assert site.file.read_bytes() == OURS


# --- diff, and checkouts


def git(folder, *arguments, **options):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def checkout(site):
    """A git repository without pip's RECORD."""
    shutil.rmtree(site.root / "megatron_core-0.16.1.dist-info")
    git(site.root, "init", "-q")
    git(site.root, "add", "-A")
    git(site.root, "commit", "-qm", "upstream")
    return site


@pytest.mark.parametrize("content", [UPSTREAM, UPSTREAM.rstrip(b"\n"), b"\xff\x0c\r\n\r x\n", b""])
def test_diff_goes_through_git_apply(checkout, content):
    checkout.file.write_bytes(content)
    output, _ = checkout("diff", target=True)
    assert checkout.file.read_bytes() == content
    call = [sys.executable, "-m", "megatron.clip_grads_patch", "diff", "--target", "."]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    patch = subprocess.run(call, cwd=checkout.root, env=environment, capture_output=True).stdout
    git(checkout.root, "apply", input=patch)
    assert checkout.file.read_bytes() == OURS
    assert checkout("diff", target=True) == ("", "")


def test_diff_names_no_path_of_the_machine(checkout):
    output, _ = checkout("diff", target=True)
    assert output.startswith(f"--- a/{RELATIVE}\n+++ b/{RELATIVE}\n@@ ")
    assert str(checkout.root) not in output and str(ROOT) not in output


def test_checkout_as_committed_is_upstream_s(checkout):
    assert "upstream's, untouched" in checkout("status", target=True, code=1)[0]
    checkout("apply", target=True)
    checkout("revert", target=True)
    assert git(checkout.root, "status", "--porcelain") == b""


def test_checkout_with_local_edits_is_refused(checkout):
    checkout.file.write_bytes(UPSTREAM + b"# edited\n")
    assert "it has local edits" in checkout("apply", target=True, code=1)[1]


# --- use


@pytest.mark.parametrize("arguments", [[], ["bogus"], ["apply", "--jsn"], ["demo", "--steps", "0"]])
def test_wrong_use_is_2(site, arguments):
    site(*arguments, code=2)


@pytest.mark.parametrize("verb", ["status", "apply", "revert", "diff", "demo"])
def test_help_has_an_example(site, verb):
    assert f"example: megatron-clip-grads {verb}" in site(verb, "--help")[0]


def test_version(site):
    assert site("--version")[0] == f"megatron-clip-grads {__version__}\n"


def test_a_reader_that_stops_early_is_no_error(site):
    call = f"{sys.executable} -m megatron.clip_grads_patch diff | head -1 >/dev/null"
    environment = os.environ | {"PYTHONPATH": f"{site.root}:{ROOT}"}
    done = subprocess.run(call, shell=True, env=environment, cwd=site.root, capture_output=True)
    assert done.stderr == b""


# --- demo


def test_demo_without_ours_in_place_says_what_to_do(site):
    assert "megatron-clip-grads apply" in site("demo", code=1)[1]


def test_demo_without_a_megatron_core_that_imports_is_no_traceback(site):
    (site.root / "megatron/core/__init__.py").write_text("import missing_altogether")
    site("apply")
    assert "missing_altogether" in site("demo", code=1)[1]


@pytest.fixture(scope="module")
def real_site(tmp_path_factory):
    """A copy of the installed Megatron-Core, with ours in place."""
    spec = importlib.util.find_spec("megatron.core")
    root = tmp_path_factory.mktemp("real")
    shutil.copytree(Path(spec.origin).parent, root / "megatron" / "core")
    call = [sys.executable, "-m", "megatron.clip_grads_patch", "apply", "--force", "--target"]
    subprocess.run([*call, str(root)], cwd=ROOT, check=True)
    return root


def run_demo(root, code):
    environment = os.environ | {"PYTHONPATH": f"{root}:{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
    call = [sys.executable, "-c", code]
    return subprocess.run(call, cwd=root, env=environment, capture_output=True, text=True)


def test_demo_trains_and_every_norm_is_right(real_site):
    done = run_demo(
        real_site,
        "from megatron.clip_grads_patch.command import main; raise SystemExit(main(['demo']))",
    )
    assert done.returncode == 0, done.stderr
    assert str(real_site / RELATIVE) in done.stdout
    assert "says nothing about a GPU" in done.stdout
    rows = re.findall(
        r"^ +(\d+) +([\d.]+) +([\d.]+) +([\d.]+) +(\S+) +([\d.]+)  \{.*float32.*bfloat16.*\}$",
        done.stdout,
        re.MULTILINE,
    )
    assert [int(row[0]) for row in rows] == [1, 2, 3, 4, 5]
    assert all(float(error) < 1e-6 for *_, error, _ in rows)
    assert all(float(row[2]) > 0.15 and abs(float(row[5]) - 0.1) < 1e-3 for row in rows)
    assert float(rows[-1][1]) < float(rows[0][1])  # the loss falls


def test_demo_is_1_when_a_norm_is_off(real_site):
    done = run_demo(
        real_site,
        "from megatron.clip_grads_patch import demo\n"
        "right = demo._norm64\n"
        "demo._norm64 = lambda grads: right(grads) * 1.0001\n"
        "raise SystemExit(demo.run(2))",
    )
    assert done.returncode == 1, done.stderr


# --- the package


def test_wheel_owns_nothing_of_megatron_core_and_carries_the_file(tmp_path):
    source = tmp_path / "source"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode != 0:
        pytest.skip("needs a git checkout, to take what it tracks")
    for name in tracked.stdout.split():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    build = "import sys, setuptools.build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"
    for kind, folder in (("build_sdist", source), ("build_wheel", None)):
        if folder is None:
            shutil.unpack_archive(next(tmp_path.glob("*.tar.gz")), tmp_path / "unpacked")
            (folder,) = (tmp_path / "unpacked").iterdir()
        call = [sys.executable, "-c", build, kind, str(tmp_path)]
        subprocess.run(call, cwd=folder, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = wheel.namelist()
        assert not [name for name in names if name.startswith("megatron/core")]
        assert wheel.read("megatron/clip_grads_patch/clip_grads.py") == OURS
