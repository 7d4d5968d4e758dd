"""Ranges of positions in an epoch's order, as few numbers as they can be: they stand for many."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

__all__ = ["Span", "Spans", "count", "cut", "minus", "normal"]

Span = tuple[int, int]
"""Positions from the first number to before the second."""
Spans = tuple[Span, ...]


def count(spans: Spans) -> int:
    """Return how many positions there are."""
    return sum(stop - start for start, stop in spans)


def normal(spans: Iterable[Span]) -> Spans:
    """Return the spans ascending, with those that touch made one."""
    result: list[Span] = []
    for start, stop in sorted(spans):
        if start >= stop:
            continue
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return tuple(result)


def minus(spans: Spans, without: Spans) -> Spans:
    """Return ``spans`` without ``without``, both as ``normal`` makes them."""
    result: list[Span] = []
    at = 0
    for start, stop in spans:
        while at < len(without) and without[at][1] <= start:
            at += 1
        k = at
        while k < len(without) and without[k][0] < stop:
            if without[k][0] > start:
                result.append((start, without[k][0]))
            start = max(start, without[k][1])
            k += 1
        if start < stop:
            result.append((start, stop))
    return tuple(result)


def cut(spans: Spans, offsets: Sequence[int], start: int, stop: int) -> Spans:
    """Return the positions from ``start`` to before ``stop``. ``offsets``: of each span."""
    result: list[Span] = []
    at = bisect_right(offsets, start) - 1
    while start < stop:
        first = spans[at][0] + start - offsets[at]
        last = min(spans[at][1], first + stop - start)
        result.append((first, last))
        start += last - first
        at += 1
    return tuple(result)
