"""What a job hears of ranks that somebody else runs."""

from __future__ import annotations

import fcntl
import os
import select
import threading
from collections.abc import Iterator

import pytest

from kolovod.launch.death import reported
from kolovod.launch.exit_queue import ExitQueue
from kolovod.launch.local import Ended


@pytest.fixture
def exits() -> Iterator[ExitQueue]:
    made = ExitQueue()
    yield made
    made.close()


def rings(exits: ExitQueue, timeout_s: float = 0.0) -> bool:
    return bool(select.select([exits.fd], [], [], timeout_s)[0])


def test_a_rank_runs_until_its_end_was_collected(exits: ExitQueue) -> None:
    exits.expect([0, 1])
    exits.began({0: 10, 1: 11})
    assert not rings(exits)
    teller = threading.Thread(target=exits.add, args=(Ended(1, 11, reported(3)),))
    teller.start()
    assert rings(exits, 20)
    teller.join()
    assert exits.running == {0, 1}
    assert exits.collect() == [Ended(1, 11, reported(3))]
    assert exits.running == {0}
    assert exits.pids() == {0: 10, 1: 11}
    assert not rings(exits)
    assert exits.collect() == []


def test_all_others_have_ended_each_once(exits: ExitQueue) -> None:
    exits.expect([2, 0, 1, 3])
    exits.began({0: 10, 1: 11})
    exits.add(Ended(3, 13, reported(0)))
    exits.collect()
    exits.add(Ended(1, 11, reported(0)))
    for _ in range(2):
        exits.add_others(lambda rank, pid: Ended(rank, pid, None, lost="no answer"))
    # 3 was collected and 1 is known; 2 was ordered, but nobody has seen its process.
    assert [(end.rank, end.pid, end.lost) for end in exits.collect()] == [
        (1, 11, ""),
        (0, 10, "no answer"),
        (2, 0, "no answer"),
    ]
    assert not exits.running


def test_a_ring_without_an_end_wakes_once(exits: ExitQueue) -> None:
    exits.ring()
    assert rings(exits)
    assert exits.collect() == []
    assert not rings(exits)


def test_what_comes_after_the_end_reaches_no_other_file(exits: ExitQueue) -> None:
    """A scheduler may tell of a process when the job is over, and the descriptor has a new file."""
    exits.expect([0])
    number = exits.fd
    spare = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    exits.close()
    exits.close()
    assert exits.fd == -1
    heir = fcntl.fcntl(spare, fcntl.F_DUPFD_CLOEXEC, number)
    os.close(spare)
    try:
        assert heir == number  # the lowest free one from there on
        exits.add(Ended(0, 10, reported(0)))
        exits.ring()
        with pytest.raises(BlockingIOError):
            os.eventfd_read(heir)
    finally:
        os.close(heir)
    assert [end.rank for end in exits.collect()] == [0]
