"""The ranks' output: one thread takes it from their pipes, marks it, and passes on whole lines."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, TextIO

__all__ = ["LineSplitter", "OutputPump"]

_READ_BYTES = 1 << 16
_MAX_LINE_CHARS = 1 << 16
_TAIL_LINES = 40
_LINE_END = re.compile(r"\r\n|\r|\n")


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
        self.continues = False
        """Whether the first line that ``feed`` just returned is the end of the one before it: the
        second half of a line end that the reads cut in two."""

    def feed(self, data: bytes, final: bool = False) -> list[str]:
        """The lines that ``data`` completes, with their ends; the rest too when ``final``."""
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
        return lines


@dataclass
class _Stream:
    pipe: IO[bytes]
    prefix: str
    console: TextIO | None
    file: IO[bytes] | None
    splitter: LineSplitter = field(default_factory=LineSplitter)
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))


class OutputPump:
    """Copies each rank's output to the console, and to files if wanted, on a thread of its own.

    ``now`` makes the time before each line, or None for none.
    """

    def __init__(self, now: Callable[[], str] | None = None) -> None:
        self._now = now
        self._streams: dict[tuple[int, str], _Stream] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._deadline: float | None = None
        self._thread = threading.Thread(target=self._run, name="kolovod output", daemon=True)

    def add(
        self,
        rank: int,
        stream_name: str,
        pipe: IO[bytes],
        console: TextIO | None,
        file: IO[bytes] | None = None,
    ) -> None:
        """Before ``start``: take over ``pipe`` (and ``file``), the ``stream_name`` of a rank."""
        stream = _Stream(pipe, f"[{rank}]<{stream_name}>:", console, file)
        self._streams[rank, stream_name] = stream
        self._selector.register(pipe, selectors.EVENT_READ, stream)

    def start(self) -> None:
        """Begin to copy."""
        self._thread.start()

    def tail(self, rank: int, stream_name: str) -> str:
        """The last lines of a stream, as they came. Call it after ``finish``."""
        return "".join(self._streams[rank, stream_name].tail)

    def finish(self, timeout_s: float = 2.0) -> None:
        """Copy what is left, for ``timeout_s`` at most: someone may hold a pipe. Idempotent."""
        if self._wake_write < 0:
            return
        self._deadline = time.monotonic() + timeout_s
        os.write(self._wake_write, b"x")
        if self._thread.ident is not None:
            self._thread.join(timeout=timeout_s + 5)
        self._selector.close()
        for stream in self._streams.values():
            stream.pipe.close()
            if stream.file is not None:
                stream.file.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        self._wake_write = -1

    def _run(self) -> None:
        open_streams = len(self._streams)
        while open_streams:
            timeout = None
            if self._deadline is not None:
                timeout = self._deadline - time.monotonic()
                if timeout <= 0:
                    break
            for key, _ in self._selector.select(timeout):
                if key.data is None:
                    os.read(self._wake_read, 1)
                    continue
                data = os.read(key.fd, _READ_BYTES)
                self._pass_on(key.data, data)
                if not data:
                    self._selector.unregister(key.fd)
                    open_streams -= 1
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self._pass_on(key.data, b"")

    def _pass_on(self, stream: _Stream, data: bytes) -> None:
        lines = stream.splitter.feed(data, final=not data)
        stream.tail.extend(lines)
        if stream.file is not None:
            stream.file.write(data)
            stream.file.flush()
        if stream.console is None or not lines:
            return
        start = stream.prefix if self._now is None else f"{self._now()} {stream.prefix}"
        text = ("" if stream.splitter.continues else start) + start.join(lines)
        # A console that is gone must not stop the ranks from writing.
        with contextlib.suppress(OSError, ValueError):
            stream.console.write(text)
            stream.console.flush()
