"""Rank 0's collector and the others' reporters, without a world: lost, refused, put back."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from slow import slow_but
from waiting import until

from kolovod.core.spans import SpanLog
from kolovod.net.channel import Channel, connect
from kolovod.observe import collector
from kolovod.observe.collector import Clock, Collector, Reporter
from kolovod.observe.recorder import Batch, Recorder

SECRET = "s" * 32
OTHERS_TURN_S = 0.3  # for another thread to come between, which it cannot
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
        self.asked: list[bool] = []
        """Of each exchange of the reporter, when it is over: whether it is to record."""
        self.reporter = Reporter(SECRET, self.epoch, 1, 2, self.recorder, "")
        self._exchange = self.reporter._exchange
        self.reporter._exchange = self._noted  # type: ignore[method-assign]

    def _noted(self, channel: Channel, batch: Batch, clock: Clock) -> tuple[bool, int]:
        answer = self._exchange(channel, batch, clock)
        self.asked.append(answer[0])
        return answer

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


@pytest.mark.slow
def test_stop_and_start_at_once_lose_nothing(ends: Ends) -> None:
    ends.reporter.expect()
    ends.log.add("first", 1, 2)
    ends.collector.start()
    assert ends.collector.finish() == []
    ends.reporter.await_end()
    ends.reporter.expect()
    assert ends.recorder.on
    ends.log.add("second", 1, 2)
    already = len(ends.asked)
    until(lambda: len(ends.asked) > already + 3)  # rank 0 has yet to begin that timeline
    assert ends.names() == ["first"]
    ends.collector.start()
    assert ends.collector.finish() == []
    assert ends.names() == ["first", "second"]


@pytest.mark.parametrize("step", slow_but(["switch"], ["switch", "take"]))
def test_who_begins_while_an_answer_is_weighed_records(step: str, ends: Ends) -> None:
    """Rank 0 has said that there is nothing to record, and this rank begins a timeline just then.

    What the reporter does about that answer must not be done to the timeline that has begun.
    """
    came, begun = threading.Event(), threading.Event()
    switched: list[bool] = []
    steps: dict[str, Callable[[Any], Any]] = {
        "switch": ends.recorder.switch,
        "take": ends.recorder.take,
    }

    def begin() -> None:
        ends.reporter.expect()
        ends.log.add("first", 1, 2)
        begun.set()

    thread = threading.Thread(target=begin)

    def do(name: str, argument: Any) -> Any:
        if (
            name == step
            and threading.current_thread() is ends.reporter._thread
            and not came.is_set()
        ):
            came.set()
            thread.start()
            begun.wait(OTHERS_TURN_S)
        result = steps[name](argument)
        if name == "switch":
            switched.append(argument)
        return result

    ends.recorder.switch = partial(do, "switch")  # type: ignore[method-assign]
    ends.recorder.take = partial(do, "take")  # type: ignore[method-assign]
    until(begun.is_set)
    thread.join()
    already = len(ends.asked)
    until(lambda: len(ends.asked) > already + 1)
    assert ends.names() == []
    assert all(switched[switched.index(True) :])
    ends.collector.start()
    assert ends.collector.finish() == []
    assert ends.names() == ["first"]


def test_a_stop_waits_for_a_timeline_that_rank_0_has_just_begun(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that rank 0 gave before it began comes late: it is no answer to this stop."""
    monkeypatch.setattr(collector, "_STOP_S", 60.0)
    arrived, release, stopped = threading.Event(), threading.Event(), threading.Event()
    until(lambda: len(ends.asked) > collector._FIRST_LOOKS)  # whose answers tell the time only
    noted = ends.reporter._exchange

    def late(channel: Channel, batch: Batch, clock: Clock) -> tuple[bool, int]:
        if release.is_set():
            stopped.wait(OTHERS_TURN_S)
        answer = noted(channel, batch, clock)
        if not arrived.is_set():
            arrived.set()
            release.wait(30)
        return answer

    ends.reporter._exchange = late  # type: ignore[method-assign]
    assert arrived.wait(30)
    ends.reporter.expect()
    ends.log.add("first", 1, 2)
    ends.collector.start()

    def stop() -> None:
        ends.reporter.await_end()
        stopped.set()

    thread = threading.Thread(target=stop)
    thread.start()
    until(ends.reporter._hurry.is_set)
    release.set()
    until(lambda: True in ends.asked)
    assert not stopped.is_set()
    assert ends.collector.finish() == []
    thread.join()
    assert ends.names() == ["first"]


def test_a_rank_that_begins_again_at_once_has_told_all_before(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else rank 0 would wait for the end of a timeline that it has yet to begin."""
    monkeypatch.setattr(collector, "_STOP_S", 60.0)
    again = threading.Event()
    take = ends.recorder.take

    def slow(most: int) -> Batch:
        if not ends.recorder.on and ends.collector._begun and not again.is_set():
            again.wait(OTHERS_TURN_S)
        return take(most)

    ends.recorder.take = slow  # type: ignore[method-assign]
    ends.collector.start()
    until(lambda: ends.recorder.on)
    ends.log.add("first", 1, 2)
    missing: list[list[int]] = []
    thread = threading.Thread(target=lambda: missing.append(ends.collector.finish()))
    thread.start()
    ends.reporter.await_end()
    ends.reporter.expect()
    again.set()
    ends.log.add("second", 1, 2)
    thread.join()
    assert missing == [[]]
    assert ends.recorder.on
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


def test_a_connection_that_ends_late_does_not_end_what_a_newer_one_reports() -> None:
    """Else ``finish`` does not wait for the rest of that rank's timeline."""
    here = Collector(SECRET, next(EPOCHS), 2, lambda rank, batch: None)
    deadline = time.monotonic() + 30
    ends = []
    try:
        here.start()
        for _ in range(2):
            address = here._servers[0]._listener.getsockname()
            channel = connect(socket.AF_UNIX, address, SECRET, "timeline", deadline)
            report = {"on": True, "begun": 1, "operations": [], "spans": [], "lost": 0}
            for message in (HELLO, report):
                channel.send(message, deadline)
                channel.receive(deadline)
            ends.append(channel)
        ends[0].close()
        until(lambda: len(here._servers[0]._open) == 1)
        assert here._recording == {1: True}
        ends[1].close()
        until(lambda: here._recording == {1: False})
    finally:
        here.close()


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
        address = f"\0{collector._unix_name(SECRET, epoch)}"
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
