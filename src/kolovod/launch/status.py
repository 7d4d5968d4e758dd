"""The display of how a job gets on: a line at the foot of a terminal, or one now and then.

The line is there while nothing is written: what is written erases it, and has it drawn again below.
Nothing of the terminal's state is changed, so nothing is to be put back, however this process ends.
"""

from __future__ import annotations

import abc
import contextlib
import io
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import TextIO, cast

from kolovod.errors import CommandArgumentError
from kolovod.notices import report_to

__all__ = ["Status", "status_of"]

_PERIOD_S = 0.25  # between two looks at the job
_PLAIN_S = 60.0
_SELDOM_S = 600.0  # where nobody has asked for it
_AHEAD_S = (
    10.0  # progress is asked for before it is shown: ranks are looked at only then (StepRateProbe)
)
_ERASE = "\r\x1b[K"
_UP = "\x1b[A"
_LOCK_S = 0.5


class Status:
    """A display that shows nothing.

    A context manager: after it, nothing is left of what its kinds show.
    """

    is_on = False
    """Whether it shows anything."""

    def __init__(self, stdout: TextIO | None, stderr: TextIO | None) -> None:
        self.stdout, self.stderr = stdout, stderr
        """Where everything else is to be written meanwhile."""

    def start(self, progress: Callable[[], object]) -> None:
        """From now on show how the job gets on, as the text of ``progress()``; "": not yet.

        It is called on another thread. A second call takes the place of the first.
        """

    def close(self) -> None:
        """Show nothing from now on. Idempotent."""

    def __enter__(self) -> Status:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Shown(Status, abc.ABC):
    """A display that shows it again each ``period_s``, for the first time after ``first_s``."""

    is_on = True

    def __init__(
        self, stdout: TextIO | None, stderr: TextIO | None, first_s: float, period_s: float
    ) -> None:
        super().__init__(stdout, stderr)
        self._first_s, self._period_s = first_s, period_s
        self._progress: Callable[[], object] = str
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kolovod status", daemon=True)

    def start(self, progress: Callable[[], object]) -> None:
        self._progress = progress
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join(10)  # it may be writing to a terminal that is held (Ctrl-S)

    def _run(self) -> None:
        due_s = time.monotonic() + self._first_s
        while not self._is_over.wait(_PERIOD_S):
            if time.monotonic() < due_s - _AHEAD_S:
                continue
            text = str(self._progress())
            if text and time.monotonic() >= due_s:
                due_s = time.monotonic() + self._period_s
                self._show(text)

    @abc.abstractmethod
    def _show(self, text: str) -> None: ...


class _Plain(_Shown):
    """A display in whole lines."""

    def _show(self, text: str) -> None:
        report_to(self.stderr, text)


class _Line(_Shown):
    """A display in the last line of a terminal."""

    def __init__(self, stdout: TextIO | None, stderr: TextIO) -> None:
        self._fd = stderr.fileno()
        self._lock = threading.Lock()
        self._text = ""
        self._is_drawn = False
        self._is_held = False  # nothing is to be drawn
        self._is_in_line = False  # what was written last is a line that the next one replaces
        self._is_asking = False  # and goes on: it is no whole line
        self._signal_before: object = None
        if stdout is not None and _is_same_terminal(stdout, stderr):
            stdout = cast("TextIO", _Console(self, stdout))
        super().__init__(stdout, cast("TextIO", _Console(self, stderr)), 0.0, 0.0)

    def start(self, progress: Callable[[], object]) -> None:
        super().start(progress)
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
            signal.signal(signal.SIGTSTP, self._stop)
            self._signal_before = signal.SIG_DFL

    def close(self) -> None:
        super().close()
        if self._signal_before is not None:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            self._signal_before = None
        self._hold()

    def write(self, stream: TextIO, text: str) -> None:
        """Write ``text`` to ``stream``, which is the terminal; the line is below it after that."""
        with self._lock:
            before = self._erasing()
            self._is_in_line = text.endswith("\r")
            self._is_asking = bool(text) and not text.endswith(("\n", "\r"))
            stream.write(before + text + self._drawing())
            stream.flush()

    def _show(self, text: str) -> None:
        line = f"kolovod: {text}"
        with self._lock:
            if self._text != line or not self._is_drawn:
                self._text = line
                self._write(self._erasing() + self._drawing())

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        """Ctrl-Z: be gone while this process is stopped."""
        self._hold()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._stop)
        self._is_held = False

    def _hold(self) -> None:
        """Erase the line. Not if it is being drawn by the thread that this signal has come to."""
        self._is_held = True
        with _held(self._lock, _LOCK_S) as is_ours:
            if is_ours:
                self._write(self._erasing())

    def _erasing(self) -> str:
        if not self._is_drawn:
            return ""
        self._is_drawn = False
        return _ERASE + (_UP if self._is_in_line else "")

    def _drawing(self) -> str:
        """The cursor stays at the line's beginning: what others write begins there, too."""
        if self._is_held or self._is_asking or not self._text or not self._is_in_foreground():
            return ""
        self._is_drawn = True
        columns = os.get_terminal_size(self._fd).columns
        return ("\n" if self._is_in_line else "") + self._text[: columns - 1] + "\r"

    def _is_in_foreground(self) -> bool:
        """Return whether this is the shell's job that has the terminal."""
        try:
            return os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:  # it is gone
            return False

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._fd, text.encode())


class _Console(io.TextIOBase):
    """The terminal, for all that is not the line."""

    def __init__(self, line: _Line, stream: TextIO) -> None:
        self._line, self._stream = line, stream

    def write(self, text: str) -> int:
        self._line.write(self._stream, text)
        return len(text)

    def isatty(self) -> bool:
        """Return True: that is why this class is here."""
        return True


@contextlib.contextmanager
def _held(lock: threading.Lock, timeout_s: float) -> Iterator[bool]:
    is_ours = lock.acquire(timeout=timeout_s)
    try:
        yield is_ours
    finally:
        if is_ours:
            lock.release()


def status_of(
    mode: str, stdout: TextIO | None, stderr: TextIO | None, environ: Mapping[str, str]
) -> Status:
    """Return a display of a job's progress. Raises InvalidArgumentError.

    ``mode``: "auto" for a line where ``stderr`` is a terminal that a person may watch, and
    elsewhere a line after a minute and each ten minutes from then on; "plain" for a line a minute,
    "plain=SECONDS" for another period; "off".
    """
    period_s = _plain_period_s(mode)
    if period_s is not None:
        return _Plain(stdout, stderr, period_s, period_s)
    if mode == "off" or stderr is None:
        return Status(stdout, stderr)
    if _can_be_drawn_on(stderr, environ):
        return _Line(stdout, stderr)
    return _Plain(stdout, stderr, _PLAIN_S, _SELDOM_S)


def _plain_period_s(mode: str) -> float | None:
    kind, equals, text = mode.partition("=")
    if mode in ("auto", "off"):
        return None
    try:
        period_s = float(text) if equals else _PLAIN_S
        if kind == "plain" and 0 < period_s < threading.TIMEOUT_MAX:
            return period_s
    except ValueError:
        pass
    raise CommandArgumentError(
        f"--progress {mode}: expected auto, plain, plain=SECONDS or off"
    ) from None


def _can_be_drawn_on(stderr: TextIO, environ: Mapping[str, str]) -> bool:
    if environ.get("TERM", "dumb") == "dumb" or environ.get("CI"):
        return False
    try:
        return stderr.isatty() and os.get_terminal_size(stderr.fileno()).columns > 1
    except (OSError, ValueError):
        return False


def _is_same_terminal(stdout: TextIO, stderr: TextIO) -> bool:
    try:
        return stdout.isatty() and os.ttyname(stdout.fileno()) == os.ttyname(stderr.fileno())
    except (OSError, ValueError):
        return False
