"""Put a file in the place of another so that a kill at any moment leaves one of the two, whole."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep other runs of this command out of a folder, and clear up what a killed one left."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        # Some network file systems cannot lock; there it is as it was before there were locks.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        for left in folder.glob(".clip_grads-*.tmp"):
            shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(handle)


def write(path: Path, content: bytes, mode: int, owner: tuple[int, int]) -> None:
    """Make a new file, on disk when this returns."""
    with path.open("xb") as new:
        new.write(content)
        new.flush()
        made = os.fstat(new.fileno())
        if (made.st_uid, made.st_gid) != owner:
            os.fchown(new.fileno(), *owner)
        os.fchmod(new.fileno(), mode)
        os.fsync(new.fileno())


def replace(target: Path, make: Callable[[Path], None], original: Path | None) -> None:
    """Replace `target` by what `make` makes, and keep what was there as `original`, if named.

    If anything fails, all is as it was.
    """
    folder = Path(tempfile.mkdtemp(prefix=".clip_grads-", suffix=".tmp", dir=target.parent))
    kept = False
    try:
        make(folder / target.name)
        if original:
            _keep(target, original, folder)
            kept = True
            _sync(target.parent)
        swap(folder / target.name, target)
    except BaseException:
        if kept:
            original.unlink()
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _keep(target: Path, original: Path, folder: Path) -> None:
    """Give the file in place a second name: itself, not a copy, where the file system can."""
    try:
        os.link(target, original, follow_symlinks=False)
    except OSError:
        copy, info = folder / "copy", target.lstat()
        if target.is_symlink():
            os.symlink(os.readlink(target), copy)
        else:
            write(copy, target.read_bytes(), info.st_mode & 0o7777, (info.st_uid, info.st_gid))
            os.utime(copy, ns=(info.st_atime_ns, info.st_mtime_ns))
        os.rename(copy, original)


def swap(source: Path, target: Path) -> None:
    """The one step that changes which file is in place."""
    os.replace(source, target)
    _sync(target.parent)
    drop_stale_pyc(target)


def stale_pyc(target: Path) -> list[Path]:
    """Compiled files of the module; one that is not checked against its source would win."""
    return list(target.parent.glob(f"__pycache__/{target.stem}.*.pyc"))


def drop_stale_pyc(target: Path) -> None:
    """Remove them."""
    for stale in stale_pyc(target):
        stale.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Make a rename in this folder last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
