"""The messages where ranks meet: who each of them is, and which world has come together.

Pure: values of messages in, values out. ``server.py`` answers, ``client.py`` asks; there stands in
which order they speak.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import Any, NamedTuple

from kolovod.errors import (
    BootstrapError,
    KolovodError,
    RankLostError,
    SettingError,
    StartTimeoutError,
)
from kolovod.net import messages
from kolovod.net.messages import MAX_RANKS

__all__ = [
    "Formation",
    "Member",
    "Request",
    "encode_members",
    "parse_answer",
    "parse_join",
    "parse_stranger",
    "parse_word",
    "raise_told",
    "spans",
]

_MAX_TIMEOUT_S = 1e7
_MAX_TEXT = 1 << 16  # of an error
_MAX_ADDRESS = 512
MAX_EPOCH = (1 << 32) - 1
WORLDS_PER_SCOPE = 1 << 12
MAX_SCOPE = (MAX_EPOCH + 1) // WORLDS_PER_SCOPE - 1
_PART = 512  # members in a message: with the longest names and addresses they fit
_INT64_MAX = (1 << 63) - 1
_MAX_CONFIG = 256  # names; there are about forty
_MAX_NOTES = 16
_MAX_NOTE = 1024
_SHARED_TEXTS = (1, 3)  # columns of a member that many have in common: host, pid_namespace
_ERRORS: dict[str, type[KolovodError]] = {
    "rank_lost": RankLostError,
    "timeout": StartTimeoutError,
    "conflict": SettingError,
    "malformed": BootstrapError,
    "version": BootstrapError,
    "gave_up": BootstrapError,
    "closed": BootstrapError,
}


@dataclass(frozen=True)
class Member:
    """The facts that a rank tells the others about itself."""

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
    """The address at which it listens for ranks of other hosts, "ip:port"; "" while nobody needs
    that."""
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
    """The engine's configuration that the first member has given."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """The texts that the first member tells the others besides, by name."""


class Request(NamedTuple):
    """The message with which a rank joins."""

    members: tuple[int, ...]
    member: Member
    timeout_s: float
    config: dict[str, int]
    notes: dict[str, str]
    scope: int
    """The scope of these numbers: the world of that epoch of an elastic job; 0: the job."""


def parse_join(message: Any) -> Request:
    """Return the request. Raises BootstrapError naming what is wrong."""
    members = _parse_spans(message)
    member = _parse_member(messages.mapping(message).get("member"))
    if member.rank not in members:
        raise BootstrapError(f"a malformed message: rank {member.rank} is not among the members")
    timeout_s = messages.number(message, "timeout_s", _MAX_TIMEOUT_S)
    scope = messages.whole(message, "scope", 0, MAX_SCOPE)
    return Request(members, member, timeout_s, _parse_config(message), _parse_notes(message), scope)


def parse_stranger(message: Any) -> tuple[tuple[int, ...], int | None, str]:
    """Return members, rank and a name for messages of a join by an incompatible release.

    That release has another protocol. What cannot be found in the message is empty, None or "a
    rank".
    """
    try:
        members = _parse_spans(message)
    except BootstrapError:
        members = ()
    row = message.get("member") if isinstance(message, dict) else None
    try:
        given = dict(
            zip(("rank", "host", "pid"), row if isinstance(row, list) else [], strict=False)
        )
        rank = messages.whole(given, "rank", 0, MAX_RANKS - 1)
        pid = messages.whole(given, "pid", 0, _INT64_MAX)
        return members, rank, f"rank {rank} on host {messages.text(given, 'host', 255)} (pid {pid})"
    except BootstrapError:
        return members, None, "a rank"


def _parse_spans(message: Any) -> tuple[int, ...]:
    """Return the members, from ``[first, last]`` for those that follow each other."""
    given = messages.mapping(message).get("members")
    if not isinstance(given, list) or not 0 < len(given) <= MAX_RANKS:
        raise BootstrapError("a malformed message: members must be a list of spans")
    members: list[int] = []
    for span in given:
        pair = {"span": span}
        first_and_last = messages.wholes(pair, "span", 0, MAX_RANKS - 1)
        before = members[-1] if members else -1
        if len(first_and_last) != 2 or not before < first_and_last[0] <= first_and_last[1]:
            raise BootstrapError("a malformed message: members must ascend")
        members += range(first_and_last[0], first_and_last[1] + 1)
    return tuple(members)


def _parse_member(row: Any) -> Member:
    """Return a member from its fields, in their order."""
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
    """Return int64 values by name, of any names: a server serves worlds of any version."""
    config = messages.mapping(messages.mapping(message).get("config"))
    if len(config) > _MAX_CONFIG:
        raise BootstrapError(f"a malformed message: a config of {len(config)} values")
    return {name: messages.whole(config, name, -_INT64_MAX - 1, _INT64_MAX) for name in config}


def _parse_notes(message: Any) -> dict[str, str]:
    """Return texts by name."""
    notes = messages.mapping(messages.mapping(message).get("notes"))
    if len(notes) > _MAX_NOTES:
        raise BootstrapError(f"a malformed message: {len(notes)} notes")
    return {name: messages.text(notes, name, _MAX_NOTE) for name in notes}


def encode_members(members: Sequence[Member]) -> list[dict[str, Any]]:
    """Return the parts of an answer that tell ``members``, each of which fits into a message."""
    parts = []
    for start in range(0, len(members), _PART):
        texts: dict[str, int] = {}
        rows = []
        for member in members[start : start + _PART]:
            row = list(astuple(member))
            for column in _SHARED_TEXTS:
                row[column] = texts.setdefault(row[column], len(texts))
            rows.append(row)
        parts.append({"texts": list(texts), "members": rows})
    return parts


def parse_answer(
    receive: Callable[[], Any], members: Sequence[int], own_config: Mapping[str, int] | None
) -> Formation:
    """Return the world, whose config has the names of ours; raise an error that was told instead.

    ``receive``: returns the next message; no more of them are taken than ``members`` need.
    """
    answer = receive()
    raise_told(answer)
    epoch = messages.whole(answer, "epoch", 1, MAX_EPOCH)
    config = messages.config(answer, own_config) if own_config else _parse_config(answer)
    notes = _parse_notes(answer)
    found = _parse_members(answer)
    while len(found) < len(members):
        found += _parse_members(receive())
    if [member.rank for member in found] != list(members):
        raise BootstrapError("a malformed message: the members are not those that were asked for")
    return Formation(epoch, tuple(found), config, notes)


def _parse_members(part: Any) -> list[Member]:
    """Return the members of one message, with their shared texts put in."""
    texts, rows = messages.mapping(part).get("texts"), part.get("members")
    if not isinstance(texts, list) or not isinstance(rows, list) or not rows:
        raise BootstrapError("a malformed message: texts and members must be lists")
    for row in rows:
        if not isinstance(row, list) or len(row) <= max(_SHARED_TEXTS):
            raise BootstrapError("a malformed message: a member is a list")
        for column in _SHARED_TEXTS:
            pair = {"text": row[column]}
            row[column] = texts[messages.whole(pair, "text", 0, len(texts) - 1)]
    return [_parse_member(row) for row in rows]


def raise_told(message: Any) -> None:
    """Raise the error that the rendezvous server has told, if it has told one."""
    if "error" not in messages.mapping(message):
        return
    kind = _ERRORS.get(messages.text(message, "error", 64), BootstrapError)
    said = message.get("message")
    said = said[:_MAX_TEXT] if isinstance(said, str) else "the rendezvous server gives no reason"
    if kind is RankLostError:
        raise RankLostError(said, messages.whole(message, "rank", 0, MAX_RANKS - 1))
    raise kind(said)


def parse_word(message: Any, epoch: int) -> tuple[str, int | None] | None:
    """Return why a rank cannot form the world, and the launcher rank that is lost, if one is.

    None: the rank says, after the answer, that it has formed the world of ``epoch``.
    """
    if "error" not in messages.mapping(message):
        messages.whole(message, "formed", epoch, epoch)
        return None
    said = message["error"]
    if not isinstance(said, str):
        raise BootstrapError("a malformed message: an error must be a text")
    lost = message.get("rank")
    if lost is not None:
        lost = messages.whole(message, "rank", 0, MAX_RANKS - 1)
    return said[:_MAX_TEXT], lost


def spans(members: Sequence[int]) -> list[list[int]]:
    """Return ``[first, last]`` of numbers that follow each other: all ranks are one span."""
    found: list[list[int]] = []
    for rank in members:
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return found
