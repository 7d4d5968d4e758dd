"""How long a host has acknowledged nothing. That one vanishes is played in elastic's tests."""

from __future__ import annotations

import socket
import time

import pytest
from waiting import until

from kolovod.net import lost_hosts
from kolovod.net.lost_hosts import UNACKNOWLEDGED_S, HostWatch, notice_lost_host


def test_a_host_whose_process_reads_nothing_is_not_silent() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sender,
    ):
        notice_lost_host(sender.fileno())
        watch = HostWatch(sender.fileno())
        sender.sendall(b"x" * 1000)
        until(lambda: not lost_hosts._has_unacknowledged(sender.fileno()), "an acknowledgement")
        now_s = time.monotonic()
        assert watch.due_s() >= now_s + UNACKNOWLEDGED_S
        watch.check()


def test_other_sockets_and_closed_ones_are_never_silent() -> None:
    here, there = socket.socketpair()
    with here, there:
        watch = HostWatch(here.fileno())
        here.sendall(b"x")
        watch.check()
    watch.check()


def test_silence_counts_from_the_first_message_that_is_not_acknowledged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits, now_s = False, 100.0
    monkeypatch.setattr(lost_hosts, "_has_unacknowledged", lambda fd: waits)
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    watch = HostWatch(0)
    now_s = 200.0  # this process stood still, or said nothing
    watch.check()
    waits = True
    now_s = 200.4
    watch.check()
    now_s = 200.8
    watch.check()
    assert watch.due_s() == pytest.approx(200.0 + UNACKNOWLEDGED_S)
    now_s = 230.8  # it stood still again: that counts for half a second
    assert watch.due_s() == pytest.approx(229.5 + UNACKNOWLEDGED_S)
    with pytest.raises(TimeoutError, match="acknowledges nothing for 1 s"):
        watch.check()
    waits = False
    watch.check()
