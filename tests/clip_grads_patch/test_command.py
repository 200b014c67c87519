"""The command, one test a promise."""

import base64
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from megatron.clip_grads_patch import __version__, command, place
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
        self.original = self.file.with_name("clip_grads.py.original")
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
        if code == 2 or (code == 1 and arguments[0] != "status"):
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


@pytest.mark.parametrize(
    "record",
    [b"one column\n", RELATIVE.encode() + b",sha256=%%%,1\n", RELATIVE.encode() + b"\n", b"\xff"],
)
def test_status_reads_on_over_a_broken_install(site, record):
    site("apply")
    next(site.root.glob("*.dist-info/RECORD")).write_bytes(record)
    optimizers = site.root / "transformer_engine" / "pytorch" / "optimizers"
    optimizers.mkdir(parents=True)
    (site.root / "transformer_engine" / "__init__.py").write_text("")
    (optimizers / "__init__.py").write_bytes(b"from x import (\0")
    (site.root / "transformer_engine-2.9.0.dist-info").mkdir()
    (site.root / "transformer_engine-2.9.0.dist-info" / "METADATA").write_bytes(b"Version: \xff")
    (site.root / "megatron/core/package_info.py").write_text("MAJOR = = 1")
    output, errors = site("status")
    assert "unknown" in output and errors == ""


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
    assert output.count("\n") == 1


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
SORTED = b'''
from operator import attrgetter


def get_grad_norm_fp32(grads_for_norm, norm_type=2, grad_stats_parallel_group=None):
    return [launch(list(group)) for group in groupby(grads_for_norm, attrgetter("dtype"))]
'''
HELPER = b'''
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype as grouped


def get_grad_norm_fp32(grads_for_norm, norm_type=2, grad_stats_parallel_group=None):
    return [launch(group) for group in _group_tensors_by_device_and_dtype([grads_for_norm])]
'''
REFUSED = {
    "local edits": (UPSTREAM + b"# edited\n", False, "it has local edits"),
    "groups in a loop": (GROUPS, True, "it seems to group by dtype already, in line 5"),
    "groups by sorting": (SORTED, True, "it seems to group by dtype already, in line 6"),
    "groups by torch": (HELPER, True, "it seems to group by dtype already, in line 6"),
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
        r"it defines clip_by_value, which ours does not",
    ),
    "a function under if": (
        UPSTREAM + b"\n\nif True:\n    async def clip_later(grads):\n        pass\n",
        True,
        "it defines clip_later, which ours does not",
    ),
    "a class": (UPSTREAM + b"\n\nclass Clipper:\n    pass\n", True, "it defines Clipper, which"),
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
    assert "is not a folder" in site("apply", "--target", str(site.root / "nowhere"), code=2)[1]
    assert "is not a folder" in site("apply", "--target", "", code=2)[1]


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


def test_apply_refuses_where_a_stale_pyc_could_not_go(site, monkeypatch, capsys):
    cache = site.file.parent / "__pycache__"
    cache.mkdir()
    (cache / "clip_grads.cpython-311.pyc").write_bytes(b"")
    monkeypatch.setattr(os, "access", lambda path, mode: path != cache)
    assert command.main(["apply", "--target", str(site.root)]) == 1
    assert f"{cache} is not writable" in capsys.readouterr().err
    assert site.file.read_bytes() == UPSTREAM


@pytest.mark.parametrize("who", ["user", "group"])
def test_apply_refuses_where_it_could_not_keep_the_owner(site, monkeypatch, capsys, who):
    info = site.file.stat()
    before = site.snapshot()
    monkeypatch.setattr(os, "geteuid", lambda: info.st_uid + (who == "user") or 65534)
    if who == "group":
        os.chown(site.file, 65534 if info.st_uid == 0 else -1, -1)
        monkeypatch.setattr(os, "getegid", lambda: info.st_gid + 1)
        monkeypatch.setattr(os, "getgroups", lambda: [])
        before = site.snapshot()
    assert command.main(["apply", "--force", "--target", str(site.root)]) == 1
    assert "could not keep it so" in capsys.readouterr().err
    assert site.snapshot() == before


def test_an_original_once_kept_is_never_overwritten(site):
    site("apply")
    newer = UPSTREAM + b"# of a newer release\n"
    site.install(newer)
    site("apply")
    assert site.original.read_bytes() == UPSTREAM
    assert site.original.with_name("clip_grads.py.original.1").read_bytes() == newer
    assert str(site.original) in site("revert")[0]  # which is still kept
    assert site.file.read_bytes() == newer


def test_an_edited_file_of_ours_does_not_take_the_original_s_place(site):
    site("apply")
    site.file.write_bytes(OURS + b"# edited\n")
    site("apply", "--force")
    site("revert")
    assert site.file.read_bytes() == UPSTREAM
    edited = site.original.with_name("clip_grads.py.original.1")
    assert edited.read_bytes() == OURS + b"# edited\n"


def test_apply_after_a_kill_between_keeping_and_replacing_keeps_one_original(site):
    os.link(site.file, site.original)
    site("apply")
    assert len(list(site.file.parent.glob("*.original*"))) == 1


def test_apply_keeps_a_copy_where_there_are_no_hard_links(site, monkeypatch):
    def no_links(*unused, **unused_too):
        raise PermissionError("no hard links here")

    site.file.chmod(0o640)
    os.utime(site.file, (1, 1))
    before = site.snapshot()
    monkeypatch.setattr(os, "link", no_links)
    assert command.main(["apply", "--target", str(site.root)]) == 0
    assert site.original.read_bytes() == UPSTREAM and site.file.read_bytes() == OURS
    assert command.main(["revert", "--target", str(site.root)]) == 0
    assert site.snapshot() == before


def failing(error):
    def fail(*unused, **unused_too):
        raise error

    return fail


@pytest.mark.parametrize("call", ["replace", "fsync", "link"])
@pytest.mark.parametrize("options", [(), ("--link",)], ids=["file", "link"])
def test_a_step_that_fails_leaves_all_as_it_was(site, monkeypatch, capsys, call, options):
    """Such as for want of space, or because another file is mounted over this one."""
    before = site.snapshot()
    (site.file.parent / "__pycache__").mkdir()
    (site.file.parent / "__pycache__" / "clip_grads.cpython-311.pyc").write_bytes(b"")
    before = site.snapshot()
    monkeypatch.setattr(os, call, failing(OSError(28, "No space left on device")))
    if call == "link":  # and neither can it be copied
        monkeypatch.setattr(os, "rename", failing(OSError(28, "No space left on device")))
    assert command.main(["apply", *options, "--target", str(site.root)]) == 1
    errors = capsys.readouterr().err
    assert re.fullmatch("error: [^\n]+No space left[^\n]*\nhint: [^\n]+\n", errors)
    assert site.snapshot() == before


def test_what_is_put_in_place_is_on_disk_before_and_after(site, monkeypatch):
    """A crash of the machine must not leave a name that points to nothing."""
    steps = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *given, name=name, real=real: (steps.append(name), real(*given))
        )
    assert command.main(["apply", "--target", str(site.root)]) == 0
    # The new file, the folder with the kept one, the step itself, the folder.
    assert steps == ["fsync", "fsync", "replace", "fsync"]


def test_two_at_once_end_as_one_after_the_other(site):
    """Both are fine, and upstream's file comes back."""
    for _ in range(6):
        call = [sys.executable, "-m", "megatron.clip_grads_patch"]
        verbs = [["apply"], ["apply"], ["revert"]]
        running = [
            subprocess.Popen(
                [*call, *verb, "--target", str(site.root)],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=subprocess.DEVNULL,
            )
            for verb in verbs
        ]
        assert [process.wait() for process in running] == [0, 0, 0]
        site("revert", target=True)
        assert site.file.read_bytes() == UPSTREAM
    assert sorted(path.name for path in site.file.parent.iterdir()) == ["clip_grads.py"]


def test_one_run_waits_for_another(site):
    """The lock of the test above, seen."""
    with place.alone(site.file.parent):
        call = [sys.executable, "-m", "megatron.clip_grads_patch", "apply"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        other = subprocess.Popen([*call, "--target", str(site.root)], env=environment)
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(1.0)
        assert site.file.read_bytes() == UPSTREAM
    assert other.wait() == 0 and site.file.read_bytes() == OURS


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
            names = {path.name for path in site.file.parent.iterdir()}
            assert "clip_grads.py.original.1" not in names
            # Whatever was left behind, the next run ends where it should.
            site("apply" if verb == "apply" else "revert", target=True)
            assert (site.file.read_bytes() == OURS) == (verb == "apply")
    left = {path.name for path in site.file.parent.iterdir()} - {"clip_grads.py.original"}
    assert left == {"clip_grads.py"}
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


def test_checkout_that_git_will_not_read_is_not_said_to_be_edited(checkout):
    os.chown(checkout.root, 1234, 1234) if os.geteuid() == 0 else None
    shutil.move(checkout.root / ".git" / "HEAD", checkout.root / ".git" / "HEAD_moved")
    assert "nothing tells whether it was edited" in checkout("apply", target=True, code=1)[1]


def test_checkout_without_git_is_not_said_to_be_edited(checkout, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert "git does not run" in checkout("apply", target=True, code=1)[1]


def test_checkout_is_judged_by_its_own_repository(checkout, tmp_path, monkeypatch):
    git(tmp_path, "init", "-q", "other")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    assert "upstream's, untouched" in checkout("status", target=True, code=1)[0]


def test_record_comes_before_head(site):
    """A site-packages that is tracked by git, with an edit committed."""
    site.file.write_bytes(UPSTREAM + b"# edited\n")
    git(site.root, "init", "-q")
    git(site.root, "add", "-A")
    git(site.root, "commit", "-qm", "all")
    assert "something else" in site("status", code=1)[0]


# --- use


def test_undo_can_be_pasted(tmp_path):
    site = Site(tmp_path / "with space")
    output, _ = site("apply", "--target", os.path.relpath(site.root, site.root))
    undo = re.search("`megatron-clip-grads (.*)`", output)[1]
    site(*shlex.split(undo))
    assert site.file.read_bytes() == UPSTREAM


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
    site("apply")
    for line in ("import missing_altogether", "raise RuntimeError('two\\nlines')"):
        (site.root / "megatron/core/__init__.py").write_text(line)
        assert "does not import" in site("demo", code=1)[1]


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
        "from megatron.clip_grads_patch.command import main\n"
        "raise SystemExit(main(['demo', '--steps', '3']))",
    )
    assert done.returncode == 0, done.stderr
    assert str(real_site / RELATIVE) in done.stdout
    assert "says nothing about a GPU" in done.stdout
    rows = re.findall(
        r"^ +(\d+) +([\d.]+) +([\d.]+) +([\d.]+) +(\S+) +([\d.]+)  \{.*float32.*bfloat16.*\}$",
        done.stdout,
        re.MULTILINE,
    )
    assert [int(row[0]) for row in rows] == [1, 2, 3]
    assert all(float(error) < 1e-6 for *_, error, _ in rows)
    assert all(float(row[2]) > 0.15 and abs(float(row[5]) - 0.1) < 1e-3 for row in rows)
    assert float(rows[-1][1]) < float(rows[0][1])  # the loss falls


@pytest.mark.parametrize(
    "fault",
    [
        "right = demo._norm64; demo._norm64 = lambda grads: right(grads) * 1.0001",
        "demo.Record.clip_grad_by_total_norm_fp32 = lambda self, *a, **k: None",
    ],
    ids=["norm", "clip"],
)
def test_demo_is_1_when_a_norm_is_off_or_nothing_is_clipped(real_site, fault):
    done = run_demo(
        real_site,
        f"from megatron.clip_grads_patch import demo; {fault}; raise SystemExit(demo.run(2))",
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
        wheel.extractall(tmp_path / "installed")

    # As installed, and with a setup.py beside it, as in `pip install --target` of an application.
    (tmp_path / "installed" / "setup.py").write_text("")
    site = Site(tmp_path / "site")
    call = [sys.executable, "-m", "megatron.clip_grads_patch"]
    codes = []
    for verb in (["status"], ["apply", "--link"], ["apply"], ["status"]):
        done = subprocess.run(
            [*call, *verb, "--target", str(site.root)],
            cwd=tmp_path / "installed",
            capture_output=True,
        )
        codes.append(done.returncode)
    assert codes == [1, 1, 0, 0]
    assert b"--link needs a checkout" not in done.stderr and site.file.read_bytes() == OURS
