"""megatron-clip-grads: put the revised clip_grads.py into a Megatron-Core, look at it, undo it."""

import argparse
import difflib
import json
import os
import re
import shlex
import stat
import sys
from pathlib import Path

from . import __version__, place
from .target import RELATIVE, Refusal, Target, in_checkout, our_file, transformer_engine

PROGRAM = "megatron-clip-grads"
STATES = {
    "ours": "ours",
    "older": "ours, of an older release",
    "upstream": "upstream's, untouched",
    "modified": "something else: neither upstream's untouched file nor ours",
    "dangling": "a link that points nowhere",
}


def status(options: argparse.Namespace) -> int:
    """Say what is in place."""
    target = Target(options.target)
    engine = transformer_engine()
    report = {
        "megatron_core": target.version,
        "file": str(target.file),
        "state": target.state,
        "link": target.link,
        "original": str(target.original) if target.original else None,
        "our_file": str(our_file()),
        "our_version": __version__,
        "transformer_engine": engine,
    }
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        kernels = ", ".join(name for name, there in engine["kernels"].items() if there)
        link = f", a link to {target.link}" if target.link else ""
        print(f"Megatron-Core       {target.version}")
        print(f"clip_grads.py       {STATES[target.state]}{link}")
        print(f"in place            {target.file}")
        print(f"original            {report['original'] or 'none kept'}")
        print(f"our file            {our_file()} ({__version__})")
        print(f"Transformer Engine  {engine['version'] or 'not installed'}")
        print(f"its kernels         {kernels or 'none'}")
    return 0 if target.state == "ours" else 1


def apply(options: argparse.Namespace) -> int:
    """Put our file in place, unless that could lose something."""
    with place.alone(Target(options.target).file.parent):
        target = Target(options.target)
        linked = target.link is not None and os.path.realpath(target.file) == str(our_file())
        if target.state == "ours" and (linked or not options.link):
            if not options.dry_run:
                place.drop_stale_pyc(target.file)
            print(f"already in place: {target.file}")
            return 0
        if options.link and not in_checkout():
            raise Refusal(
                "--link needs a checkout of this project, and this is an installed copy",
                "run it from a checkout (pip install -e .), or leave --link out",
            )
        objections = target.objections()
        if objections and not options.force:
            raise Refusal(
                f"{target.file} is left as it is: {'; '.join(objections)}",
                f"look at it with `{PROGRAM} diff`; to replace it all the same, add --force",
            )
        mode, owner = _writable(target)
        how = f"a link to {our_file()}" if options.link else f"version {__version__}"
        if options.dry_run:
            print(f"would put in place: {target.file}, {how}")
            return 0

        def make(new: Path) -> None:
            if options.link:
                new.symlink_to(our_file())
            else:
                place.write(new, our_file().read_bytes(), mode, owner)

        place.replace(target.file, make, target.keep_as)
        print(f"put in place: {target.file}, {how}; undo it with `{_call('revert', target)}`")
        return 0


def revert(options: argparse.Namespace) -> int:
    """Put the original back."""
    with place.alone(Target(options.target).file.parent):
        target = Target(options.target)
        if target.state == "upstream":
            print(f"nothing to revert: {target.file} is upstream's, untouched")
            return 0
        if target.state == "modified":
            raise Refusal(
                f"{target.file} is not ours, so it is left as it is",
                f"look at it with `{PROGRAM} diff`; kept as the original: {target.original}",
            )
        if target.original is None:
            raise Refusal(
                f"no original is kept beside {target.file}",
                f"pip install --force-reinstall --no-deps megatron-core=={target.version}, or in "
                f"a checkout: git checkout -- {RELATIVE}",
            )
        _writable(target)
        others = [str(path) for path in target.originals if path != target.original]
        place.swap(target.original, target.file)
        again = f"`{_call('apply', target)}` puts ours in place again"
        print(f"put back: {target.file}; {again}" + "".join(f"; still kept: {o}" for o in others))
        return 0


def diff(options: argparse.Namespace) -> int:
    """Print the way from the file in place to ours."""
    target = Target(options.target)
    contents = (target.content or b"", our_file().read_bytes())
    sides = [re.findall(rb"[^\n]*\n|[^\n]+", content) for content in contents]
    names = [f"{side}/{RELATIVE}".encode() for side in "ab"]
    for line in difflib.diff_bytes(difflib.unified_diff, *sides, *names):
        if not line.endswith(b"\n"):
            line += b"\n\\ No newline at end of file\n"
        sys.stdout.buffer.write(line)
    return 0


def demo(options: argparse.Namespace) -> int:
    """Train a small Megatron-Core model and check every norm."""
    target = Target(None)
    if target.state != "ours":
        raise Refusal(
            f"{target.file} is {STATES[target.state]}", f"run `{PROGRAM} apply` first, then this"
        )
    try:
        from .demo import run
    except ImportError as error:
        raise Refusal(
            f"the demo needs torch: {error}", "the other verbs work without it"
        ) from error
    return run(options.steps)


def _call(verb: str, target: Target) -> str:
    """The command line of another verb for the same file."""
    return f"{PROGRAM} {verb} --target {shlex.quote(str(target.root))}"


def _writable(target: Target) -> tuple[int, tuple[int, int]]:
    """Mode and owner that the file in place has and a new one gets; refuses if it could not."""
    info, folder = target.file.lstat(), target.file.parent
    touched = [folder] + ([] if target.link else [target.file])
    touched += {stale.parent for stale in place.stale_pyc(target.file)}
    for path in touched:
        if not os.access(path, os.W_OK):
            raise Refusal(
                f"{path} is not writable",
                f"run as its owner; for a read-only image mount {our_file()} over {target.file}",
            )
    groups = {os.getegid(), *os.getgroups()}
    if os.geteuid() != 0 and (os.geteuid() != info.st_uid or info.st_gid not in groups):
        raise Refusal(
            f"{target.file} belongs to user {info.st_uid}, group {info.st_gid}, and this user "
            f"could not keep it so",
            "run as its owner or as root",
        )
    like = target.file if target.file.exists() else target.package_info
    return stat.S_IMODE(like.stat().st_mode), (info.st_uid, info.st_gid)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in the two lines of every other refusal."""

    def error(self, message: str):
        self.exit(2, f"error: {message}\nhint: see `{self.prog} --help`\n")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=PROGRAM, description=__doc__.split(": ", 1)[1])
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(function, example: str, target: bool = True) -> argparse.ArgumentParser:
        added = verbs.add_parser(
            function.__name__,
            help=function.__doc__,
            description=function.__doc__,
            epilog=f"example: {PROGRAM} {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.set_defaults(function=function)
        if target:
            added.add_argument(
                "--target",
                metavar="DIR",
                help="source checkout, or any folder that holds megatron/core "
                "(default: the installed Megatron-Core)",
            )
        return added

    added = verb(status, "status --json")
    added.add_argument("--json", action="store_true", help="print one JSON object")
    added = verb(apply, "apply --dry-run --target ~/Megatron-LM")
    added.add_argument("--dry-run", action="store_true", help="decide everything, change nothing")
    added.add_argument("--link", action="store_true", help="link to this checkout's file")
    added.add_argument(
        "--force", action="store_true", help="replace a file that was edited or already fixed"
    )
    verb(revert, "revert")
    verb(diff, "diff --target ~/Megatron-LM | git -C ~/Megatron-LM apply --allow-empty")
    added = verb(demo, "demo --steps 8", target=False)
    added.add_argument("--steps", type=_count, default=5, metavar="N", help="default: 5")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code: 0 as asked, 1 no or refused, 2 wrong use."""
    sys.stdout.reconfigure(errors="backslashreplace")
    options = _parser().parse_args(arguments)
    code = 1
    try:
        code = options.function(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # as in `status | head -1`; keep Python from trying once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code
    except Refusal as refusal:
        problem, hint, code = refusal.error, refusal.hint, refusal.code
    except OSError as error:
        problem, hint, code = str(error), "see to owner, permissions and free space, then again", 1
    print(f"error: {problem}\nhint: {hint}", file=sys.stderr)
    return code
