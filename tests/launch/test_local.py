"""Processes of one host, by the parts that a launcher is made of."""

from __future__ import annotations

import contextlib
import os
import select
import time

from waiting import DEADLINE_S, until

from kolovod.launch.agent_line import SshLine, SshOptions
from kolovod.launch.local import Ended, HostRanks, Order
from kolovod.launch.remote import RemoteRanks


def ended(ranks: HostRanks) -> list[Ended]:
    deadline = time.monotonic() + DEADLINE_S
    while not (found := ranks.collect()):
        assert time.monotonic() < deadline
        select.select(ranks.fds(), [], [], 0.1)
    return found


def test_processes_that_have_ended_keep_no_files_open() -> None:
    """An elastic job may start as many as it likes, one after the other."""
    counts = []
    said: list[bytes] = []
    ranks = HostRanks(lambda rank, stream, data: said.append(data))
    try:
        for number in range(6):
            ranks.start([Order(number, ["echo", "hello"], {})])
            assert [(end.rank, end.code) for end in ended(ranks)] == [(number, 0)]
            both = 2 * (number + 1)
            until(lambda both=both: said.count(b"") == both, "the end of both streams")  # type: ignore[misc]
            if number > 1:  # the pump closes them after it has said so
                with contextlib.suppress(AssertionError):
                    until(lambda: len(os.listdir("/proc/self/fd")) <= counts[1])
            counts.append(len(os.listdir("/proc/self/fd")))
    finally:
        ranks.close()
    assert counts[-1] <= counts[1], counts
    assert b"".join(said) == b"hello\n" * 6


def test_what_is_started_on_a_lost_host_ends_at_once() -> None:
    remote = RemoteRanks("b", SshLine("b", SshOptions()), lambda rank, stream, data: None)
    remote._lose("ssh to b ended")
    remote.start([Order(3, ["true"], {})])
    (end,) = remote.collect()
    assert (end.rank, end.host, end.lost) == (3, "b", "ssh to b ended")
    assert not remote.running
    remote.close()
