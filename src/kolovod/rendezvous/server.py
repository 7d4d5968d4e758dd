"""The server at which ranks meet: each says which world it wants, and hears who is in it.

The launcher runs one ``RendezvousServer`` for the whole job, so that a world can be formed again
after a failure. One conversation per rank and world (protocol.py)::

    rank  -> server  {"protocol": n, "version": text,
                      "members": [[first, last] of launcher ranks that follow each other],
                      "member": member, "config": {name: number}, "notes": {name: text},
                      "timeout_s", "scope": n}
    server -> rank   {"epoch": n, "config": {...}, "notes": {...},
                      "texts": [...], "members": [member]}
                     and, as long as members are left,   {"texts": [...], "members": [member]}
                or   {"error": kind, "message": text, "rank": launcher rank or null}
    rank  -> server  {"formed": epoch}   or   {"error": text, "rank": launcher rank or null}
    server -> rank   {"formed": epoch}   or   {"error": kind, "message": ..., "rank": ...}
    member           [rank, host, pid, pid_namespace, socket, user, address, encrypts], in an
                     answer with the numbers of host and pid_namespace in texts, which are few

The answer comes when all members have joined; its config and notes are the first member's. It is an
error at once when a member's process is known to have ended, or when two ranks wait for different
worlds that need each other; when one of them has a release with another protocol than the
rendezvous server's (versions.py); and after ``timeout_s`` of the rank that came first, naming the
ranks that are missing. Every world gets a new epoch number.

In an elastic job other processes come with the numbers of those that have ended. There ranks are
those of a world that the job has agreed upon, whose own number is the scope in which they count; it
is 0 in other jobs, where ranks are the launcher's.

With the answer ranks connect to each other, and say here when they have. Until all have, a rank
whose connection breaks has ended: the others hear its name, those too that come later. Before the
answer it may come again within a second.

A rank that waits has no thread here: one watches all of them.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kolovod.errors import BootstrapError
from kolovod.net.addresses import LOOPBACK, address_of, listen, listen_again
from kolovod.net.channel import Channel, encode
from kolovod.net.lost_hosts import notice_lost_host
from kolovod.net.server import Server
from kolovod.rendezvous import versions
from kolovod.rendezvous.protocol import (
    WORLDS_PER_SCOPE,
    Member,
    Request,
    encode_members,
    parse_join,
    parse_stranger,
    parse_word,
)

__all__ = ["GONE_GRACE_S", "LABEL", "RendezvousServer"]

LABEL = "rendezvous"
GONE_GRACE_S = 1.0
"""For a rank that has gone away to come again, and for the launcher to know why it has."""
_SEND_TIMEOUT_S = 5.0
_FORMING_S = 10.0  # at least, from the answer on, as ranks give each other (bootstrap.py)
_TURNS = 16
"""Servers that follow each other and number the process sets of one world differently."""
_WATCH_S = 3600.0  # at most, between two looks at deadlines


_Rank = tuple[int, int]
"""A scope, and a rank there."""
_Key = tuple[int, tuple[int, ...]]
"""A scope, and the ranks there."""


@dataclass
class _Group:
    """A world that is waiting for members, or that they are forming. Guarded by the lock."""

    key: _Key
    deadline: float
    timeout_s: float
    joined: dict[int, tuple[Member, Channel]] = field(default_factory=dict)
    """The members that are connected."""
    config: dict[str, int] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    gone: dict[int, tuple[Member, float]] = field(default_factory=dict)
    """The members that were connected, and until when they may come again."""
    epoch: int = 0
    """Its number from the answer on."""
    forming: set[int] = field(default_factory=set)
    """The members that have not said, after the answer, that they have formed it."""

    @property
    def members(self) -> tuple[int, ...]:
        return self.key[1]

    def missing(self) -> list[int]:
        if self.epoch:
            return sorted(self.forming)
        return [rank for rank in self.members if rank not in self.joined]

    def next_deadline(self) -> float:
        return min([self.deadline, *(until for _, until in self.gone.values())])


class RendezvousServer:
    """The rendezvous server. Thread based; ``close`` ends its threads."""

    def __init__(
        self,
        secret: str,
        size: int,
        *hosts: str,
        port: int = 0,
        at: str = "",
        turn: int = 0,
        lasting: bool = False,
    ) -> None:
        """``hosts``: the addresses where it listens; by default the loopback interface.

        ``port``: at all of them; 0: free ones, as ``listen`` finds them. ``at``: the very
        "ip:port,ip:port" of an earlier server, whose part this one takes as the ``turn``-th after
        the first. ``lasting``: see ``listen``. Raises BootstrapError if they cannot be had.
        """
        backlog = max(128, size)
        if at:
            listeners = listen_again(at, backlog)
        else:
            listeners = listen(hosts or [LOOPBACK], backlog, port, lasting=lasting)
        self.address = ",".join(map(address_of, listeners))
        self.host_of: Sequence[str] = ()
        """The host of each rank, for messages, if the launcher knows."""
        self.has_been_asked = False
        """Whether a rank has come, for a world of any kind."""
        self._lock = threading.Lock()
        self._has_formed = threading.Condition(self._lock)
        self._formed_scope = 0  # the highest of those whose worlds have formed
        self._groups: dict[_Key, _Group] = {}  # that wait for members
        self._forming: dict[int, _Group] = {}  # that have had the answer, by epoch
        self._waiting: dict[int, tuple[_Group, int, Channel]] = {}  # by descriptor
        self._watched = select.epoll()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._watched.register(self._bell, select.EPOLLIN)
        self._dead: dict[_Rank, str] = {}
        self._lost: dict[_Rank, Member] = {}  # went while a world formed, and did not come again
        self._refused: dict[int, str] = {}  # came with another protocol, and not again since
        self._epoch = 0
        self._over = 0  # worlds of the scopes before are not formed any more
        self._first_in_scope = turn % _TURNS * (WORLDS_PER_SCOPE // _TURNS)
        self._closed = False
        self._servers = [
            Server(listener, secret, LABEL, self._serve, max_strangers=64 + size)
            for listener in listeners
        ]
        self._watcher = threading.Thread(target=self._watch, name="kolovod rendezvous", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._watcher.start()
        for server in self._servers:
            server.start()

    def close(self) -> None:
        """Stop; ranks that still wait are told so. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for group in self._open_groups():
                self._fail(group, "closed", "the launcher is going away", None)
            os.eventfd_write(self._bell, 1)
        for server in self._servers:
            server.close()
        if self._watcher.ident is not None:
            self._watcher.join()
        for fd in list(self._waiting):
            self._dismiss(fd)
        self._watched.close()
        os.close(self._bell)

    def mark_dead(self, rank: int, cause: str, scope: int = 0) -> None:
        """The process of ``rank`` has ended. Worlds that need it fail now, or when asked for.

        ``cause`` completes "rank 3 ...", for example "was killed by signal 9 (SIGKILL)".
        """
        with self._lock:
            self._dead[scope, rank] = cause
            for group in self._open_groups():
                if group.key[0] == scope and rank in group.members:
                    self._fail_dead(group, rank)

    def wait_formed(self, scope: int, timeout_s: float) -> bool:
        """Return whether a world of that scope, or a later one, forms here in ``timeout_s``."""
        with self._lock:
            return self._has_formed.wait_for(lambda: self._formed_scope >= scope, timeout_s)

    def end_scopes(self, before: int) -> None:
        """A world of the scope ``before`` has formed: earlier ones fail now, or when asked for.

        Whoever waits there may wait for a rank that is cut off, and that is not known to be dead.
        """
        with self._lock:
            self._over = max(self._over, before)
            for group in self._open_groups():
                if self._is_over(group):
                    self._fail_over(group)

    def _is_over(self, group: _Group) -> bool:
        return 0 < group.key[0] < self._over

    def _open_groups(self) -> list[_Group]:
        return [*self._groups.values(), *self._forming.values()]

    def _serve(self, channel: Channel) -> None:
        message = channel.receive(time.monotonic() + _SEND_TIMEOUT_S)
        self.has_been_asked = True
        if (other := versions.find_other(message)) is not None:
            self._refuse_release(message, other, channel)
            return
        try:
            request = parse_join(message)
        except BootstrapError as error:
            _send(channel, {"error": "malformed", "message": f"JOIN: {error}", "rank": None})
            return
        with self._lock:
            if not self._closed:
                self._enter(request, channel)

    def _refuse_release(self, message: Any, other: str, channel: Channel) -> None:
        """Refuse a rank of a release with another protocol: its world cannot form."""
        members, rank, name = parse_stranger(message)
        text = (
            f"{name} has {other}, but the rendezvous server where ranks meet, in the launcher, has "
            f"{versions.OURS}: {versions.ADVICE}"
        )
        with self._lock:
            if rank is not None:
                self._refused[rank] = text
            for group in [g for g in self._groups.values() if g.members == members]:
                self._fail(group, "version", text, rank)
        _send(channel, {"error": "version", "message": text, "rank": rank})

    def _enter(self, request: Request, channel: Channel) -> None:
        """Let a rank join, or refuse it. Under the lock."""
        members, member, key = request.members, request.member, (request.scope, request.members)
        group = self._groups.get(key)
        if group is None:
            group = _Group(key, time.monotonic() + request.timeout_s, request.timeout_s)
        previous = group.joined.get(member.rank)
        if previous is not None and previous[0].pid != member.pid:
            text = f"{previous[0]} has joined already, and so does pid {member.pid} now"
            _send(channel, {"error": "conflict", "message": text, "rank": member.rank})
            return
        if key not in self._groups:
            self._groups[key] = group
            os.eventfd_write(self._bell, 1)  # the watcher has a new deadline
        kept = channel.keep()
        if request.scope:  # the others go on without a rank whose host is lost
            notice_lost_host(kept.fileno())
        group.joined[member.rank] = (member, kept)
        group.gone.pop(member.rank, None)
        self._lost.pop((request.scope, member.rank), None)
        self._refused.pop(member.rank, None)
        if member.rank == members[0]:
            group.config, group.notes = request.config, request.notes
        self._waiting[kept.fileno()] = (group, member.rank, kept)
        # Before the answer the rank sends nothing more: its socket becomes readable when it goes.
        self._watched.register(kept.fileno(), select.EPOLLIN)
        dead = [rank for scope, rank in self._dead if scope == request.scope and rank in members]
        lost = [
            other
            for (scope, rank), other in self._lost.items()
            if scope == request.scope and rank in members
        ]
        refused = [rank for rank in self._refused if rank in members]
        if refused:  # and then it has ended
            self._fail(group, "version", self._refused[refused[0]], refused[0])
        elif self._is_over(group):
            self._fail_over(group)
        elif dead:  # the first to have ended: the likely cause of the others
            self._fail_dead(group, dead[0])
        elif lost:
            self._fail_lost(group, lost[0])
        elif not self._refuse_conflict(group, member) and len(group.joined) == len(members):
            self._complete(group)

    def _watch(self) -> None:
        """Run the watcher's thread: it hears ranks, and sees who goes away or is late."""
        while not self._closed:
            with self._lock:
                deadlines = [group.next_deadline() for group in self._open_groups()]
            wait_s = min(deadlines, default=_WATCH_S + time.monotonic()) - time.monotonic()
            ready = self._watched.poll(min(max(0.0, wait_s), _WATCH_S))
            with self._lock:
                for fd, _ in ready:
                    if fd == self._bell:
                        os.eventfd_read(self._bell)
                    elif fd in self._waiting:
                        self._hear(fd)
                now = time.monotonic()
                for group in [g for g in self._open_groups() if g.next_deadline() <= now]:
                    self._fail_late(group, now)

    def _hear(self, fd: int) -> None:
        """Hear a rank that says something, or has gone away."""
        group, rank, channel = self._waiting[fd]
        member, current = group.joined.get(rank, (None, None))
        if self._forming.get(group.epoch) is not group or current is not channel:
            self._dismiss(fd)
            return
        try:
            message = channel.receive(time.monotonic() + _SEND_TIMEOUT_S)
            word = parse_word(message, group.epoch)
        except (EOFError, OSError):
            self._dismiss(fd)
            return
        except BootstrapError as error:
            word = str(error), None
        if word is None:
            group.forming.discard(rank)
            if not group.forming:
                self._forming.pop(group.epoch)
                self._formed_scope = max(self._formed_scope, group.key[0])
                self._has_formed.notify_all()
                self._tell(group, encode({"formed": group.epoch}))
            return
        text, lost = word
        if lost is None:
            self._fail(group, "gave_up", f"{member} could not form the world: {text}", rank)
        else:
            self._fail(group, "rank_lost", text, lost)

    def _dismiss(self, fd: int) -> None:
        """Close the connection of a rank that has gone away, or is not waited for any more."""
        group, rank, channel = self._waiting.pop(fd)
        self._watched.unregister(fd)
        if rank in group.joined and group.joined[rank][1] is channel:
            member, _ = group.joined.pop(rank)
            group.gone[rank] = member, time.monotonic() + GONE_GRACE_S
        channel.close()
        if group.epoch and not group.joined:  # nobody is left to form it, or to be told
            self._forget(group)

    def _forget(self, group: _Group) -> None:
        if self._groups.get(group.key) is group:
            del self._groups[group.key]
        self._forming.pop(group.epoch, None)

    def _complete(self, group: _Group) -> None:
        parts = encode_members([group.joined[rank][0] for rank in group.members])
        terms = {"config": group.config, "notes": group.notes}
        # So it grows, too, when another process takes the server's part later.
        epoch = max(self._epoch, group.key[0] * WORLDS_PER_SCOPE + self._first_in_scope) + 1
        parts[0] = {"epoch": epoch, **terms, **parts[0]}
        try:
            bodies = [encode(part) for part in parts]
        except BootstrapError as error:
            self._fail(group, "malformed", f"the answer to all ranks: {error}", None)
            return
        del self._groups[group.key]
        self._epoch = epoch
        group.epoch, group.forming = epoch, set(group.members)
        group.deadline = max(group.deadline, time.monotonic() + _FORMING_S)
        self._forming[group.epoch] = group
        self._tell(group, *bodies)

    def _tell(self, group: _Group, *bodies: bytes) -> None:
        for _, channel in group.joined.values():
            with contextlib.suppress(OSError):  # one that went away is no concern of the others
                for body in bodies:
                    channel.send_encoded(body, time.monotonic() + _SEND_TIMEOUT_S)

    def _refuse_conflict(self, group: _Group, member: Member) -> bool:
        """Refuse a group if it and another one wait for each other's ranks, for ever.

        Returns whether it has done so.
        """
        for other in self._groups.values():
            if other is group or group.key[0] or member.rank not in other.members:
                continue
            for rank in group.members:
                if rank in other.joined:
                    text = (
                        f"rank {member.rank} asks for the world {list(group.members)}, but rank "
                        f"{rank} for {list(other.members)}: all ranks of a world must give the "
                        "same comm"
                    )
                    self._fail(other, "conflict", text, member.rank)
                    self._fail(group, "conflict", text, member.rank)
                    return True
        return False

    def _fail_dead(self, group: _Group, rank: int) -> None:
        cause = self._dead[group.key[0], rank]
        text = f"rank {rank} {cause}, so the world {list(group.members)} cannot form"
        self._fail(group, "rank_lost", text, rank)

    def _fail_over(self, group: _Group) -> None:
        text = f"the job is in epoch {self._over}: the world of epoch {group.key[0]} is over"
        self._fail(group, "gave_up", text, None)

    def _fail_lost(self, group: _Group, member: Member) -> None:
        text = f"{member} ended while the world was forming"
        self._fail(group, "rank_lost", text, member.rank)

    def _name(self, rank: int) -> str:
        return f"{rank} (host {self.host_of[rank]})" if rank < len(self.host_of) else str(rank)

    def _fail_late(self, group: _Group, now: float) -> None:
        """Fail a group of which a deadline has passed."""
        lost = [member for member, until in group.gone.values() if until <= now]
        if lost:
            self._lost.update({(group.key[0], member.rank): member for member in lost})
            self._fail_lost(group, lost[0])
            return
        missing = ", ".join(map(self._name, group.missing()))
        limit = "KOLOVOD_START_TIMEOUT_S sets the limit"
        if group.key[0]:
            limit = "KOLOVOD_START_TIMEOUT_S and KOLOVOD_LATE_FAILURE_S set the limit"
        if group.epoch:
            text = f"rank {missing} joined, but did not form the world with the others. {limit}"
        else:
            there = ", ".join(str(rank) for rank in sorted(group.joined))
            text = (
                f"rank {missing} did not call init() within {group.timeout_s:g} s of the first "
                f"(there: {there}). {limit}"
            )
        self._fail(group, "timeout", text, group.missing()[0])

    def _fail(self, group: _Group, kind: str, text: str, rank: int | None) -> None:
        """Tell everybody in the group, and forget it. Under the lock."""
        self._forget(group)
        self._tell(group, encode({"error": kind, "message": text, "rank": rank}))


def _send(channel: Channel, message: dict[str, Any]) -> None:
    # A rank that went away meanwhile is no concern of the others.
    with contextlib.suppress(OSError):
        channel.send(message, time.monotonic() + _SEND_TIMEOUT_S)
