"""Hosts on which processes of an elastic job have failed, and what becomes of the others there."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from kolovod.coordination.hosts import Failure, RetryPolicy, cooling_until
from kolovod.launch.supervisor import Supervisor

__all__ = ["AvoidedHosts", "Process"]


@dataclass
class Process:
    """A process that was started."""

    slot: int
    host: str
    started_s: float
    member: int | None
    """The number of the member that it is; None: it has not come yet, as far as is known. One that
    the job begins with has that of its slot."""
    local_rank: int = 0
    """A number that no other process on its host has: by it a script chooses a GPU."""
    has_resigned: bool = False
    """An exception has left its function, as it has said. It is left to finish: the script may
    catch that, and save what it has, and its exit code says whether it has failed."""
    sent_away: bool = False
    """Its host, or its place there, is not wanted any more."""
    is_told: bool = False
    """It was told to end before."""


class AvoidedHosts:
    """Keeps the failures, and ends processes in Horovod's mode (``RetryPolicy.whole_host``)."""

    def __init__(
        self, retry: RetryPolicy, supervisor: Supervisor, report: Callable[[str], None]
    ) -> None:
        """``supervisor`` ends the processes; ``report(text)`` tells the user."""
        self.failures: list[Failure] = []
        self._retry = retry
        self._supervisor = supervisor
        self._report = report

    def note(self, process: Process, *, was_cut_off: bool = False) -> bool:
        """Note that ``process`` has failed; return whether its host is avoided from now on.

        ``was_cut_off``: see ``Failure``. In Horovod's mode that makes no difference.
        """
        now = time.monotonic()
        ran_s, jitter = now - process.started_s, random.random()
        excused = was_cut_off and not self._retry.whole_host
        self.failures.append(
            Failure(process.slot, process.host, now, ran_s, jitter, was_cut_off=excused)
        )
        return cooling_until(process.host, self.failures, self._retry) > now

    def end(self, hosts: Collection[str], processes: Mapping[int, Process]) -> None:
        """End what runs on ``hosts``."""
        for host in hosts:
            left = [n for n in self._supervisor.fleet.running if processes[n].host == host]
            left = [n for n in left if not self._supervisor.is_ending(n)]
            left = [n for n in left if not processes[n].has_resigned]
            if left:
                self._report(
                    f"host {host} is avoided, since a process has failed there: ending the other "
                    f"{len(left)}"
                )
                self._supervisor.end(left, f"host {host} is avoided")
            for number in left:
                processes[number].is_told = True
