"""A connection by which rank 0 gets what the other ranks report for its timeline.

Each other rank connects and, several times a second, reports::

    rank    -> rank 0   {"rank", "whereabouts": [machine, cores, mask]}
    rank 0  -> rank     {"clock": whose}
    rank    -> rank 0   {"on": bool, "begun": n, "operations": [...], "spans": [...], "lost": n}
    rank 0  -> rank     {"on": bool, "begun": n, "now_ns": n}

Rank 0 says whether to record, how many timelines it has begun, and what time it is, so that all
times in the trace are rank 0's. The other rank repeats the number, so that rank 0 knows who has
heard of a timeline. A rank that is told to stop reports what is left, and that it is off. Both ends
prove the job's secret first (net/channel.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kolovod.errors import AuthenticationError, BootstrapError
from kolovod.net.addresses import connect_any
from kolovod.net.channel import Channel, connect
from kolovod.net.server import Server
from kolovod.net.unix_sockets import listen_abstract
from kolovod.observe.recorder import PULL_MOST_S, PULL_S, REPORT_S, Batch, PullInterval, Recorder
from kolovod.observe.whereabouts import (
    Whereabouts,
    clock_identity,
    parse_whereabouts,
    whereabouts,
)

__all__ = ["Clock", "Collector", "Reporter"]

_LABEL = "timeline"
_MOST_PER_REPORT = 400  # of a kind: a message may hold that, whatever characters the names have
_NAME_CHARACTERS = 256
_INT64 = 1 << 63
_RETRY_S = 0.2
_IDLE_S = 0.25
_HURRY_S = 0.01
_CONNECT_S = 5.0
_FINISH_S = 5.0
_STOP_S = 1.0
_SOON_S = 2.0
_EXPECT_S = 10.0
_FIRST_LOOKS = 4  # at the clock
_ANSWER_S = 30.0
_FOREVER_S = 1e6
_REPORTS_PER_S = 1000.0  # of all ranks together
_MALFORMED = (BootstrapError, LookupError, TypeError, ValueError, OverflowError)
_CONNECTION_ERRORS = (OSError, EOFError, *_MALFORMED)


class Clock:
    """The difference to be added to this process's clock to get another one's.

    It is estimated as NTP does (Mills, RFC 5905): the answer is taken to be written half way
    between the question and its arrival; the fastest answer counts. The error is half of its time
    at most.
    """

    def __init__(self, *, is_same: bool) -> None:
        """``is_same``: it is the same clock, and there is nothing to estimate."""
        self._is_same = is_same
        self._seen: deque[tuple[int, int]] = deque(maxlen=64)  # the clocks drift

    def asked(self, before_ns: int, answer_ns: int, after_ns: int) -> None:
        """The other clock showed ``answer_ns`` between two moments of ours."""
        took_ns = after_ns - before_ns
        self._seen.append((took_ns, answer_ns - (before_ns + took_ns // 2)))

    @property
    def offset_ns(self) -> int:
        """The best estimate."""
        return 0 if self._is_same or not self._seen else min(self._seen)[1]


class Collector:
    """Rank 0's end: takes the others' reports."""

    def __init__(
        self,
        secret: str,
        epoch: int,
        size: int,
        receive: Callable[[int, Batch], None],
        listeners: Sequence[socket.socket] = (),
    ) -> None:
        """Listen for ranks of this host; for those of others at ``listeners``, which it takes.

        ``receive`` gets a rank's batches, on any thread.
        """
        self._receive = receive
        self._size = size
        self.whereabouts: dict[int, Whereabouts] = {}
        """By rank that has ever connected; known before its first report."""
        self._changed = threading.Condition()
        self._on = False
        self._begun, self._began_s, self._last_s = 0, 0.0, 0.0
        # By rank that has ever connected: does it record, and of how many timelines has it heard?
        self._recording: dict[int, bool] = {}
        self._heard: dict[int, int] = {}
        self._speaks_by: dict[int, Channel] = {}  # the newest connection of each
        self._unfinished: set[int] = set()  # who has more to report of a timeline that ends
        here = listen_abstract(_unix_name(secret, epoch), 64 + size)
        self._servers = [
            Server(listener, secret, _LABEL, self._serve, max_strangers=64 + size)
            for listener in (here, *listeners)
        ]
        for server in self._servers:
            server.start()

    def start(self) -> None:
        """From now on, ranks that connect are to record."""
        with self._changed:
            self._began_s = time.monotonic()
            self._begun += 1
            self._on = True

    def finish(self) -> list[int]:
        """Tell all to stop, and wait until they have reported the rest, as long as they do so.

        Those that have not heard of the timeline are waited for only if it began just now. Returns
        the ranks of which something is missing, or all.
        """

        def all_know() -> bool:
            know = sum(heard >= self._begun for heard in self._heard.values())
            return know == self._size - 1

        with self._changed:
            soon_s = self._began_s + _CONNECT_S - time.monotonic()
            self._changed.wait_for(all_know, max(0.0, soon_s))
            self._on, self._last_s = False, time.monotonic()
            # Who has told all may record for the next timeline before this thread sees it.
            self._unfinished = {rank for rank, records in self._recording.items() if records}
            while self._unfinished:
                remaining_s = self._last_s + _FINISH_S - time.monotonic()
                if remaining_s <= 0:
                    break
                self._changed.wait(remaining_s)
            return [
                rank
                for rank in range(1, self._size)
                if rank in self._unfinished or self._heard.get(rank, 0) < self._begun
            ]

    def close(self) -> None:
        """Hang up."""
        for server in self._servers:
            server.close()

    def _serve(self, channel: Channel) -> None:
        rank = -1
        try:
            hello = channel.receive(time.monotonic() + _ANSWER_S)
            rank = int(hello["rank"])
            if not 0 < rank < self._size:
                raise ValueError(f"there are {self._size} ranks")
            self.whereabouts[rank] = parse_whereabouts(hello["whereabouts"])
            with self._changed:
                self._speaks_by[rank] = channel
            channel.send({"clock": clock_identity()}, time.monotonic() + _ANSWER_S)
            while True:
                self._take(rank, channel.receive(time.monotonic() + _FOREVER_S))
                with self._changed:
                    answer = {"on": self._on, "begun": self._begun}
                channel.send(answer | {"now_ns": time.monotonic_ns()}, time.monotonic() + _ANSWER_S)
        except AuthenticationError:
            raise
        except _MALFORMED as error:
            if channel.fileno() >= 0:  # else it is closed here
                text = f"kolovod: rank {rank} sent a malformed report for the timeline: {error!r}"
                print(text, file=sys.stderr)
        finally:
            with self._changed:
                if self._speaks_by.get(rank) is channel:  # else it has connected again
                    del self._speaks_by[rank]
                    self._record(rank, False)

    def _take(self, rank: int, message: dict[str, Any]) -> None:
        """Take one report. Raises what malformed ones make Python raise."""
        batch = _parse(message)
        if batch:
            self._receive(rank, batch)
        with self._changed:
            self._heard[rank] = int(message["begun"])
            self._last_s = time.monotonic()
            self._record(rank, bool(message["on"]))

    def _record(self, rank: int, is_on: bool) -> None:
        """Note whether it records; ``_changed`` is held."""
        self._recording[rank] = is_on
        if not is_on:
            self._unfinished.discard(rank)
        self._changed.notify_all()


class Reporter:
    """The end of another rank: a thread that connects to rank 0's collector and reports."""

    def __init__(
        self,
        secret: str,
        epoch: int,
        rank: int,
        size: int,
        recorder: Recorder,
        address: str,
        *,
        encrypted: bool = False,
    ) -> None:
        """``address``: of the collector if that is on another host, else "".

        ``encrypted``: what passes between hosts is encrypted.
        """
        self._encrypted = encrypted
        self._secret = secret
        self._rank = rank
        self._recorder = recorder
        self._interval_s = max(REPORT_S, size / _REPORTS_PER_S)
        self._address, self._unix_name = address, _unix_name(secret, epoch)
        # Of what follows, and of turning the recorder on or off because of it: by two threads.
        self._changed = threading.Condition()
        self._begun = 0
        self._expected = (0, 0.0)  # how many rank 0 will have begun, and until when to believe it
        self._has_told_all = True  # it does not record, and rank 0 has got what it recorded
        self._ends = 0  # how often that came true
        self._last_on_s = -_FOREVER_S
        self._channel: Channel | None = None
        self._stopping = threading.Event()
        self._hurry = threading.Event()  # also while rank 0's timeline ends, which waits for us
        self._thread = threading.Thread(target=self._serve, name="kolovod-timeline", daemon=True)
        self._thread.start()

    def expect(self) -> None:
        """Record at once: rank 0 is about to begin a timeline, or has."""
        with self._changed:
            if not self._recorder.on:
                self._expected = (self._begun + 1, time.monotonic() + _EXPECT_S)
                self._switch(True)

    def await_end(self) -> None:
        """Return once rank 0 has ended its timeline and has the rest of it, or soon if it does not.

        The next timeline may begin then: nothing of this one is left that it could get instead.
        """
        self._hurry.set()
        with self._changed:
            ends = self._ends
            self._changed.wait_for(lambda: self._has_told_all or self._ends > ends, _STOP_S)
            if self._is_expecting():  # rank 0 has not begun it
                self._expected = (0, 0.0)
                self._recorder.switch(False)
        if not self._stopping.is_set():
            self._hurry.clear()

    def _switch(self, on: bool) -> None:
        """Record or do not; ``_changed`` is held, so that what it follows from is still so."""
        self._recorder.switch(on)
        if on:
            self._has_told_all = False

    def _tells_all(self) -> None:
        """There is nothing left of what was recorded; ``_changed`` is held."""
        if not self._has_told_all:
            self._has_told_all = True
            self._ends += 1
            self._changed.notify_all()

    def _is_expecting(self) -> bool:
        """Return whether rank 0 has yet to begin the timeline that this rank records for."""
        number, until_s = self._expected
        return self._begun < number and time.monotonic() < until_s

    def close(self) -> None:
        """Report the rest and hang up."""
        self._stopping.set()
        self._hurry.set()
        self._thread.join(_IDLE_S + 2)
        channel = self._channel
        if self._thread.is_alive() and channel is not None:
            channel.close()  # rank 0 does not answer
            self._thread.join(1)

    def _connect(self, deadline: float) -> Channel:
        if self._address:
            encrypted = self._encrypted
            return connect_any(self._address, self._secret, _LABEL, deadline, encrypted=encrypted)
        return connect(socket.AF_UNIX, f"\0{self._unix_name}", self._secret, _LABEL, deadline)

    def _serve(self) -> None:
        cause: Exception | None = None
        while True:
            is_over = self._stopping.is_set()
            try:
                deadline = time.monotonic() + _ANSWER_S
                channel = self._connect(deadline)
                with contextlib.closing(channel):
                    self._channel = channel
                    self._report(channel)
            except _CONNECTION_ERRORS as error:
                cause = error
            with self._changed:
                if is_over or not self._is_expecting():
                    self._switch(False)  # nobody listens
                    self._tells_all()
            if is_over:
                break
            self._stopping.wait(_RETRY_S)
        if self._begun == 0 and cause is not None and self._recorder.take(1):
            print(
                f"kolovod: rank {self._rank} has reported nothing for a timeline, since it did not "
                f"reach rank 0: {type(cause).__name__}: {cause}",
                file=sys.stderr,
            )

    def _report(self, channel: Channel) -> None:
        hello = {"rank": self._rank, "whereabouts": whereabouts()}
        channel.send(hello, time.monotonic() + _ANSWER_S)
        whose = channel.receive(time.monotonic() + _ANSWER_S)["clock"]
        clock = Clock(is_same=whose == clock_identity() != "")
        for _ in range(_FIRST_LOOKS):
            self._exchange(channel, Batch(), clock)
        last_ns, pace = 0, PullInterval(PULL_MOST_S)
        while True:
            is_over = self._stopping.is_set()
            if is_over:
                self._recorder.switch(False)
            pause_s = pace.pause_s(self._recorder.pull())
            with self._changed:
                # What rank 0 has yet to begin is kept until it has.
                is_early = self._is_expecting() and not is_over
                batch = Batch() if is_early else self._recorder.take(_MOST_PER_REPORT)
                is_last = not self._recorder.on and not batch
            try:
                wanted, begun = self._exchange(channel, batch, clock)
            except BaseException:
                self._recorder.put_back(batch)
                raise
            if batch.holds(_MOST_PER_REPORT):
                continue  # there may be more
            if is_over and not batch and begun == self._begun:
                return
            with self._changed:
                was_on = self._recorder.on
                # Who knows of a timeline and does not record has told all, as rank 0 sees it.
                self._begun = begun
                if is_last and not was_on:
                    self._tells_all()
                self._switch(not is_over and (wanted or self._is_expecting()))
                has_stopped = was_on and not self._recorder.on
            if is_over or has_stopped:
                continue
            self._pause(last_ns, pace, pause_s)
            last_ns = time.monotonic_ns()

    def _pause(self, last_ns: int, pace: PullInterval, pause_s: float) -> None:
        """Wait until the next report is due, and read meanwhile: nothing may be missed."""
        if self._recorder.on:
            self._last_on_s = time.monotonic()
        else:  # the next timeline may begin soon after one
            soon = time.monotonic() - self._last_on_s < _SOON_S
            self._stopping.wait(PULL_S if soon else _IDLE_S)
        # Rank 0 is about to say that its timeline has begun, and waits for who has not heard of it.
        interval_s = PULL_S if self._is_expecting() else self._interval_s
        while self._recorder.on and time.monotonic_ns() - last_ns < interval_s * 1e9:
            if self._hurry.wait(pause_s):
                self._stopping.wait(_HURRY_S)
                return
            pause_s = pace.pause_s(self._recorder.pull())

    def _exchange(self, channel: Channel, batch: Batch, clock: Clock) -> tuple[bool, int]:
        """Report ``batch``; return whether to record, and how many timelines have begun."""
        batch = batch.shifted(clock.offset_ns)
        report = {
            "on": self._recorder.on or bool(batch),
            "begun": self._begun,
            "operations": batch.operations,
            "spans": batch.spans,
            "lost": batch.lost,
        }
        before_ns = time.monotonic_ns()
        channel.send(report, time.monotonic() + _ANSWER_S)
        answer: dict[str, Any] = channel.receive(time.monotonic() + _ANSWER_S)
        clock.asked(before_ns, int(answer["now_ns"]), time.monotonic_ns())
        return bool(answer["on"]), int(answer["begun"])


def _unix_name(secret: str, epoch: int) -> str:
    """Return a name in the abstract namespace, so that nothing is left behind.

    Only who knows the secret knows it.
    """
    digest = hashlib.sha256(f"timeline {epoch} {secret}".encode()).hexdigest()[:32]
    return f"kolovod-timeline-{digest}"


def _parse(message: dict[str, Any]) -> Batch:
    """Return a report, with the types that it must have. Raises what Python does for others."""
    operations = [
        (
            str(where)[:_NAME_CHARACTERS],
            str(name)[:_NAME_CHARACTERS],
            str(verb)[:_NAME_CHARACTERS],
            str(dtype)[:_NAME_CHARACTERS],
            *(_int(fact) for fact in (tensors, size, bucket)),
            bool(ok),
            *(_int(at) for at in (submitted, started, ended)),
        )
        for where, name, verb, dtype, tensors, size, bucket, ok, submitted, started, ended in (
            message["operations"]
        )
    ]
    spans = [
        (
            str(name)[:_NAME_CHARACTERS],
            str(who)[:_NAME_CHARACTERS],
            _int(start),
            _int(end),
            tuple(map(_int, cpu[:4])),
        )
        for name, who, start, end, cpu in message["spans"]
    ]
    return Batch(operations, spans, _int(message["lost"]))  # type: ignore[arg-type]


def _int(value: Any) -> int:
    number = int(value)
    if not -_INT64 <= number < _INT64:
        raise ValueError("a number of more than 64 bits")
    return number
