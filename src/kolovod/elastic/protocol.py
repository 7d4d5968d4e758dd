"""What members of an elastic job and its steward say to each other.

Pure: values in, JSON values out, and back with every field checked. After the handshake
(net/channel.py) a member says who it is; from then on both sides speak when they have to::

    member  -> steward  {"protocol": n, "version": text, "number": n or null, "slot": n,
                         "host": text, "pid": n, "record": record}
    steward -> member   {"you": member, "formed": world}
    member  -> steward  {"alive": record, "has_state": bool, "leaves": bool, "broken": text,
                         "epoch": n}
                        {"promised": record}
                        {"agreed": [[term, steward], epoch], "record": record}
                        {"resigns": text, "record": record}
    steward -> member   {"ask": [term, steward]}
                        {"propose": world, "urgent": bool, "reason": text}
                        {"formed": world, "reason": text}, {"stop": text}, {"alive": true}

    member  [number, slot, host]        ballot  [term, steward]
    world   {"ballot", "epoch", "members", "basis": [world], "joined": [number], "resets"}
    record  {"promised": ballot, "formed": world or null, "agreed": world or null}
"""

from __future__ import annotations

import itertools
from typing import Any

from kolovod.elastic.ballots import Ballot, Member, Record, Stamp, World
from kolovod.errors import BootstrapError
from kolovod.net import messages
from kolovod.net.messages import MAX_RANKS

__all__ = [
    "ballot_of",
    "encode_member",
    "encode_reason",
    "encode_record",
    "encode_stamp",
    "encode_world",
    "member_of",
    "reason_of",
    "record_of",
    "stamp_of",
    "world_of",
]

_MAX_REASON = 1 << 12
_MAX_NUMBER = 1 << 53
_MAX_BASIS = 64
_MAX_HOST = 255


def encode_member(member: Member) -> list[Any]:
    """See the module."""
    return [member.number, member.slot, member.host]


def encode_world(world: World) -> dict[str, Any]:
    """See the module."""
    return {
        "ballot": list(world.ballot),
        "epoch": world.epoch,
        "members": [encode_member(member) for member in world.members],
        "basis": [encode_world(base) for base in world.basis],
        "joined": sorted(world.joined),
        "resets": world.resets,
    }


def encode_record(record: Record) -> dict[str, Any]:
    """See the module."""
    return {
        "promised": list(record.promised),
        "formed": None if record.formed is None else encode_world(record.formed),
        "agreed": None if record.agreed is None else encode_world(record.agreed),
    }


def encode_reason(reason: str) -> str:
    """In one line; what is too long is cut."""
    return messages.printable(" ".join(reason.splitlines()), _MAX_REASON)


def encode_stamp(stamp: Stamp) -> list[Any]:
    """See the module."""
    return [list(stamp.ballot), stamp.epoch]


def ballot_of(value: Any) -> Ballot:
    """Raises BootstrapError naming what is wrong, as all below do."""
    numbers = messages.wholes({"ballot": value}, "ballot", -_MAX_NUMBER, _MAX_NUMBER)
    if len(numbers) != 2:
        raise BootstrapError("a malformed message: a ballot has two numbers")
    return Ballot(*numbers)


def stamp_of(value: Any) -> Stamp:
    """A ballot and an epoch."""
    if not isinstance(value, list) or len(value) != 2:
        raise BootstrapError("a malformed message: a stamp is a ballot and an epoch")
    return Stamp(ballot_of(value[0]), messages.whole({"epoch": value[1]}, "epoch", 0, _MAX_NUMBER))


def member_of(row: Any) -> Member:
    """One member."""
    if not isinstance(row, list) or len(row) != 3:
        raise BootstrapError("a malformed message: a member has a number, a slot and a host")
    given = dict(zip(("number", "slot", "host"), row, strict=True))
    return Member(
        messages.whole(given, "number", 0, _MAX_NUMBER),
        messages.whole(given, "slot", 0, _MAX_NUMBER),
        messages.text(given, "host", _MAX_HOST),
    )


def world_of(value: Any, *, is_basis: bool = False) -> World:
    """A world; what is in a basis has none itself."""
    given = messages.mapping(value)
    rows, basis = given.get("members"), given.get("basis")
    if not isinstance(rows, list) or not 0 < len(rows) <= MAX_RANKS:
        raise BootstrapError(f"a malformed message: a world has 1 to {MAX_RANKS} members")
    if not isinstance(basis, list) or len(basis) > (0 if is_basis else _MAX_BASIS):
        raise BootstrapError("a malformed message: a basis is a list of worlds without one")
    members = tuple(map(member_of, rows))
    numbers = [member.number for member in members]
    if any(a >= b for a, b in itertools.pairwise(numbers)):
        raise BootstrapError("a malformed message: members must ascend")
    return World(
        ballot_of(given.get("ballot")),
        messages.whole(given, "epoch", 0, _MAX_NUMBER),
        members,
        tuple(world_of(base, is_basis=True) for base in basis),
        frozenset(messages.wholes(given, "joined", 0, _MAX_NUMBER)),
        messages.whole(given, "resets", 0, _MAX_NUMBER),
    )


def reason_of(message: dict[str, Any], name: str) -> str:
    """The text called ``name``."""
    return messages.text(message, name, _MAX_REASON)


def record_of(value: Any) -> Record:
    """A record."""
    given = messages.mapping(value)
    formed, agreed = given.get("formed"), given.get("agreed")
    return Record(
        ballot_of(given.get("promised")),
        None if formed is None else world_of(formed),
        None if agreed is None else world_of(agreed),
    )
