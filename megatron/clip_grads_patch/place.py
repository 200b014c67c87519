"""Put a file in the place of another so that a kill at any moment leaves one of the two, whole."""

import os
import shutil
import stat
import tempfile
from pathlib import Path


def write(target: Path, content: bytes, like: os.stat_result) -> None:
    """Replace `target` by a new file with this content, and with the mode and owner of `like`."""
    handle, temporary = tempfile.mkstemp(prefix=".clip_grads-", suffix=".tmp", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as new:
            new.write(content)
            new.flush()
            made = os.fstat(new.fileno())
            if (made.st_uid, made.st_gid) != (like.st_uid, like.st_gid):
                os.fchown(new.fileno(), like.st_uid, like.st_gid)
            os.fchmod(new.fileno(), stat.S_IMODE(like.st_mode))
            os.fsync(new.fileno())
        _swap(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def link(target: Path, to: Path) -> None:
    """Replace `target` by a symbolic link."""
    folder = tempfile.mkdtemp(prefix=".clip_grads-", suffix=".tmp", dir=target.parent)
    temporary = os.path.join(folder, target.name)
    try:
        os.symlink(to, temporary)
        _swap(temporary, target)
    finally:
        Path(temporary).unlink(missing_ok=True)
        os.rmdir(folder)


def keep(target: Path, content: bytes | None, original: Path) -> None:
    """Keep the file in place under a second name: itself, not a copy, where the folder can.

    `content` is what the decision to replace it was made on. A file kept earlier stays if it is
    the same, and else (it is of a release since replaced) moves aside.
    """
    if os.path.lexists(original):
        if original.exists() and original.read_bytes() == content:
            return
        number = 1
        while os.path.lexists(f"{original}.{number}"):
            number += 1
        os.rename(original, f"{original}.{number}")
    try:
        os.link(target, original, follow_symlinks=False)
    except FileExistsError:
        raise  # somebody else is at work here
    except OSError:  # no hard links in this file system
        temporary = tempfile.mkdtemp(prefix=".clip_grads-", suffix=".tmp", dir=target.parent)
        shutil.copy2(target, os.path.join(temporary, target.name), follow_symlinks=False)
        os.rename(os.path.join(temporary, target.name), original)
        os.rmdir(temporary)
    _sync(target.parent)


def restore(original: Path, target: Path) -> None:
    """Put the kept file back, and with it its mode, owner and times."""
    _swap(original, target)


def _swap(source: str | Path, target: Path) -> None:
    # A .pyc that is not checked against its source would win over the new file.
    for stale in target.parent.glob(f"__pycache__/{target.stem}.*.pyc"):
        stale.unlink(missing_ok=True)
    os.replace(source, target)
    _sync(target.parent)


def _sync(folder: Path) -> None:
    """Make a rename in this folder last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
