"""Members on this host, watched by their pidfds: who has ended is proven without who started it.

Each member holds the records of the others open (record_file.py), so that what one has promised is
found when it has ended, though the process that gave it the file may be gone, too.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Collection
from dataclasses import dataclass

from kolovod.elastic import record_file
from kolovod.elastic.ballots import NOTHING, Proof
from kolovod.elastic.protocol import Contact
from kolovod.net.sockets import close_all
from kolovod.rendezvous.segment_handover import pid_namespace

__all__ = ["Mates"]

_CAUSE = "its process has ended"


@dataclass(frozen=True)
class _Mate:
    number: int
    pidfd: int
    record: int
    """-1: it could not be opened."""


class Mates:
    """For one thread. ``close`` releases what it holds."""

    def __init__(self) -> None:
        self._by_pidfd: dict[int, _Mate] = {}
        self._here = pid_namespace()

    def add(self, contact: Contact) -> None:
        """Watch it if it is a process of this host."""
        known = {mate.number for mate in self._by_pidfd.values()}
        if not self._here or contact.namespace != self._here or contact.number in known:
            return
        if contact.pid == os.getpid():
            return
        record = -1
        with contextlib.suppress(OSError):
            record = os.open(contact.record_path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            pidfd = os.pidfd_open(contact.pid)
        except OSError:  # it has ended; whose the pid was by then, nobody knows
            close_all([record] if record >= 0 else [])
            return
        self._by_pidfd[pidfd] = _Mate(contact.number, pidfd, record)

    def forget(self, numbers: Collection[int]) -> None:
        """Watch these no more."""
        for mate in list(self._by_pidfd.values()):
            if mate.number in numbers:
                self._drop(mate)

    def fds(self) -> list[int]:
        """Readable when ``ended`` has something to tell."""
        return list(self._by_pidfd)

    def ended(self) -> list[Proof]:
        """Of those that have ended since the last time."""
        poll = select.poll()
        for fd in self._by_pidfd:
            poll.register(fd, select.POLLIN)
        proofs = []
        for fd, _ in poll.poll(0):
            mate = self._by_pidfd[fd]
            record = None
            if mate.record >= 0:
                record = record_file.parse(record_file.read(mate.record)) or NOTHING
            proofs.append(Proof(mate.number, _CAUSE, record))
            self._drop(mate)
        return proofs

    def close(self) -> None:
        """Idempotent."""
        for mate in list(self._by_pidfd.values()):
            self._drop(mate)

    def _drop(self, mate: _Mate) -> None:
        del self._by_pidfd[mate.pidfd]
        close_all([fd for fd in (mate.pidfd, mate.record) if fd >= 0])
