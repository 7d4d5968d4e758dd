"""The launcher's hand on a host: ``python -m kolovod.launch.agent``.

Takes orders and reports, in frames (``agent_messages``), by its standard input and output as ssh
passes them on::

    order    {"start": {"ranks": [[rank, command, environment, beside]], "shared": environment,
             "payload": bool}}   after the frames "P", if there is a payload
             {"signal": number, "ranks": [number]}   for every process of the ranks; of these only
             {"noted": [rank]}    these ends need not be told again
             {"keep": value}      for the launcher that comes next
             {"close": true}      end what is left, say "bye" and end
             {"alive": true, "shown": n}   so many frames "O" need not be told to another launcher
             {"took": bytes}      of all frames "O": there are never more than WINDOW_BYTES between
    report   {"hello": {"version", "python", "host", "cores", "torch_port", "connection", "pid",
             "ranks": {rank: pid}, "kept"}}   pid 0: it is being started
             {"started": {rank: pid}},
             {"ended": [rank, pid, code, whom it blames or null, its record as JSON or ""]},
             {"stopped": [rank]} when that has changed, {"alive": true}, {"bye": true}

When its standard input ends, or nothing is heard for half a minute, the launcher is gone: it ends
its ranks, and then itself. If it is killed, ``orphan_reaper`` does that. SIGTERM, as a host that
shuts down sends it, is passed on to its ranks; when they have ended, so does it.

``serve NAME`` is an agent that *lasts*, for an elastic job: launchers come to its socket
(``agent_line``), the latest counts. While there is none its ranks go on, and it keeps for the next
one what they write, as much as a ``Spool`` does, and how they end. One that was started on the
launcher's own host starts that again (``keep``: {"again": command line}). It ends when no rank runs
and nobody has come for a while. ``reach NAME`` starts it if it is not there, and passes on between
it and ssh. ``wake PID`` has an agent go on that a signal has stopped; ``end PID RANK_PID...`` kills
it, and succeeds when neither it nor anything of its ranks is left (``agent_end``).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from kolovod.errors import BootstrapError
from kolovod.launch import agent_end
from kolovod.launch.agent_folder import AgentFolder
from kolovod.launch.agent_line import open_socket
from kolovod.launch.agent_messages import MAGIC, FrameReader, FrameWriter
from kolovod.launch.background import popen_apart, start_in_background
from kolovod.launch.local import Ended, HostRanks, Order, Start
from kolovod.launch.outbox import Outbox
from kolovod.launch.remote import ALIVE_S
from kolovod.net.unix_sockets import accept_own
from kolovod.notices import report_to_stderr
from kolovod.rendezvous.rank_environment import usable_cores
from kolovod.version import __version__

__all__ = ["main"]

_LAUNCHER_LOST_AFTER_S = 30.0
_SILENT_S = 5.0
"""A launcher of an elastic job that has said nothing for so long holds up no rank that prints."""
_POLL_WITHOUT_PIDFD_MS = 50.0
_ORPHAN_S = 60.0
"""Without ranks and without a launcher."""
_AGAIN_S = (0.0, 1.0, 10.0)
"""Before each start of the launcher in a row that fails."""
_PROVEN_S = 10.0
"""A launcher that has stayed so long is no failed start; one that has come at all is but one."""
_READ_BYTES = 1 << 18
_PAUSE_S = 0.05
"""Before the next connection is accepted, where that has failed."""
_NO_SENSE = (
    BootstrapError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError,
)  # fmt: skip
"""What is raised by orders that are none."""


class _Launcher:
    """The launcher that gives orders now."""

    def __init__(self, source: int, sink: int, connection: socket.socket | None = None) -> None:
        self.source = source
        self.reader = FrameReader(prelude=False)
        self.writer = FrameWriter(sink)
        self.came_s = self.heard_s = time.monotonic()
        self._connection = connection

    def hang_up(self) -> None:
        """Hang up; a thread that reads or writes there is woken."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Release it."""
        self.writer.close()  # the descriptor may be another file's soon
        if self._connection is not None:
            self._connection.close()


class _Agent:
    """An agent. ``launcher``: that has started it; None: it lasts, and they come to ``folder``."""

    def __init__(self, launcher: _Launcher | None, folder: AgentFolder | None = None) -> None:
        self._launcher = launcher
        self._folder = folder
        self._lock = threading.Condition()  # of the launcher, and of what waits for one
        self._outbox = Outbox(keeps=folder is not None)
        self._ranks = HostRanks(self._output, popen_apart)
        self._begun: queue.SimpleQueue[Start] = queue.SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._payload = bytearray()
        self._said_s = 0.0
        self._stopped: set[int] = set()
        self._untold: dict[int, Ended] = {}  # which the launcher has not noted
        self._kept: dict[str, Any] | None = None
        self._alone_s = time.monotonic()
        self._starts: list[float] = []  # of launchers, in a row
        self._closing = False
        self._is_told_to_end = False
        self._is_sending = False

    def _hear_end(self, *_: object) -> None:
        """SIGTERM has come."""
        self._is_told_to_end = True
        os.eventfd_write(self._bell, 1)

    def run(self) -> int:
        """Run until the launcher wants no more, or is gone for good, or this process is to end."""
        signal.signal(signal.SIGTERM, self._hear_end)
        for target in (self._watch_launcher, self._send_output):
            threading.Thread(target=target, daemon=True).start()
        try:
            if self._launcher is not None:
                self._greet(self._launcher)
            is_told = False
            while not self._closing:
                self._turn()
                if self._is_told_to_end and not is_told:
                    is_told = True
                    self._ranks.send(signal.SIGTERM)
                if is_told and not (self._ranks.running or self._ranks.starting):
                    self._closing = True
            with self._lock:
                self._lock.notify_all()
            self._ranks.close()
            self._tell_ended()
            self._wait_for_output()
            self._say({"bye": True})
        except OSError:  # nobody listens any more
            return 1
        finally:
            self._ranks.close()
        return 0

    # --- who gives orders ---

    def _greet(self, launcher: _Launcher) -> None:
        """Say who is here, and what no launcher has heard yet."""
        launcher.writer.json({"hello": self._facts()})
        for end in self._untold.values():
            self._tell(launcher, end)
        with self._lock:
            self._outbox.begin()
            self._launcher = launcher
            self._lock.notify_all()
        self._stopped = set()

    def _facts(self) -> dict[str, Any]:
        to_tell = self._ranks.running | self._untold.keys()
        return {
            "version": __version__,
            "python": sys.executable,
            "host": socket.gethostname(),
            "cores": usable_cores(),
            "torch_port": self._ranks.torch_port,
            "connection": os.environ.get("SSH_CONNECTION", ""),
            "pid": os.getpid(),
            "ranks": {
                **{rank: pid for rank, pid in self._ranks.pids().items() if rank in to_tell},
                **dict.fromkeys(self._ranks.starting, 0),
            },
            "kept": self._kept,
        }

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection = accept_own(listener)
        except OSError:  # it has gone away, or there are no descriptors: the ranks go on
            time.sleep(_PAUSE_S)
            return
        if connection is None:
            return
        self._lose_launcher()
        launcher = _Launcher(connection.fileno(), connection.fileno(), connection)
        try:
            self._greet(launcher)
        except OSError:
            launcher.close()

    def _lose_launcher(self) -> None:
        """Drop the launcher: it is gone, or another one has come."""
        with self._lock:
            launcher, self._launcher = self._launcher, None
            self._lock.notify_all()
        if launcher is not None:
            launcher.hang_up()
            launcher.close()
            self._alone_s = time.monotonic()
            if self._alone_s > launcher.came_s + _PROVEN_S:
                self._starts.clear()
            del self._starts[:-1]  # it could start, so the next one may, too, but not at once

    def _say(self, value: Any) -> None:
        """Tell the launcher. Raises OSError only where it cannot be replaced."""
        launcher = self._launcher
        if launcher is None:
            return
        try:
            launcher.writer.json(value)
        except OSError:
            if self._folder is None:
                raise
            self._lose_launcher()

    def _output(self, rank: int, stream: str, data: bytes) -> None:
        """Take output, on the thread that reads the ranks' pipes and waits for a slow launcher."""
        with self._lock:
            while self._outbox.is_full() and not self._closing and self._takes_output():
                self._lock.wait(ALIVE_S)
            self._outbox.add((rank, stream, data))
            self._lock.notify_all()

    def _takes_output(self) -> bool:
        """Return whether to wait for the launcher to take output: not for one that is stopped.

        But the launcher that has started this agent is as a terminal, which its user may stop.
        """
        launcher = self._launcher
        if launcher is None or self._folder is None:
            return launcher is not None
        return time.monotonic() < launcher.heard_s + _SILENT_S

    def _send_output(self) -> None:
        """Send output, on a thread of its own: a launcher that takes none still gets reports."""
        while True:
            with self._lock:
                while (launcher := self._launcher) is None or (frame := self._next()) is None:
                    self._lock.wait()
                self._is_sending = True
            try:
                launcher.writer.output(*frame)
            except OSError:  # it is gone, which the other thread will read, or has
                launcher.hang_up()
            with self._lock:
                self._is_sending = False
                self._lock.notify_all()

    def _next(self) -> tuple[int, str, bytes] | None:
        # At the end nobody hears any more what the launcher has taken.
        return self._outbox.next(at_once=self._closing)

    def _wait_for_output(self) -> None:
        """Wait until the launcher has been sent all of it."""
        with self._lock:
            while self._launcher is not None and (self._is_sending or self._outbox.has_unsent()):
                self._lock.wait()

    # --- its turns ---

    def _turn(self) -> None:
        launcher, folder = self._launcher, self._folder
        listener = None if folder is None else folder.listener
        poll = select.poll()
        sources = [] if launcher is None else [launcher.source]
        if listener is not None:
            sources.append(listener.fileno())
        for fd in (*sources, self._bell, *self._ranks.fds()):
            poll.register(fd, select.POLLIN)
        wait_ms = _POLL_WITHOUT_PIDFD_MS if self._ranks.needs_polling() else ALIVE_S * 1000
        ready = [fd for fd, _ in poll.poll(wait_ms)]
        if self._bell in ready:
            self._note_begun()
        self._tell_ended()
        if launcher is not None and launcher.source in ready and launcher is self._launcher:
            self._hear(launcher)
        if listener is not None and listener.fileno() in ready:
            self._accept(listener)
        if time.monotonic() - self._said_s >= ALIVE_S / 2:
            self._said_s = time.monotonic()
            self._say({"alive": True})
            self._tell_stopped()
            if folder is not None:
                folder.stay_found()
        if folder is not None and self._launcher is None:
            self._be_alone(folder)

    def _hear(self, launcher: _Launcher) -> None:
        try:
            data = os.read(launcher.source, _READ_BYTES)
        except OSError:  # the connection is broken, or the terminal is gone
            data = b""
        if not data:
            self._let_go_of_launcher()
            return
        launcher.heard_s = time.monotonic()
        try:
            for kind, body in launcher.reader.feed(data):
                if kind == b"P":
                    self._payload += body
                elif kind == b"J":
                    self._obey(json.loads(body))
        except _NO_SENSE as error:  # it is another version, say, and would say it again
            report_to_stderr(
                f"the agent on host {socket.gethostname()} hangs up, since an order makes no "
                f"sense: {error!r}. Do both hosts have the same version of kolovod?"
            )
            self._let_go_of_launcher()

    def _let_go_of_launcher(self) -> None:
        """The launcher is gone: wait for the next one, or end where no other one comes."""
        if self._folder is None:
            self._closing = True
        else:
            self._lose_launcher()

    def _obey(self, order: dict[str, Any]) -> None:
        if "start" in order:
            start = order["start"]
            orders = [
                Order(int(rank), list(command), {**start["shared"], **environment}, int(beside))
                for rank, command, environment, beside in start["ranks"]
            ]
            payload = bytes(self._payload) if start["payload"] else None
            self._payload.clear()
            for one in self._ranks.prepare(orders, payload):
                threading.Thread(target=self._begin, args=(one,), daemon=True).start()
        elif "signal" in order:
            ranks = order.get("ranks")
            there = self._ranks.running | self._ranks.starting
            chosen = None if ranks is None else there.intersection(map(int, ranks))
            self._ranks.send(int(order["signal"]), chosen)
        elif "noted" in order:
            for rank in order["noted"]:
                self._untold.pop(int(rank), None)
        elif "keep" in order:
            self._kept = dict(order["keep"])
        elif "close" in order:
            self._closing = True
        elif "shown" in order:
            with self._lock:
                self._outbox.drop_shown(int(order["shown"]))
        elif "took" in order:
            with self._lock:
                self._outbox.took(int(order["took"]))
                self._lock.notify_all()

    def _begin(self, start: Start) -> None:
        """Start a rank, on a thread of its own: who executes a file may wait for a file server.

        It lasts as long as the process, which is killed with it.
        """
        start.run()
        self._begun.put(start)
        os.eventfd_write(self._bell, 1)
        if start.process is not None:
            with contextlib.suppress(ChildProcessError):  # it was reaped at the end
                os.waitid(os.P_PID, start.process.pid, os.WEXITED | os.WNOWAIT)

    def _note_begun(self) -> None:
        os.eventfd_read(self._bell)
        with contextlib.suppress(queue.Empty):
            while True:
                self._ranks.add(self._begun.get_nowait())
        self._say({"started": self._ranks.pids()})

    def _tell_ended(self) -> None:
        for end in self._ranks.collect():
            if self._folder is not None:
                self._untold[end.rank] = end
            launcher = self._launcher
            if launcher is None:
                continue
            try:
                self._tell(launcher, end)
            except OSError:
                if self._folder is None:
                    raise
                self._lose_launcher()

    def _tell(self, launcher: _Launcher, end: Ended) -> None:
        launcher.writer.result(end.rank, end.result)
        record = (end.record or b"").decode()
        launcher.writer.json({"ended": [end.rank, end.pid, end.code, end.blames, record]})

    def _tell_stopped(self) -> None:
        before, self._stopped = self._stopped, self._ranks.stopped()
        if self._stopped != before:
            self._say({"stopped": sorted(self._stopped)})

    def _be_alone(self, folder: AgentFolder) -> None:
        """Start the launcher again where that is due, or end: none is there."""
        now = time.monotonic()
        again = None if self._kept is None else self._kept.get("again")
        starts = self._starts
        if again and len(starts) < len(_AGAIN_S):
            if now >= max([self._alone_s, *starts]) + _AGAIN_S[len(starts)]:
                starts.append(now)
                folder.stay_found()
                with contextlib.suppress(OSError):  # then somebody may attach
                    start_in_background(again)
        elif not self._ranks.running and now > self._alone_s + _ORPHAN_S:
            self._closing = True

    def _watch_launcher(self) -> None:
        """Watch the launcher, also when a report that nobody takes blocks the other thread.

        It counts what it has slept, and asks no clock: who was stopped meanwhile has heard nothing,
        though much may have been said.
        """
        heard_s = slept_s = 0.0
        while True:
            time.sleep(ALIVE_S)
            launcher = self._launcher
            slept_s += ALIVE_S
            if launcher is None or launcher.heard_s != heard_s:
                heard_s, slept_s = 0.0 if launcher is None else launcher.heard_s, 0.0
            if slept_s < _LAUNCHER_LOST_AFTER_S or launcher is None:
                continue
            if self._folder is None:
                break
            launcher.hang_up()
        self._ranks.send(signal.SIGTERM)
        time.sleep(ALIVE_S)
        os._exit(1)  # the watcher beside it kills what is left


def _serve(name: str) -> int:
    with AgentFolder(name, forget_after_s=_ORPHAN_S) as folder:
        return _Agent(None, folder).run()


def _reach(name: str, sink: int) -> int:
    """Pass on between standard input, ``sink`` and the agent, until one of them ends."""
    connection = open_socket(name)
    os.write(sink, b"\n" + MAGIC)
    poll = select.poll()
    ways = {0: connection.fileno(), connection.fileno(): sink}
    for fd in ways:
        poll.register(fd, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            data = memoryview(os.read(fd, _READ_BYTES))
            if not data:
                return 0
            while data:
                data = data[os.write(ways[fd], data) :]


def main(arguments: Sequence[str]) -> int:
    """Do what ``arguments`` say (see the module); return the exit code."""
    sink = os.dup(1)
    os.dup2(2, 1)  # whatever prints here must not print among the frames
    os.environ.pop("OLDPWD", None)  # of the shell that came here, no business of the ranks
    # Who sends these to all processes of a job means its ranks.
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, lambda *_: None)  # not SIG_IGN, which the ranks would inherit
    if arguments[:1] == ["serve"]:
        return _serve(arguments[1])
    if arguments[:1] == ["wake"]:
        return 0 if agent_end.wake(int(arguments[1])) else 1
    if arguments[:1] == ["end"]:
        return 0 if agent_end.end(int(arguments[1]), list(map(int, arguments[2:]))) else 1
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        if arguments[:1] == ["reach"]:
            return _reach(arguments[1], sink)
        os.write(sink, b"\n" + MAGIC)
        return _Agent(_Launcher(0, sink)).run()
    return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
