"""``monitored_barrier``: rank 0 says which ranks have not come.

It goes through the store that torch.distributed has made for the group, not through the engine, so
that it works while an operation is stuck there: ranks note that they have come, rank 0 looks for
the notes in turn and leaves a verdict, for which the others wait.

``torch.distributed.monitored_barrier`` refuses every backend that is not called gloo before it asks
the group. ``install`` puts a function in its place that asks groups of ours.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from kolovod.errors import GroupArgumentError, WaitTimeoutError

__all__ = ["MonitoredBarrier", "Store", "install", "seconds"]

_PASSED = "passed"
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.001, 0.05  # between two looks


class Store(Protocol):
    """The methods of a ``torch.distributed.Store`` that are used."""

    def set(self, key: str, value: str) -> None:
        """Write ``value`` under ``key``."""
        ...

    def get(self, key: str) -> bytes:
        """Return the value under ``key``."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Return whether all ``keys`` are there."""
        ...

    def delete_key(self, key: str) -> bool:
        """Delete ``key``."""
        ...


class MonitoredBarrier:
    """The barriers of one group; each rank counts them: its n-th meets the n-th of the others."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        """``store``: the group's own, or one whose keys no other group uses."""
        self._store = store
        self._rank = rank
        self._size = size
        self._number = 0

    def wait(self, timeout_s: float, wait_all_ranks: bool) -> None:
        """Wait until all ranks have come. Raises WaitTimeoutError after ``timeout_s``.

        On rank 0 it names the first rank that has not come, or, with ``wait_all_ranks``, all of
        them. On the others it says that rank 0 did not let them pass, and why if that is known.
        """
        self._number += 1
        self._store.set(self._note(self._rank), "")
        if self._rank == 0:
            self._collect(timeout_s, wait_all_ranks)
        else:
            self._await_verdict(timeout_s)

    def _collect(self, timeout_s: float, wait_all_ranks: bool) -> None:
        deadline = time.monotonic() + timeout_s
        missing: list[int] = []
        for rank in range(1, self._size):
            if not self._appears(self._note(rank), deadline):
                missing.append(rank)
                if not wait_all_ranks:
                    break
        if not missing:
            self._store.set(self._verdict(), _PASSED)
            self._tidy_up()
            return
        who = f"Rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        text = f"{who} failed to pass monitoredBarrier in {timeout_s * 1000:.0f} ms"
        self._store.set(self._verdict(), text)
        raise WaitTimeoutError(
            f"{text}. Rank 0 timed out in monitoredBarrier: look what the ranks that are missing "
            "do instead"
        )

    def _await_verdict(self, timeout_s: float) -> None:
        verdict = f"rank 0 has not answered within {timeout_s * 1000:.0f} ms"
        if self._appears(self._verdict(), time.monotonic() + timeout_s):
            verdict = self._store.get(self._verdict()).decode(errors="replace")
            if verdict == _PASSED:
                return
        raise WaitTimeoutError(
            f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while "
            f"waiting for send/recv from rank 0: {verdict}"
        )

    def _appears(self, key: str, deadline: float) -> bool:
        """Return whether ``key`` is in the store before the deadline; look once in any case.

        It looks again and again, since a wait in the store could not be interrupted.
        """
        pause_s = _FIRST_PAUSE_S
        while not self._store.check([key]):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        return True

    def _tidy_up(self) -> None:
        """Delete the notes, and the verdict before this one: all have come, so all have read it."""
        self._forget(self._note(rank) for rank in range(self._size))
        self._forget([self._verdict(self._number - 1)])

    def _forget(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._store.delete_key(key)

    def _note(self, rank: int) -> str:
        return f"kolovod/monitored/{self._number}/{rank}"

    def _verdict(self, number: int | None = None) -> str:
        return f"kolovod/monitored/{self._number if number is None else number}"


def seconds(timeout: timedelta | float | None, default_s: float) -> float:
    """A time limit as torch.distributed takes it. Raises InvalidArgumentError."""
    if timeout is None:
        return default_s
    if isinstance(timeout, timedelta):
        return timeout.total_seconds()
    if isinstance(timeout, int | float) and not isinstance(timeout, bool):
        return float(timeout)
    raise GroupArgumentError(f"timeout is {timeout!r}: give a datetime.timedelta")


def install() -> None:
    """Have ``torch.distributed.monitored_barrier`` ask the groups of this backend."""
    refusing: Any = c10d.monitored_barrier

    @functools.wraps(refusing)
    def monitored_barrier(
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | float | None = None,
        wait_all_ranks: bool = False,
    ) -> Any:
        if c10d._rank_not_in_group(group) or c10d.get_backend(group) != "kolovod":
            return refusing(group, timeout, wait_all_ranks)
        asked: Any = c10d._get_default_group() if group is None else group
        return asked.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    c10d.monitored_barrier = monitored_barrier
    dist.monitored_barrier = monitored_barrier
