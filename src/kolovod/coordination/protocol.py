"""Messages between members of an elastic job and its coordinator.

Pure: values in, JSON values out, and back with every field checked. After the handshake
(net/channel.py) whoever listens says whether it is a coordinator, or which it knows (``address`` is
"" for the launcher, which all know). To a coordinator a member says who it is; from then on both
sides speak when they have to::

    listener -> caller      {"coordinator": n or null, "is_here": bool, "address": text,
                             "formed": world or null, "rendezvous": text,
                             "policy": policy or null}

    member -> coordinator   {"protocol": n, "version": text, "number": n or null, "slot": n,
                             "host": text, "record": record, "facts": facts or null,
                             "left": [number, record] or null, of who was in the slot before,
                             "process": n or null, which it is of a launcher's processes,
                             "contact": [addresses, pid, pid space, path of the record]}
    coordinator -> member   {"you": member, "formed": world}
    member -> coordinator   {"alive": record, "has_state": bool, "leaves": bool, "stops": bool,
                             "ends": bool, "broken": text, "epoch": n, "unreached": n or null,
                             "late": bool}
                            {"promised": record}
                            {"agreed": [[term, coordinator], epoch], "record": record}
                            {"prepared": [[term, coordinator], epoch], "works": bool}
                            {"resigns": text, "record": record}
                            {"proofs": [proof]} of processes on its host
    coordinator -> member   {"ask": [term, coordinator]}
                            {"prepare": world}
                            {"propose": world, "urgent": bool, "reason": text}
                            {"formed": world, "reason": text, "is_let_go": bool,
                             "others_come": bool}, or "others_come" alone when it changes
                            {"stop": text}, {"alive": true}
                            {"facts": facts}
                            {"contacts": [contact]} for when the coordinator is lost

    member  [number, slot, host]        ballot  [term, coordinator]
    world   {"ballot", "epoch", "members", "basis": [world], "joined": [number], "resets"}
    record  {"promised": ballot, "formed": world or null, "agreed": world or null}
    proof   [number, cause, record or null, has finished]
    facts   {"formed": world, "proofs": [proof], "entrants": [member], "leaving": [number],
             "has_state": [number]}
    contact [number, addresses, pid, pid space, path of the record]
    policy  {name: value} of ``membership.Policy``
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, NamedTuple, TypeVar

from kolovod.coordination.consensus import Ballot, Member, Proof, Record, Stamp, World
from kolovod.coordination.coordinator_state import Facts
from kolovod.coordination.membership import Policy
from kolovod.errors import ElasticBootstrapError
from kolovod.net import messages
from kolovod.net.messages import MAX_RANKS

__all__ = [
    "Contact",
    "Hello",
    "Left",
    "ballot_of",
    "contact_of",
    "encode_contact",
    "encode_facts",
    "encode_hello",
    "encode_member",
    "encode_policy",
    "encode_proof",
    "encode_reason",
    "encode_record",
    "encode_stamp",
    "encode_world",
    "facts_of",
    "hello_of",
    "list_of",
    "member_of",
    "policy_of",
    "proof_of",
    "reason_of",
    "record_of",
    "stamp_of",
    "world_of",
]

_MAX_REASON = 1 << 12
_MAX_NUMBER = 1 << 53
_MAX_BASIS = 64
_MAX_HOST = 255
_MAX_ADDRESSES = 1 << 10
_MAX_PATH = 1 << 10
_MAX_PID_SPACE = 128

T = TypeVar("T")


class Contact(NamedTuple):
    """The data by which a member is found, and by which others on its host watch it."""

    number: int
    addresses: str
    """The addresses at which it listens, as coordinator or to say who that is."""
    pid: int
    pid_space: str
    """An identifier of where the pid counts (boot and pid namespace); "": unknown."""
    record_path: str
    """See record_file.py."""


class Left(NamedTuple):
    """The number and the record of the process that was in a slot before."""

    number: int
    record: Record


class Hello(NamedTuple):
    """The first message of a member, or of a process that wants to be one."""

    number: int | None
    slot: int
    host: str
    contact: Contact
    """Its number counts only if the member has one."""
    record: Record
    facts: Facts | None = None
    """The facts that it has from another coordinator."""
    left: Left | None = None
    """What it has found of the process that was in its slot before."""
    process: int | None = None
    """The number by which the launcher that has started it calls it: no two processes of a job have
    the same. Two that fill one slot may run at a time, where a host was lost and is reached
    again."""


def encode_member(member: Member) -> list[Any]:
    """Return a ``member`` as the module's docstring has it."""
    return [member.number, member.slot, member.host]


def encode_world(world: World) -> dict[str, Any]:
    """Return a ``world`` as the module's docstring has it."""
    return {
        "ballot": list(world.ballot),
        "epoch": world.epoch,
        "members": [encode_member(member) for member in world.members],
        "basis": [encode_world(base) for base in world.basis],
        "joined": sorted(world.joined),
        "resets": world.resets,
    }


def encode_record(record: Record) -> dict[str, Any]:
    """Return a ``record`` as the module's docstring has it."""
    return {
        "promised": list(record.promised),
        "formed": None if record.formed is None else encode_world(record.formed),
        "agreed": None if record.agreed is None else encode_world(record.agreed),
    }


def encode_reason(reason: str) -> str:
    """Return a reason as one line, cut if it is too long."""
    return messages.printable(" ".join(reason.splitlines()), _MAX_REASON)


def encode_stamp(stamp: Stamp) -> list[Any]:
    """Return a stamp as a list of its ballot and its epoch."""
    return [list(stamp.ballot), stamp.epoch]


def encode_proof(proof: Proof) -> list[Any]:
    """Return a ``proof`` as the module's docstring has it."""
    record = None if proof.record is None else encode_record(proof.record)
    return [proof.number, encode_reason(proof.cause), record, proof.has_finished]


def encode_facts(facts: Facts) -> dict[str, Any]:
    """Return ``facts`` as the module's docstring has them."""
    return {
        "formed": encode_world(facts.formed),
        "proofs": [encode_proof(proof) for proof in facts.proofs.values()],
        "entrants": [encode_member(member) for member in facts.entrants.values()],
        "leaving": sorted(facts.leaving),
        "has_state": sorted(facts.has_state),
    }


def encode_contact(contact: Contact) -> list[Any]:
    """Return a ``contact`` as the module's docstring has it."""
    return list(contact)


def encode_hello(hello: Hello) -> dict[str, Any]:
    """Return a member's first message to a coordinator, as the module's docstring has it."""
    left = hello.left
    return {
        "number": hello.number,
        "slot": hello.slot,
        "host": hello.host,
        "contact": encode_contact(hello.contact)[1:],
        "record": encode_record(hello.record),
        "left": None if left is None else [left.number, encode_record(left.record)],
        "facts": None if hello.facts is None else encode_facts(hello.facts),
        "process": hello.process,
    }


def encode_policy(policy: Policy) -> dict[str, Any]:
    """Return a ``policy`` as the module's docstring has it."""
    return asdict(policy)


def ballot_of(value: Any) -> Ballot:
    """Return a ballot. Raises BootstrapError naming what is wrong, as all below do."""
    numbers = messages.wholes({"ballot": value}, "ballot", -_MAX_NUMBER, _MAX_NUMBER)
    if len(numbers) != 2:
        raise ElasticBootstrapError("a malformed message: a ballot has two numbers")
    return Ballot(*numbers)


def stamp_of(value: Any) -> Stamp:
    """Return a stamp, from a ballot and an epoch."""
    if not isinstance(value, list) or len(value) != 2:
        raise ElasticBootstrapError("a malformed message: a stamp is a ballot and an epoch")
    return Stamp(ballot_of(value[0]), messages.whole({"epoch": value[1]}, "epoch", 0, _MAX_NUMBER))


def member_of(row: Any) -> Member:
    """Return a member."""
    given = _named(row, ("number", "slot", "host"), "a member")
    return Member(
        messages.whole(given, "number", 0, _MAX_NUMBER),
        messages.whole(given, "slot", 0, _MAX_NUMBER),
        messages.text(given, "host", _MAX_HOST),
    )


def world_of(value: Any, *, is_basis: bool = False) -> World:
    """Return a world; one that is in a basis has none itself."""
    given = messages.mapping(value)
    rows, basis = given.get("members"), given.get("basis")
    if not isinstance(rows, list) or not 0 < len(rows) <= MAX_RANKS:
        raise ElasticBootstrapError(f"a malformed message: a world has 1 to {MAX_RANKS} members")
    if not isinstance(basis, list) or len(basis) > (0 if is_basis else _MAX_BASIS):
        raise ElasticBootstrapError("a malformed message: a basis is a list of worlds without one")
    members = tuple(map(member_of, rows))
    world = World(
        ballot_of(given.get("ballot")),
        messages.whole(given, "epoch", 0, _MAX_NUMBER),
        members,
        tuple(world_of(base, is_basis=True) for base in basis),
        frozenset(messages.wholes(given, "joined", 0, _MAX_NUMBER)),
        messages.whole(given, "resets", 0, _MAX_NUMBER),
    )
    if len(world.numbers) < len(members):
        raise ElasticBootstrapError("a malformed message: a member is twice in a world")
    return world


def reason_of(message: dict[str, Any], name: str) -> str:
    """Return the text called ``name``."""
    return messages.text(message, name, _MAX_REASON)


def record_of(value: Any) -> Record:
    """Return a record."""
    given = messages.mapping(value)
    formed, agreed = given.get("formed"), given.get("agreed")
    return Record(
        ballot_of(given.get("promised")),
        None if formed is None else world_of(formed),
        None if agreed is None else world_of(agreed),
    )


def list_of(value: Any, item_of: Callable[[Any], T], what: str) -> list[T]:
    """Return a list of what ``item_of`` returns of each item. ``what``: its name in messages."""
    if not isinstance(value, list):
        raise ElasticBootstrapError(f"a malformed message: {what} are a list")
    return [item_of(item) for item in value]


def proof_of(row: Any) -> Proof:
    """Return a proof."""
    given = _named(row, ("number", "cause", "record", "has_finished"), "a proof")
    return Proof(
        messages.whole(given, "number", 0, _MAX_NUMBER),
        messages.text(given, "cause", _MAX_REASON),
        None if given["record"] is None else record_of(given["record"]),
        messages.flag(given, "has_finished"),
    )


def facts_of(value: Any) -> Facts:
    """Return facts."""
    given = messages.mapping(value)
    proofs = list_of(given.get("proofs"), proof_of, "proofs")
    entrants = list_of(given.get("entrants"), member_of, "entrants")
    return Facts(
        world_of(given.get("formed")),
        {proof.number: proof for proof in proofs},
        {member.number: member for member in entrants},
        frozenset(messages.wholes(given, "leaving", 0, _MAX_NUMBER)),
        frozenset(messages.wholes(given, "has_state", 0, _MAX_NUMBER)),
    )


def contact_of(row: Any) -> Contact:
    """Return a contact."""
    given = _named(row, Contact._fields, "a contact")
    return Contact(
        messages.whole(given, "number", 0, _MAX_NUMBER),
        messages.text(given, "addresses", _MAX_ADDRESSES),
        messages.whole(given, "pid", 1, _MAX_NUMBER),
        messages.text(given, "pid_space", _MAX_PID_SPACE),
        messages.text(given, "record_path", _MAX_PATH),
    )


def hello_of(value: Any) -> Hello:
    """Return a member's first message to a coordinator."""
    given = messages.mapping(value)
    has_number = given.get("number") is not None
    number = messages.whole(given, "number", 0, _MAX_NUMBER) if has_number else None
    left, facts = given.get("left"), given.get("facts")
    has_process = given.get("process") is not None
    return Hello(
        number,
        messages.whole(given, "slot", 0, _MAX_NUMBER),
        messages.text(given, "host", _MAX_HOST),
        contact_of([number or 0, *list_of(given.get("contact"), lambda item: item, "contacts")]),
        record_of(given.get("record")),
        None if facts is None else facts_of(facts),
        None if left is None else _left_of(left),
        messages.whole(given, "process", 0, _MAX_NUMBER) if has_process else None,
    )


def _left_of(row: Any) -> Left:
    given = _named(row, ("number", "record"), "what a process has left")
    return Left(messages.whole(given, "number", 0, _MAX_NUMBER), record_of(given["record"]))


def policy_of(value: Any) -> Policy:
    """Return a policy; whoever says it has checked what it means."""
    given = messages.mapping(value)
    limit = given.get("reset_limit")
    return Policy(
        min_np=messages.whole(given, "min_np", 0, _MAX_NUMBER),
        max_np=messages.whole(given, "max_np", 0, _MAX_NUMBER),
        replica_size=messages.whole(given, "replica_size", 1, _MAX_NUMBER),
        **{name: _seconds(given, name) for name in _TIMES},
        reset_limit=None if limit is None else messages.whole(given, "reset_limit", 0, _MAX_NUMBER),
        ends_for_growth=messages.flag(given, "ends_for_growth"),
        go_on_after_loss=messages.flag(given, "go_on_after_loss"),
        replaced_are_dead=messages.flag(given, "replaced_are_dead"),
    )


_TIMES = (
    "elastic_timeout_s",
    "gather_s",
    "gather_started_s",
    "silence_s",
    "prepare_s",
    "broken_s",
    "hang_s",
)


def _seconds(given: dict[str, Any], name: str) -> float:
    value: Any = given.get(name)
    if type(value) not in (int, float) or not value >= 0:
        raise ElasticBootstrapError(
            f"a malformed message: {name} is {value!r:.40}; expected seconds"
        )
    return float(value)


def _named(row: Any, names: Iterable[str], what: str) -> dict[str, Any]:
    """Return the row's fields by name."""
    expected = tuple(names)
    if not isinstance(row, list) or len(row) != len(expected):
        raise ElasticBootstrapError(f"a malformed message: {what} has {', '.join(expected)}")
    return dict(zip(expected, row, strict=True))
