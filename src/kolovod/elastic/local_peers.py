"""Members on this host, watched by their pidfds: they prove an end without the launcher.

Each member holds the records of the others open (record_file.py), so that what one has promised is
found when it has ended, though the process that gave it the file may be gone, too.
"""

from __future__ import annotations

import os
import re
import select
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from kolovod.coordination import record_file
from kolovod.coordination.consensus import NOTHING, Proof
from kolovod.coordination.protocol import Contact
from kolovod.net.sockets import close_all
from kolovod.rendezvous.segment_handover import pid_namespace

__all__ = ["LocalPeers", "pid_space"]

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_CAUSE = "its process has ended"


def pid_space() -> str:
    """Return an identifier of where a pid of this process's means the same; "": unknown.

    It is not the namespace alone: the first one has the same name on every host.
    """
    namespace = pid_namespace()
    try:
        boot = Path(_BOOT_ID).read_text().strip()
    except OSError:
        return ""
    return f"{boot} {namespace}" if boot and namespace else ""


@dataclass(frozen=True)
class _LocalPeer:
    number: int
    pidfd: int
    record: int


class LocalPeers:
    """The members on this host that are watched. For one thread.

    ``close`` releases what it holds.
    """

    def __init__(self) -> None:
        self._by_pidfd: dict[int, _LocalPeer] = {}
        self._here = pid_space()

    def add(self, contact: Contact) -> None:
        """Watch it if it is a process of this host."""
        known = {mate.number for mate in self._by_pidfd.values()}
        if not self._here or contact.pid_space != self._here or contact.number in known:
            return
        own_file = re.fullmatch(rf"/proc/{contact.pid}/fd/\d+", contact.record_path)
        if contact.pid == os.getpid() or own_file is None:
            return
        opened: list[int] = []
        try:
            opened.append(os.pidfd_open(contact.pid))
            opened.append(record_file.open_to_read(contact.record_path))
        except OSError:  # it has ended, and another process may have its pid
            close_all(opened)
            return
        self._by_pidfd[opened[0]] = _LocalPeer(contact.number, *opened)

    def forget(self, numbers: Collection[int]) -> None:
        """Watch these no more."""
        for mate in list(self._by_pidfd.values()):
            if mate.number in numbers:
                self._drop(mate)

    def fds(self) -> list[int]:
        """Return descriptors that are readable when ``ended`` has something to tell."""
        return list(self._by_pidfd)

    def ended(self) -> list[Proof]:
        """Return proofs of those that have ended since the last call."""
        poll = select.poll()
        for fd in self._by_pidfd:
            poll.register(fd, select.POLLIN)
        proofs = []
        for fd, _ in poll.poll(0):
            mate = self._by_pidfd[fd]
            record = record_file.parse(record_file.read(mate.record)) or NOTHING
            proofs.append(Proof(mate.number, _CAUSE, record))
            self._drop(mate)
        return proofs

    def close(self) -> None:
        """Watch nobody any more. Idempotent."""
        for mate in list(self._by_pidfd.values()):
            self._drop(mate)

    def _drop(self, mate: _LocalPeer) -> None:
        del self._by_pidfd[mate.pidfd]
        close_all([mate.pidfd, mate.record])
