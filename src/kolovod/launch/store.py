"""Where ranks meet: each says which world it wants, and hears who else is in it.

The launcher runs one ``Store`` on the loopback interface for the whole job, so that a world can be
formed again after a failure. One conversation per rank and world::

    rank  -> store   {"members": [launcher ranks], "rank", "host", "pid", "pid_namespace",
                      "socket", "user", "address", "timeout_s"}
    store -> rank    {"epoch": n, "members": [{"rank", "host", "pid", "pid_namespace", "socket",
                      "user", "address"}]}
                or   {"error": kind, "message": text, "rank": launcher rank or null}

The answer comes when all members have joined. It is an error at once when a member's process is
known to have ended, or when two ranks wait for different worlds that need each other; and after
``timeout_s`` of the rank that came first, naming the ranks that are missing. Every world gets a new
epoch number.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kolovod.errors import (
    AuthenticationError,
    BootstrapError,
    InvalidArgumentError,
    KolovodError,
    RankLostError,
    StartTimeoutError,
)
from kolovod.launch import messages
from kolovod.launch.auth import Channel, Server, connect, poll_until
from kolovod.launch.messages import MAX_RANKS

__all__ = ["Formation", "Member", "Store", "join"]

LABEL = "store"
_SEND_TIMEOUT_S = 5.0
_ANSWER_GRACE_S = 5.0  # the store's own deadline comes first: it knows who is missing
_MAX_TIMEOUT_S = 1e7
_MAX_TEXT = 1 << 16  # of an error
_INT64_MAX = (1 << 63) - 1
_ERRORS: dict[str, type[KolovodError]] = {
    "rank_lost": RankLostError,
    "timeout": StartTimeoutError,
    "conflict": InvalidArgumentError,
    "malformed": BootstrapError,
    "closed": BootstrapError,
}


@dataclass(frozen=True)
class Member:
    """What a rank tells the others about itself."""

    rank: int
    """Its number in the job, as the launcher gave it."""
    host: str
    pid: int
    pid_namespace: str
    """Two ranks can watch each other by pid only within one namespace."""
    socket: str
    """Name of the abstract AF_UNIX socket where it listens as the leader."""
    user: int
    """Effective user id: the system keeps processes of different users apart."""
    address: str = ""
    """Where it listens for ranks of other hosts, "ip:port"; "" while nobody needs that."""

    def __str__(self) -> str:
        return f"rank {self.rank} on host {self.host} (pid {self.pid})"


@dataclass(frozen=True)
class Formation:
    """A world that has come together: its number, and its members by ascending launcher rank."""

    epoch: int
    members: tuple[Member, ...]


@dataclass
class _Group:
    """A world that is waiting for members. Guarded by the store's lock."""

    members: tuple[int, ...]
    deadline: float
    timeout_s: float
    joined: dict[int, tuple[Member, Channel]] = field(default_factory=dict)

    def missing(self) -> list[int]:
        return [rank for rank in self.members if rank not in self.joined]


class Store:
    """The rendezvous server. Thread based; ``close`` ends its threads."""

    def __init__(self, secret: str, size: int, host: str = "127.0.0.1") -> None:
        listener = socket.create_server((host, 0), backlog=max(128, size))
        self.address = f"{host}:{listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._groups: dict[tuple[int, ...], _Group] = {}
        self._dead: dict[int, str] = {}
        self._epoch = 0
        self._server = Server(listener, secret, LABEL, self._serve, max_strangers=64 + size)

    def start(self) -> None:
        """Begin to serve."""
        self._server.start()

    def close(self) -> None:
        """Stop; ranks that still wait are told so. Idempotent."""
        with self._lock:
            for group in list(self._groups.values()):
                self._fail(group, "closed", "the launcher is going away", None)
        self._server.close()

    def mark_dead(self, rank: int, cause: str) -> None:
        """The process of ``rank`` has ended. Worlds that need it fail now, or when asked for.

        ``cause`` completes "rank 3 ...", for example "was killed by signal 9 (SIGKILL)".
        """
        with self._lock:
            self._dead[rank] = cause
            for group in [g for g in self._groups.values() if rank in g.members]:
                self._fail_dead(group, rank)

    def _serve(self, channel: Channel) -> None:
        message = channel.receive(time.monotonic() + _SEND_TIMEOUT_S)
        try:
            members, member, timeout_s = _parse_join(message)
        except BootstrapError as error:
            _send(channel, {"error": "malformed", "message": f"JOIN: {error}", "rank": None})
            return
        with self._lock:
            group = self._enter(members, member, timeout_s, channel)
        if group is None:
            return
        # The rank sends nothing more: its socket becomes readable when it goes away, be it after
        # the answer (which the thread of the last one to join sends to all) or before.
        poll = select.poll()
        poll.register(channel, select.POLLIN)
        readable = poll_until(poll, group.deadline)
        with self._lock:
            if not readable and self._groups.get(members) is group:
                self._fail_late(group)
            if group.joined.get(member.rank, (None, None))[1] is channel:
                del group.joined[member.rank]
            if not group.joined and self._groups.get(members) is group:
                del self._groups[members]

    def _enter(
        self, members: tuple[int, ...], member: Member, timeout_s: float, channel: Channel
    ) -> _Group | None:
        """Let a rank join; None if it was refused. Under the lock."""
        group = self._groups.get(members)
        if group is None:
            group = _Group(members, time.monotonic() + timeout_s, timeout_s)
        previous = group.joined.get(member.rank)
        if previous is not None and previous[0].pid != member.pid:
            text = f"{previous[0]} has joined already, and so does pid {member.pid} now"
            _send(channel, {"error": "conflict", "message": text, "rank": member.rank})
            return None
        self._groups[members] = group
        group.joined[member.rank] = (member, channel)
        dead = [rank for rank in self._dead if rank in members]
        if dead:  # the first to have ended: the likely cause of the others
            self._fail_dead(group, dead[0])
            return None
        if self._refuse_conflict(group, member):
            return None
        if not group.missing():
            self._complete(group)
        return group

    def _complete(self, group: _Group) -> None:
        del self._groups[group.members]
        self._epoch += 1
        everybody = [asdict(group.joined[rank][0]) for rank in group.members]
        for _, channel in group.joined.values():
            _send(channel, {"epoch": self._epoch, "members": everybody})

    def _refuse_conflict(self, group: _Group, member: Member) -> bool:
        """Two ranks that wait for each other in different worlds would wait for ever."""
        for other in self._groups.values():
            if other is group or member.rank not in other.members:
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
        text = f"rank {rank} {self._dead[rank]}, so the world {list(group.members)} cannot form"
        self._fail(group, "rank_lost", text, rank)

    def _fail_late(self, group: _Group) -> None:
        missing = ", ".join(str(rank) for rank in group.missing())
        there = ", ".join(str(rank) for rank in sorted(group.joined))
        text = (
            f"rank {missing} did not call init() within {group.timeout_s:g} s of the first (there: "
            f"{there}). KOLOVOD_START_TIMEOUT_S sets the limit"
        )
        self._fail(group, "timeout", text, group.missing()[0])

    def _fail(self, group: _Group, kind: str, text: str, rank: int | None) -> None:
        """Tell everybody in the group, and forget it. Under the lock."""
        self._groups.pop(group.members, None)
        for _, channel in group.joined.values():
            _send(channel, {"error": kind, "message": text, "rank": rank})


def _send(channel: Channel, message: dict[str, Any]) -> None:
    # A rank that went away meanwhile is no concern of the others.
    with contextlib.suppress(OSError):
        channel.send(message, time.monotonic() + _SEND_TIMEOUT_S)


def _parse_join(message: Any) -> tuple[tuple[int, ...], Member, float]:
    """Raises BootstrapError naming what is wrong."""
    ranks = messages.wholes(message, "members", 0, MAX_RANKS - 1)
    if not ranks or ranks != sorted(set(ranks)):
        raise BootstrapError("a malformed message: members must ascend")
    member = _parse_member(message)
    if member.rank not in ranks:
        raise BootstrapError(f"a malformed message: rank {member.rank} is not among the members")
    return tuple(ranks), member, messages.number(message, "timeout_s", _MAX_TIMEOUT_S)


def _parse_member(message: Any) -> Member:
    return Member(
        rank=messages.whole(message, "rank", 0, MAX_RANKS - 1),
        host=messages.text(message, "host", 255),
        pid=messages.whole(message, "pid", 0, _INT64_MAX),
        pid_namespace=messages.text(message, "pid_namespace", 64),
        socket=messages.text(message, "socket", 107),
        user=messages.whole(message, "user", 0, _INT64_MAX),
        address=messages.text(message, "address", 64),
    )


def _parse_answer(answer: Any, members: Sequence[int]) -> Formation:
    """The world, or the error that the store has told."""
    if "error" in messages.mapping(answer):
        kind = _ERRORS.get(messages.text(answer, "error", 64), BootstrapError)
        said = answer.get("message")
        said = said[:_MAX_TEXT] if isinstance(said, str) else "the store gives no reason"
        if kind is RankLostError:
            raise RankLostError(said, messages.whole(answer, "rank", 0, MAX_RANKS - 1))
        raise kind(said)
    epoch = messages.whole(answer, "epoch", 1, (1 << 32) - 1)
    given = answer.get("members")
    found = tuple(map(_parse_member, given)) if isinstance(given, list) else ()
    if [member.rank for member in found] != list(members):
        raise BootstrapError("a malformed message: the members are not those that were asked for")
    return Formation(epoch, found)


def join(
    address: str, secret: str, members: Sequence[int], member: Member, timeout_s: float
) -> Formation:
    """Wait at the store at ``address`` ("host:port") until all ``members`` have joined.

    Raises RankLostError if one of them has ended, StartTimeoutError naming the missing ones,
    InvalidArgumentError if they ask for different worlds, AuthenticationError, BootstrapError.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise BootstrapError(f"KOLOVOD_STORE={address!r}: expected host:port")
    deadline = time.monotonic() + timeout_s + _ANSWER_GRACE_S
    request = {"members": list(members), "timeout_s": timeout_s, **asdict(member)}
    try:
        channel = connect(socket.AF_INET, (host, int(port)), secret, LABEL, deadline)
        with contextlib.closing(channel):
            channel.send(request, deadline)
            answer = channel.receive(deadline)
    except AuthenticationError:
        raise
    except (EOFError, OSError) as error:
        raise BootstrapError(
            f"rank {member.rank} cannot reach the launcher's store at {address} ({error}): has the "
            "launcher ended?"
        ) from error
    return _parse_answer(answer, members)
