"""Jobs that outlive their launcher: a process in the background keeps them, another one shows them.

``kolovod run --elastic`` forks the job daemon, which has agents start the ranks, is their
coordinator and takes what they write. What the user sees is a viewer: it shows that, and passes
signals on. If it ends, however that comes, the job goes on, and ``kolovod attach`` is another
viewer. They speak in frames (``agent_messages``) over a socket of this host::

    daemon -> viewer   {"folder": path} first;  "O", where the rank is 0;  {"exit": code}
                       {"progress": text}: the answer to the same
    viewer -> daemon   {"shown": frames so far}, {"told": true} of the exit code, {"signal": number}
                       {"progress": true}: how does the job get on?

The daemon hangs up where another viewer has come (``viewer``). If it ends the ranks go on, too: the
agent of this host starts another daemon, to which viewers come by themselves.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TextIO, cast

from kolovod.errors import BootstrapError, InvalidArgumentError, text_with_code
from kolovod.launch import job_folders
from kolovod.launch.agent_messages import FrameReader, FrameWriter
from kolovod.launch.elastic_job import ElasticJob
from kolovod.launch.elastic_options import ElasticOptions
from kolovod.launch.foreground import run_elastic_job
from kolovod.launch.job import JobOptions
from kolovod.launch.job_folders import JobFolder
from kolovod.launch.saved_state import Persistence
from kolovod.launch.spool import Frame, Spool
from kolovod.launch.status import Status
from kolovod.launch.viewer import PASSED_ON, READ_BYTES, show
from kolovod.net import messages
from kolovod.net.unix_sockets import accept_own
from kolovod.notices import report_to_stderr

__all__ = ["keep_again", "run_kept_job"]

_EXIT_WRONG_USE = 2
_SHOWN_S = 1.0
"""For viewers to show why a daemon ends, before the next one tries."""
_LOOK_S = 2.0
_PAUSE_S = 0.05
"""Before the next viewer is accepted, where that has failed."""


def run_kept_job(
    elastic: ElasticOptions,
    command: Sequence[str],
    options: JobOptions,
    again: Sequence[str],
    status: Status,
) -> int:
    """Run an elastic job that goes on if this process ends; return the exit code.

    ``again``: the command line that calls ``keep_again`` with the same, but for its last argument,
    which tells the job. ``status``: shows meanwhile how the job gets on.
    """
    here, there = socket.socketpair()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # it was closed when this process began
            stream.flush()
    with warnings.catch_warnings():  # of threads that NumPy's library has started, which is ready
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            here.close()
            code = _JobDaemon(there).run(elastic, command, options, again)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    there.close()
    with status:
        code = show(here, None, status, pid)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    return code


def keep_again(
    job: str,
    elastic: ElasticOptions,
    command: Sequence[str],
    options: JobOptions,
    again: Sequence[str],
) -> int:
    """Be the daemon of a job whose own has ended, until it has come to its end, too."""
    try:
        folder = job_folders.take_over(job, command, again)
        return _JobDaemon(None).go_on(folder, elastic, command, options)
    except BootstrapError as error:
        report_to_stderr(text_with_code(error))
        return 1


class _Console(io.TextIOBase):
    """A stream of the job's, as the launcher sees it."""

    def __init__(self, spool: Spool, stream: str, is_terminal: bool) -> None:
        self._spool, self._stream, self._is_terminal = spool, stream, is_terminal

    def write(self, text: str) -> int:
        self._spool.write(self._stream, text)
        return len(text)

    def isatty(self) -> bool:
        """Return whether the stream of the first viewer is a terminal."""
        return self._is_terminal


class _JobDaemon:
    """The process in the background."""

    def __init__(self, first_viewer: socket.socket | None) -> None:
        with contextlib.suppress(PermissionError):  # it has one already
            os.setsid()
        self._spool = Spool()
        self._lock = threading.Lock()
        self._viewer: socket.socket | None = None
        self._folder: JobFolder | None = None
        self._is_told = False
        self._is_over = threading.Event()
        self._placing = threading.Lock()  # while the folder is made anew
        self._job: ElasticJob | None = None
        names = ("stdout", "stderr")
        self._consoles = {
            name: _Console(self._spool, name, _is_terminal(getattr(sys, name))) for name in names
        }
        sys.stdout, sys.stderr = (cast("TextIO", self._consoles[name]) for name in names)
        self._take_over_descriptors()
        self._first_viewer = first_viewer

    def _take_over_descriptors(self) -> None:
        """Nobody shall wait for the end of the viewer's output because this process has it open."""
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        source, sink = os.pipe()
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        os.close(sink)

        def take() -> None:  # what libraries print
            for text in texts_from(source):
                self._spool.write("stderr", text)

        threading.Thread(target=take, name="kolovod stderr", daemon=True).start()

    def run(
        self,
        elastic: ElasticOptions,
        command: Sequence[str],
        options: JobOptions,
        again: Sequence[str],
    ) -> int:
        """Run the job to its end, and until that was told."""
        persistence: Persistence | None = None
        try:
            folder = self._folder = job_folders.make(command, again)
            persistence = self._persistence(folder)
            self._listen(folder)
        except (BootstrapError, OSError) as error:
            report_to_stderr(f"the job ends with this launcher, nobody could attach: {error}")
        assert self._first_viewer is not None
        self._begin_view(self._first_viewer)
        return self._end(self._run(elastic, command, options, persistence))

    def go_on(
        self,
        folder: JobFolder,
        elastic: ElasticOptions,
        command: Sequence[str],
        options: JobOptions,
    ) -> int:
        """Run a job that an earlier daemon has begun, as ``run`` does.

        Where it cannot, it says why, and returns 1: the job goes on, and others try. Raises
        BootstrapError if nobody can connect to it.
        """
        self._folder = folder
        self._listen(folder)
        persistence = self._persistence(folder, goes_on=True)
        try:
            code = self._run(elastic, command, options, persistence)
        except BootstrapError as error:
            report_to_stderr(f"this launcher cannot go on with the job: {text_with_code(error)}")
            time.sleep(_SHOWN_S)
            return 1
        return self._end(code)

    def _persistence(self, folder: JobFolder, *, goes_on: bool = False) -> Persistence:
        return Persistence(
            folder.agent, folder.again, self._spool, folder.note_hosts, folder.hosts, goes_on
        )

    def _listen(self, folder: JobFolder) -> None:
        threading.Thread(target=self._accept, args=(folder.listen(),), daemon=True).start()
        threading.Thread(target=self._stay_found, args=(folder,), daemon=True).start()

    def _stay_found(self, folder: JobFolder) -> None:
        """Make the folder anew where somebody has removed it.

        A viewer that has come by it meanwhile is connected.
        """
        while not self._is_over.wait(_LOOK_S):
            # There may be no room for it.
            with self._placing, contextlib.suppress(OSError, BootstrapError):
                if not self._is_over.is_set() and not folder.is_found():
                    listener = folder.make_anew()
                    threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _run(
        self,
        elastic: ElasticOptions,
        command: Sequence[str],
        options: JobOptions,
        persistence: Persistence | None,
    ) -> int:
        shown = replace(
            options,
            stdout=cast("TextIO", self._consoles["stdout"]),
            stderr=cast("TextIO", self._consoles["stderr"]),
            report=report_to_stderr,  # which is that console here
        )
        try:
            return run_elastic_job(
                elastic, command, shown, persistence=persistence, watched=self._watch
            )
        except InvalidArgumentError as error:
            report_to_stderr(str(error))
            return _EXIT_WRONG_USE
        except KeyboardInterrupt:  # before there was a job to pass it on to
            return 128 + signal.SIGINT
        except BootstrapError:
            raise
        except BaseException:
            traceback.print_exc()
            return 1

    def _watch(self, job: ElasticJob) -> None:
        self._job = job

    def _end(self, code: int) -> int:
        for signum in PASSED_ON:  # nothing is left to be ended
            signal.signal(signum, lambda *_: None)
        self._spool.end(code)
        self._spool.wait_for_view()
        if self._folder is not None:
            self._leave(self._folder, code)
        return code

    def _leave(self, folder: JobFolder, code: int) -> None:
        """Leave the job's end for who attaches later, unless all was shown."""
        with self._placing:
            self._is_over.set()
        folder.close_socket()
        self._spool.wait_for_view()  # of somebody who came last
        if self._is_told:
            folder.remove()
        else:
            folder.leave(self._spool.rest(), code)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection = accept_own(listener)
                if connection is not None:
                    self._begin_view(connection)
            except (OSError, RuntimeError):  # it has gone away, or there are no descriptors, no
                time.sleep(_PAUSE_S)  # threads: who comes later can still attach

    def _begin_view(self, connection: socket.socket) -> None:
        with self._lock:
            before, self._viewer = self._viewer, connection
            view, first = self._spool.begin_view()
        if before is not None:
            _hang_up(before)
        try:
            threading.Thread(
                target=self._serve, args=(connection, view, first), daemon=True
            ).start()
        except RuntimeError:  # the system gives no more threads
            self._spool.end_view(view)
            connection.close()
            raise

    def _serve(self, connection: socket.socket, view: int, first: int) -> None:
        """Serve one viewer, until it is gone."""
        writer = FrameWriter(connection.fileno())
        sender = threading.Thread(target=self._send, args=(writer, view, first), daemon=True)
        failure: Exception | None = None
        try:
            sender.start()
            reader = FrameReader(prelude=False)
            while data := connection.recv(READ_BYTES):
                for _, body in reader.feed(data):
                    said = messages.mapping(json.loads(body))
                    if "progress" in said:
                        writer.json({"progress": self._progress_text()})
                    else:
                        self._obey(said, view, first)
        except OSError:  # it is gone
            pass
        except Exception as error:  # it says what makes no sense, or there are no more threads
            failure = error
        _hang_up(connection)
        self._spool.end_view(view)
        if sender.ident is not None:
            sender.join()
        connection.close()
        if failure is not None:
            report_to_stderr(f"a viewer of this job cannot be served any more: {failure!r}")
        with self._lock:
            is_last = self._viewer is connection
        if is_last and self._folder is None:
            os.kill(os.getpid(), signal.SIGTERM)

    def _obey(self, said: dict[str, Any], view: int, first: int) -> None:
        if "shown" in said:
            self._spool.shown(view, first + int(said["shown"]))
        elif "told" in said:
            self._is_told = True
        elif (signum := int(said.get("signal", 0))) in PASSED_ON:
            if self._job is None:
                os.kill(os.getpid(), signum)
            else:
                self._job.supervisor.signal(signum, "viewer")

    def _progress_text(self) -> str:
        with self._lock:
            job = self._job
        return "" if job is None else str(job.supervisor.status())

    def _send(self, writer: FrameWriter, view: int, number: int) -> None:
        with contextlib.suppress(OSError):  # it is gone, which is read
            if self._folder is not None:
                writer.json({"folder": str(self._folder.path)})
            while (what := self._spool.next(view, number)) is not None:
                if not isinstance(what, Frame):
                    writer.json({"exit": what})
                    return
                writer.output(0, what.stream, what.text.encode(errors="replace"))
                number += 1


def texts_from(source: int) -> Iterator[str]:
    """Yield what is written into the pipe ``source``, as text, as it comes; to its end.

    A character that comes in two parts is one all the same.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while data := os.read(source, READ_BYTES):
        if text := decoder.decode(data):
            yield text
    if text := decoder.decode(b"", final=True):
        yield text


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed
        connection.shutdown(socket.SHUT_RDWR)
