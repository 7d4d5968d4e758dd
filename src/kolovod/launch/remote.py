"""The ranks of a job that an agent runs, on another host or on this one.

An agent that says nothing may be stopped, or wait for a file server: its ranks work on. It is woken
if a signal has stopped it, and waited for. Only a job that must end ends it for sure, or says that
its ranks may run on (docs/design/membership.md).

The launcher's half; ``agent`` has the other, ``agent_line`` the way there, ``agent_messages`` what
they say. The same methods as ``HostRanks``, so that a job does not care where its ranks are.
Orders, also the job's secret, go through ssh's standard input, never by a command line.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from kolovod.errors import BootstrapError, HostError
from kolovod.launch.agent_line import START_S, Line
from kolovod.launch.agent_messages import (
    FrameReader,
    OrderWriter,
    split_output,
    split_result,
)
from kolovod.launch.death import Death, reported
from kolovod.launch.exit_queue import ExitQueue
from kolovod.launch.inbox import Inbox
from kolovod.launch.local import GRACE_S, Ended, Order
from kolovod.launch.rank_monitor import RankMonitor
from kolovod.launch.saved_state import Persistence
from kolovod.version import __version__

__all__ = ["RemoteRanks"]

ALIVE_S = 1.0  # between two signs of life
SILENT_AFTER_S = 10.0  # without one users hear of it, and the agent is woken
_LETS_GO_S = 5.0  # for an agent whose connection ends to end as well
_LOOK_S = 0.02


class RemoteRanks:
    """Ranks on ``host``. ``connect``, then ``start``; ``close`` leaves nothing of them behind.

    ``sink`` is called with (rank, "stdout" or "stderr", bytes) on a thread of its own.
    ``persistence``: of a job that outlives its launcher; then the agent may run some already.
    """

    def __init__(
        self,
        host: str,
        line: Line,
        sink: Callable[[int, str, bytes], None],
        persistence: Persistence | None = None,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``report``: called with what users should know, on any thread."""
        self.host = host
        self._described = "the agent of this host" if line.is_here else f"the agent of host {host}"
        self._line = line
        self._report_text = report
        self._output = Inbox(
            host,
            sink,
            lambda count: self._out().json({"took": count}),
            None if persistence is None else persistence.shown,
        )
        self._lock = threading.Lock()
        self._handed: list[int] = []  # ends that the job was told of, and the agent not yet
        self._writer: OrderWriter | None = None
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition(self._lock)
        self._hello: dict[str, Any] = {}
        self._exits = ExitQueue()
        self._stopped: set[int] = set()
        self._results: dict[int, bytearray] = {}
        self._errors = b""
        self._heard = time.monotonic()
        self._said = 0.0
        self._has_answered = False  # ssh, if not the agent
        self._silent_since = 0.0  # when users heard of it; 0: it is not silent
        self._woken = 0.0
        self._rank_monitor: RankMonitor | None = None  # of an agent on this host
        self._proven: set[int] = set()  # the ranks whose end was seen without the agent
        self._unproven: dict[int, int] = {}  # process ids of those whose end nobody saw; 0: unknown
        self.may_run_on = False
        """Whether ``close`` could not find out if all of its ranks have ended."""
        self._ending: threading.Thread | None = None
        self._lost = ""
        self._finished = False

    # --- the beginning ---

    def connect(self) -> None:
        """Start the agent and hear its greeting. Raises BootstrapError with the reason.

        A host that was reached, but where the agent takes long to start, is waited for.
        """
        self._line.open()
        self._writer = OrderWriter(self._line.sink, f"kolovod orders to {self.host}")
        self._heard = time.monotonic()
        self._thread = threading.Thread(
            target=self._listen, name=f"kolovod host {self.host}", daemon=True
        )
        self._thread.start()
        self._output.start()
        self._wait_for_hello()
        version = self._hello.get("version")
        if version != __version__:
            raise HostError(
                f"{self._hello.get('python')} there has Kolovod {version}, this is {__version__}: "
                "install the same on all hosts"
            )

    def _wait_for_hello(self) -> None:
        began, told = time.monotonic(), False
        reach_s = 2 * self._line.connect_timeout_s + SILENT_AFTER_S
        with self._changed:
            while not self._changed.wait_for(lambda: self._hello or self._lost, ALIVE_S):
                waited_s = time.monotonic() - began
                if waited_s > (START_S if self._has_answered else reach_s):
                    raise HostError(f"no answer within {waited_s:.0f} s")
                if waited_s > SILENT_AFTER_S and not told:
                    told = True
                    what = "its agent to start" if self._has_answered else "it to answer"
                    self._report_text(f"{self._described}: waiting for {what}")
                    self._line.wake(0)
            if not self._hello:
                raise HostError(self._lost)

    @property
    def lost(self) -> str:
        """Why it cannot be reached any more; "" while it can."""
        with self._lock:
            return self._lost

    @property
    def kept(self) -> Any:
        """The value that an earlier launcher had the agent ``keep``."""
        return self._hello.get("kept")

    def keep(self, value: Any) -> None:
        """Have the agent keep a JSON value for the launcher that comes next."""
        self._out().json({"keep": value})

    @property
    def torch_port(self) -> int:
        """A port there for a server that a rank may start; free, and kept so."""
        return int(self._hello["torch_port"])

    @property
    def addresses(self) -> tuple[str, str]:
        """Our address as that host sees it, and that host's own, by ssh's connection."""
        parts = str(self._hello.get("connection", "")).split()
        return (parts[0], parts[2]) if len(parts) == 4 else ("", "")

    def start(self, orders: Sequence[Order], payload: bytes | None = None) -> None:
        """Have them started; on a host that is lost they end at once, as lost ones."""
        with self._lock:
            self._exits.expect(order.rank for order in orders)
            if self._lost:
                self._end_others(None, "")
                return
            self._unproven.update((order.rank, 0) for order in orders)
        # What all have in common travels once.
        shared = dict(set.intersection(*(set(order.environment.items()) for order in orders)))
        listed = []
        for order in orders:
            own = {n: v for n, v in order.environment.items() if n not in shared}
            listed.append([order.rank, list(order.command), own, order.beside])
        writer = self._out()
        if payload is not None:
            writer.payload(payload)
        writer.json({"start": {"ranks": listed, "shared": shared, "payload": payload is not None}})

    # --- the same as HostRanks ---

    @property
    def running(self) -> frozenset[int]:
        """The ranks that were not seen to end."""
        return self._exits.running

    def pids(self) -> dict[int, int]:
        """Return the process id of each rank that was started, on its host."""
        return self._exits.pids()

    def fds(self) -> list[int]:
        """Return descriptors that are readable when ``collect`` has something to tell."""
        return [self._exits.fd]

    def stopped(self) -> set[int]:
        """Return the ranks that run, but whose process is stopped (SIGSTOP)."""
        with self._lock:
            return self._stopped & self._exits.running

    def needs_polling(self) -> bool:
        """Return whether ``collect`` must be called by and by."""
        return False

    def collect(self) -> list[Ended]:
        """Return the ends since the last call."""
        ended = self._exits.collect()
        noted, self._handed = self._handed, [end.rank for end in ended]
        if noted:
            self._out().json({"noted": noted})
        return ended

    def send(self, signum: int, ranks: Collection[int] | None = None) -> None:
        """Have a signal sent to every process of these ranks, or of ``ranks`` among them.

        All that a silent agent runs is killed without it.
        """
        order: dict[str, Any] = {"signal": signum}
        if ranks is not None:
            order["ranks"] = sorted(ranks)
        self._out().json(order)
        is_all = ranks is None or self.running <= set(ranks)
        if signum == signal.SIGKILL and is_all and self._silent_since:
            self._begin_end()

    def leave_alone(self) -> None:
        """Have nothing ended; the agent must be one that lasts."""
        with self._changed:
            self._finished = True
        if self._writer is not None:
            self._writer.close()
            self._writer.join(_LETS_GO_S)
        self._line.close(0.1)

    def begin_close(self) -> None:
        """Have whatever is left ended; ``close`` waits for it."""
        if self._writer is None or self._finished:
            return
        self._writer.json({"close": True})
        if self._lost and self._unproven:
            self._begin_end()

    def close(self) -> None:
        """End whatever is left, and release everything. Idempotent."""
        if self._exits.fd < 0:
            return
        if self._thread is not None:
            self.begin_close()
            with self._changed:
                limit_s = 2 * GRACE_S + SILENT_AFTER_S
                self._changed.wait_for(self._is_over, limit_s)
            if not self._finished and (self._unproven or not self._lost):
                self._begin_end()
            if self._ending is not None:
                self._ending.join()
            self._out().close()
            self._line.close(1.0 if self._finished else 0.1)
            self._thread.join(timeout=5)
            self._out().join()
            self._output.close()
            self._line.release()
        self._exits.close()

    def replaced(self) -> None:
        """Leave what the agent runs to another one, which stands for it from now on."""
        with self._lock:
            self._finished = True

    def _is_over(self) -> bool:
        return self._finished or bool(self._lost) or bool(self._silent_since)

    # --- without the agent ---

    def _begin_end(self) -> None:
        """Kill the agent and its ranks by another way than its own, on a thread."""
        with self._lock:
            if self._ending is not None or self._finished or not self._hello:
                return
            self._ending = threading.Thread(
                target=self._end_for_sure, name=f"kolovod end of {self.host}", daemon=True
            )
        self._ending.start()

    def _end_for_sure(self) -> None:
        left = sorted(pid for pid in self._unproven.values() if pid)
        why = self._line.end(int(self._hello["pid"]), left)
        if why:
            self._report_text(
                f"{self._described}: nobody knows whether {len(self._unproven)} processes of this "
                f"job have ended there, and they may run on ({why}); 'kill -9 "
                f"{' '.join(map(str, left))}' there ends them"
            )
        killed = None if why else reported(-signal.SIGKILL)
        self.may_run_on = bool(why)
        how = "its agent did not answer, and was killed with it"
        with self._changed:
            # Where the job goes on another agent is needed here, before anything is started.
            lost = f"says nothing: {why}" if why else "did not answer, and was killed"
            self._lost = self._lost or f"{self._described} {lost}"
            self._end_others(killed, how)
            self._finished = True
            self._changed.notify_all()

    def _end_others(self, death: Death | None, how: str) -> None:
        """Note that all have ended, by ``death``; None: they are lost. With the lock held."""

        def end(rank: int, pid: int) -> Ended:
            if death is None:
                return Ended(rank, pid, None, self.host, lost=self._lost, time=self._heard)
            self._prove(rank)
            now = time.monotonic()
            return Ended(rank, pid, death, self.host, seen=how, record=None, time=now)

        self._exits.add_others(end)

    def _prove(self, rank: int) -> None:
        """Note, with the lock held, that it has ended, whatever its agent says later."""
        self._proven.add(rank)
        self._unproven.pop(rank, None)

    def _look_here(self, how: str) -> None:
        """Take ends on this host that the agent does not report."""
        if self._rank_monitor is None:
            return
        pids = self._exits.pids()
        now = time.monotonic()
        for rank, death in self._rank_monitor.ended().items():
            with self._lock:
                if rank not in self._unproven:  # its agent has reported it
                    continue
                self._prove(rank)
            pid = pids.get(rank, 0)
            self._exits.add(Ended(rank, pid, death, self.host, seen=how, record=None, time=now))

    def _be_silent(self, now: float) -> None:
        if not self._silent_since:
            with self._changed:
                self._silent_since = now
                self._changed.notify_all()
            self._report_text(
                f"{self._described} says nothing for {SILENT_AFTER_S:g} s: its ranks are taken to "
                "go on, and it is waited for"
            )
        if now >= self._woken + SILENT_AFTER_S:
            self._woken = now
            self._line.wake(int(self._hello["pid"]))
        if now >= self._silent_since + SILENT_AFTER_S:  # the agent could tell more
            self._look_here("")

    def _be_heard(self, now: float) -> None:
        self._heard = now
        self._has_answered = True
        if self._silent_since:
            silent_s, self._silent_since = now - self._silent_since + SILENT_AFTER_S, 0.0
            self._report_text(f"{self._described} is heard again, after {silent_s:.0f} s")

    def _end_of_line(self) -> None:
        """The connection has ended. Here it can be told whether the agent has, and its ranks."""
        why = self._line.why_ended(self._errors)
        rank_monitor = self._rank_monitor
        if rank_monitor is None:
            self._lose(why)
            return
        deadline = time.monotonic() + _LETS_GO_S
        while not rank_monitor.has_agent_ended():
            if self._finished or time.monotonic() > deadline:
                self._lose(why)
                return
            time.sleep(_LOOK_S)
        with self._changed:
            if self._finished:
                return
            self._lost = "the process that runs the ranks of this host has ended"
            self._changed.notify_all()
        how = "with the process that runs the ranks of this host"
        while rank_monitor.watched and not self._finished:
            self._look_here(how)
            time.sleep(_LOOK_S)
        with self._lock:  # those that had not begun, and never will
            self._end_others(reported(-signal.SIGKILL), how)

    # --- what the agent says ---

    def _out(self) -> OrderWriter:
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
                        self._end_of_line()
                        return
                    self._be_heard(now)
                    for kind, body in reader.feed(data):
                        self._take(kind, body)
                elif self._hello and now - self._heard > SILENT_AFTER_S:
                    self._be_silent(now)
                if self._hello and now - self._said >= ALIVE_S / 2:
                    self._said = now
                    self._out().sign_of_life({"alive": True, "shown": self._output.shown()})
        except ConnectionError:
            self._end_of_line()
        except (OSError, ValueError, KeyError, BootstrapError) as error:
            self._lose(f"{type(error).__name__}: {error}")
        finally:
            if self._rank_monitor is not None:
                self._rank_monitor.close()

    def _lose(self, reason: str) -> None:
        """Give up the host: it is out of reach, and so are its ranks."""
        with self._changed:
            if self._finished:
                return
            self._lost = reason
            self._end_others(None, "")
            self._changed.notify_all()

    def _take(self, kind: bytes, body: bytes) -> None:
        if kind == b"O":
            self._output.put(split_output(body))
        elif kind == b"R":
            rank, data = split_result(body)
            self._results.setdefault(rank, bytearray()).extend(data)
        elif kind == b"J":
            self._report(json.loads(body))

    def _find(self, ranks: Mapping[int, int]) -> None:
        """Note ranks that run already, for an earlier launcher or since before it was lost."""
        self._exits.began(ranks)
        self._exits.expect(ranks)
        self._unproven.update(ranks)
        if self._line.is_here:
            with contextlib.suppress(OSError):  # it has ended, as its connection will
                self._rank_monitor = RankMonitor(int(self._hello["pid"]))
                self._rank_monitor.watch(ranks)

    def _report(self, report: dict[str, Any]) -> None:
        if "ended" in report:
            self._output.wait_for_last_words()
        with self._changed:
            if "hello" in report:
                self._hello = report["hello"]
                self._find({int(r): int(pid) for r, pid in self._hello["ranks"].items()})
            elif "started" in report:
                pids = {int(rank): int(pid) for rank, pid in report["started"].items()}
                self._exits.began(pids)
                self._unproven.update((n, pids[n]) for n in self._unproven.keys() & pids.keys())
                if self._rank_monitor is not None:
                    running = self._exits.running
                    self._rank_monitor.watch({rank: pids[rank] for rank in running & pids.keys()})
            elif "ended" in report:
                *numbers, blamed, record = report["ended"]
                rank, pid, code = (int(number) for number in numbers)
                if rank in self._proven:
                    self._out().json({"noted": [rank]})
                    return
                result = bytes(self._results.pop(rank, b""))
                blames = None if blamed is None else int(blamed)
                now = time.monotonic()
                end = Ended(
                    rank,
                    pid,
                    reported(code),
                    self.host,
                    result=result,
                    blames=blames,
                    record=str(record).encode(),
                    time=now,
                )
                self._unproven.pop(rank, None)
                self._exits.add(end)
            elif "stopped" in report:
                self._stopped = {int(rank) for rank in report["stopped"]}
            elif "bye" in report:
                self._finished = True
            self._changed.notify_all()
        self._exits.ring()
