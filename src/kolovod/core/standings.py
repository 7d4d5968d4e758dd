"""Statements of ranks that wait, and the search in them for ranks that can never go on.

These are pure functions of data: ``deadlocks.py`` makes the statements, reads those of others, and
reports the error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import NamedTuple

__all__ = [
    "Message",
    "Scope",
    "Standing",
    "decode",
    "encode",
    "find_deadlock",
    "key_of",
    "text_of",
    "without_counts",
]

_MOST_TEXT = 700

Operation = tuple[str, str]
"""Its scope, and the hash of its name."""
Message = tuple[str, str, int]
"""Its scope, "send" or "recv", and the rank that is to meet it; -1: any."""
Counts = tuple[int, int, int, int]
"""Messages sent to a rank, and seen of it; its offers answered, and its answers to ours."""
_NOTHING: Counts = (0, 0, 0, 0)


class Scope(NamedTuple):
    """The world, or a process set, as one of its ranks sees it."""

    members: tuple[int, ...] | None
    """None: all ranks."""
    buckets: int
    """The number of buckets that have begun."""
    has_joined: bool
    """The rank contributes zeros to whatever the others submit."""
    receives: bool = False
    """A recv is pending."""
    exchanged: Mapping[int, Counts] | None = {}
    """The messages exchanged with each rank, but for those with none; None: too many to be told."""


class Standing(NamedTuple):
    """The statement of a rank, made while all of its threads that run the script wait."""

    scopes: Mapping[str, Scope]
    pending: frozenset[Operation]
    where: str
    """The operation that it waits for, and the line: "allreduce 'loss' at train.py:12"."""
    messages: frozenset[Message] = frozenset()
    """The messages that it waits for."""
    within_framework: bool = False
    """A framework holds the script up, and has come to rest; else it waits in calls of ours."""
    at_rest: bool = True
    """Nothing in the process computes, whatever the script waits for."""


def find_deadlock(said: Mapping[int, Standing], size: int) -> list[int]:
    """The ranks that can never go on, by what the ranks of a world of ``size`` have said."""

    def lacks(rank: int, operation: Operation) -> set[int]:
        scope = said[rank].scopes[operation[0]]
        found = set()
        for other in range(size) if scope.members is None else scope.members:
            standing = said.get(other)
            theirs = standing and standing.scopes.get(operation[0])
            if standing is None or not theirs or other == rank or operation in standing.pending:
                continue
            if theirs.buckets == scope.buckets and not theirs.has_joined:
                found.add(other)
        return found

    def meets(rank: int, message: Message) -> set[int]:
        """The ranks one of which is to meet it; empty if something is on its way."""
        name, verb, peer = message
        scope = said[rank].scopes[name]
        members = range(size) if scope.members is None else scope.members
        found = {peer} if peer >= 0 else {other for other in members if other != rank}
        for other in found:
            theirs = said[other].scopes.get(name) if other in said else None
            if theirs is None or theirs.exchanged is None or scope.exchanged is None:
                return set()
            sent, seen, _, answers = scope.exchanged.get(other, _NOTHING)
            their_sent, their_seen, answered, _ = theirs.exchanged.get(rank, _NOTHING)
            if verb == "recv":
                is_level = their_sent == seen
            else:  # who receives nothing need not have seen it
                is_level = answered == answers and (their_seen == sent or not theirs.receives)
            if not is_level:
                return set()
        return found

    lacking = {
        rank: [lacks(rank, operation) for operation in standing.pending]
        for rank, standing in said.items()
    }
    meeting = {
        rank: [meets(rank, message) for message in standing.messages]
        for rank, standing in said.items()
    }

    def may_go_on(rank: int) -> bool:
        return any(not others & stuck for others in lacking[rank]) or any(
            not others or others - stuck for others in meeting[rank]
        )

    stuck = {rank for rank in said if lacking[rank] or meeting[rank]}
    while free := set(filter(may_go_on, stuck)):
        stuck -= free
    if any(said[rank].within_framework for rank in stuck):
        resting = {rank: said[rank] for rank in said if said[rank].at_rest}
        if len(resting) < len(said):
            return find_deadlock(resting, size)
    return sorted(stuck)


def text_of(said: Mapping[int, Standing], stuck: list[int]) -> str:
    """The error for ``stuck`` ranks."""
    by_place: dict[str, list[str]] = {}
    for rank in stuck:
        by_place.setdefault(said[rank].where, []).append(str(rank))
    waits = "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)} in {where}"
        for where, ranks in by_place.items()
    )
    if len(waits) > _MOST_TEXT:
        waits = f"{waits[:_MOST_TEXT]}..."
    return (
        f"ranks wait for different operations, so that none can ever complete: {waits}. See "
        "whether a rank takes one step, or one operation, more than another"
    )


def key_of(text: str) -> str:
    return hashlib.blake2s(text.encode(), digest_size=6).hexdigest()


def without_counts(standing: Standing) -> Standing:
    scopes = {name: scope._replace(exchanged=None) for name, scope in standing.scopes.items()}
    return standing._replace(scopes=scopes)


def encode(standing: Standing) -> bytes:
    scopes = {
        name: [*scope[:4], scope.exchanged and list(scope.exchanged.items())]
        for name, scope in standing.scopes.items()
    }
    pending, messages = sorted(standing.pending), sorted(standing.messages)
    rests = [standing.within_framework, standing.at_rest]
    fields = [scopes, pending, standing.where, messages, *rests]
    return json.dumps(fields, separators=(",", ":")).encode()


def decode(text: bytes) -> Standing:
    """Raises ValueError or TypeError for what ``encode`` has not made."""
    scopes, pending, where, messages, within_framework, at_rest = json.loads(text)
    return Standing(
        {
            name: Scope(
                members and tuple(members),
                buckets,
                has_joined,
                receives,
                None
                if exchanged is None
                else {rank: (c[0], c[1], c[2], c[3]) for rank, c in exchanged or ()},
            )
            for name, (members, buckets, has_joined, receives, exchanged) in scopes.items()
        },
        frozenset((scope, key) for scope, key in pending),
        where,
        frozenset((scope, verb, peer) for scope, verb, peer in messages),
        within_framework,
        at_rest,
    )
