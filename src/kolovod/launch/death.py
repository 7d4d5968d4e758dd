"""Proof that a process has ended.

Silence is none: a process whose agent, node or connection says nothing may work on. So a job takes
nobody for dead without a ``Death``, and only this module makes one, of what the kernel has said to
this process, or to one that reports it.
"""

from __future__ import annotations

import os
import select
from typing import Final, final

__all__ = ["Death", "ended_by_pidfd", "ended_child", "exit_status", "reported"]

_KEY: Final = object()


@final
class Death:
    """The kernel has said that a process has ended, with ``code``.

    ``code``: its exit code, or minus the number of the signal that has killed it.
    """

    __slots__ = ("code",)

    def __init__(self, code: int, key: object) -> None:
        """Make one for the functions of this module. Raises TypeError for all others."""
        if key is not _KEY:
            raise TypeError("only kolovod.launch.death makes a Death, of what the kernel says")
        self.code = code

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Death) and other.code == self.code

    def __hash__(self) -> int:
        return hash(self.code)

    def __repr__(self) -> str:
        return f"Death({self.code})"


def ended_child(pid: int) -> Death | None:
    """Return the death of a child of this process, by its wait status; None: it runs.

    The child stays a zombie, so its process id, which is also its session's number, is given to no
    other process.
    """
    result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    if result is None:
        return None
    was_killed = result.si_code != os.CLD_EXITED
    return Death(-result.si_status if was_killed else result.si_status, _KEY)


def ended_by_pidfd(pidfd: int, pid: int, unknown_code: int) -> Death | None:
    """Return the death, by its pidfd, of a process that is nobody's child here; None: it runs.

    Its code is that of the zombie, which ``pid`` is as long as its parent has not reaped it;
    ``unknown_code`` where there is none any more.
    """
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if not poll.poll(0):
        return None
    code = exit_status(pid)
    return Death(unknown_code if code is None else code, _KEY)


def reported(code: int) -> Death:
    """Return a death that somebody reports who has proof of it, or who cannot be wrong.

    That is an agent, an actor or a scheduler.
    """
    return Death(code, _KEY)


def exit_status(pid: int) -> int | None:
    """Return the exit code of a zombie, or minus the signal that has killed it; None: it is none.

    By the last field of /proc/PID/stat, which proc(5) describes.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return os.waitstatus_to_exitcode(int(fields[49])) if fields[0] == b"Z" else None
    except (OSError, ValueError, IndexError):  # it was reaped
        return None
