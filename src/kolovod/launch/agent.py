"""The launcher's hand on another host: ``python -m kolovod.launch.agent``, started by ssh.

Takes orders from standard input and reports on standard output, in frames (``frames``)::

    order    {"start": {"ranks": [[rank, command, environment, beside]], "shared": environment,
             "payload": bool}}   after the frames "P", if there is a payload
             {"signal": number, "ranks": [number]}   for every process of the ranks; of these only
             {"close": true}      end what is left, say "bye" and end
             {"alive": true}
    report   {"hello": {"version", "python", "host", "cores", "torch_port", "connection"}}
             {"started": {rank: pid}},
             {"ended": [rank, pid, code, whom it blames or null, its record as JSON or ""]},
             {"stopped": [rank]} when that has changed, {"alive": true}, {"bye": true}

When its standard input ends, or nothing is heard for half a minute, the launcher is gone: it ends
its ranks, and then itself. If it is killed, ``guard`` does that.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from typing import Any

from kolovod.launch.agent_messages import MAGIC, FrameReader, FrameWriter
from kolovod.launch.local import HostRanks, Order
from kolovod.launch.remote import ALIVE_S
from kolovod.rendezvous.rank_environment import usable_cores
from kolovod.version import __version__

__all__ = ["main"]

_LAUNCHER_LOST_AFTER_S = 30.0
_POLL_WITHOUT_PIDFD_MS = 50.0


class _Agent:
    def __init__(self, source: int, sink: int) -> None:
        self._source = source
        self._reader = FrameReader(prelude=False)
        self._writer = FrameWriter(sink)
        self._ranks = HostRanks(self._writer.output)
        self._payload = bytearray()
        self._heard = time.monotonic()
        self._said = 0.0
        self._stopped: set[int] = set()
        self._closing = False

    def run(self) -> int:
        """Until the launcher wants no more, or is gone."""
        threading.Thread(target=self._watch_launcher, daemon=True).start()
        try:
            self._writer.json({"hello": self._facts()})
            while not self._closing:
                self._turn()
            self._ranks.close()
            self._tell_ended()
            self._writer.json({"bye": True})
        except OSError:  # nobody listens any more
            return 1
        finally:
            self._ranks.close()
        return 0

    def _facts(self) -> dict[str, Any]:
        return {
            "version": __version__,
            "python": sys.executable,
            "host": socket.gethostname(),
            "cores": usable_cores(),
            "torch_port": self._ranks.torch_port,
            "connection": os.environ.get("SSH_CONNECTION", ""),
        }

    def _turn(self) -> None:
        poll = select.poll()
        for fd in (self._source, *self._ranks.fds()):
            poll.register(fd, select.POLLIN)
        wait_ms = _POLL_WITHOUT_PIDFD_MS if self._ranks.needs_polling() else ALIVE_S * 1000
        ready = [fd for fd, _ in poll.poll(wait_ms)]
        self._tell_ended()
        if self._source in ready:
            data = os.read(self._source, 1 << 18)
            if not data:
                self._closing = True
                return
            self._heard = time.monotonic()
            for kind, body in self._reader.feed(data):
                if kind == b"P":
                    self._payload += body
                elif kind == b"J":
                    self._obey(json.loads(body))
        if time.monotonic() - self._said >= ALIVE_S / 2:
            self._said = time.monotonic()
            self._writer.json({"alive": True})
            self._tell_stopped()

    def _obey(self, order: dict[str, Any]) -> None:
        if "start" in order:
            start = order["start"]
            orders = [
                Order(int(rank), list(command), {**start["shared"], **environment}, int(beside))
                for rank, command, environment, beside in start["ranks"]
            ]
            self._ranks.start(orders, bytes(self._payload) if start["payload"] else None)
            self._payload.clear()
            self._writer.json({"started": self._ranks.pids()})
        elif "signal" in order:
            ranks = order.get("ranks")
            chosen = None if ranks is None else self._ranks.running.intersection(map(int, ranks))
            self._ranks.send(int(order["signal"]), chosen)
        elif "close" in order:
            self._closing = True

    def _tell_ended(self) -> None:
        for end in self._ranks.collect():
            self._writer.result(end.rank, end.result)
            ended = [end.rank, end.pid, end.code, end.blames, end.record.decode()]
            self._writer.json({"ended": ended})

    def _tell_stopped(self) -> None:
        before, self._stopped = self._stopped, self._ranks.stopped()
        if self._stopped != before:
            self._writer.json({"stopped": sorted(self._stopped)})

    def _watch_launcher(self) -> None:
        """Also when a report that nobody takes blocks the other thread."""
        while time.monotonic() - self._heard < _LAUNCHER_LOST_AFTER_S:
            time.sleep(ALIVE_S)
        self._ranks.send(signal.SIGTERM)
        time.sleep(ALIVE_S)
        os._exit(1)  # the watcher beside it kills what is left


def main() -> int:
    """Run until the launcher is gone; 0 if it said goodbye."""
    sink = os.dup(1)
    os.dup2(2, 1)  # whatever prints here must not print among the frames
    os.environ.pop("OLDPWD", None)  # of the shell that came here, no business of the ranks
    for signum in (signal.SIGHUP, signal.SIGINT):
        signal.signal(signum, lambda *_: None)  # not SIG_IGN, which the ranks would inherit
    with contextlib.suppress(BrokenPipeError):
        os.write(sink, b"\n" + MAGIC)
        return _Agent(0, sink).run()
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
