"""How each fault of chaos_faults.py is made, and ended, on a job that runs."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable, Iterable
from typing import ClassVar, Protocol

from chaos_faults import LOOPS, Fault
from chaos_hosts import SHARED_MEMORY, TEMPORARY, ChaosHosts
from netbed import Bed, Process

__all__ = ["Beaten", "Means"]


class Beaten(Protocol):
    """A job, as far as faults need to know it."""

    def ranks(self) -> dict[int, list[Process]]:
        """Return the processes in each slot."""

    def agent(self, host: str) -> list[Process]:
        """Return the process that runs the ranks of a host."""

    def keeper(self) -> list[Process]:
        """Return the launcher's process in the background."""

    def kill_viewer(self) -> None:
        """Kill what shows the job."""

    def attach(self) -> None:
        """Have something show it again."""

    def remove_folder(self) -> None:
        """Remove the folder by which it is found."""


class Means:
    """What can be done to ``job``. For one thread."""

    def __init__(self, bed: Bed, hosts: ChaosHosts, job: Beaten) -> None:
        self._bed, self._hosts, self._job = bed, hosts, job
        self._stopped: dict[Fault, list[Process]] = {}

    def begin(self, fault: Fault) -> None:
        """Make the fault."""
        begin = self._ways.get(fault.kind)
        if begin is not None:
            begin(self, fault)
        number = _TO_RANKS.get(fault.kind)
        if number is not None:
            self._signal(self._job.ranks().get(fault.slot, []), number)
        if fault.kind in ("keeper", "viewer and keeper"):
            self._signal(self._job.keeper(), signal.SIGKILL)
        if fault.kind in ("viewer", "viewer and keeper"):
            self._job.kill_viewer()

    def end(self, fault: Fault) -> None:
        """End what ``begin`` has made."""
        end = self._ends.get(fault.kind)
        if end is not None:
            end(self, fault)

    # --- begin ---

    def _fill_shared_memory(self, fault: Fault) -> None:
        self._hosts.fill(fault.hosts[0], SHARED_MEMORY)

    def _fill_tmp(self, fault: Fault) -> None:
        self._hosts.fill(fault.hosts[0], TEMPORARY)

    def _slow_down(self, fault: Fault) -> None:
        self._hosts.slow_down(fault.hosts[0])

    def _pull_cable(self, fault: Fault) -> None:
        self._bed.set_link(fault.hosts[0], up=False)

    def _partition(self, fault: Fault) -> None:
        others = [name for name in self._bed.names if name not in fault.hosts]
        self._bed.partition(fault.hosts, others)

    def _kill_agent(self, fault: Fault) -> None:
        self._signal(self._job.agent(fault.hosts[0]), signal.SIGKILL)

    def _stop_agent(self, fault: Fault) -> None:
        self._stop(fault, self._job.agent(fault.hosts[0]))

    def _stop_keeper(self, fault: Fault) -> None:
        self._stop(fault, self._job.keeper())

    def _suspend(self, fault: Fault) -> None:
        found = [p for host in self._bed.names for p in self._bed.processes(host)]
        random.shuffle(found)
        self._stop(fault, found)

    def _remove_job_folder(self, fault: Fault) -> None:
        self._job.remove_folder()

    def _stop(self, fault: Fault, processes: Iterable[Process]) -> None:
        self._stopped[fault] = list(processes)
        self._signal(self._stopped[fault], signal.SIGSTOP)

    @staticmethod
    def _signal(processes: Iterable[Process], number: int) -> None:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    # --- end ---

    def _empty_shared_memory(self, fault: Fault) -> None:
        self._hosts.empty(fault.hosts[0], SHARED_MEMORY)

    def _empty_tmp(self, fault: Fault) -> None:
        self._hosts.empty(fault.hosts[0], TEMPORARY)

    def _speed_up(self, fault: Fault) -> None:
        self._hosts.speed_up(fault.hosts[0])

    def _put_cable_in(self, fault: Fault) -> None:
        self._bed.set_link(fault.hosts[0], up=True)

    def _heal(self, fault: Fault) -> None:
        self._bed.heal()

    def _continue_rank(self, fault: Fault) -> None:
        self._signal(self._job.ranks().get(fault.slot, []), signal.SIGCONT)

    def _continue(self, fault: Fault) -> None:
        """Continue processes in another order than they were stopped in."""
        found = self._stopped.pop(fault)
        random.shuffle(found)
        self._signal(found, signal.SIGCONT)

    def _attach(self, fault: Fault) -> None:
        self._job.attach()

    _ways: ClassVar[dict[str, Callable[[Means, Fault], None]]] = {
        "shared memory": _fill_shared_memory,
        "tmp": _fill_tmp,
        "slow agent": _slow_down,
        "link": _pull_cable,
        "partition": _partition,
        "agent": _kill_agent,
        "agent stopped": _stop_agent,
        "keeper stopped": _stop_keeper,
        "suspended": _suspend,
        "job folder": _remove_job_folder,
    }
    _ends: ClassVar[dict[str, Callable[[Means, Fault], None]]] = {
        "shared memory": _empty_shared_memory,
        "tmp": _empty_tmp,
        "slow agent": _speed_up,
        "stop": _continue_rank,
        "link": _put_cable_in,
        "partition": _heal,
        "viewer": _attach,
        "viewer and keeper": _attach,
        "agent stopped": _continue,
        "keeper stopped": _continue,
        "suspended": _continue,
    }


_TO_RANKS = {
    "kill": signal.SIGKILL,
    "shared memory": signal.SIGKILL,
    "tmp": signal.SIGKILL,
    "slow agent": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "stopped": signal.SIGSTOP,
    "loop": LOOPS,
    "leave": signal.SIGTERM,
}
"""What the rank of a fault is sent."""
