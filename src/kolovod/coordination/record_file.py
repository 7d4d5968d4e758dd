"""A member's record where whoever reports its end can read it (rule 3 of ``consensus``).

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
from dataclasses import dataclass
from pathlib import Path

from kolovod.coordination.consensus import Record
from kolovod.coordination.protocol import Left, encode_record, record_of
from kolovod.errors import BootstrapError, ElasticBootstrapError
from kolovod.memory_files import OtherFileError, is_file_in, open_checked, open_own_memory
from kolovod.net import messages

__all__ = [
    "VARIABLE",
    "Copy",
    "RecordFile",
    "new_file",
    "open_to_read",
    "parse",
    "read",
    "read_kept",
]

VARIABLE = "KOLOVOD_RECORD"
_NAME = "kolovod-record"
_MAX_NUMBER = 1 << 53
_HEAD = struct.Struct("<QII")
_PLACE_BYTES = 1 << 23
"""A world of 65,536 members and what it is based on fit; memory is taken only for what is there."""


def new_file() -> tuple[int, str]:
    """Make an empty file; return its descriptor, and the variable's value."""
    fd = os.memfd_create(_NAME)
    os.ftruncate(fd, 2 * _PLACE_BYTES)
    return fd, f"/proc/{os.getpid()}/fd/{fd}"


@dataclass
class Copy:
    """A file that outlives the process and its host, for ``read_kept``."""

    path: Path
    job: str
    """A random name of the job: its next one may have the same file."""
    number: int | None = None
    """The member's number; while it has none nothing is written, so what another one left stays."""

    def write(self, record: Record) -> None:
        """Return when the file has it, whatever becomes of this host. Raises BootstrapError."""
        if self.number is None:
            return
        left = {"job": self.job, "number": self.number, "record": encode_record(record)}
        _replace(self.path, json.dumps(left).encode())


class RecordFile:
    """The file as the member sees it, which writes there."""

    def __init__(self, path: str, copy: Copy | None = None) -> None:
        """``path``: the variable's value; "": there is none, and ``write`` does nothing."""
        self._copy = copy
        self._fd = open_own_memory(path, _NAME, os.O_RDWR) if path else -1
        self._sequence = 0

    @property
    def path(self) -> str:
        """The path for others of this host while this process lives; "": there is none."""
        return "" if self._fd < 0 else f"/proc/{os.getpid()}/fd/{self._fd}"

    def write(self, record: Record) -> None:
        """Return when a reader will find it, whatever this process does. Raises BootstrapError."""
        if self._fd < 0:
            return
        if self._copy is not None:
            self._copy.write(record)
        body = json.dumps(encode_record(record), separators=(",", ":")).encode()
        if len(body) > _PLACE_BYTES - _HEAD.size:
            raise ElasticBootstrapError(f"a record of {len(body)} bytes is too long for its file")
        self._sequence += 1
        head = _HEAD.pack(self._sequence, len(body), _sum(self._sequence, body))
        data = memoryview(head + body)
        at = self._sequence % 2 * _PLACE_BYTES
        while data:
            count = os.pwrite(self._fd, data, at)
            data, at = data[count:], at + count

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def open_to_read(path: str) -> int:
    """Open ``RecordFile.path`` of another process. Raises OSError if there is no such file."""
    return open_own_memory(path, _NAME, os.O_RDONLY)


def read(fd: int) -> bytes:
    """Return the latest record, for ``parse``; b"": none was written."""
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
    """Return the record that ``read`` has found; None: there is none, or it makes no sense."""
    try:
        return record_of(json.loads(body)) if body else None
    except (BootstrapError, ValueError, RecursionError):
        return None


def read_kept(path: Path) -> tuple[str, Left] | None:
    """Return the job that ``Copy`` has written, and what is left of its member; None: nothing.

    Raises BootstrapError if it cannot be read.
    """
    try:
        given = messages.mapping(json.loads(_read_own(path)))
        number = messages.whole(given, "number", 0, _MAX_NUMBER)
        job = messages.text(given, "job", 1 << 10)
        return job, Left(number, record_of(given.get("record")))
    except OtherFileError as error:
        raise ElasticBootstrapError(
            f"{error} than a record of this user's: KOLOVOD_RECORD_DIR is to be a folder that only "
            "this user may write to"
        ) from None
    except FileNotFoundError:
        return None
    except (BootstrapError, OSError, ValueError, RecursionError) as error:
        raise ElasticBootstrapError(
            f"the record at {path} cannot be read ({error}). KOLOVOD_RECORD_DIR says where; remove "
            "the file if it is of another job"
        ) from error


def _read_own(path: Path) -> bytes:
    """Return its bytes. Raises OSError; OtherFileError where others may have put it there."""
    fd = open_checked(str(path), is_file_in(path.parent), os.O_RDONLY)
    with os.fdopen(fd, "rb") as file:
        return file.read(_PLACE_BYTES)


def _replace(path: Path, body: bytes) -> None:
    """Write a file that is whole or the one before, also if this host fails."""
    new = path.with_name(f"{path.name}.new")
    try:
        new.unlink(missing_ok=True)  # not into a link that others have put there
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(body)
            file.flush()
            os.fsync(fd)
        os.rename(new, path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)  # the file's new name
        finally:
            os.close(folder)
    except OSError as error:
        raise ElasticBootstrapError(
            f"the record cannot be kept at {path}: {error.strerror}; KOLOVOD_RECORD_DIR says where"
        ) from error


def _sum(sequence: int, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(sequence.to_bytes(8, "little")))
