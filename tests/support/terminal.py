"""A command in a terminal of its own, and what is to be seen on it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

_TOKEN = re.compile(r"\x1b\[(\d*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


class Screen:
    """What a terminal shows: of its language what launchers write. It never scrolls."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._row, self._column = 0, 0
        self._rows = [""]
        self._rest = ""

    @property
    def lines(self) -> list[str]:
        """From the top; without those at the end that are empty."""
        lines = [row.rstrip() for row in self._rows]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def feed(self, text: str) -> None:
        """What was written to it."""
        text = self._rest + text
        position = 0
        while match := _TOKEN.match(text, position):
            position = match.end()
            number, letter, control, plain = match.groups()
            if letter == "K":
                self._rows[self._row] = self._rows[self._row][: self._column]
            elif letter == "A":
                self._row -= int(number or 1)
                assert self._row >= 0
            elif letter is not None:
                assert letter == "m", match.group()
            elif control == "\r":
                self._column = 0
            elif control == "\n":
                self._move_down()
            else:
                self._put(plain)
        self._rest = text[position:]

    def _put(self, text: str) -> None:
        for character in text:
            if self._column == self._columns:
                self._column = 0
                self._move_down()
            row = self._rows[self._row].ljust(self._column)
            self._rows[self._row] = row[: self._column] + character + row[self._column + 1 :]
            self._column += 1

    def _move_down(self) -> None:
        self._row += 1
        if self._row == len(self._rows):
            self._rows.append("")


class Terminal:
    """With a process whose terminal it is."""

    def __init__(self, fd: int, process: subprocess.Popen[bytes], columns: int) -> None:
        self.process = process
        self.screen = Screen(columns)
        self.text = ""
        """All that was written."""
        self._fd = fd

    def type(self, keys: str) -> None:
        """As somebody at the keyboard."""
        os.write(self._fd, keys.encode())

    def read_until(self, seen: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Fails where that does not come, or the process ends before."""
        deadline = time.monotonic() + timeout_s
        while not seen():
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"after {timeout_s:g} s: {self.screen.lines}"
            assert self._read(left_s), self.screen.lines

    def read_to_end(self, timeout_s: float = 60.0) -> int:
        """The process's exit code."""
        deadline = time.monotonic() + timeout_s
        while self._read(deadline - time.monotonic()):
            pass
        return self.process.wait(max(0.0, deadline - time.monotonic()))

    def settings(self) -> list[object]:
        """Of the terminal."""
        return list(termios.tcgetattr(self._fd))

    def _read(self, timeout_s: float) -> bool:
        poll = select.poll()  # select takes descriptors below 1,024 only
        poll.register(self._fd, select.POLLIN)
        if not poll.poll(max(0.0, timeout_s) * 1000):
            raise AssertionError(f"nothing more is written: {self.screen.lines}")
        try:
            data = os.read(self._fd, 1 << 16)
        except OSError:  # nobody has it open any more
            return False
        text = data.decode()
        self.text += text
        self.screen.feed(text)
        return bool(data)


@contextlib.contextmanager
def terminal(
    command: Sequence[str], columns: int = 100, variables: Mapping[str, str] | None = None
) -> Iterator[Terminal]:
    """``command`` in a terminal; killed at the end if it is still there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
    environment.pop("CI", None)
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**environment, **(variables or {})},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    try:
        yield Terminal(ours, process, columns)
    finally:
        process.kill()
        process.wait(60)
        os.close(ours)
