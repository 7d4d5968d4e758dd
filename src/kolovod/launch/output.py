"""The ranks' output: taken from their pipes, marked, and passed on in whole lines."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TextIO, cast

from kolovod.launch.line_merger import LineMerger, MergedLine, rank_ranges

__all__ = ["LineSplitter", "Output", "OutputPump"]

_READ_BYTES = 1 << 16
_MAX_LINE_CHARS = 1 << 16
_TAIL_LINES = 40
_QUESTION_S = 0.2  # after so long what is no whole line is shown
_COLORS = (36, 33, 32, 35, 34, 31)  # SGR: cyan, yellow, green, magenta, blue, red
_LINE_END = re.compile(r"\r\n|\r|\n")
_LINE_GOES_ON = ""  # in the place of a line: the second half of the line end before it


class LineSplitter:
    r"""Cuts a stream of bytes into lines that end with ``\n``, ``\r\n`` or ``\r``.

    A lone ``\r`` ends a line as well, since progress bars redraw themselves by it. UTF-8 is decoded
    across reads; bytes that are not UTF-8 become U+FFFD. A line longer than 65,536 characters is
    passed on in pieces.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        self._after_return = False  # the last line given out ended with "\r"
        self._is_within = False  # the beginning of a line was given out
        self._redraws = False  # the last line ended with "\r": a progress bar's
        self.continues = False
        """Whether the first line that ``feed`` just returned is the end of the one before it: the
        second half of a line end that the reads cut in two, or what follows ``begun``."""

    def feed(self, data: bytes, final: bool = False) -> list[str]:
        """Return the lines that ``data`` completes, with their ends; the rest too if ``final``."""
        text = self._rest + self._decoder.decode(data, final)
        lines = []
        self.continues = self._after_return and text[:1] == "\n"
        if self.continues:
            lines.append("\n")
            text = text[1:]
        if self._after_return and not (text or lines):
            return lines
        position = 0
        for match in _LINE_END.finditer(text):
            lines.append(text[position : match.end()])
            position = match.end()
        self._after_return = position == len(text) and bool(lines) and lines[-1].endswith("\r")
        self._rest = text[position:]
        if self._rest and (final or len(self._rest) > _MAX_LINE_CHARS):
            lines.append(self._rest + "\n")
            self._rest = ""
        if final and self._is_within and not lines:
            lines.append("\n")
        if lines:
            self._redraws = lines[-1].endswith("\r")
        if lines and self._is_within:
            self.continues, self._is_within = True, False
        return lines

    def begun(self) -> tuple[str, bool]:
        """Return what there is of a line that has not ended, and whether some was asked for before.

        ``feed`` does not return it any more. It is nothing of a progress bar, which is drawn again
        soon.
        """
        if self._redraws:
            return "", self._is_within
        text, self._rest = self._rest, ""
        was_within, self._is_within = self._is_within, self._is_within or bool(text)
        return text, was_within

    def broken_off(self) -> None:
        """Note that somebody else has written since ``begun``: a line of its own follows."""
        self._is_within = False


@dataclass
class _Stream:
    prefix: str
    console: TextIO | None
    file: IO[bytes] | None
    splitter: LineSplitter = field(default_factory=LineSplitter)
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))
    last_s: float = 0.0
    """The time when something was written, of a stream whose questions are shown."""


class Output:
    """The output of ranks, marked to the console, as it is to files. For several threads.

    ``size``: ranks that the job begins with; ``most``: there may be so many later, if that is more.
    ``consoles``: of "stdout" and "stderr", None for nowhere; ``now`` makes the time before each
    line, None for none; ``folder``: each rank's bytes go to rank.N/stdout and stderr below it, too.
    A file that cannot be written is given up, and ``report`` is told of it. ``merges``: lines that
    several ranks write within a moment go to the console once (``line_merger``). ``asks``: a rank
    that may ask the user something, and wait for the answer at the end of a line: a debugger. What
    it has written of a line is shown when nothing follows; not where lines are merged.
    """

    def __init__(
        self,
        size: int,
        consoles: Mapping[str, TextIO | None],
        now: Callable[[], str] | None = None,
        folder: Path | None = None,
        report: Callable[[str], None] = lambda text: None,
        most: int = 0,
        *,
        merges: bool = False,
        asks: int | None = None,
    ) -> None:
        self._now = now
        self._report = report
        self._consoles, self._folder = consoles, folder
        self._width = len(str(max(size, most) - 1))
        self._lock = threading.Lock()
        self._streams: dict[tuple[int, str], _Stream] = {}
        self._mergers = {name: LineMerger() for name in consoles if merges}
        self._waiting = threading.Condition(self._lock)  # of lines that the mergers have
        self._asks = None if merges else asks
        self._question: _Stream | None = (
            None  # whose line, without an end, is the last on the console
        )
        self._is_closed = False
        self._later: threading.Thread | None = None
        if merges or self._asks is not None:
            self._later = threading.Thread(
                target=self._show_later, name="kolovod later output", daemon=True
            )
            self._later.start()
        for rank in range(size):
            for name in consoles:
                self._streams[rank, name] = self._stream(rank, name, self._file(rank, name))

    def add(self, rank: int) -> None:
        """Add a rank to those of the beginning. Does nothing if it was there before."""
        for name in self._consoles:
            if (rank, name) in self._streams:
                continue
            file: IO[bytes] | None = None
            try:
                file = self._file(rank, name)
            except OSError as error:  # as later, when a file cannot be written
                self._report(f"{error.filename} is missing: {error}; the job goes on without it")
            self._streams[rank, name] = self._stream(rank, name, file)

    def _file(self, rank: int, name: str) -> IO[bytes] | None:
        if self._folder is None:
            return None
        place = self._folder / f"rank.{rank:0{self._width}d}"
        place.mkdir(parents=True, exist_ok=True)
        return open(place / name, "wb")

    def _stream(self, rank: int, name: str, file: IO[bytes] | None) -> _Stream:
        console = self._consoles[name]
        if name in self._mergers:
            with self._lock:
                self._mergers[name].open(rank)
        return _Stream(_colored(f"[{rank}]<{name}>:", rank, console), console, file)

    def write(self, rank: int, stream_name: str, data: bytes) -> None:
        """Show what a rank has written; no bytes: the stream has ended."""
        stream = self._streams[rank, stream_name]
        with self._lock:
            lines = stream.splitter.feed(data, final=not data)
            stream.tail.extend(lines)
            self._write_file(stream, data)
            if stream.console is None:
                return
            if stream_name in self._mergers:
                self._merge(rank, stream_name, lines, continues=stream.splitter.continues)
                if not data:
                    self._show(stream_name, self._mergers[stream_name].end(rank))
            elif lines:
                start = self._stamp() + stream.prefix
                text = ("" if stream.splitter.continues else start) + start.join(lines)
                if self._question is not None and self._question is not stream:
                    self._question.splitter.broken_off()
                    text = "\n" + text
                self._question = None
                _print(stream.console, text)
            if rank == self._asks:
                stream.last_s = time.monotonic()
                self._waiting.notify()

    def _stamp(self) -> str:
        return "" if self._now is None else f"{self._now()} "

    def _merge(self, rank: int, name: str, lines: list[str], *, continues: bool) -> None:
        """Merge lines, with the lock held."""
        if not lines:
            return
        merger, stamp, now_s = self._mergers[name], self._stamp(), time.monotonic()
        if continues:
            lines = [_LINE_GOES_ON, *lines[1:]]
        self._show(name, [each for line in lines for each in merger.add(rank, line, now_s, stamp)])
        self._waiting.notify()

    def _show(self, name: str, merged: Sequence[MergedLine]) -> None:
        """Show lines, with the lock held."""
        parts = []
        for each in merged:
            if each.line == _LINE_GOES_ON:
                parts.append("\n")
                continue
            prefix = f"[{rank_ranges(each.ranks)}]<{name}>:"
            if len(each.ranks) == 1:
                prefix = self._streams[each.ranks[0], name].prefix
            parts += [each.stamp, prefix, each.line]
        console = self._consoles[name]
        if console is not None and parts:
            _print(console, "".join(parts))

    def _show_later(self) -> None:
        """Show, on a thread, what waits for the same of other ranks, or for its line's end."""
        with self._lock:
            while not self._is_closed:
                now_s = time.monotonic()
                for name, merger in self._mergers.items():
                    self._show(name, merger.due(now_s))
                times = [due_s for m in self._mergers.values() if (due_s := m.due_s()) is not None]
                times += self._show_questions(now_s)
                self._waiting.wait(max(0.0, min(times) - now_s) if times else None)

    def _show_questions(self, now_s: float) -> list[float]:
        """Show questions, with the lock held; return when there may be more."""
        times = []
        for name in self._consoles:
            stream = self._streams.get((self._asks, name)) if self._asks is not None else None
            if stream is None or stream.console is None or not stream.last_s:
                continue
            if (due_s := stream.last_s + _QUESTION_S) > now_s:
                times.append(due_s)
                continue
            stream.last_s = 0.0
            text, goes_on = stream.splitter.begun()
            if text:
                stream.tail.append(text)
                _print(stream.console, text if goes_on else self._stamp() + stream.prefix + text)
                self._question = stream
        return times

    def tail(self, rank: int, stream_name: str) -> str:
        """Return the last lines of a stream, as they came."""
        return "".join(self._streams[rank, stream_name].tail)

    def last_lines(self, stream_name: str) -> dict[int, str]:
        """Return, by rank, the last line of a stream that is not empty, without its end."""
        with self._lock:
            tails = {
                r: list(s.tail) for (r, name), s in self._streams.items() if name == stream_name
            }
        texts = {rank: [line.strip() for line in tail] for rank, tail in tails.items()}
        return {
            rank: next(filter(None, reversed(text))) for rank, text in texts.items() if any(text)
        }

    def close(self) -> None:
        """Pass on lines that have no end, and close the files. Idempotent."""
        for (rank, name), stream in self._streams.items():
            self.write(rank, name, b"")
            with self._lock:
                self._give_up(stream)
        with self._lock:
            for name, merger in self._mergers.items():
                self._show(name, merger.rest())
            self._is_closed = True
            self._waiting.notify()
        if self._later is not None:
            self._later.join()

    def _write_file(self, stream: _Stream, data: bytes) -> None:
        """Write, with the lock held. A full disk must not stop the ranks from writing."""
        if stream.file is None:
            return
        try:
            stream.file.write(data)
            stream.file.flush()
        except OSError as error:
            self._give_up(stream, error)

    def _give_up(self, stream: _Stream, error: OSError | None = None) -> None:
        """With the lock held: close the file, and report ``error``, or what closing meets."""
        file, stream.file = stream.file, None
        if file is None:
            return
        try:
            file.close()
        except OSError as closing:  # the system's file is closed all the same
            error = error or closing
        if error is not None:
            with contextlib.suppress(Exception):  # the caller's, which must not stop them either
                self._report(f"{file.name} is incomplete: {error}; the job goes on without it")


def _print(console: TextIO, text: str) -> None:
    """Print: a console that is gone must not stop the ranks from writing."""
    with contextlib.suppress(OSError, ValueError):
        console.write(text)
        console.flush()


def _colored(prefix: str, rank: int, console: TextIO | None) -> str:
    """Return ``prefix``, in its rank's colour on a terminal unless NO_COLOR is set."""
    if console is None or not console.isatty() or os.environ.get("NO_COLOR"):
        return prefix
    return f"\x1b[{_COLORS[rank % len(_COLORS)]}m{prefix}\x1b[0m"


class OutputPump:
    """Takes what ranks write from their pipes, on a thread of its own.

    ``sink`` is called with (rank, "stdout" or "stderr", bytes); no bytes: the stream has ended.
    """

    def __init__(self, sink: Callable[[int, str, bytes], None]) -> None:
        self._sink = sink
        self._pipes: list[IO[bytes]] = []
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._deadline: float | None = None
        self._open = 0  # streams that have not ended
        self._start_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kolovod output", daemon=True)

    def add(self, rank: int, stream_name: str, pipe: IO[bytes]) -> None:
        """Take over ``pipe``, the ``stream_name`` of a rank."""
        self._pipes.append(pipe)
        self._open += 1
        self._selector.register(pipe, selectors.EVENT_READ, (rank, stream_name))

    def start(self) -> None:
        """Begin to copy. Idempotent, on any thread."""
        with self._start_lock:  # an actor prepares several ranks at once
            if self._thread.ident is None:
                self._thread.start()

    def finish(self, timeout_s: float = 2.0) -> None:
        """Copy what is left, for ``timeout_s`` at most: someone may hold a pipe. Idempotent."""
        if self._wake_write < 0:
            return
        self._deadline = time.monotonic() + timeout_s
        os.write(self._wake_write, b"x")
        if self._thread.ident is not None:
            self._thread.join(timeout=timeout_s + 5)
        self._selector.close()
        for pipe in self._pipes:
            pipe.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        self._wake_write = -1

    def _run(self) -> None:
        while self._deadline is None or self._open:
            timeout = None
            if self._deadline is not None:
                timeout = self._deadline - time.monotonic()
                if timeout <= 0:
                    break
            for key, _ in self._selector.select(timeout):
                if key.data is None:
                    os.read(self._wake_read, 1)
                    continue
                rank, name = key.data
                data = os.read(key.fd, _READ_BYTES)
                self._sink(rank, name, data)
                if not data:
                    self._selector.unregister(key.fd)
                    self._open -= 1
                    pipe = cast("IO[bytes]", key.fileobj)
                    self._pipes.remove(pipe)
                    pipe.close()
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self._sink(key.data[0], key.data[1], b"")
