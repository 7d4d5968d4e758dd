"""Spark as what hands out processes (``clusters.fleet.Cluster``): each task is a place for one."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import select
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyspark
from pyspark import InheritableThread, SparkContext

from kolovod.clusters.fleet import Reached, Told
from kolovod.errors import AuthenticationError, BootstrapError, ClusterError, StartTimeoutError
from kolovod.launch.death import reported
from kolovod.launch.fleet import Sink
from kolovod.launch.local import Ended, Order
from kolovod.net import messages
from kolovod.net.addresses import address_of, listen, own_addresses
from kolovod.net.channel import Channel, new_secret
from kolovod.net.server import Server
from kolovod.spark.messages import ALIVE_S, LABEL, LOST_AFTER_S, SEND_S, parts, row, unpacked, whole
from kolovod.spark.task import Invitation

__all__ = ["SparkCluster"]

_MOST_TASKS = 1 << 16
_MAX_RESULT_BYTES = 1 << 34
_PORTS = 1 << 16
_CLOSE_S = 10.0
_LOOK_S = 0.1
_NO_PLACE_S = 1.5
_JOBS = itertools.count()


@dataclass
class _Task:
    """A task that is connected."""

    host: str
    pids: str
    """The space of processes that its numbers are of (``local_peers.pid_space``)."""
    reached: Reached
    orders: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    bell: int = -1
    """Rung when there are orders, while it is connected."""
    number: int | None = None
    """The number of the process that runs there."""
    pid: int = 0
    told: Told | None = None
    sink: Sink | None = None
    result: bytearray = field(default_factory=bytearray)
    is_over: bool = False

    def order(self, *orders: Any) -> None:
        """Hand orders to the thread that has the connection."""
        for order in orders:
            self.orders.put(order)
        with contextlib.suppress(OSError):
            os.eventfd_write(self.bell, 1)


@dataclass(frozen=True)
class _Doubt:
    """A question that is open: whether a process has ended with its task."""

    host: str
    watcher: _Task
    """The task that looks."""
    answer: Callable[[bool], None]


class SparkCluster:
    """A Spark job whose tasks connect here; see Cluster. ``close`` ends it."""

    def __init__(
        self, context: SparkContext, tasks: int, *, barrier: bool, executable: str = ""
    ) -> None:
        """``barrier``: Spark starts all tasks or none. ``executable``: the Python of the ranks."""
        self._context = context
        self._count = tasks
        self._barrier = barrier
        self._executable = executable
        self._lock = threading.Lock()
        self._tasks: list[_Task] = []
        # By number of a process whose task is gone.
        self._waiting: dict[int, _Doubt] = {}
        self._failure = ""
        self._is_closed = False
        secret = new_secret()
        listeners = listen(own_addresses() or ["127.0.0.1"], backlog=128)
        addresses = ",".join(map(address_of, listeners))
        self._servers = [Server(one, secret, LABEL, self._greet) for one in listeners]
        self._invitation = Invitation(addresses, secret, tuple(sys.path))
        self._group = f"kolovod-{os.getpid()}-{next(_JOBS)}"
        self._thread = InheritableThread(target=self._run_tasks, daemon=True)

    def start_tasks(self) -> None:
        """Have Spark start them."""
        for server in self._servers:
            server.start()
        self._thread.start()

    def _run_tasks(self) -> None:
        """Run the job in Spark, on a thread of its own."""
        try:
            self._context.setJobGroup(self._group, "ranks of Kolovod", interruptOnCancel=True)
            rdd = self._context.parallelize(range(self._count), self._count)
            serve = self._invitation.serve
            (rdd.barrier() if self._barrier else rdd).mapPartitions(serve).collect()
            failure = "its tasks have ended"
        except Exception as error:  # of Spark's, or of the connection to it
            failure = _said(error)
        with self._lock:
            self._failure = failure

    def wait_for(self, least: int, most: int, timeout_s: float, settle_s: float) -> None:
        """Wait until ``least`` tasks are there, and no more come for a while, or ``most`` are.

        Raises StartTimeoutError, and BootstrapError where the tasks have ended.
        """
        deadline = time.monotonic() + timeout_s
        before, changed_s = -1, time.monotonic()
        while True:
            count = sum(self.places().values())
            now = time.monotonic()
            if count != before:
                before, changed_s = count, now
            if count >= most or (count >= least and now >= changed_s + settle_s):
                return
            with self._lock:
                failure = self._failure
            if failure:
                raise ClusterError(f"the job in Spark has ended before its ranks: {failure}")
            if now >= deadline:
                raise StartTimeoutError(
                    f"Spark has started {count} of {least} tasks in {timeout_s:g} s: it has too "
                    "few cores (spark.cores.max, executors), or others have them"
                )
            time.sleep(_LOOK_S)

    # --- what a task says, on its connection's own thread ---

    def _greet(self, channel: Channel) -> None:
        if not channel.is_sealed:
            return
        hello = messages.mapping(
            messages.mapping(channel.receive(time.monotonic() + SEND_S)).get("hello")
        )
        port = messages.whole(hello, "torch_port", 1, _PORTS)
        task = _Task(
            messages.text(hello, "host", 1 << 10),
            messages.text(hello, "pids", 1 << 10),
            Reached(messages.text(hello, "address", 1 << 10), port),
        )
        with self._lock:
            if self._is_closed or len(self._tasks) >= _MOST_TASKS:
                return
            task.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._tasks.append(task)
        reason = "it has ended"
        try:
            self._converse(task, channel)
        except (EOFError, OSError, BootstrapError, AuthenticationError) as error:
            reason = str(error)
        finally:
            self._forget(task, reason)

    def _converse(self, task: _Task, channel: Channel) -> None:
        heard_s = said_s = time.monotonic()
        while True:
            poll = select.poll()
            for fd in (channel.fileno(), task.bell):
                poll.register(fd, select.POLLIN)
            ready = [fd for fd, _ in poll.poll(ALIVE_S * 1000)]
            now = time.monotonic()
            if channel.fileno() in ready:
                heard_s = now
                self._hear(task, messages.mapping(channel.receive(now + SEND_S)))
            if task.bell in ready:
                os.eventfd_read(task.bell)
            with contextlib.suppress(queue.Empty):
                while True:
                    channel.send(task.orders.get_nowait(), time.monotonic() + SEND_S)
            if now >= heard_s + LOST_AFTER_S:
                raise TimeoutError(f"nothing was heard of it for {LOST_AFTER_S:g} s")
            if now >= said_s + ALIVE_S:
                said_s = now
                channel.send({"alive": True}, now + SEND_S)

    def _hear(self, task: _Task, message: dict[str, Any]) -> None:
        told, sink = task.told, task.sink
        if "output" in message and sink is not None:
            number, stream, data = row(message, "output", 3)
            if number == task.number and stream in ("stdout", "stderr"):
                sink(number, stream, unpacked(data))
        elif "result" in message:
            task.result += unpacked(message["result"])
            if len(task.result) > _MAX_RESULT_BYTES:
                raise ClusterError(f"a result has more than {_MAX_RESULT_BYTES} bytes")
        elif "began" in message and told is not None:
            number, pid = row(message, "began", 2)
            task.pid = whole(pid, "began")
            told.began(whole(number, "began"), task.pid)
        elif "ended" in message and told is not None:
            number, pid, code, blames, record = row(message, "ended", 5)
            if number != task.number:
                return
            blames = None if blames is None else whole(blames, "ended")
            number, pid, code = (whole(value, "ended") for value in (number, pid, code))
            result, task.result = bytes(task.result), bytearray()
            with self._lock:
                task.number = task.told = None
            told.ended(
                Ended(
                    number,
                    pid,
                    reported(code),
                    result=result,
                    blames=blames,
                    record=str(record).encode(),
                    time=time.monotonic(),
                )
            )
        elif "gone" in message:
            number, is_gone = row(message, "gone", 2)
            with self._lock:
                if (doubt := self._waiting.pop(whole(number, "gone"), None)) is not None:
                    doubt.answer(bool(is_gone))

    def _forget(self, task: _Task, reason: str) -> None:
        """Forget a task that is not connected any more; what ran there ends with it."""
        with self._lock:
            self._tasks.remove(task)
            unanswered = [n for n, doubt in self._waiting.items() if doubt.watcher is task]
            for doubt in [self._waiting.pop(n) for n in unanswered]:
                doubt.answer(False)
            number, told, pid = task.number, task.told, task.pid
            bell, task.bell = task.bell, -1
            os.close(bell)
            others = [one for one in self._tasks if (one.host, one.pids) == (task.host, task.pids)]
            if number is None or told is None:
                return
            lost = Ended(number, pid, None, lost=f"its Spark task is gone: {reason}", record=None)
            if not (others and pid) or self._is_closed:
                told.ended(lost)
                return
            dead = Ended(
                number,
                pid,
                reported(-signal.SIGKILL),
                seen=f"with its Spark task: {reason}",
                record=None,
            )
            # Another task of that host can tell whether it has ended, which is a proof.
            answer = lambda is_gone: told.ended(dead if is_gone else lost)  # noqa: E731
            self._waiting[number] = _Doubt(task.host, others[0], answer)
        others[0].order({"watch": [number, pid]})

    # --- see Cluster ---

    def places(self) -> Mapping[str, int]:
        """Implement ``Cluster.places``."""
        with self._lock:
            hosts = [task.host for task in self._tasks]
            # Where there is a place less, it must be known who has ended, or another one leaves.
            hosts += [doubt.host for doubt in self._waiting.values()]
            return dict(Counter(hosts))

    def reach(self, host: str) -> Reached:
        """Implement ``Cluster.reach``."""
        for task in self._on(host):
            return task.reached
        raise ClusterError(f"no task of Spark's is on {host}")

    def _on(self, host: str) -> Iterator[_Task]:
        with self._lock:
            return iter([task for task in self._tasks if task.host == host])

    def start(self, host: str, order: Order, payload: bytes, sink: Sink, told: Told) -> None:
        """Implement ``Cluster.start``."""
        with self._lock:
            free = [one for one in self._tasks if one.host == host and one.number is None]
            if free:
                task = free[0]
                task.number, task.told, task.sink, task.pid = order.rank, told, sink, 0
                task.result.clear()
        if not free:
            lost = "no task of Spark's is free there any more"
            end = Ended(order.rank, 0, None, lost=lost, record=None)
            # Later, when the job has asked for the places that there are: it would try at once.
            timer = threading.Timer(_NO_PLACE_S, told.ended, [end])
            timer.daemon = True
            timer.start()
            return
        command = [self._executable, *order.command[1:]]
        start = {"start": [order.rank, command, dict(order.environment)]}
        task.order(*({"payload": part} for part in parts(payload)), start)

    def send(self, host: str, signum: int, numbers: Collection[int]) -> None:
        """Implement ``Cluster.send``."""
        for task in self._on(host):
            if task.number in numbers:
                task.order({"signal": signum})

    def stopped(self, host: str, numbers: Collection[int]) -> set[int]:
        """Return none: tasks do not tell."""
        return set()

    def close(self) -> None:
        """Implement ``Cluster.close``."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            tasks = list(self._tasks)
        for task in tasks:
            task.order({"close": True})
        deadline = time.monotonic() + _CLOSE_S
        while self.places() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        with contextlib.suppress(Exception):  # Spark is gone
            self._context.cancelJobGroup(self._group)
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_S)
        for server in self._servers:
            server.close()


def _said(error: Exception) -> str:
    """Return the first lines of what Spark says, which has long stack traces."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:500] or type(error).__name__


def active_context() -> SparkContext:
    """Return that of this process. Raises BootstrapError if there is none."""
    context = pyspark.SparkContext._active_spark_context
    if context is None:
        raise ClusterError(
            "there is no SparkContext: make a SparkSession first (Spark Connect has none)"
        )
    return context
