"""The ranks of a job that an agent runs, on another host or on this one.

The launcher's half; ``agent`` has the other, ``agent_line`` the way there, ``agent_messages`` what
they say. The same methods as ``HostRanks``, so that a job does not care where its ranks are.
Orders, also the job's secret, go through ssh's standard input, never by a command line.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kolovod.errors import BootstrapError
from kolovod.launch.agent_line import Line
from kolovod.launch.agent_messages import (
    WINDOW_BYTES,
    FrameReader,
    FrameWriter,
    split_output,
    split_result,
)
from kolovod.launch.ends import Ends
from kolovod.launch.keeping import Keeping
from kolovod.launch.local import GRACE_S, Ended, Order
from kolovod.version import __version__

__all__ = ["RemoteRanks"]

ALIVE_S = 1.0  # between two signs of life
_LAST_WORDS_S = 0.05
LOST_AFTER_S = 10.0  # without one a host is lost


class RemoteRanks:
    """Ranks on ``host``. ``connect``, then ``start``; ``close`` leaves nothing of them behind.

    ``sink`` is called with (rank, "stdout" or "stderr", bytes) on a thread of its own. ``keeping``:
    of a job that outlives its launcher; then the agent may run some already.
    """

    def __init__(
        self,
        host: str,
        line: Line,
        sink: Callable[[int, str, bytes], None],
        keeping: Keeping | None = None,
    ) -> None:
        self.host = host
        self._line = line
        self._sink = sink
        self._keeping = keeping
        self._output: queue.SimpleQueue[tuple[int, str, bytes] | None] = queue.SimpleQueue()
        self._frames = 0  # of output that the sink has taken
        self._came = 0  # that came
        self._shown_frames = 0
        self._marks: deque[tuple[int, int]] = deque()  # (frames, Shown.mark) of moments
        self._lock = threading.Lock()
        self._handed: list[int] = []  # ends that the job was told of, and the agent not yet
        self._writer: FrameWriter | None = None
        self._thread: threading.Thread | None = None
        self._output_thread: threading.Thread | None = None
        self._changed = threading.Condition(self._lock)
        self._hello: dict[str, Any] = {}
        self._ends = Ends()
        self._stopped: set[int] = set()
        self._results: dict[int, bytearray] = {}
        self._errors = b""
        self._heard = time.monotonic()
        self._said = 0.0
        self._lost = ""
        self._finished = False

    # --- the beginning ---

    def connect(self) -> None:
        """Start the agent and hear its greeting. Raises BootstrapError with the reason."""
        self._line.open()
        self._writer = FrameWriter(self._line.sink)
        self._heard = time.monotonic()
        self._thread = threading.Thread(
            target=self._listen, name=f"kolovod host {self.host}", daemon=True
        )
        self._thread.start()
        self._output_thread = threading.Thread(
            target=self._pass_on, name=f"kolovod output of {self.host}", daemon=True
        )
        self._output_thread.start()
        limit_s = 2 * self._line.connect_timeout_s + LOST_AFTER_S
        with self._changed:
            self._changed.wait_for(lambda: self._hello or self._lost, limit_s)
            if not self._hello:
                raise BootstrapError(self._lost or f"no answer within {limit_s:g} s")
            version = self._hello.get("version")
        if version != __version__:
            raise BootstrapError(
                f"{self._hello.get('python')} there has Kolovod {version}, this is {__version__}: "
                "install the same on all hosts"
            )

    @property
    def lost(self) -> str:
        """Why it cannot be reached any more; "" while it can."""
        with self._lock:
            return self._lost

    @property
    def kept(self) -> Any:
        """What an earlier launcher had it ``keep``."""
        return self._hello.get("kept")

    def keep(self, value: Any) -> None:
        """Have the agent keep a JSON value for the launcher that comes next."""
        with contextlib.suppress(OSError):
            self._out().json({"keep": value})

    @property
    def torch_port(self) -> int:
        """A port there for a server that a rank may start; free, and kept so."""
        return int(self._hello["torch_port"])

    @property
    def addresses(self) -> tuple[str, str]:
        """By ssh's connection: our address as that host sees it, and that host's own."""
        parts = str(self._hello.get("connection", "")).split()
        return (parts[0], parts[2]) if len(parts) == 4 else ("", "")

    def start(self, orders: Sequence[Order], payload: bytes | None = None) -> None:
        """Have them started; on a host that is lost they end at once, as lost ones."""
        with self._lock:
            self._ends.expect(order.rank for order in orders)
            if self._lost:
                self._end_as_lost()
                return
        # What all have in common travels once.
        shared = dict(set.intersection(*(set(order.environment.items()) for order in orders)))
        listed = []
        for order in orders:
            own = {n: v for n, v in order.environment.items() if n not in shared}
            listed.append([order.rank, list(order.command), own, order.beside])
        with contextlib.suppress(OSError):  # then the host is lost, as its thread will find
            writer = self._out()
            if payload is not None:
                writer.payload(payload)
            writer.json(
                {"start": {"ranks": listed, "shared": shared, "payload": payload is not None}}
            )

    # --- the same as HostRanks ---

    @property
    def running(self) -> frozenset[int]:
        """The ranks that were not seen to end."""
        return self._ends.running

    def pids(self) -> dict[int, int]:
        """The process id of each rank that was started, on its host."""
        return self._ends.pids()

    def fds(self) -> list[int]:
        """Readable when ``collect`` has something to tell."""
        return [self._ends.fd]

    def stopped(self) -> set[int]:
        """Those that run, but whose process is stopped (SIGSTOP)."""
        with self._lock:
            return self._stopped & self._ends.running

    def needs_polling(self) -> bool:
        """Whether ``collect`` must be called by and by."""
        return False

    def collect(self) -> list[Ended]:
        """Who has ended since the last time."""
        ended = self._ends.collect()
        noted, self._handed = self._handed, [end.rank for end in ended]
        if noted:
            with contextlib.suppress(OSError):
                self._out().json({"noted": noted})
        return ended

    def send(self, signum: int, ranks: Collection[int] | None = None) -> None:
        """Have a signal sent to every process of these ranks, or of ``ranks`` among them."""
        order: dict[str, Any] = {"signal": signum}
        if ranks is not None:
            order["ranks"] = sorted(ranks)
        with contextlib.suppress(OSError):
            self._out().json(order)

    def leave_alone(self) -> None:
        """Have nothing ended; the agent must be one that lasts."""
        with self._changed:
            self._finished = True
        self._line.close(0.1)

    def begin_close(self) -> None:
        """Have whatever is left ended; ``close`` waits for it."""
        if self._writer is not None and not self._lost and not self._finished:
            with contextlib.suppress(OSError):
                self._writer.json({"close": True})

    def close(self) -> None:
        """End whatever is left, and release everything. Idempotent."""
        if self._ends.fd < 0:
            return
        if self._thread is not None:
            self.begin_close()
            with self._changed:
                limit_s = 2 * GRACE_S + LOST_AFTER_S
                self._changed.wait_for(lambda: self._finished or self._lost, limit_s)
            self._line.close(1.0 if self._finished else 0.1)
            self._thread.join(timeout=5)
            self._output.put(None)
            if self._output_thread is not None:
                self._output_thread.join()
            self._line.release()
        self._ends.close()

    # --- what the agent says ---

    def _out(self) -> FrameWriter:
        if self._writer is None:
            raise AssertionError("not connected")
        return self._writer

    def _listen(self) -> None:
        line = self._line
        reader = FrameReader(prelude=line.has_prelude)
        poll = select.poll()
        for fd in (line.source, line.errors):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        try:
            while not self._finished:
                ready = [fd for fd, _ in poll.poll(ALIVE_S * 1000)]
                now = time.monotonic()
                if line.errors in ready:
                    data = os.read(line.errors, 1 << 16)
                    self._errors = (self._errors + data)[-4096:]
                    if not data:
                        poll.unregister(line.errors)
                if line.source in ready:
                    data = os.read(line.source, 1 << 18)
                    if not data:
                        self._lose(line.why_ended(self._errors))
                        return
                    self._heard = now
                    for kind, body in reader.feed(data):
                        self._take(kind, body)
                elif self._hello and now - self._heard > LOST_AFTER_S:
                    self._lose(f"host {self.host} says nothing for {LOST_AFTER_S:g} s")
                    return
                if self._hello and now - self._said >= ALIVE_S / 2:
                    self._said = now
                    self._out().json({"alive": True, "shown": self._shown()})
        except ConnectionError:
            self._lose(line.why_ended(self._errors))
        except (OSError, ValueError, KeyError, BootstrapError) as error:
            self._lose(f"{type(error).__name__}: {error}")

    def _pass_on(self) -> None:
        """Output, on a thread of its own: whoever shows it may be slow, and the agent waits."""
        took = told = 0
        while (frame := self._output.get()) is not None:
            self._sink(*frame)
            self._frames += 1
            took += len(frame[2])
            if took > told + WINDOW_BYTES // 4:
                told = took
                with contextlib.suppress(OSError):
                    self._out().json({"took": took})

    def _wait_for_output(self) -> None:
        """A moment, so that what a rank has written is shown before its end is told."""
        deadline = time.monotonic() + _LAST_WORDS_S
        while self._frames < self._came and time.monotonic() < deadline:
            time.sleep(0.002)

    def _shown(self) -> int:
        """How many frames of output the agent need not keep."""
        if self._keeping is None:
            return self._frames
        shown = self._keeping.shown
        self._marks.append((self._frames, shown.mark()))
        frames = 0
        while self._marks and shown.is_shown(self._marks[0][1]):
            frames = self._marks.popleft()[0]
        self._shown_frames = max(self._shown_frames, frames)
        return self._shown_frames

    def _lose(self, reason: str) -> None:
        """The host is out of reach: so are its ranks."""
        with self._changed:
            if self._finished:
                return
            self._lost = reason
            self._end_as_lost()
            self._changed.notify_all()

    def _end_as_lost(self) -> None:
        """With the lock held."""

        def lost(rank: int, pid: int) -> Ended:
            end = Ended(rank, pid, 255, self.host, lost=self._lost, time=self._heard)
            if self._line.is_here:  # its ranks die with it (``guard``), and what they have left
                end = replace(end, code=-signal.SIGKILL, lost="", record=None)
            return end

        self._ends.add_others(lost)

    def _take(self, kind: bytes, body: bytes) -> None:
        if kind == b"O":
            self._came += 1
            self._output.put(split_output(body))
        elif kind == b"R":
            rank, data = split_result(body)
            self._results.setdefault(rank, bytearray()).extend(data)
        elif kind == b"J":
            self._report(json.loads(body))

    def _find(self, ranks: Mapping[int, int]) -> None:
        """The agent runs these already, for an earlier launcher or since before it was lost."""
        self._ends.began(ranks)
        self._ends.expect(ranks)

    def _report(self, report: dict[str, Any]) -> None:
        if "ended" in report:
            self._wait_for_output()
        with self._changed:
            if "hello" in report:
                self._hello = report["hello"]
                self._find({int(r): int(pid) for r, pid in self._hello["ranks"].items()})
            elif "started" in report:
                pids = report["started"].items()
                self._ends.began({int(rank): int(pid) for rank, pid in pids})
            elif "ended" in report:
                *numbers, blamed, record = report["ended"]
                rank, pid, code = (int(number) for number in numbers)
                result = bytes(self._results.pop(rank, b""))
                blames = None if blamed is None else int(blamed)
                now = time.monotonic()
                end = Ended(
                    rank,
                    pid,
                    code,
                    self.host,
                    result=result,
                    blames=blames,
                    record=str(record).encode(),
                    time=now,
                )
                self._ends.add(end)
            elif "stopped" in report:
                self._stopped = {int(rank) for rank in report["stopped"]}
            elif "bye" in report:
                self._finished = True
            self._changed.notify_all()
        self._ends.ring()
