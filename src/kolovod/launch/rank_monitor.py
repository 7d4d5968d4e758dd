"""A rank monitor of the ends of an agent's ranks on this host: the agent's silence hides none."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Mapping

from kolovod.launch.death import Death, ended_by_pidfd
from kolovod.net.sockets import close_all

__all__ = ["RankMonitor"]


class RankMonitor:
    """A holder of pidfds of an agent on this host and of its ranks. For one thread."""

    def __init__(self, agent: int) -> None:
        """``agent``: its process id. Raises OSError if it has ended, or without pidfds."""
        self._agent = os.pidfd_open(agent)
        self._ranks: dict[int, tuple[int, int]] = {}  # pidfd and process id

    def watch(self, pids: Mapping[int, int]) -> None:
        """Look at these, too: process ids by rank.

        Their agent keeps them as zombies, so the numbers are theirs as long as it lives.
        """
        for rank, pid in pids.items():
            if pid and rank not in self._ranks:
                with contextlib.suppress(OSError):
                    pidfd = os.pidfd_open(pid)
                    if self.has_agent_ended():
                        os.close(pidfd)
                        return
                    self._ranks[rank] = pidfd, pid

    def has_agent_ended(self) -> bool:
        """Return whether the agent has ended: its ``orphan_reaper`` kills all that it runs then."""
        poll = select.poll()
        poll.register(self._agent, select.POLLIN)
        return bool(poll.poll(0))

    def ended(self) -> dict[int, Death]:
        """Return the ranks that have ended since the last call."""
        found = {}
        for rank, (pidfd, pid) in list(self._ranks.items()):
            # Without its parent it is a zombie no more, and its number may be another one's.
            zombie = 0 if self.has_agent_ended() else pid
            death = ended_by_pidfd(pidfd, zombie, -signal.SIGKILL)
            if death is not None:
                found[rank] = death
                del self._ranks[rank]
                os.close(pidfd)
        return found

    @property
    def watched(self) -> frozenset[int]:
        """The ranks that it sees, and that have not ended."""
        return frozenset(self._ranks)

    def close(self) -> None:
        """Release all. Idempotent."""
        close_all([self._agent, *(pidfd for pidfd, _ in self._ranks.values())])
        self._agent, self._ranks = -1, {}
