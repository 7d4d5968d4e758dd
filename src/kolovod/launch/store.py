"""Where ranks meet: each says which world it wants, and hears who else is in it.

The launcher runs one ``Store`` on the loopback interface for the whole job, so that a world can be
formed again after a failure. One conversation per rank and world::

    rank  -> store   {"members": [[first, last] of launcher ranks that follow each other],
                      "member": member, "config": {name: number}, "timeout_s"}
    store -> rank    {"epoch": n, "config": {...}, "texts": [...], "members": [member]}
                or   {"error": kind, "message": text, "rank": launcher rank or null}
    member           [rank, host, pid, pid_namespace, socket, user, address, encrypts], in an
                     answer with the numbers of host and pid_namespace in texts, which are few

The answer comes when all members have joined; its config is that of the first member. It is an
error at once when a member's process is known to have ended, or when two ranks wait for different
worlds that need each other; and after ``timeout_s`` of the rank that came first, naming the ranks
that are missing. Every world gets a new epoch number.

A rank that waits has no thread here: one watches all of them.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
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
from kolovod.launch.auth import Channel, encode
from kolovod.launch.messages import MAX_RANKS
from kolovod.launch.network import LOOPBACK, address_of, connect_any, listen, split_addresses
from kolovod.launch.server import Server

__all__ = ["Formation", "Member", "Store", "join"]

LABEL = "store"
_SEND_TIMEOUT_S = 5.0
_WATCH_S = 3600.0  # at most, between two looks at deadlines
_ANSWER_GRACE_S = 5.0  # the store's own deadline comes first: it knows who is missing
_MAX_TIMEOUT_S = 1e7
_MAX_TEXT = 1 << 16  # of an error
_MAX_ADDRESS = 512
_INT64_MAX = (1 << 63) - 1
_MAX_CONFIG = 256  # names; there are about forty
_SHARED_TEXTS = (1, 3)  # columns of a member that many have in common: host, pid_namespace
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
    encrypts: bool = False
    """Its KOLOVOD_ENCRYPT, which must be the same for all."""

    def __str__(self) -> str:
        return f"rank {self.rank} on host {self.host} (pid {self.pid})"


@dataclass(frozen=True)
class Formation:
    """A world that has come together: its number, and its members by ascending launcher rank."""

    epoch: int
    members: tuple[Member, ...]
    config: Mapping[str, int] = field(default_factory=dict)
    """What the first member has given as its engine's configuration."""


@dataclass
class _Group:
    """A world that is waiting for members. Guarded by the store's lock."""

    members: tuple[int, ...]
    deadline: float
    timeout_s: float
    joined: dict[int, tuple[Member, Channel]] = field(default_factory=dict)
    config: dict[str, int] = field(default_factory=dict)

    def missing(self) -> list[int]:
        return [rank for rank in self.members if rank not in self.joined]


class Store:
    """The rendezvous server. Thread based; ``close`` ends its threads."""

    def __init__(self, secret: str, size: int, *hosts: str) -> None:
        """``hosts``: the addresses where it listens; by default the loopback interface."""
        listeners = listen(hosts or [LOOPBACK], backlog=max(128, size))
        self.address = ",".join(map(address_of, listeners))
        self.host_of: Sequence[str] = ()
        """The host of each rank, for messages, if the launcher knows."""
        self._lock = threading.Lock()
        self._groups: dict[tuple[int, ...], _Group] = {}
        self._waiting: dict[int, tuple[_Group, int, Channel]] = {}  # by descriptor
        self._watched = select.epoll()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._watched.register(self._bell, select.EPOLLIN)
        self._dead: dict[int, str] = {}
        self._epoch = 0
        self._closed = False
        self._servers = [
            Server(listener, secret, LABEL, self._serve, max_strangers=64 + size)
            for listener in listeners
        ]
        self._watcher = threading.Thread(target=self._watch, name="kolovod store", daemon=True)

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
            for group in list(self._groups.values()):
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
            members, member, timeout_s, config = _parse_join(message)
        except BootstrapError as error:
            _send(channel, {"error": "malformed", "message": f"JOIN: {error}", "rank": None})
            return
        with self._lock:
            if not self._closed:
                self._enter(members, member, timeout_s, config, channel)

    def _enter(
        self,
        members: tuple[int, ...],
        member: Member,
        timeout_s: float,
        config: dict[str, int],
        channel: Channel,
    ) -> None:
        """Let a rank join, or refuse it. Under the lock."""
        group = self._groups.get(members)
        if group is None:
            group = _Group(members, time.monotonic() + timeout_s, timeout_s)
        previous = group.joined.get(member.rank)
        if previous is not None and previous[0].pid != member.pid:
            text = f"{previous[0]} has joined already, and so does pid {member.pid} now"
            _send(channel, {"error": "conflict", "message": text, "rank": member.rank})
            return
        if group.members not in self._groups:
            self._groups[members] = group
            os.eventfd_write(self._bell, 1)  # the watcher has a new deadline
        kept = channel.keep()
        group.joined[member.rank] = (member, kept)
        if member.rank == members[0]:
            group.config = config
        self._waiting[kept.fileno()] = (group, member.rank, kept)
        # The rank sends nothing more: its socket becomes readable when it goes away, be it after
        # the answer or before.
        self._watched.register(kept.fileno(), select.EPOLLIN)
        dead = [rank for rank in self._dead if rank in members]
        if dead:  # the first to have ended: the likely cause of the others
            self._fail_dead(group, dead[0])
        elif not self._refuse_conflict(group, member) and len(group.joined) == len(members):
            self._complete(group)

    def _watch(self) -> None:
        """The watcher's thread: ranks that go away, and groups that are not complete in time."""
        while not self._closed:
            with self._lock:
                groups = list(self._groups.values())
            now = time.monotonic()
            wait_s = min((group.deadline - now for group in groups), default=_WATCH_S)
            ready = self._watched.poll(min(max(0.0, wait_s), _WATCH_S))
            with self._lock:
                for fd, _ in ready:
                    if fd == self._bell:
                        os.eventfd_read(self._bell)
                    elif fd in self._waiting:
                        self._dismiss(fd)
                now = time.monotonic()
                for group in [g for g in self._groups.values() if g.deadline <= now]:
                    self._fail_late(group)

    def _dismiss(self, fd: int) -> None:
        """Close the connection of a rank that has gone away, or is not waited for any more."""
        group, rank, channel = self._waiting.pop(fd)
        self._watched.unregister(fd)
        if rank in group.joined and group.joined[rank][1] is channel:
            del group.joined[rank]
        channel.close()
        if not group.joined and self._groups.get(group.members) is group:
            del self._groups[group.members]

    def _complete(self, group: _Group) -> None:
        del self._groups[group.members]
        self._epoch += 1
        texts: dict[str, int] = {}
        rows = []
        for rank in group.members:
            row = list(astuple(group.joined[rank][0]))
            for column in _SHARED_TEXTS:
                row[column] = texts.setdefault(row[column], len(texts))
            rows.append(row)
        answer = {"epoch": self._epoch, "config": group.config, "texts": list(texts)}
        body = encode({**answer, "members": rows})
        for _, channel in group.joined.values():
            with contextlib.suppress(OSError):  # one that went away is no concern of the others
                channel.send_encoded(body, time.monotonic() + _SEND_TIMEOUT_S)

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

    def _name(self, rank: int) -> str:
        return f"{rank} (host {self.host_of[rank]})" if rank < len(self.host_of) else str(rank)

    def _fail_late(self, group: _Group) -> None:
        missing = ", ".join(map(self._name, group.missing()))
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


def _parse_join(message: Any) -> tuple[tuple[int, ...], Member, float, dict[str, int]]:
    """Raises BootstrapError naming what is wrong."""
    members = _parse_spans(message)
    member = _parse_member(messages.mapping(message).get("member"))
    if member.rank not in members:
        raise BootstrapError(f"a malformed message: rank {member.rank} is not among the members")
    timeout_s = messages.number(message, "timeout_s", _MAX_TIMEOUT_S)
    return members, member, timeout_s, _parse_config(message)


def _parse_spans(message: Any) -> tuple[int, ...]:
    """The members, from ``[first, last]`` for those that follow each other."""
    spans = messages.mapping(message).get("members")
    if not isinstance(spans, list) or not 0 < len(spans) <= MAX_RANKS:
        raise BootstrapError("a malformed message: members must be a list of spans")
    members: list[int] = []
    for span in spans:
        pair = {"span": span}
        first_and_last = messages.wholes(pair, "span", 0, MAX_RANKS - 1)
        before = members[-1] if members else -1
        if len(first_and_last) != 2 or not before < first_and_last[0] <= first_and_last[1]:
            raise BootstrapError("a malformed message: members must ascend")
        members += range(first_and_last[0], first_and_last[1] + 1)
    return tuple(members)


def _parse_member(row: Any) -> Member:
    """From its fields, in their order."""
    names = [field.name for field in fields(Member)]
    if not isinstance(row, list) or len(row) != len(names):
        raise BootstrapError(f"a malformed message: a member has {len(names)} fields")
    given = dict(zip(names, row, strict=True))
    return Member(
        rank=messages.whole(given, "rank", 0, MAX_RANKS - 1),
        host=messages.text(given, "host", 255),
        pid=messages.whole(given, "pid", 0, _INT64_MAX),
        pid_namespace=messages.text(given, "pid_namespace", 64),
        socket=messages.text(given, "socket", 107),
        user=messages.whole(given, "user", 0, _INT64_MAX),
        address=messages.text(given, "address", _MAX_ADDRESS),
        encrypts=messages.flag(given, "encrypts"),
    )


def _parse_config(message: Any) -> dict[str, int]:
    """Some names with int64 values: a store serves worlds of any version."""
    config = messages.mapping(messages.mapping(message).get("config"))
    if len(config) > _MAX_CONFIG:
        raise BootstrapError(f"a malformed message: a config of {len(config)} values")
    return {name: messages.whole(config, name, -_INT64_MAX - 1, _INT64_MAX) for name in config}


def _parse_answer(
    answer: Any, members: Sequence[int], own_config: Mapping[str, int] | None
) -> Formation:
    """The world, or the error that the store has told; whose config has the names of ours."""
    if "error" in messages.mapping(answer):
        kind = _ERRORS.get(messages.text(answer, "error", 64), BootstrapError)
        said = answer.get("message")
        said = said[:_MAX_TEXT] if isinstance(said, str) else "the store gives no reason"
        if kind is RankLostError:
            raise RankLostError(said, messages.whole(answer, "rank", 0, MAX_RANKS - 1))
        raise kind(said)
    epoch = messages.whole(answer, "epoch", 1, (1 << 32) - 1)
    found = tuple(map(_parse_member, _with_texts(answer)))
    if [member.rank for member in found] != list(members):
        raise BootstrapError("a malformed message: the members are not those that were asked for")
    config = messages.config(answer, own_config) if own_config else _parse_config(answer)
    return Formation(epoch, found, config)


def _with_texts(answer: dict[str, Any]) -> list[Any]:
    """The rows of the members, with their shared texts put in."""
    texts, rows = answer.get("texts"), answer.get("members")
    if not isinstance(texts, list) or not isinstance(rows, list):
        raise BootstrapError("a malformed message: texts and members must be lists")
    for row in rows:
        if not isinstance(row, list) or len(row) <= max(_SHARED_TEXTS):
            raise BootstrapError("a malformed message: a member is a list")
        for column in _SHARED_TEXTS:
            pair = {"text": row[column]}
            row[column] = texts[messages.whole(pair, "text", 0, len(texts) - 1)]
    return rows


def _spans(members: Sequence[int]) -> list[list[int]]:
    """Numbers that follow each other as ``[first, last]``: a world of all ranks is one span."""
    spans: list[list[int]] = []
    for rank in members:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return spans


def join(
    address: str,
    secret: str,
    members: Sequence[int],
    member: Member,
    timeout_s: float,
    config: Mapping[str, int] | None = None,
) -> Formation:
    """Wait at the store at ``address`` ("host:port", or several) until all ``members`` have joined.

    ``config``: this rank's engine configuration, which holds for all if it is the first member.

    Raises RankLostError if one of them has ended, StartTimeoutError naming the missing ones,
    InvalidArgumentError if they ask for different worlds, AuthenticationError, BootstrapError.
    """
    split_addresses(address, "KOLOVOD_STORE")
    deadline = time.monotonic() + timeout_s + _ANSWER_GRACE_S
    request = {
        "members": _spans(members),
        "member": astuple(member),
        "config": dict(config or {}) if member.rank == members[0] else {},
        "timeout_s": timeout_s,
    }
    try:
        channel = connect_any(address, secret, LABEL, deadline, sealed=member.encrypts)
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
    return _parse_answer(answer, members, config)
