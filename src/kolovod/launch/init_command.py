"""``kolovod init``: the diff that makes a script distributed; written after a yes."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

__all__ = ["add"]

_UNKNOWN = 1


def add(parser: argparse.ArgumentParser) -> None:
    """Give the command its arguments."""
    parser.description = (
        "Look at a script of PyTorch, Keras, TensorFlow or JAX, for one process, for "
        "DistributedDataParallel or for Horovod, without running it. Show the changes that make "
        "it distributed, a reason for each, and what must be decided by hand; then ask before "
        "writing. Exits with 0 if there are changes, written or not, or nothing is left to do; "
        "with 1 if nothing could be changed safely; with 2 for a file that is no Python."
    )
    parser.set_defaults(act=_init)
    parser.add_argument("script", type=Path, metavar="SCRIPT")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--diff", action="store_true", help="only show, do not ask")
    how.add_argument("--write", action="store_true", help="write without a question")
    parser.add_argument(
        "--rename",
        action="store_true",
        help="of a script for Horovod, which runs as it is: import Kolovod's modules instead, "
        "where all that it uses means the same there",
    )


def _init(options: argparse.Namespace) -> int:
    from kolovod.migrate import files, proposal, words  # not for other commands

    path: Path = options.script
    old = files.read(path)
    made = proposal.propose(old, str(path), rename=options.rename)
    colored = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    parts = [f"{path}: {made.what}; {made.summary}."]
    if made.outcome is proposal.Outcome.CHANGES:
        parts.append(words.diff(str(path), old, made, colored=colored))
    parts.append(words.remarks("Why (lines of the script as it is now):", made.reasons))
    parts.append(words.remarks("Still needed, by hand:", made.needs))
    parts.append(words.remarks("Look at this yourself:", made.looks))
    print("\n\n".join(filter(None, parts)), flush=True)
    if made.outcome is proposal.Outcome.UNKNOWN:
        return _UNKNOWN
    if made.outcome is proposal.Outcome.CHANGES:
        print()
        _write_if_wanted(path, old, made.new, options)
    command = f"python {shlex.quote(str(path))}"
    if not made.starts_itself:
        command = f"kolovod run -np 2 -- {command}"
    print(f"\nRun it: {command}")
    return 0


def _write_if_wanted(path: Path, old: bytes, new: bytes, options: argparse.Namespace) -> None:
    from kolovod.migrate import files

    in_git = files.is_in_git(path)
    kept = "git has it as it is now" if in_git else f"a copy of it stays as {path.name}.orig"
    if not options.write:
        if options.diff or not sys.stdin.isatty():
            print("Nothing is written (--write does that).")
            return
        print(f"Write to {path} ({kept})? [y/N] ", end="", flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            print("Nothing is written.")
            return
    backup = files.replace(path, old, new, keep_old=not in_git)
    kept = "git has the former text" if backup is None else f"the former text is in {backup}"
    print(f"Written to {path}; {kept}.")
