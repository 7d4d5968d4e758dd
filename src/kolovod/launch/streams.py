"""Standard input, output and error of a command: every entry point of ours runs in ``as_command``.

Python notices too late that nobody takes what it has printed: it flushes when the interpreter
ends, and then says "Exception ignored" with exit code 120, or nothing. Here the descriptor itself
notes the first write that fails, and what follows is decided in one place: a command whose purpose
is what it prints ends; one that runs a job goes on for the ranks' sake.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import resource
import select
import signal
import sys
from collections.abc import Callable
from typing import TextIO

from kolovod import starting
from kolovod.notices import report_to_stderr

__all__ = ["as_command", "go_on_without_reader"]

_READER_GONE = 128 + signal.SIGPIPE
"""The exit code of a command that the system ends for want of a reader, as it ends ``cat``."""


def as_command(run: Callable[[], int]) -> int:
    """Call ``run()`` as a command of its own; return the exit code.

    ``run`` returns its code, or raises SystemExit as argparse does. The code is 141 (128 +
    SIGPIPE), in silence, if who reads standard output went away, and 1, with a line on standard
    error, if standard output could not be written for another reason, a full disk for example;
    another code of ``run`` but 0 has precedence. A command that has called
    ``go_on_without_reader`` keeps its code. A standard stream that was closed is the null device.
    """
    starting.end()
    _open_what_is_closed()
    output = _noting(sys.stdout, 1)
    errors = _noting(sys.stderr, 2)
    errors.goes_on = True  # there is nobody left to be told of it
    errors.is_said = True
    try:
        code = run()
    except SystemExit as ended:
        code = _code_of(ended)
    except KeyboardInterrupt:  # of what passes it on to nobody
        code = 128 + signal.SIGINT
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            report_to_stderr(_too_many_files(error))
            code = 1
        elif error is not output.failure:
            raise
        else:
            code = 0
    with contextlib.suppress(OSError):  # output has noted it
        sys.stdout.flush()
    sys.stderr.flush()
    if output.failure is None or output.goes_on:
        return code
    if output.failure.errno == errno.EPIPE:
        return code or _READER_GONE
    report_to_stderr(f"standard output is incomplete: {output.failure}")
    return code or 1


def go_on_without_reader() -> None:
    """Let this command go on if standard output cannot be written: ranks write through it.

    What cannot be passed on is lost. Unless the reader has gone away, standard error says so once.
    """
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(raw, _Descriptor):
        raw.goes_on = True


def _too_many_files(error: OSError) -> str:
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"{error.strerror}: this process may open {limit} files, and a launcher opens several for "
        f"each rank and host: raise that with 'ulimit -n' (here it can be {most})"
    )


class _Descriptor(io.FileIO):
    """A descriptor that notes the first failure to write. Later writes are dropped, or tried again.

    Dropped, so that what Python's buffers still hold is no second error when the interpreter ends.
    """

    def __init__(self, fd: int) -> None:
        super().__init__(fd, "wb", closefd=False)
        self.failure: OSError | None = None
        """The first one."""
        self.goes_on = False
        """Whether a failure is no error for who writes."""
        self.is_said = False

    def write(self, data: object) -> int:
        """Write all of ``data``, a buffer of bytes; return their number."""
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        if self.failure is not None and not self.goes_on:
            return len(view)
        try:
            self._write_all(view)
        except OSError as error:
            self._note(error)
        return len(view)

    def _write_all(self, view: memoryview) -> None:
        while view:
            written = super().write(view)
            if written is None:  # another process has made the descriptor non-blocking
                poll = select.poll()
                poll.register(self.fileno(), select.POLLOUT)
                poll.poll()
                continue
            view = view[written:]

    def _note(self, error: OSError) -> None:
        self.failure = self.failure or error
        if not self.goes_on:
            raise error
        if error.errno != errno.EPIPE and not self.is_said:
            self.is_said = True
            report_to_stderr(f"standard output is incomplete: {error}; the job goes on without it")


def _open_what_is_closed() -> None:
    """Open the null device in the place of closed streams, before a socket gets such a number."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
            os.set_inheritable(fd, True)  # rank 0 has the launcher's input
    if sys.stdin is None:
        sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, "rb", closefd=False)))


def _noting(stream: TextIO | None, fd: int) -> _Descriptor:
    """Put a stream like ``stream`` in its place, with a descriptor that notes failures."""
    descriptor = _Descriptor(fd)
    text = io.TextIOWrapper(
        io.BufferedWriter(descriptor),
        encoding=getattr(stream, "encoding", None),
        errors="backslashreplace" if fd == 2 else "replace",  # what a terminal's encoding lacks
        line_buffering=fd == 2 or descriptor.isatty() or getattr(stream, "write_through", False),
    )
    if fd == 1:
        sys.stdout = text
    else:
        sys.stderr = text
    return descriptor


def _code_of(ended: SystemExit) -> int:
    """Return the exit code that Python would end with; print the message that it would print."""
    if ended.code is None:
        return 0
    if isinstance(ended.code, int):
        return ended.code
    print(ended.code, file=sys.stderr)
    return 1
