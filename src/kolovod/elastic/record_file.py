"""A member's record where whoever reports its end can read it (rule 3 of ``ballots``).

A file in memory that the process which starts the member makes, holds open, and reads when the
member has ended::

    KOLOVOD_RECORD   its path: /proc/PID/fd/N of the process that has made it
    the file         two places of half of it each, written in turns: [sequence: uint64]
                     [length: uint32] [CRC-32 of sequence and record: uint32] [record as JSON]

The newer of the places whose sum is right counts: a member may be killed while it writes.

Where no launcher of ours holds such a file, its copy in a folder of the user's tells the next
process in the same slot what this one had agreed to (external.py).
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path

from kolovod.elastic.ballots import Record
from kolovod.elastic.protocol import encode_record, record_of
from kolovod.errors import BootstrapError

__all__ = ["VARIABLE", "RecordFile", "new_file", "open_to_read", "parse", "read", "read_kept"]

VARIABLE = "KOLOVOD_RECORD"
_NAME = "kolovod-record"
_HEAD = struct.Struct("<QII")
_PLACE_BYTES = 1 << 23
"""A world of 65,536 members and what it is based on fit; memory is taken only for what is there."""


def new_file() -> tuple[int, str]:
    """An empty file: its descriptor, and the variable's value."""
    fd = os.memfd_create(_NAME)
    os.ftruncate(fd, 2 * _PLACE_BYTES)
    return fd, f"/proc/{os.getpid()}/fd/{fd}"


class RecordFile:
    """The member's end."""

    def __init__(self, path: str, copy: Path | None = None) -> None:
        """``path``: the variable's value; "": there is none, and ``write`` does nothing.

        ``copy``: a file that outlives this host, for ``read_kept``.
        """
        self._copy = copy
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC) if path else -1
        self._sequence = 0

    @property
    def path(self) -> str:
        """Where others of this host open it while this process lives; "": there is none."""
        return "" if self._fd < 0 else f"/proc/{os.getpid()}/fd/{self._fd}"

    def write(self, record: Record) -> None:
        """Returns when a reader will find it, whatever becomes of this process."""
        if self._fd < 0:
            return
        if self._copy is not None:
            _replace(self._copy, _encode(record))
        body = _encode(record)
        if len(body) > _PLACE_BYTES - _HEAD.size:
            raise BootstrapError(f"a record of {len(body)} bytes is too long for its file")
        self._sequence += 1
        head = _HEAD.pack(self._sequence, len(body), _sum(self._sequence, body))
        data = memoryview(head + body)
        at = self._sequence % 2 * _PLACE_BYTES
        while data:
            count = os.pwrite(self._fd, data, at)
            data, at = data[count:], at + count

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def open_to_read(path: str) -> int:
    """``RecordFile.path`` of another process. Raises OSError if there is no such file."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if not os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{_NAME}"):
        os.close(fd)
        raise FileNotFoundError(path)
    return fd


def read(fd: int) -> bytes:
    """The latest record, for ``parse``; b"": none was written."""
    best: tuple[int, bytes] | None = None
    for place in range(2):
        head = os.pread(fd, _HEAD.size, place * _PLACE_BYTES)
        if len(head) < _HEAD.size:
            continue
        sequence, length, checksum = _HEAD.unpack(head)
        if not 0 < length <= _PLACE_BYTES - _HEAD.size or (best and sequence <= best[0]):
            continue
        body = os.pread(fd, length, place * _PLACE_BYTES + _HEAD.size)
        if _sum(sequence, body) == checksum:
            best = sequence, body
    return b"" if best is None else best[1]


def parse(body: bytes) -> Record | None:
    """What ``read`` has found; None: nothing, or it makes no sense."""
    try:
        return record_of(json.loads(body)) if body else None
    except (BootstrapError, ValueError, RecursionError):
        return None


def read_kept(path: Path) -> Record | None:
    """From ``RecordFile``'s copy; None: there is none, or it makes no sense."""
    try:
        return parse(path.read_bytes())
    except OSError:
        return None


def _encode(record: Record) -> bytes:
    return json.dumps(encode_record(record), separators=(",", ":")).encode()


def _replace(path: Path, body: bytes) -> None:
    """Write a file that is whole or the one before, also if this host fails."""
    new = path.with_name(f"{path.name}.new")
    try:
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(body)
            file.flush()
            os.fsync(fd)
        os.rename(new, path)
    except OSError as error:
        raise BootstrapError(
            f"the record cannot be kept at {path}: {error.strerror}; KOLOVOD_RECORD_DIR says where"
        ) from error


def _sum(sequence: int, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(sequence.to_bytes(8, "little")))
