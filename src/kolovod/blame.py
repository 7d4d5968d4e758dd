"""Whom a failing rank blames, so that the launcher names the cause and not an effect of it.

A rank that fails because of another one may end before that one, whose interpreter can take a
second to go away. So a rank that meets another's failure writes that one's number into a small
memory file of whoever started it, which reads it when the rank has ended::

    KOLOVOD_BLAME   the file's name, a colon, and its path: /proc/PID/fd/N of the process that has
                    it, by which also a rank finds it that was started through a command of the
                    user's, with other descriptors
    the file        a rank in decimal digits, padded with spaces; blank: nobody is blamed
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Collection, Mapping, Sequence

from kolovod.memory_files import open_own_memory

__all__ = [
    "VARIABLE",
    "first_cause",
    "formed",
    "launched_as",
    "named_in",
    "new_file",
    "note",
    "note_member",
    "parse",
    "read",
]

VARIABLE = "KOLOVOD_BLAME"
_BYTES = 8
_BLANK = b" " * _BYTES
_PREFIX = "kolovod-blame-"
_NAMED = re.compile(
    r"\brank (?P<rank>\d{1,6}) on host \S+ "
    r"\(pid \d+(?:, launched as rank (?P<launched>\d{1,6}))?\)"
)
"""See ``mesh.describe``."""

_own = -1
_members: Sequence[int] = ()


def new_file() -> tuple[int, str]:
    """A file for one rank, nobody being blamed: its descriptor, and the variable's value."""
    name = f"{_PREFIX}{secrets.token_hex(8)}"
    fd = os.memfd_create(name)
    os.pwrite(fd, _BLANK, 0)
    return fd, f"{name}:/proc/{os.getpid()}/fd/{fd}"


def note(rank: int | None) -> None:
    """Blame ``rank``, a number of the launcher's, for what happens to this process. None: nobody.

    Does nothing where no launcher of ours has made a file, or it cannot be reached. Never raises.
    """
    name, _, path = os.environ.get(VARIABLE, "").partition(":")
    with contextlib.suppress(OSError):
        if not name.startswith(_PREFIX):
            return
        # The path may be somebody else's: in another namespace of processes, or when whoever has
        # started this one is gone.
        fd = open_own_memory(path, name, os.O_WRONLY)
        try:
            os.pwrite(fd, _BLANK if rank is None else str(rank).encode().ljust(_BYTES), 0)
        finally:
            os.close(fd)


def formed(own: int, members: Sequence[int]) -> None:
    """From now on this process is rank ``own``; ``members``: the launcher's number of each."""
    global _own, _members
    _own, _members = own, members


def note_member(rank: int | None) -> None:
    """``note`` for a rank of this world; does nothing for this rank itself."""
    if rank is not None and rank != _own and 0 <= rank < len(_members):
        note(_members[rank])


def named_in(text: str) -> int | None:
    """The rank that ``text`` names first, as the engine names ranks: its number in the world."""
    found = _NAMED.search(text)
    return int(found["rank"]) if found else None


def launched_as(rank: int | None, text: str) -> int | None:
    """The launcher's number of ``rank``, by what ``text``, of an error while a world forms, says.

    Those who have met have new numbers, and are named by both where these differ; before that,
    ranks have the launcher's numbers only.
    """
    found = _NAMED.search(text)
    is_both = found is not None and found["launched"] and int(found["rank"]) == rank
    return int(found["launched"]) if found is not None and is_both else rank


def read(fd: int) -> int | None:
    """Whom the rank blames that has this file; None: nobody, or what is there is no number."""
    return parse(os.pread(fd, _BYTES + 1, 0))


def parse(content: bytes) -> int | None:
    """The rank that a file's ``content`` names, else None."""
    digits = content.rstrip(b" ")
    return int(digits) if len(content) == _BYTES and digits.isdigit() else None


def first_cause(
    rank: int, blamed: Mapping[int, int | None], running: Collection[int], well: Collection[int]
) -> tuple[int, bool]:
    """Return the rank to be named for the failure of ``rank``: follow which rank blames which.

    ``blamed``: for each rank that has ended, the rank that it blames; ``running``: the ranks that
    have not ended; ``well``: the ranks that ended without a failure and so are no cause. Returns
    the last rank on that way which has failed, and whether it blames one that still runs: then the
    end of that one tells more.
    """
    seen = {rank}
    while True:
        cause = blamed.get(rank)
        if cause is None or cause in seen or cause in well:
            return rank, False
        if cause in running:
            return rank, True
        if cause not in blamed:  # a number that is no rank's
            return rank, False
        seen.add(cause)
        rank = cause
