"""The ends of ranks that somebody else runs, an agent or a scheduler, on their way to the job."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping

from kolovod.launch.local import Ended

__all__ = ["ExitQueue"]


class ExitQueue:
    """The ranks that run and that have ended, between the threads that learn it and the job's.

    The job's thread waits for ``fd`` and calls ``collect``; everything else may be called on any
    thread. A rank runs until its end was collected: the job has heard of it then.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[int] = set()
        self._pids: dict[int, int] = {}
        self._waiting: list[Ended] = []
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    @property
    def fd(self) -> int:
        """A descriptor, readable when ``collect`` has something to tell; -1 after ``close``."""
        return self._bell

    @property
    def running(self) -> frozenset[int]:
        """The ranks whose end was not collected."""
        with self._lock:
            return frozenset(self._running)

    def pids(self) -> dict[int, int]:
        """Return the process id of each rank that has begun, also of those that have ended."""
        with self._lock:
            return dict(self._pids)

    def expect(self, ranks: Iterable[int]) -> None:
        """Note that these ranks were ordered, so that an end of each will come."""
        with self._lock:
            self._running.update(ranks)

    def began(self, pids: Mapping[int, int]) -> None:
        """Note that these ranks have processes."""
        with self._lock:
            self._pids |= pids

    def add(self, end: Ended) -> None:
        """A rank has ended."""
        with self._lock:
            self._waiting.append(end)
            self._ring()

    def add_others(self, made: Callable[[int, int], Ended]) -> None:
        """Note that all ranks have ended: as ``made(rank, pid)`` says where no other end is known.

        The process id is 0 where it is not known.
        """
        with self._lock:
            known = {end.rank for end in self._waiting}
            for rank in sorted(self._running - known):
                self._waiting.append(made(rank, self._pids.get(rank, 0)))
            self._ring()

    def ring(self) -> None:
        """Wake the job for another reason."""
        with self._lock:
            self._ring()

    def _ring(self) -> None:
        # Under the lock: the number of a closed descriptor may be another file's.
        if self._bell >= 0:
            os.eventfd_write(self._bell, 1)

    def collect(self) -> list[Ended]:
        """Return the ends since the last call, in the order in which they were heard of."""
        with self._lock:
            try:
                if self._bell >= 0:
                    os.eventfd_read(self._bell)
            except BlockingIOError:  # nobody has rung
                pass
            ended, self._waiting = self._waiting, []
            self._running.difference_update(end.rank for end in ended)
        return ended

    def close(self) -> None:
        """Close the descriptor. Idempotent; what is told afterwards is kept, as before."""
        with self._lock:
            bell, self._bell = self._bell, -1
            if bell >= 0:
                os.close(bell)
