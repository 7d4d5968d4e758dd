"""Rank 0's collector and the others' reporters, without a world: lost, refused, put back."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kolovod.core.spans import SpanLog
from kolovod.net.channel import connect
from kolovod.observe import collector
from kolovod.observe.collector import Collector, Reporter
from kolovod.observe.recorder import Batch, Recorder

SECRET = "s" * 32
HELLO = {"rank": 1, "whereabouts": ["m", 2, "3"]}
EPOCHS = iter(range(1 << 20, 1 << 21))


class Ends:
    """A collector and one reporter, with what the first has received."""

    def __init__(self, *, is_begun: bool = False) -> None:
        self.epoch = next(EPOCHS)
        self.batches: list[Batch] = []
        self.log = SpanLog()
        self.recorder = Recorder(dict, self.log)
        self.collector = Collector(
            SECRET, self.epoch, 2, lambda _, batch: self.batches.append(batch)
        )
        if is_begun:
            self.collector.start()
        self.reporter = Reporter(SECRET, self.epoch, 1, 2, self.recorder, "")

    def names(self) -> list[str]:
        return [name for batch in list(self.batches) for name, *_ in batch.spans]

    def close(self) -> None:
        self.reporter.close()
        self.collector.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    pair = Ends()
    yield pair
    pair.close()


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert condition()


def test_spans_of_any_characters_arrive(ends: Ends) -> None:
    ends.collector.start()
    until(lambda: ends.recorder.on)
    names = ["\U0001f600" * 300, "\u0448" * 300, '\\"\x01' * 300]
    thread = threading.current_thread()
    before, thread.name = thread.name, "\U0001f600" * 500
    try:
        for i in range(3000):
            ends.log.add(names[i % 3], i, i + 1)
    finally:
        thread.name = before
    assert ends.collector.finish() == []
    assert len(ends.names()) == 3000
    assert not ends.recorder.on


def test_who_has_heard_of_a_timeline_records_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else rank 0 would think that it has reported all, and not wait for the rest."""
    said: list[tuple[int, bool]] = []
    take = Collector._take

    def noted(self: Collector, rank: int, message: dict[str, Any]) -> None:
        said.append((message["begun"], message["on"]))
        take(self, rank, message)

    monkeypatch.setattr(Collector, "_take", noted)
    ends = Ends(is_begun=True)
    try:
        until(lambda: (1, True) in said)
        assert (1, False) not in said
        assert ends.collector.finish() == []
    finally:
        ends.close()


def test_stop_and_start_at_once_lose_nothing(ends: Ends) -> None:
    ends.reporter.expect()
    ends.log.add("first", 1, 2)
    ends.collector.start()
    assert ends.collector.finish() == []
    ends.reporter.await_end()
    ends.reporter.expect()
    assert ends.recorder.on
    ends.log.add("second", 1, 2)
    time.sleep(0.5)  # rank 0 takes its time, and gets nothing that it has no timeline for
    assert ends.names() == ["first"]
    ends.collector.start()
    assert ends.collector.finish() == []
    assert ends.names() == ["first", "second"]


def test_what_a_broken_connection_swallowed_is_sent_again(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends.collector.start()
    until(lambda: ends.recorder.on)
    send, broken = collector.Channel.send, []

    def breaking(self: Any, message: Any, deadline: float) -> None:
        if message.get("spans") and not broken:
            broken.append(True)
            raise ConnectionResetError
        send(self, message, deadline)

    monkeypatch.setattr(collector.Channel, "send", breaking)
    ends.reporter.expect()
    ends.log.add("kept", 1, 2)
    until(lambda: "kept" in ends.names())
    assert broken


def test_a_reporter_that_ends_late_leaves_the_next_worlds_spans_alone(ends: Ends) -> None:
    ends.recorder.switch(True)
    later = Recorder(dict, ends.log)
    later.switch(True)
    ends.recorder.switch(False)
    assert ends.log.on
    later.switch(False)
    assert not ends.log.on


def test_who_never_reported_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "_CONNECT_S", 0.1)
    here = Collector(SECRET, next(EPOCHS), 3, lambda rank, batch: None)
    try:
        here.start()
        assert here.finish() == [1, 2]
    finally:
        here.close()


def test_a_rank_that_reaches_nobody_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    log = SpanLog()
    there = Reporter(SECRET, next(EPOCHS), 1, 2, Recorder(dict, log), "")
    there.expect()
    log.add("lost", 1, 2)
    there.close()
    shown = capfd.readouterr().err
    assert "rank 1 has reported nothing" in shown
    assert "ConnectionRefusedError" in shown


@pytest.mark.parametrize(
    "messages",
    [
        [{"rank": None}],
        [{"rank": 2}],
        [[1]],
        [{"rank": 1}],
        [{"rank": 1, "whereabouts": ["m", "two", "3"]}],
        [HELLO, {"on": True}],
        [HELLO, {"on": True, "begun": 1, "operations": [[1]], "spans": [], "lost": 0}],
        [HELLO, {"on": True, "begun": 1, "operations": [], "spans": [], "lost": 1 << 70}],
        [HELLO, {"on": True, "begun": 1, "operations": [], "spans": [], "lost": 1e400}],
    ],
    ids=repr,
)
def test_malformed_reports_are_said_in_one_line(
    messages: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    received: list[Batch] = []
    epoch = next(EPOCHS)
    here = Collector(SECRET, epoch, 2, lambda _, batch: received.append(batch))
    try:
        address = collector._unix_address(SECRET, epoch)
        deadline = time.monotonic() + 30
        channel = connect(socket.AF_UNIX, address, SECRET, "timeline", deadline)
        for i, message in enumerate(messages):
            channel.send(message, deadline)
            if i < len(messages) - 1:
                channel.receive(deadline)
        with pytest.raises((EOFError, OSError)):
            channel.receive(deadline)
        channel.close()
    finally:
        here.close()
    shown = capfd.readouterr().err
    assert shown.count("\n") == 1
    assert "sent a malformed report for the timeline" in shown
    assert not received
