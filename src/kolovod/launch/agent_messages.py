"""The messages between the launcher and its agent on another host, over ssh's two pipes.

ssh has authenticated both ends and encrypts what passes::

    agent -> launcher    MAGIC, on a line of its own (what a login shell prints before is skipped)
    frame                body_length: uint32 (big-endian)  kind: uint8  body
      kind "J"           one JSON value in UTF-8: an order, or a report (launch/agent.py, remote.py)
      kind "O"           rank: uint32  stream: uint8 (0 stdout, 1 stderr)  bytes; none: it has ended
      kind "P"           a part of the payload for all ranks of the host
      kind "R"           rank: uint32  bytes: a part of what the rank has returned
"""

from __future__ import annotations

import json
import os
import queue
import select
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

from kolovod.errors import HostError

__all__ = ["MAGIC", "STREAMS", "WINDOW_BYTES", "FrameReader", "FrameWriter", "OrderWriter"]

MAGIC = b"KOLOVOD-AGENT-1\n"
STREAMS = ("stdout", "stderr")
WINDOW_BYTES = 1 << 20
"""Of output that is on its way at most, so that reports never wait for who shows it."""
MAX_BODY_BYTES = 16 << 20
_PART_BYTES = 1 << 20
_MAX_PRELUDE_BYTES = 1 << 20  # of what a login shell may print
_HEADER = struct.Struct(">Ic")
_RANK = struct.Struct(">I")


class FrameReader:
    """A reader that cuts what arrives into frames. ``prelude``: MAGIC comes first."""

    def __init__(self, prelude: bool) -> None:
        self._data = bytearray()
        self._in_prelude = prelude

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the frames that ``data`` completes, as (kind, body). Raises BootstrapError."""
        self._data += data
        if self._in_prelude:
            found = self._data.find(MAGIC)
            if found < 0:
                if len(self._data) > _MAX_PRELUDE_BYTES:
                    raise HostError("what answers is no agent of Kolovod's")
                return
            del self._data[: found + len(MAGIC)]
            self._in_prelude = False
        while len(self._data) >= _HEADER.size:
            length, kind = _HEADER.unpack_from(self._data)
            if length > MAX_BODY_BYTES:
                raise HostError(f"a frame says it has {length} bytes: refused")
            if len(self._data) < _HEADER.size + length:
                return
            body = bytes(self._data[_HEADER.size : _HEADER.size + length])
            del self._data[: _HEADER.size + length]
            yield kind, body


class FrameWriter:
    """A writer of frames to a pipe, for several threads."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def json(self, value: Any) -> None:
        """Write one JSON value. Raises OSError if the pipe is broken, as the others do."""
        self._frame(b"J", json.dumps(value).encode())

    def output(self, rank: int, stream: str, data: bytes) -> None:
        """Write a part of a rank's output."""
        self._frame(b"O", _RANK.pack(rank) + bytes([STREAMS.index(stream)]) + data)

    def payload(self, data: bytes) -> None:
        """Write the payload that all ranks of the host are given."""
        for start in range(0, len(data), _PART_BYTES):
            self._frame(b"P", data[start : start + _PART_BYTES])

    def result(self, rank: int, data: bytes) -> None:
        """Write the result that a rank has returned."""
        for start in range(0, len(data), _PART_BYTES):
            self._frame(b"R", _RANK.pack(rank) + data[start : start + _PART_BYTES])

    def close(self) -> None:
        """Write nothing any more: another writer gets an OSError, once the present one is done."""
        with self._lock:
            self._fd = -1

    def _frame(self, kind: bytes, body: bytes) -> None:
        if len(body) > MAX_BODY_BYTES:
            raise HostError(f"a message of {len(body)} bytes is over {MAX_BODY_BYTES} bytes")
        view = memoryview(_HEADER.pack(len(body), kind) + body)
        with self._lock:
            while view:
                view = view[os.write(self._fd, view) :]


class OrderWriter:
    """A writer on a thread of its own: who gives orders does not wait for a silent agent.

    Orders that cannot be written any more are dropped, as whoever reads the other direction will
    find.
    """

    def __init__(self, fd: int, name: str) -> None:
        # One of its own, which is closed when the thread has written its last.
        self._fd = os.dup(fd)
        self._writer = FrameWriter(self._fd)
        self._orders: queue.SimpleQueue[Callable[[FrameWriter], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name=name, daemon=True)
        self._thread.start()

    def json(self, value: Any) -> None:
        """Write one JSON value, after all that was ordered before."""
        self._orders.put(lambda writer: writer.json(value))

    def payload(self, data: bytes) -> None:
        """Write the payload that all ranks of the host are given."""
        self._orders.put(lambda writer: writer.payload(data))

    def sign_of_life(self, value: Any) -> None:
        """Write one JSON value, unless the reader is behind: then it has as good a one to read."""
        self._orders.put(lambda writer: self._write_if_read(writer, value))

    def close(self) -> None:
        """Write what was ordered, and no more."""
        self._orders.put(None)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for that, or until nobody reads any more."""
        self._thread.join(timeout_s)

    def _write_if_read(self, writer: FrameWriter, value: Any) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        if poll.poll(0):
            writer.json(value)

    def _write(self) -> None:
        try:
            while (order := self._orders.get()) is not None:
                order(self._writer)
        except OSError:  # nobody reads any more
            pass
        finally:
            os.close(self._fd)


def split_output(body: bytes) -> tuple[int, str, bytes]:
    """Return (rank, stream, bytes) of a frame "O"."""
    (rank,) = _RANK.unpack_from(body)
    return rank, STREAMS[body[_RANK.size]], body[_RANK.size + 1 :]


def split_result(body: bytes) -> tuple[int, bytes]:
    """Return (rank, bytes) of a frame "R"."""
    (rank,) = _RANK.unpack_from(body)
    return rank, body[_RANK.size :]
