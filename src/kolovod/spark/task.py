"""A Spark task as a place for a rank: it starts a process, and stays until the driver says so.

The rank is a process of its own, since Spark uses its Python workers again, and a rank that is
killed must not cost the task.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kolovod.elastic.local_peers import pid_space
from kolovod.launch.local import Ended, HostRanks, Order
from kolovod.net import messages
from kolovod.net.addresses import connect_any
from kolovod.net.channel import Channel
from kolovod.spark.messages import (
    ALIVE_S,
    LABEL,
    LOST_AFTER_S,
    SEND_S,
    packed,
    parts,
    row,
    unpacked,
)

__all__ = ["GPUS", "Invitation", "gpus_of_task"]

GPUS = "KOLOVOD_SPARK_GPUS"
"""Variable of a rank: the addresses of the GPUs that Spark has given its task."""
_CONNECT_S = 60.0
_OUTPUT_FRAMES = 64
_GONE_S = 5.0


def gpus_of_task() -> list[str]:
    """Return the addresses of the GPUs that Spark has given the task that calls this."""
    from pyspark import TaskContext

    context = TaskContext.get()
    resources = {} if context is None else context.resources()
    return list(resources["gpu"].addresses) if "gpu" in resources else []


@dataclass(frozen=True)
class Invitation:
    """The driver's addresses and the secret, which a task is sent within Spark's call."""

    addresses: str
    secret: str = field(repr=False)
    paths: tuple[str, ...] = ()
    """The driver's ``sys.path``."""

    def serve(self, partition: Iterable[Any]) -> Iterator[None]:
        """Be a place for ranks; for ``mapPartitions``. Raises OSError if the driver is gone."""
        deadline = time.monotonic() + _CONNECT_S
        channel = connect_any(self.addresses, self.secret, LABEL, deadline, encrypted=True)
        with contextlib.closing(channel):
            _Task(channel).serve()
        return iter(())


class _Task:
    """The task. All that uses the channel is on one thread."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._output: queue.Queue[tuple[int, str, bytes]] = queue.Queue(_OUTPUT_FRAMES)
        self._is_over = False
        self._ranks = HostRanks(self._write)
        self._payload = bytearray()
        self._heard_s = self._said_s = time.monotonic()
        self._watched: dict[int, tuple[int, float]] = {}  # by number: process id, and until when
        self._gpus = gpus_of_task()

    def serve(self) -> None:
        """Obey the driver until it wants no more. Raises OSError or EOFError if it is gone."""
        try:
            self._say({"hello": self._facts()})
            while not self._is_over:
                self._turn()
            self._end_ranks()
        finally:
            self._is_over = True
            self._ranks.close()
            os.close(self._bell)

    def _facts(self) -> dict[str, Any]:
        with socket.socket(fileno=os.dup(self._channel.fileno())) as own:
            address = own.getsockname()[0]
        return {
            "host": socket.gethostname(),
            "address": address,
            "torch_port": self._ranks.torch_port,
            "pids": pid_space(),
        }

    def _say(self, message: Any) -> None:
        self._channel.send(message, time.monotonic() + SEND_S)

    def _write(self, number: int, stream: str, data: bytes) -> None:
        """Hand output on, on the thread that reads the rank's pipes and waits for a slow driver."""
        while not self._is_over:
            with contextlib.suppress(queue.Full):
                self._output.put((number, stream, data), timeout=ALIVE_S)
                os.eventfd_write(self._bell, 1)
                return

    def _turn(self) -> None:
        poll = select.poll()
        for fd in (self._channel.fileno(), self._bell, *self._ranks.fds()):
            poll.register(fd, select.POLLIN)
        quick = self._watched or self._ranks.needs_polling()
        ready = [fd for fd, _ in poll.poll(50 if quick else ALIVE_S * 1000 / 2)]
        now = time.monotonic()
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        self._tell_output()
        for end in self._ranks.collect():
            self._tell(end)
        self._look_at_watched(now)
        if self._channel.fileno() in ready:
            self._obey(messages.mapping(self._channel.receive(now + SEND_S)))
            self._heard_s = now
        if now >= self._heard_s + LOST_AFTER_S:
            raise TimeoutError("the driver of this job in Spark has said nothing for too long")
        if now >= self._said_s + ALIVE_S:
            self._said_s = now
            self._say({"alive": True})

    def _tell_output(self) -> None:
        with contextlib.suppress(queue.Empty):
            for _ in range(_OUTPUT_FRAMES):  # then the driver is heard, too
                number, stream, data = self._output.get_nowait()
                self._say({"output": [number, stream, packed(data)]})

    def _tell(self, end: Ended) -> None:
        for part in parts(end.result):
            self._say({"result": part})
        record = (end.record or b"").decode()
        self._say({"ended": [end.rank, end.pid, end.code, end.blames, record]})

    def _end_ranks(self) -> None:
        """Kill the ranks, and pass on what they write until their end."""
        self._ranks.send(9)
        deadline = time.monotonic() + _GONE_S
        while self._ranks.running and time.monotonic() < deadline:
            self._ranks.collect()
            self._tell_output()
            time.sleep(0.01)

    def _obey(self, order: dict[str, Any]) -> None:
        if "payload" in order:
            self._payload += unpacked(order["payload"])
        elif "start" in order:
            number, command, environment = row(order, "start", 3)
            variables = {GPUS: ",".join(self._gpus), **environment}
            if self._gpus:
                variables.setdefault("CUDA_VISIBLE_DEVICES", ",".join(self._gpus))
            line = [command[0] or sys.executable, *command[1:]]
            self._ranks.start([Order(int(number), line, variables)], bytes(self._payload))
            self._payload.clear()
            self._say({"began": [number, self._ranks.pids()[int(number)]]})
        elif "signal" in order:
            self._ranks.send(int(order["signal"]))
        elif "watch" in order:
            number, pid = row(order, "watch", 2)
            self._watched[int(number)] = int(pid), time.monotonic() + _GONE_S
        elif "close" in order:
            self._is_over = True

    def _look_at_watched(self, now: float) -> None:
        """Tell which processes of an ended task are gone: they end with it (``orphan_reaper``)."""
        for number, (pid, until_s) in list(self._watched.items()):
            is_gone = not os.path.exists(f"/proc/{pid}")
            if is_gone or now >= until_s:
                del self._watched[number]
                self._say({"gone": [number, is_gone]})
