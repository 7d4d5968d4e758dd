"""Slow tests in turn: CI runs a part of them each time, and those that a change concerns.

All of them take half an hour. What a run leaves out runs in another one, in `make test-slow` and
every night, so a change is refused within minutes for what it is likely to break, and within a day
for the rest. The draw depends on the row's name and the number of commits only: who runs the same
commit again gets the same rows, and no list has to be kept.
"""

from __future__ import annotations

import subprocess
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

__all__ = ["Change", "chosen", "concerned", "last_change"]

_LAST_COMMITS = 10
_FRONT_ENDS = ("torch", "tensorflow", "keras", "jax", "mxnet")


class Change(NamedTuple):
    """What the repository says of a run."""

    commits: int
    """Their number up to HEAD; 0 where there is no repository."""
    files: frozenset[str]
    """Paths that the last commits touched, relative to the repository."""


def last_change(root: Path) -> Change:
    """The change that the repository in ``root`` holds last."""
    try:
        commits = int(_git(root, "rev-list", "--count", "HEAD"))
        number = min(_LAST_COMMITS, commits - 1)
        files = _git(root, "diff", "--name-only", f"HEAD~{number}", "HEAD").splitlines()
    except (OSError, subprocess.CalledProcessError):  # a source distribution, a shallow clone
        return Change(0, frozenset())
    return Change(commits, frozenset(files))


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def concerned(files: Iterable[str]) -> frozenset[str]:
    """Folders and files of tests, relative to the repository, that changes to ``files`` concern.

    A test file concerns itself, a package of the source the folder of tests with its name.
    """
    found = set()
    for name in files:
        parts = PurePosixPath(name).parts
        if parts[0] == "tests" and parts[-1].startswith("test_"):
            found.add(name)
        elif parts[:2] == ("src", "horovod"):
            found.add("tests/horovod")
        elif parts[:2] == ("src", "kolovod") and len(parts) > 3:
            room = parts[2]
            if room in ("ray", "spark"):
                room = "clusters"
            found.add(f"tests/frontends/{room}" if room in _FRONT_ENDS else f"tests/{room}")
        elif parts[0] == "csrc":
            found |= {"tests/core", "tests/system"}
    return frozenset(found)


def chosen(rows: Sequence[str], change: Change, parts: int) -> frozenset[str]:
    """Of these rows (pytest's node ids) those that this run takes, one of ``parts`` times as many.

    Beside the drawn ones it takes rows that the change concerns, but half as many at most: a change
    of everything must not make the run longer than it may be.
    """
    if parts <= 1:
        return frozenset(rows)
    drawn = {row for row in rows if (zlib.crc32(row.encode()) + change.commits) % parts == 0}
    rooms = concerned(change.files)
    more = [row for row in rows if row not in drawn and _is_in(row, rooms)]
    more.sort(key=lambda row: zlib.crc32(f"{change.commits} {row}".encode()))
    return frozenset(drawn | set(more[: len(rows) // (2 * parts)]))


def _is_in(row: str, rooms: frozenset[str]) -> bool:
    path = PurePosixPath(row.partition("::")[0])
    return any(str(each) in rooms for each in (path, *path.parents))
