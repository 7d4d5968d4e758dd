"""The ends of an elastic job's processes, and what the job has come to."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Mapping
from enum import Enum, auto

from kolovod.coordination import record_file
from kolovod.coordination.consensus import World
from kolovod.coordination.coordinator import Coordinator
from kolovod.launch.avoided_hosts import Process
from kolovod.launch.local import Ended

__all__ = ["How", "Outcome"]


class How(Enum):
    """The meaning of a process's end."""

    AS_TOLD = auto()
    """It was told to end, and nobody waits for its code."""
    AT_ITS_END = auto()
    """Its script has come to its end, as those of the others will."""
    LEFT = auto()
    """It wanted to leave, or its script has caught what ended its function; others go on."""
    FAILED = auto()


class Outcome:
    """A collection of the ends."""

    def __init__(self, coordinator: Callable[[], Coordinator]) -> None:
        """``coordinator``: of the job, when there is one."""
        self.failed: list[Ended] = []
        """The processes that have failed, in that order."""
        self.left: dict[int, str] = {}
        """By slot, the hosts of those that wanted to leave: nobody takes their places."""
        self.ended_well = False
        """Whether a process has come to the end of its script with the others."""
        self._has_caught = False  # a script what ended its function, and came to its end
        self._coordinator = coordinator
        self._names: dict[int, tuple[int, str]] = {}  # of those that have failed, by process
        self._ends: dict[int, Ended] = {}  # of members, by number
        self._lost: dict[int, Process] = {}  # on hosts that cannot be reached

    def go_on(self, ended_well: bool, left: Mapping[int, str]) -> None:
        """Begin with what an earlier launcher has left."""
        self.ended_well, self.left = ended_well, dict(left)

    def note(self, process: Process, number: int | None, end: Ended) -> How:
        """Note an end; return what it means. ``number``: of the member it was; None: of none."""
        if process.is_told:
            return How.AS_TOLD
        if number is not None:
            self._ends[number] = end
        if end.lost:
            self._lost[end.rank] = process
        if end.code != 0 or end.lost:
            return How.FAILED
        if process.has_resigned:
            self._has_caught = True
        elif self._is_at_its_end(process, number, end):
            self.ended_well = True
            return How.AT_ITS_END
        self._note_left(process)
        return How.LEFT

    def has_left_unseen(self) -> bool:
        """Note a process that has left on a host that is lost; return whether there is one.

        Nobody tells of its end there, and its place would be filled as that of one that is cut off.
        """
        coordinator = self._coordinator()
        for number, process in self._lost.items():
            member = coordinator.number_of(number)  # it may have become one since
            member = process.member if member is None else member
            if member is not None and coordinator.has_let_go(member):
                del self._lost[number]
                self._note_left(process)
                return True
        return False

    def _note_left(self, process: Process) -> None:
        if not process.sent_away:
            self.left[process.slot] = process.host

    def note_failed(self, process: Process, number: int | None, end: Ended) -> str:
        """Count it among the failed; return what users know it as."""
        self.failed.append(end)
        rank, name = process.slot, f"the process in slot {process.slot}"
        for place, member in enumerate(self._coordinator().world.members):
            if member.number == number:
                rank, name = place, f"rank {place}"
        self._names[end.rank] = rank, f"{name} on host {process.host} (pid {end.pid})"
        return self._names[end.rank][1]

    def was_cut_off(self, number: int | None) -> bool:
        """Return whether the others have gone on without that member, since nobody heard of it."""
        return number is not None and self._coordinator().has_left_behind(number)

    def take_back(self, processes: Collection[int], members: Collection[int]) -> None:
        """Take back ends: the host is reached again, and these processes run."""
        for member in members:
            self._ends.pop(member, None)
        for number in processes:
            self._lost.pop(number, None)
        self.failed = [end for end in self.failed if end.rank not in processes]

    def failed_as(self, end: Ended) -> tuple[int, str]:
        """Return the rank that a failed process was, or its slot if it was none; and its name."""
        return self._names[end.rank]

    def results(self) -> list[bytes]:
        """Return what the last world's members have left, by rank (``JobOptions.payload``)."""
        ends = (self._ends.get(member.number) for member in self._coordinator().world.members)
        return [b"" if end is None else end.result for end in ends]

    def exit_code(self, last: World | None) -> int:
        """Return 0 if no member of the last world has failed, and a script has come to its end."""
        numbers = frozenset() if last is None else last.numbers
        ends = [end for number, end in self._ends.items() if number in numbers and end.code != 0]
        is_well = self.ended_well or self._has_caught
        all_left = bool(numbers) and numbers <= self._ends.keys()
        failed = ends or ([] if is_well or all_left else self.failed)
        if failed:
            return failed[0].exit_code
        return 0 if is_well else 128 + signal.SIGTERM  # all have left

    def _is_at_its_end(self, process: Process, number: int | None, end: Ended) -> bool:
        """Return whether a process that has ended well was in the newest world; else it has left.

        The record of one that has not come to this launcher tells, if it has any: a process that
        leaves waits until it is told of a world without it.
        """
        coordinator = self._coordinator()
        if number is not None and coordinator.lets_leave(number):
            return False
        record = None if end.record is None else record_file.parse(end.record)
        formed = None if record is None else record.formed
        if coordinator.number_of(end.rank) is not None or formed is None:
            return number is not None and number in coordinator.world.numbers
        return any((m.slot, m.host) == (process.slot, process.host) for m in formed.members)
