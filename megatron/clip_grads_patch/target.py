"""What is known about a Megatron-Core and its clip_grads.py, without importing either."""

import ast
import base64
import contextlib
import csv
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import warnings
from pathlib import Path

RELATIVE = "megatron/core/optimizer/clip_grads.py"
TE_KERNELS = (
    "multi_tensor_applier",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
)
# sha256 of our clip_grads.py in each earlier release of this project.
OLDER_SHA256: tuple[str, ...] = ()


class Refusal(Exception):
    """Nothing was changed: what is wrong, what to do about it, and the exit code."""

    def __init__(self, error: str, hint: str, code: int = 1):
        super().__init__(error)
        # A message of some library may have several lines.
        self.error, self.hint, self.code = " ".join(error.split()), " ".join(hint.split()), code


def our_file() -> Path:
    """Our clip_grads.py: the wheel's data, or the file in the checkout that is being run."""
    here = Path(__file__).resolve().parent
    return here.parents[1] / RELATIVE if in_checkout() else here / "clip_grads.py"


def in_checkout() -> bool:
    """Whether this code runs from a checkout of the project; a wheel brings the file as data."""
    return not Path(__file__).resolve().with_name("clip_grads.py").is_file()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Target:
    """A Megatron-Core, installed or a source checkout, and the state of its clip_grads.py."""

    def __init__(self, folder: str | None):
        """Find it in `folder`, or where `import megatron.core` would."""
        if folder is not None:
            self.root = Path(folder).absolute()
            if not folder or not self.root.is_dir():
                raise Refusal(
                    f"--target {folder!r} is not a folder",
                    "name the folder that holds megatron/core",
                    code=2,
                )
        else:
            spec = importlib.util.find_spec("megatron.core")
            if spec is None or spec.origin is None:
                raise Refusal(
                    "no Megatron-Core is installed for this Python",
                    "pip install megatron-core, or name a checkout with --target DIR",
                )
            self.root = Path(spec.origin).absolute().parent.parent.parent
        self.file = self.root / RELATIVE
        self.package_info = self.root / "megatron" / "core" / "package_info.py"
        for needed in (self.package_info, self.file):
            if not os.path.lexists(needed):
                raise Refusal(
                    f"{self.root} holds no Megatron-Core: there is no {needed}",
                    "name the folder that holds megatron/core with --target DIR",
                )

    @functools.cached_property
    def version(self) -> str:
        """Version from package_info.py, read but not run."""
        values = {}
        try:
            for node in _parse(self.package_info.read_bytes()).body:
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                    values[ast.unparse(node.targets[0])] = node.value.value
            return "{MAJOR}.{MINOR}.{PATCH}{PRE_RELEASE}".format(**values)
        except (KeyError, SyntaxError, ValueError):
            return "unknown"

    @functools.cached_property
    def content(self) -> bytes | None:
        """Bytes of the file in place; None for a link that points nowhere."""
        return self.file.read_bytes() if self.file.exists() else None

    @functools.cached_property
    def link(self) -> str | None:
        """What the file in place links to, or None if it is no link."""
        return os.readlink(self.file) if self.file.is_symlink() else None

    @functools.cached_property
    def state(self) -> str:
        """'ours', 'older' (ours, of an earlier release), 'upstream', 'modified' or 'dangling'."""
        return "dangling" if self.content is None else self._kind(self.content)

    def _kind(self, content: bytes) -> str:
        digest = _sha256(content)
        if digest == _sha256(our_file().read_bytes()):
            return "ours"
        if digest in OLDER_SHA256:
            return "older"
        return "upstream" if digest in self.upstream[0] else "modified"

    @functools.cached_property
    def upstream(self) -> tuple[set[str], str]:
        """sha256 of the file as pip's RECORD has it, else git's HEAD; and why, if there is none."""
        found = set()
        for record in self.root.glob("megatron_core-*.dist-info/RECORD"):
            with contextlib.suppress(ValueError, OSError, csv.Error):
                for row in csv.reader(record.read_text(encoding="utf-8").splitlines()):
                    if row[:1] == [RELATIVE] and row[1:] and row[1].startswith("sha256="):
                        code = row[1].removeprefix("sha256=")
                        found.add(base64.urlsafe_b64decode(code + "=" * (-len(code) % 4)).hex())
        if found:
            return found, ""
        call = ["git", "-C", str(self.root), "cat-file", "blob", f"HEAD:./{RELATIVE}"]
        # A hook or an alias may have set GIT_DIR for another repository.
        environment = {key: os.environ[key] for key in os.environ if not key.startswith("GIT_")}
        try:
            done = subprocess.run(call, capture_output=True, check=False, env=environment)
        except OSError as error:
            return set(), f"pip has no RECORD of it, and git does not run ({error})"
        if done.returncode != 0:
            why = done.stderr.decode(errors="replace").strip()
            return set(), f"pip has no RECORD of it, and git says: {why}"
        return {_sha256(done.stdout)}, ""

    @functools.cached_property
    def originals(self) -> list[Path]:
        """What earlier runs kept, oldest first."""
        number, found = 0, []
        while os.path.lexists(name := self._kept(number)):
            found.append(name)
            number += 1
        return found

    def _kept(self, number: int) -> Path:
        return self.file.with_name(f"{self.file.name}.original" + (f".{number}" if number else ""))

    @functools.cached_property
    def original(self) -> Path | None:
        """The kept file that `revert` puts back: upstream's if there is it, else the newest."""
        usable = [path for path in self.originals if path.is_file()]
        usable = [path for path in usable if self._kind(path.read_bytes()) not in ("ours", "older")]
        upstream = [path for path in usable if self._kind(path.read_bytes()) == "upstream"]
        return (upstream or usable or [None])[-1]

    @functools.cached_property
    def keep_as(self) -> Path | None:
        """A free name to keep the file in place by; None if it is ours, gone, or kept already."""
        if self.state not in ("upstream", "modified"):
            return None
        for path in self.originals:
            if _same(path, self.file):
                return None
        return self._kept(len(self.originals))

    def objections(self) -> list[str]:
        """Why replacing the file in place, whatever it is, could lose something."""
        found = []
        if self.state == "dangling" and not self.originals:
            found.append(f"it links to {self.link}, which is gone, and no original is kept")
        if self.state == "modified":
            known, why = self.upstream
            edited = "it has local edits: it is neither upstream's file nor ours"
            found.append(edited if known else f"nothing tells whether it was edited: {why}")
        if self.state not in ("modified", "upstream"):
            return found
        try:
            tree = _parse(self.content)
        except (SyntaxError, ValueError) as error:
            return found + [f"it is not valid Python ({error})"]
        line = _reads_dtypes(tree)
        if line:
            found.append(f"it seems to group by dtype already, in line {line}")
        ours = _definitions(_parse(our_file().read_bytes()).body)
        for name, parameters in _definitions(tree.body).items():
            if name not in ours:
                found.append(f"it defines {name}, which ours does not")
            elif parameters - ours[name]:
                extra = ", ".join(sorted(parameters - ours[name]))
                found.append(f"its {name}() takes {extra}, which ours does not")
        return found


def _same(path: Path, other: Path) -> bool:
    """Whether two files are one, or equal in content, kind, mode and owner."""
    one, two = path.lstat(), other.lstat()
    alike = all(getattr(one, at) == getattr(two, at) for at in ("st_mode", "st_uid", "st_gid"))
    if path.is_symlink() or other.is_symlink():
        return alike and os.readlink(path) == os.readlink(other)
    return alike and path.is_file() and path.read_bytes() == other.read_bytes()


def _parse(source: bytes) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as for an invalid escape in a docstring
        return ast.parse(source)


def _definitions(body: list[ast.stmt]) -> dict[str, set[str]]:
    """Public functions (with their parameters' names) and classes, also under if and try."""
    found = {}
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            every = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            every += [arg for arg in (node.args.vararg, node.args.kwarg) if arg]
            found[node.name] = {arg.arg for arg in every}
        elif isinstance(node, ast.ClassDef):
            found[node.name] = set()
        else:
            for part in ("body", "orelse", "finalbody", "handlers"):
                found |= _definitions(getattr(node, part, []))
    return {name: parameters for name, parameters in found.items() if not name.startswith("_")}


def _reads_dtypes(tree: ast.Module) -> int:
    """First line that looks at gradients' dtypes, 0 if none does.

    Upstream's affected files do so in assertions only.
    """
    asserted = {
        node
        for statement in ast.walk(tree)
        if isinstance(statement, ast.Assert)
        for node in ast.walk(statement)
    }
    lines = [
        node.lineno
        for node in ast.walk(tree)
        if node not in asserted
        and (
            (isinstance(node, ast.Attribute) and "dtype" in node.attr)
            or (isinstance(node, ast.Name) and "dtype" in node.id)
            or (isinstance(node, ast.Constant) and node.value == "dtype")
        )
    ]
    return min(lines, default=0)


def transformer_engine() -> dict:
    """TE's version and, for each kernel this file can use, whether TE's module names it."""
    version, names = None, set()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError):
        version = importlib.metadata.version("transformer-engine")
    spec = importlib.util.find_spec("transformer_engine")
    for folder in (spec and spec.submodule_search_locations) or []:
        module = Path(folder, "pytorch", "optimizers", "__init__.py")
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            for node in ast.walk(_parse(module.read_bytes())):
                if isinstance(node, ast.ImportFrom):
                    names.update(alias.asname or alias.name for alias in node.names)
    return {"version": version, "kernels": {name: name in names for name in TE_KERNELS}}
