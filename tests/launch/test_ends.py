"""What a job hears of ranks that somebody else runs."""

from __future__ import annotations

import fcntl
import os
import select
import threading
from collections.abc import Iterator

import pytest

from kolovod.launch.death import reported
from kolovod.launch.ends import Ends
from kolovod.launch.local import Ended


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def rings(ends: Ends, timeout_s: float = 0.0) -> bool:
    return bool(select.select([ends.fd], [], [], timeout_s)[0])


def test_a_rank_runs_until_its_end_was_collected(ends: Ends) -> None:
    ends.expect([0, 1])
    ends.began({0: 10, 1: 11})
    assert not rings(ends)
    teller = threading.Thread(target=ends.add, args=(Ended(1, 11, reported(3)),))
    teller.start()
    assert rings(ends, 20)
    teller.join()
    assert ends.running == {0, 1}
    assert ends.collect() == [Ended(1, 11, reported(3))]
    assert ends.running == {0}
    assert ends.pids() == {0: 10, 1: 11}
    assert not rings(ends)
    assert ends.collect() == []


def test_all_others_have_ended_each_once(ends: Ends) -> None:
    ends.expect([2, 0, 1, 3])
    ends.began({0: 10, 1: 11})
    ends.add(Ended(3, 13, reported(0)))
    ends.collect()
    ends.add(Ended(1, 11, reported(0)))
    for _ in range(2):
        ends.add_others(lambda rank, pid: Ended(rank, pid, None, lost="no answer"))
    # 3 was collected and 1 is known; 2 was ordered, but nobody has seen its process.
    assert [(end.rank, end.pid, end.lost) for end in ends.collect()] == [
        (1, 11, ""),
        (0, 10, "no answer"),
        (2, 0, "no answer"),
    ]
    assert not ends.running


def test_a_ring_without_an_end_wakes_once(ends: Ends) -> None:
    ends.ring()
    assert rings(ends)
    assert ends.collect() == []
    assert not rings(ends)


def test_what_comes_after_the_end_reaches_no_other_file(ends: Ends) -> None:
    """A scheduler may tell of a process when the job is over, and the descriptor has a new file."""
    ends.expect([0])
    number = ends.fd
    spare = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    ends.close()
    ends.close()
    assert ends.fd == -1
    heir = fcntl.fcntl(spare, fcntl.F_DUPFD_CLOEXEC, number)
    os.close(spare)
    try:
        assert heir == number  # the lowest free one from there on
        ends.add(Ended(0, 10, reported(0)))
        ends.ring()
        with pytest.raises(BlockingIOError):
            os.eventfd_read(heir)
    finally:
        os.close(heir)
    assert [end.rank for end in ends.collect()] == [0]
