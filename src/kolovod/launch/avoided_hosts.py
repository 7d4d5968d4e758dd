"""Hosts on which processes of an elastic job have failed, and what becomes of the others there."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from kolovod.coordination.hosts import Failure, RetryPolicy, cooling_until
from kolovod.launch.fleet import Fleet
from kolovod.launch.local import GRACE_S

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
    kill_s: float | None = None
    """Its host is avoided: it is killed then."""
    is_told: bool = False
    """It was told to end before."""


class AvoidedHosts:
    """Keeps the failures, and ends processes in Horovod's mode (``RetryPolicy.whole_host``)."""

    def __init__(self, retry: RetryPolicy, fleet: Fleet, report: Callable[[str], None]) -> None:
        """``fleet`` runs the processes; ``report(text)`` tells the user."""
        self.failures: list[Failure] = []
        self._retry = retry
        self._fleet = fleet
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
        """End what runs on ``hosts``: SIGTERM, and SIGKILL after a grace."""
        now = time.monotonic()
        for host in hosts:
            left = [n for n in self._fleet.running if processes[n].host == host]
            left = [n for n in left if processes[n].kill_s is None]
            left = [n for n in left if not processes[n].has_resigned]
            if left:
                self._report(
                    f"host {host} is avoided, since a process has failed there: ending the other "
                    f"{len(left)}"
                )
                self._fleet.send(signal.SIGTERM, f"host {host} is avoided", left)
            for number in left:
                processes[number].kill_s = now + GRACE_S
                processes[number].is_told = True

    def kill_late(self, processes: Mapping[int, Process]) -> None:
        """Kill those whose time is over."""
        now = time.monotonic()
        for number in self._fleet.running:
            process = processes[number]
            if process.kill_s is not None and now >= process.kill_s:
                process.kill_s = now + 1.0
                self._fleet.send(signal.SIGKILL, f"host {process.host} is avoided", [number])

    def kill_times(self, processes: Mapping[int, Process]) -> list[float]:
        """Return when to look again."""
        times = (processes[number].kill_s for number in self._fleet.running)
        return [kill_s for kill_s in times if kill_s is not None]
