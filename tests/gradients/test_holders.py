"""Which two ranks hold a part, and what goes where when ranks come and go."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from kolovod.gradients.holders import Held, Span, copied_by, moves, orphans, said_of

HOSTS = [
    *(["a"] * size for size in range(1, 6)),
    ["a", "b"],
    ["a", "a", "b"],
    ["a", "b", "b"],
    ["a", "b", "a", "b"],
    ["a", "a", "b", "b"],
    ["a", "b", "b", "b", "c"],
    ["a", "a", "b", "b", "c"],
    ["a", "b", "c", "a", "b"],
    ["a", "a", "a", "a", "b", "b", "b", "c", "c"],
]


@pytest.mark.parametrize("hosts", HOSTS, ids=lambda hosts: "".join(hosts))
def test_a_copy_is_on_another_rank_and_on_another_host_where_that_can_be(hosts: list[str]) -> None:
    size = len(hosts)
    holders = copied_by(hosts)
    assert sorted(holders) == list(range(size))
    assert size == 1 or all(holder != rank for rank, holder in enumerate(holders))
    largest = max(Counter(hosts).values())
    near = sum(hosts[rank] == hosts[holder] for rank, holder in enumerate(holders))
    assert near == max(0, 2 * largest - size)  # those of the largest who find no place elsewhere


@pytest.mark.parametrize("hosts", HOSTS, ids=lambda hosts: "".join(hosts))
def test_what_is_left_of_whichever_ranks_are_lost(hosts: list[str]) -> None:
    size = len(hosts)
    members = [10 * rank + 3 for rank in range(size)]  # numbers of processes
    holders = copied_by(hosts)
    for lost in itertools.combinations(range(size), 1):
        left = [members[rank] for rank in range(size) if rank not in lost]
        assert orphans(holders, members, left) == (list(lost) if size == 1 else [])
        assert orphans([], members, left) == list(lost)
    for rank, holder in enumerate(holders):
        if size == 1:
            continue
        left = [m for r, m in enumerate(members) if r not in (rank, holder)]
        assert rank in orphans(holders, members, left)
        text = said_of(orphans(holders, members, left), holders, hosts, 7)
        assert all(f"rank {each} on host {hosts[each]}" in text for each in (rank, holder))
    for host, count in Counter(hosts).items():
        if 2 * count <= size:
            left = [m for m, where in zip(members, hosts, strict=True) if where != host]
            assert not orphans(holders, members, left)
    assert said_of([], holders, hosts, 7) == ""


def ranges(sizes: list[int], count: int) -> list[list[Span]]:
    """Parameters of so many elements, the small ones in a row, as ranks have them."""
    found: list[list[Span]] = [[] for _ in range(count)]
    cuts = [sum(sizes) * rank // count for rank in range(count + 1)]
    at = 0
    for index, length in enumerate(sizes):
        for rank in range(count):
            first, last = max(at, cuts[rank]), min(at + length, cuts[rank + 1])
            if first < last:
                found[rank].append(Span(index, first - at, last - at))
        at += length
    return found


@pytest.mark.parametrize("before", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("after", [1, 2, 3, 4, 5])
def test_each_element_comes_from_one_who_has_it(before: int, after: int) -> None:
    sizes = [7, 0, 23, 1, 40, 3]
    old, new = ranges(sizes, before), ranges(sizes, after)
    holders = copied_by(["h"] * before)
    for lost in range(-1, before if before > 1 else 0):
        left = [rank for rank in range(before) if rank != lost]
        held = [
            [Held(*span, False) for span in old[rank]]
            + [Held(*span, True) for span in old[holders.index(rank)] if before > 1]
            for rank in left
        ][:after]
        if len(left) > after:  # some have left at the same time
            left = left[:after]
        have = held + [[] for _ in range(after - len(held))]
        of = copied_by(["h"] * after)
        need = [[*new[rank], *(new[of.index(rank)] if after > 1 else [])] for rank in range(after)]
        found, missing = moves(have, need)
        gone = orphans(holders, range(before), left)
        assert sum(s.end - s.begin for s in missing) == sum(
            (s.end - s.begin) * (1 + (after > 1)) for rank in gone for s in old[rank]
        )
        got: Counter[tuple[int, int, int]] = Counter()
        for index, rows in found.items():
            for move in rows:
                assert move.parameter == index
                spans = [s for s in have[move.source] if s.parameter == index]
                (span,) = [s for s in spans if s.begin <= move.begin and move.end <= s.end]
                owners = [r for r in left if any(s == span[:3] for s in old[r])]
                assert span.is_copy == (not owners)  # a copy only where its owner is gone
                for element in range(move.begin, move.end):
                    got[move.target, index, element] += 1
        for rank, spans in enumerate(need):
            for span in spans:
                for element in range(span.begin, span.end):
                    is_gone = any(m[0] == span[0] and m[1] <= element < m[2] for m in missing)
                    assert got[rank, span.parameter, element] == (0 if is_gone else 1)


def test_any_spans_that_overlap() -> None:
    drawn = random.Random(4)
    for _ in range(300):
        size = drawn.randrange(1, 5)

        def spans(most: int) -> list[tuple[int, int]]:
            pairs = [sorted(drawn.sample(range(13), 2)) for _ in range(drawn.randrange(most))]
            return [(a, b) for a, b in pairs]

        have = [[Held(0, a, b, drawn.random() < 0.5) for a, b in spans(4)] for _ in range(size)]
        need = [[Span(0, a, b) for a, b in spans(2)] for _ in range(size)]
        found, missing = moves(have, need)
        for target, wanted in enumerate(need):
            for span in wanted:
                for element in range(span.begin, span.end):
                    best = min(
                        (
                            (held.is_copy, rank)
                            for rank, row in enumerate(have)
                            for held in row
                            if held.begin <= element < held.end
                        ),
                        default=None,
                    )
                    sources = [
                        move.source
                        for move in found.get(0, [])
                        if move.target == target and move.begin <= element < move.end
                    ]
                    assert sources == ([] if best is None else [best[1]])
                    assert (best is None) == any(m.begin <= element < m.end for m in missing)
