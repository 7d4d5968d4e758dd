"""Waking or ending an agent that does not answer.

Silence says nothing of its ranks, so a job that must end has them ended here, and knows that they
are, or says that they may run on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator

from kolovod.launch import orphan_reaper

__all__ = ["end", "wake"]

_GRACE_S = 1.0  # from SIGTERM to the ranks until they are killed with their agent
_END_S = 15.0
"""For what a killed agent has run to be gone: its ``orphan_reaper`` kills for ten."""
_LOOK_S = 0.02


def wake(pid: int) -> bool:
    """Continue the agent ``pid`` if a signal has stopped it; return whether it was so."""
    with _opened(pid) as pidfd:
        if pidfd is None or not orphan_reaper.is_stopped(pid):
            return False
        signal.pidfd_send_signal(pidfd, signal.SIGCONT)
        return True


def end(pid: int, ranks: Iterable[int]) -> bool:
    """Kill the agent ``pid``, after SIGTERM to its ranks; return whether nothing is left of both.

    ``ranks``: process ids that it was said to have; where it has ended already, they are only
    waited for, since their numbers may be other processes' by now.
    """
    sessions = set(ranks)
    with _opened(pid) as pidfd:
        if pidfd is not None:
            below = orphan_reaper.sessions_below(pid)
            sessions |= below
            orphan_reaper.kill_job("", below, signal.SIGTERM)
            orphan_reaper.kill_job("", below, signal.SIGCONT)
            _wait(lambda: not orphan_reaper.job_processes("", set(ranks) & below), _GRACE_S)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    return _wait(lambda: not (_is_agent(pid) or orphan_reaper.job_processes("", sessions)), _END_S)


def _wait(is_so: Callable[[], bool], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
    return True


@contextlib.contextmanager
def _opened(pid: int) -> Iterator[int | None]:
    """Open a pidfd of the agent ``pid``, which is this user's; None: there is none."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        yield None
        return
    try:
        yield pidfd if _is_agent(pid) else None
    finally:
        os.close(pidfd)


def _is_agent(pid: int) -> bool:
    """Return whether it is an agent of this user's that has not ended."""
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.getuid():
            return False
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"kolovod.launch.agent" in file.read().split(b"\0")
    except OSError:
        return False
