"""What is known about a Megatron-Core and its clip_grads.py, without importing either."""

import ast
import base64
import csv
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
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
        self.error, self.hint, self.code = error, hint, code


def our_file() -> Path:
    """Our clip_grads.py: the wheel's data, or the file in the checkout that is being run."""
    here = Path(__file__).resolve().parent
    return here.parents[1] / RELATIVE if in_checkout() else here / "clip_grads.py"


def in_checkout() -> bool:
    """Whether this code runs from a checkout of the project rather than from a wheel."""
    return (Path(__file__).resolve().parents[2] / "setup.py").is_file()


def sha256(content: bytes) -> str:
    """Hex digest."""
    return hashlib.sha256(content).hexdigest()


class Target:
    """A Megatron-Core, installed or a source checkout, and the state of its clip_grads.py."""

    def __init__(self, folder: str | None):
        """Find it in `folder`, or where `import megatron.core` would."""
        if folder is not None:
            self.root = Path(folder).absolute()
            if not self.root.is_dir():
                raise Refusal(
                    f"--target {folder} is not a folder",
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
            self.root = Path(spec.origin).parent.parent.parent
        self.file = self.root / RELATIVE
        self.original = self.file.with_name(self.file.name + ".orig")
        self.package_info = self.root / "megatron" / "core" / "package_info.py"
        if not self.package_info.is_file() or not os.path.lexists(self.file):
            raise Refusal(
                f"{self.root} holds no Megatron-Core: there is no {RELATIVE} beside its "
                f"package_info.py",
                "name the folder that holds megatron/core with --target DIR",
            )

    @functools.cached_property
    def version(self) -> str:
        """Version from package_info.py, read but not run."""
        values = {}
        try:
            for node in ast.parse(self.package_info.read_bytes()).body:
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
        if self.content is None:
            return "dangling"
        digest = sha256(self.content)
        if digest == sha256(our_file().read_bytes()):
            return "ours"
        if digest in OLDER_SHA256:
            return "older"
        if digest in self._recorded() or self.content == self._committed():
            return "upstream"
        return "modified"

    def _recorded(self) -> set[str]:
        """sha256 of clip_grads.py as pip installed it."""
        found = set()
        for record in self.root.glob("megatron_core-*.dist-info/RECORD"):
            with record.open(newline="", encoding="utf-8") as lines:
                for row in csv.reader(lines):
                    if row and row[0] == RELATIVE and row[1].startswith("sha256="):
                        code = row[1].removeprefix("sha256=")
                        found.add(base64.urlsafe_b64decode(code + "=" * (-len(code) % 4)).hex())
        return found

    def _committed(self) -> bytes | None:
        """clip_grads.py as git's HEAD has it, in a checkout."""
        command = ["git", "-C", str(self.root), "cat-file", "blob", f"HEAD:./{RELATIVE}"]
        try:
            done = subprocess.run(command, capture_output=True, check=False)
        except FileNotFoundError:  # no git here
            return None
        return done.stdout if done.returncode == 0 else None

    def objections(self) -> list[str]:
        """Why replacing the file in place, whatever it is, could lose something."""
        found = []
        if self.state == "modified":
            found.append("it has local edits: it is neither upstream's file nor ours")
        if self.state == "dangling" and not os.path.lexists(self.original):
            found.append(f"it links to {self.link}, which is gone, and no original is kept")
        if self.state not in ("modified", "upstream"):
            return found
        try:
            tree = ast.parse(self.content)
        except (SyntaxError, ValueError) as error:
            return found + [f"it is not valid Python ({error})"]
        if _groups_by_dtype(tree):
            found.append("it groups by dtype already")
        ours = _functions(ast.parse(our_file().read_bytes()))
        for name, parameters in _functions(tree).items():
            if name not in ours:
                found.append(f"it defines {name}(), which ours does not")
            elif parameters - ours[name]:
                extra = ", ".join(sorted(parameters - ours[name]))
                found.append(f"its {name}() takes {extra}, which ours does not")
        return found


def _functions(tree: ast.Module) -> dict[str, set[str]]:
    """Parameter names of each public function of a module."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            every = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            every += [arg for arg in (node.args.vararg, node.args.kwarg) if arg]
            found[node.name] = {arg.arg for arg in every}
    return found


def _calls(tree: ast.AST, names: set[str]) -> bool:
    """Whether any of these functions is called in this part of a module."""
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
        for node in ast.walk(tree)
    )


def _groups_by_dtype(tree: ast.Module) -> bool:
    """Whether a module that looks at dtypes launches fused kernels in a loop, or by a helper there.

    Upstream's affected file launches outside of loops, and reads a dtype in assertions only.
    """
    launchers = {"multi_tensor_applier"}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and _calls(node, {"multi_tensor_applier"}):
            launchers.add(node.name)
    loops = (ast.For, ast.While, ast.GeneratorExp, ast.ListComp, ast.DictComp)
    in_loop = any(isinstance(node, loops) and _calls(node, launchers) for node in ast.walk(tree))
    asserted = {
        node
        for statement in ast.walk(tree)
        if isinstance(statement, ast.Assert)
        for node in ast.walk(statement)
    }
    return in_loop and any(
        isinstance(node, ast.Attribute) and node.attr == "dtype" and node not in asserted
        for node in ast.walk(tree)
    )


def transformer_engine() -> dict:
    """TE's version and, for each kernel this file can use, whether TE's module names it."""
    version = None
    for name in ("transformer-engine", "transformer_engine"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        break
    spec = importlib.util.find_spec("transformer_engine")
    folders = spec.submodule_search_locations if spec else None
    module = Path(next(iter(folders or [""]))) / "pytorch" / "optimizers" / "__init__.py"
    names = set()
    if module.is_file():
        for node in ast.walk(ast.parse(module.read_bytes())):
            if isinstance(node, ast.ImportFrom):
                names.update(alias.asname or alias.name for alias in node.names)
    return {"version": version, "kernels": {name: name in names for name in TE_KERNELS}}
