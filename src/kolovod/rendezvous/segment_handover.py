"""The segment that the ranks of a host share: their leader makes it and hands it round.

Over an AF_UNIX socket::

    follower -> leader   {"rank": new rank, "pidfd": bool}, then its own pidfd
    leader -> follower   {"pidfds": [bool, ...]}, then the segment and the pidfds
                    or   {"error": text, "rank": launcher rank or null}

The segment is an anonymous file that no crash can leave behind. The first member's configuration is
everybody's, since the segment's layout follows from it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import secrets
import select
import socket
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from kolovod import _native
from kolovod.errors import BootstrapError, KolovodError, RankLostError, StartTimeoutError
from kolovod.net import messages
from kolovod.net.channel import HANDSHAKE_TIMEOUT_S, Channel, greet, retried
from kolovod.net.server import Server
from kolovod.net.sockets import poll_until
from kolovod.net.unix_sockets import check_peer, listen_abstract
from kolovod.rendezvous.client import WORD_S, Joined
from kolovod.rendezvous.mesh import Links, describe
from kolovod.rendezvous.protocol import Formation, Member

__all__ = [
    "Leader",
    "Ready",
    "follow",
    "leader_label",
    "make_segment",
    "own_pidfd",
    "parse_answer",
    "pid_namespace",
]

_MOST_ON_A_HOST = 1024  # the engine's own limit is lower


@dataclass(frozen=True)
class Ready:
    """All that an engine needs. A context manager: leaving it closes the descriptors."""

    rank: int
    """New rank: the index among the members."""
    epoch: int
    members: tuple[Member, ...]
    segment_fd: int
    pidfds: tuple[int, ...]
    """One per rank; -1 where the system has none."""
    config: Mapping[str, int]
    links: Links | None = None
    """The connections to the ranks of other hosts; None on one host."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """What the first member has told."""

    @property
    def hosts(self) -> list[int]:
        """The number of each rank's host, in the order of ranks; empty if all are on one host."""
        numbers: dict[str, int] = {}
        by_rank = [numbers.setdefault(member.host, len(numbers)) for member in self.members]
        return by_rank if len(numbers) > 1 else []

    def peers(self, ranks: Iterable[int]) -> list[tuple[int, str]]:
        """Return ``(pidfd, description)`` of every member, as the engine wants them.

        ``ranks``: their numbers in the world.
        """
        return [
            (fd, describe(rank, member))
            for rank, fd, member in zip(ranks, self.pidfds, self.members, strict=True)
        ]

    def __enter__(self) -> Ready:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in (self.segment_fd, *self.pidfds):
            if fd >= 0:
                os.close(fd)
        if self.links is not None and not self.links.handed_over:
            self.links.close()


def pid_namespace() -> str:
    """Return an identifier of this process's pid namespace; "" if unknown."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def own_pidfd() -> int:
    """Return a descriptor that is readable when this process ends; -1 where there is none."""
    try:
        return os.pidfd_open(os.getpid())
    except OSError:  # an old kernel, or a sandbox that refuses it
        return -1


def make_segment(on_host: int, size: int, config: Mapping[str, int]) -> int:
    """Make an anonymous file for the ranks of a host, its memory reserved; return the descriptor.

    ``on_host``: how many they are; ``size``: the ranks of all hosts.

    Reserved, because a memory file system that is full kills the writer with SIGBUS otherwise.
    Raises BootstrapError if there is not enough memory.
    """
    bytes_needed = _native.segment_bytes(on_host, size, config)
    try:
        fd = os.memfd_create("kolovod-segment")
    except OSError:  # refused by a sandbox: a file without a name, in memory as well
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            fd = os.dup(file.fileno())
    try:
        os.posix_fallocate(fd, 0, bytes_needed)
    except OSError as error:
        os.close(fd)
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise
        raise BootstrapError(
            f"no {bytes_needed} bytes of shared memory for {on_host} ranks ({error.strerror}): "
            "give the container more memory, or lower KOLOVOD_CHUNK_BYTES or KOLOVOD_CHUNK_SLOTS"
        ) from error
    return fd


class _Watch:
    """The processes of other members, watched by pid until they have sent their own pidfds.

    The rendezvous server is watched, too: it tells of those that cannot be watched from here.
    """

    def __init__(self, members: Iterable[Member], joined: Joined) -> None:
        self._joined = joined
        self._poll = select.poll()
        self._members: dict[int, Member] = {}
        here = pid_namespace()
        for member in members:
            if not here or member.pid_namespace != here:
                continue
            try:
                fd = os.pidfd_open(member.pid)
            except ProcessLookupError:
                self.close()
                _raise_lost(member)
            except OSError:
                continue
            self._members[fd] = member
            self._poll.register(fd, select.POLLIN)

    def wait(self, fd: int, deadline: float) -> bool:
        """Wait until ``fd`` is readable: True; False at the deadline.

        Raises RankLostError on a death, and what the rendezvous server says.
        """
        own = {fd}
        if self._joined.is_open:
            own.add(self._joined.fileno())
        for watched in own:
            self._poll.register(watched, select.POLLIN)
        try:
            readable = [ready_fd for ready_fd, _ in poll_until(self._poll, deadline)]
        finally:
            for watched in own:
                self._poll.unregister(watched)
        if fd in readable:
            return True
        for ready_fd in readable:
            if ready_fd in self._members:
                _raise_lost(self._members[ready_fd])
        self._joined.check()
        return bool(readable) and self.wait(fd, deadline)

    def raise_if_dead(self, grace_s: float = 1.0) -> None:
        """Raise RankLostError if one ends within ``grace_s``.

        A dying process closes its sockets just before it ends. If the rendezvous server says
        something, that is raised instead: it may be why that one has ended.
        """
        self._joined.check(0.1)
        for ready_fd, _ in self._poll.poll(grace_s * 1000):
            _raise_lost(self._members[ready_fd])
        self._joined.check(WORD_S)

    def close(self) -> None:
        for fd in self._members:
            os.close(fd)
        self._members.clear()


def _raise_lost(member: Member) -> NoReturn:
    raise RankLostError(f"{member} ended while the world was being formed", member.rank)


class Leader:
    """A leader's part: it collects the followers' pidfds, then sends everything to everybody.

    It listens from its making on, so that its name can be told to the rendezvous server; a rank
    that turns out not to lead never runs it.
    """

    def __init__(self, secret: str) -> None:
        self.name = f"kolovod-{secrets.token_hex(16)}"
        self._arrivals: queue.SimpleQueue[tuple[int, int, Channel]] = queue.SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._done = threading.Event()
        listener = listen_abstract(self.name, _MOST_ON_A_HOST)
        label = leader_label(self.name)
        strangers = 64 + _MOST_ON_A_HOST
        self._server = Server(listener, secret, label, self._serve, max_strangers=strangers)

    def run(self, joined: Joined, here: Sequence[Member], deadline: float) -> Ready:
        """Do the leader's part, once the world has come together; ``here``: its host's members."""
        self._server.start()
        formation = joined.formation
        channels: dict[int, Channel] = {}
        fds: dict[int, int] = {}
        local = {member.rank for member in here}
        ranks = [new for new, member in enumerate(formation.members) if member.rank in local]
        try:
            try:
                size = len(formation.members)
                failure: Exception | None = None
                try:  # while the others come: memory is reserved page by page
                    fds[-1] = make_segment(len(here), size, formation.config)
                except Exception as error:  # which can be told to those who are here
                    failure = error
                self._collect(joined, ranks, channels, fds, deadline)
                if failure is not None:
                    raise failure
                fds[ranks[0]] = own_pidfd()
                pidfds = tuple(fds.get(new_rank, -1) for new_rank in range(size))
                self._distribute(formation, channels, fds[-1], pidfds, deadline)
            except Exception as error:
                self._tell_failure(channels, error)
                raise
        except BaseException:
            for fd in fds.values():
                if fd >= 0:
                    os.close(fd)
            raise
        members, config = formation.members, formation.config
        return Ready(ranks[0], formation.epoch, members, fds[-1], pidfds, config)

    def _serve(self, channel: Channel) -> None:
        """Hear one follower, on its thread of the server; returning closes the channel."""
        deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
        message = channel.receive(deadline)
        rank = messages.whole(message, "rank", 0, messages.MAX_RANKS - 1)
        fds = channel.receive_fds(1, deadline) if messages.flag(message, "pidfd") else [-1]
        self._arrivals.put((rank, fds[0], channel))
        os.eventfd_write(self._bell, 1)
        self._done.wait()

    def _collect(
        self,
        joined: Joined,
        ranks: Sequence[int],
        channels: dict[int, Channel],
        fds: dict[int, int],
        deadline: float,
    ) -> None:
        while len(channels) < len(ranks) - 1:
            missing = [new_rank for new_rank in ranks[1:] if new_rank not in channels]
            awaited = [joined.formation.members[new_rank] for new_rank in missing]
            with contextlib.closing(_Watch(awaited, joined)) as watch:
                if not watch.wait(self._bell, deadline):
                    names = ", ".join(map(str, awaited))
                    raise StartTimeoutError(f"{names} did not connect to the leader in time")
            os.eventfd_read(self._bell)
            while not self._arrivals.empty():
                new_rank, pidfd, channel = self._arrivals.get()
                if new_rank not in missing or new_rank in channels:
                    if pidfd >= 0:
                        os.close(pidfd)
                    continue
                channels[new_rank], fds[new_rank] = channel, pidfd

    def _distribute(
        self,
        formation: Formation,
        channels: dict[int, Channel],
        segment: int,
        pidfds: tuple[int, ...],
        deadline: float,
    ) -> None:
        message = {"pidfds": [fd >= 0 for fd in pidfds]}
        sent = [segment, *(fd for fd in pidfds if fd >= 0)]
        for new_rank, channel in channels.items():
            try:
                channel.send(message, deadline)
                channel.send_fds(sent, deadline)
            except OSError:
                _raise_lost(formation.members[new_rank])

    def _tell_failure(self, channels: dict[int, Channel], error: Exception) -> None:
        rank = error.rank if isinstance(error, RankLostError) else None
        text = str(error)
        if not isinstance(error, KolovodError):
            text = f"the leader of the world could not form it: {type(error).__name__}: {text}"
        for channel in channels.values():
            with contextlib.suppress(OSError):
                channel.send({"error": text, "rank": rank}, time.monotonic() + 5)

    def close(self) -> None:
        """Stop listening; followers that are still connected hear no more."""
        self._done.set()
        self._server.close()
        while not self._arrivals.empty():
            _, pidfd, _ = self._arrivals.get()
            if pidfd >= 0:
                os.close(pidfd)
        os.close(self._bell)


def leader_label(name: str) -> str:
    """Return the label, in the handshake, of connections to the leader that listens at ``name``."""
    return f"leader {name}"


def follow(joined: Joined, leader: Member, new_rank: int, secret: str, deadline: float) -> Ready:
    """Do the part of a rank of the host that is not the leader."""
    formation = joined.formation
    watch = _Watch([leader], joined)

    def call() -> Channel:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(f"\0{leader.socket}")
            check_peer(sock)
            if not watch.wait(sock.fileno(), deadline):  # it may be busy with other hosts
                raise StartTimeoutError(f"{leader} did not answer in time")
            return greet(sock, secret, leader_label(leader.socket), deadline)
        except BaseException:
            sock.close()
            raise

    try:
        with contextlib.closing(retried(call, deadline)) as channel:
            pidfd = own_pidfd()
            try:
                channel.send({"rank": new_rank, "pidfd": pidfd >= 0}, deadline)
                if pidfd >= 0:
                    channel.send_fds([pidfd], deadline)
            finally:
                if pidfd >= 0:
                    os.close(pidfd)
            # EOF alone would not tell that the leader died: a child that it forked may hold its
            # socket open. Its pidfd does.
            if not watch.wait(channel.fileno(), deadline):
                raise StartTimeoutError(f"{leader} did not send the shared segment in time")
            has_pidfd = parse_answer(channel.receive(deadline), len(formation.members))
            fds = channel.receive_fds(1 + sum(has_pidfd), deadline)
    except ConnectionRefusedError as error:
        watch.raise_if_dead()
        raise BootstrapError(
            f"{leader} is on the same host by name, but its socket is not here: are the ranks in "
            "different network namespaces? KOLOVOD_HOST must differ then"
        ) from error
    except (EOFError, OSError) as error:
        watch.raise_if_dead()
        raise BootstrapError(f"{leader} broke off while the world was formed: {error}") from error
    finally:
        watch.close()
    others = iter(fds[1:])
    pidfds = tuple(next(others) if has else -1 for has in has_pidfd)
    members, config = formation.members, formation.config
    return Ready(new_rank, formation.epoch, members, fds[0], pidfds, config)


def parse_answer(answer: Any, size: int) -> list[bool]:
    """Return for each rank whether the leader has its pidfd; raise what it says went wrong."""
    if "error" not in messages.mapping(answer):
        return messages.flags(answer, "pidfds", size)
    text = str(answer["error"])
    if answer.get("rank") is not None:
        raise RankLostError(text, messages.whole(answer, "rank", 0, messages.MAX_RANKS - 1))
    raise BootstrapError(text)
