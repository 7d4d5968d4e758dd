"""The two ranks that hold each part of what is sharded, and what goes where when it is cut anew.

Pure functions of ranks, hosts and ranges of elements; ``torch/resharding.py`` sends what they say.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

__all__ = ["Held", "Move", "Span", "copied_by", "moves", "orphans", "said_of"]


class Span(NamedTuple):
    """Elements of the flat parameter of that index, from ``begin`` up to ``end``."""

    parameter: int
    begin: int
    end: int


class Held(NamedTuple):
    """A span that a rank has."""

    parameter: int
    begin: int
    end: int
    is_copy: bool
    """True for a copy of another rank's part: it is asked for where that one is gone."""


class Move(NamedTuple):
    """A span that ``target`` needs, and gets from ``source``, which is itself where it has it."""

    parameter: int
    begin: int
    end: int
    source: int
    target: int


def copied_by(hosts: Sequence[str]) -> list[int]:
    """Return, by rank, the rank that holds the copy of its part; ``hosts``: by rank.

    That one is on another host wherever that can be: losing a host loses no part if no host has
    more than half of the ranks. Each rank holds one copy. A rank that is alone holds its own.

    Ranks in the order of their hosts are shifted by the size of the largest host: so each host's
    ranks get past all others of that host, and past none twice.
    """
    size = len(hosts)
    first: dict[str, int] = {}
    for rank, host in enumerate(hosts):
        first.setdefault(host, rank)
    order = sorted(range(size), key=lambda rank: (first[hosts[rank]], rank))
    largest = max(Counter(hosts).values(), default=0)
    shift = largest if largest < size else 1
    holders = [0] * size
    for place, rank in enumerate(order):
        holders[rank] = order[(place + shift) % size]
    return holders


def orphans(holders: Sequence[int], members: Sequence[int], left: Iterable[int]) -> list[int]:
    """Ranks of ``members`` whose part none of ``left`` has; both are the numbers of members.

    ``holders``: as ``copied_by`` says; empty where there are no copies.
    """
    alive = set(left)
    return [
        rank
        for rank, member in enumerate(members)
        if member not in alive and not (holders and members[holders[rank]] in alive)
    ]


def said_of(
    lost: Sequence[int], holders: Sequence[int], hosts: Sequence[str], epoch: int | None
) -> str:
    """Return the message to users about parts of the ranks ``lost``; "" where there are none."""
    if not lost:
        return ""
    gone = sorted({*lost, *(holders[rank] for rank in lost if holders)})
    who = ", ".join(f"rank {rank} on host {hosts[rank]}" for rank in gone)
    kept = "a part is on two ranks, and both of one are" if holders else "and no part has a copy"
    return (
        f"{who} (of epoch {epoch}) are not in the job any more: of a sharded optimizer "
        f"(shard_state) {kept} gone, so the job cannot go on. Start it again from a checkpoint, "
        "which optimizer.state_dict(), called by all ranks, gives"
    )


def moves(
    have: Sequence[Iterable[Held]], need: Sequence[Iterable[Span]]
) -> tuple[dict[int, list[Move]], list[Span]]:
    """Return the moves by index, in an order that is the same for all, and the spans nobody has.

    ``have``, ``need``: by rank. A rank that has a part itself is asked before one that has a copy,
    and of several the lowest one, so that all ranks that get an element get it from one. A move is
    of one held span.
    """
    sources = _sources(have)
    found: dict[int, list[Move]] = defaultdict(list)
    missing: list[Span] = []
    for target, spans in enumerate(need):
        for index, begin, end in spans:
            at = begin
            row = sources.get(index, [])
            place = max(0, bisect_right(row, (begin, end, len(have))) - 1)
            for first, last, source in row[place:]:
                if first >= end or at >= end:
                    break
                if last <= at:
                    continue
                if first > at:
                    missing.append(Span(index, at, first))
                until = min(last, end)
                found[index].append(Move(index, max(at, first), until, source, target))
                at = until
            if at < end:
                missing.append(Span(index, at, end))
    return found, missing


def _sources(have: Sequence[Iterable[Held]]) -> Mapping[int, list[tuple[int, int, int]]]:
    """Return, by index, ranges in order that do not overlap, each with the rank that gives it."""
    by_index: dict[int, list[tuple[int, int, bool, int]]] = defaultdict(list)
    for rank, spans in enumerate(have):
        for index, begin, end, is_copy in spans:
            if begin < end:
                by_index[index].append((begin, end, is_copy, rank))
    return {index: _swept(sorted(spans)) for index, spans in by_index.items()}


def _swept(spans: Sequence[tuple[int, int, bool, int]]) -> list[tuple[int, int, int]]:
    """One rank for each element of ``spans``, which are in order of their begin."""
    edges = sorted({edge for begin, end, _, _ in spans for edge in (begin, end)})
    open_now: list[tuple[bool, int, int, int]] = []
    chosen: list[tuple[int, int, tuple[bool, int, int, int]]] = []
    coming = 0
    for at, until in pairwise(edges):
        while coming < len(spans) and spans[coming][0] <= at:
            begin, end, is_copy, rank = spans[coming]
            heapq.heappush(open_now, (is_copy, rank, end, begin))
            coming += 1
        while open_now and open_now[0][2] <= at:
            heapq.heappop(open_now)
        if not open_now:
            continue
        if chosen and chosen[-1][1:] == (at, open_now[0]):
            chosen[-1] = (chosen[-1][0], until, open_now[0])
        else:
            chosen.append((at, until, open_now[0]))
    return [(begin, end, source[1]) for begin, end, source in chosen]
