"""Operations, buckets and hosts, as tables of a report. PURE."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kolovod.observe.reading import Operation, RankEvents
from kolovod.observe.summary import common_operations

__all__ = ["BucketRow", "HostRow", "OperationRow", "buckets", "hosts", "operations"]

_CLASSES = (
    (64 << 10, "up to 64 KiB"),
    (1 << 20, "64 KiB to 1 MiB"),
    (8 << 20, "1 to 8 MiB"),
    (1 << 62, "more than 8 MiB"),
)


@dataclass(frozen=True)
class OperationRow:
    """All operations of a name and verb that every rank took part in; times in microseconds."""

    name: str
    verb: str
    dtype: str
    """The dtype of the last operation's first tensor."""
    count: int
    bytes: int
    """The bytes of all operations, on the first rank."""
    carried_us: float
    """All of them, in the mean of the ranks. Operations of one bucket share its time."""
    waited_us: float
    """The mean time from a rank's submission until the operation was carried."""
    last: int
    """The rank that was most often the last to submit."""
    last_share: float


@dataclass(frozen=True)
class BucketRow:
    """Buckets of about one size, on the first rank."""

    size: str
    count: int
    bytes: int
    carried_us: float
    """The median."""
    bytes_per_s: float
    """The median rate, by bytes of tensors."""


class HostRow(NamedTuple):
    """A host that ranks ran on."""

    host: str
    machine: str
    ranks: tuple[int, ...]
    cores: float
    """The cores that its ranks may use, of the one that may use most; 0 unknown."""


def operations(ranks: Mapping[int, RankEvents]) -> list[OperationRow]:
    """Return the rows of the operations, those that took longest first."""
    first = ranks[min(ranks)]
    by_row: dict[tuple[str, str], list[tuple[object, ...]]] = {}
    for key in common_operations(ranks):
        op = first.operations.get(key)
        if op is not None:
            by_row.setdefault((op.row, op.verb), []).append(key)
    found = []
    for (row, verb), keys in by_row.items():
        mine = [first.operations[key] for key in keys]
        seen = [
            (rank.submitted[key], rank.operations[key])
            for rank in ranks.values() for key in keys if key in rank.operations
        ]  # fmt: skip
        last = Counter(max(ranks, key=lambda n: ranks[n].submitted[key]) for key in keys)
        number, times = min(last.items(), key=lambda each: (-each[1], each[0]))
        found.append(
            OperationRow(
                name=row,
                verb=verb.lower(),
                dtype=max(mine, key=lambda op: op.started_us).dtype,
                count=len(keys),
                bytes=sum(op.bytes for op in mine),
                carried_us=sum(op.ended_us - op.started_us for _, op in seen) / len(ranks),
                waited_us=statistics.fmean(op.started_us - at for at, op in seen),
                last=number,
                last_share=times / len(keys),
            )
        )
    return sorted(found, key=lambda each: (-each.carried_us, each.name, each.verb))


def buckets(ranks: Mapping[int, RankEvents]) -> list[BucketRow]:
    """Return the rows of buckets by size, the small ones first.

    A bucket's time is that of the rank which began last.
    """
    by_bucket: dict[tuple[str, int], list[list[Operation]]] = {}
    for rank in ranks.values():
        mine: dict[tuple[str, int], list[Operation]] = {}
        for (where, bucket, _, _), op in rank.operations.items():
            mine.setdefault((where, bucket), []).append(op)
        for key, members in mine.items():
            by_bucket.setdefault(key, []).append(members)
    classes: dict[str, list[tuple[int, float]]] = {name: [] for _, name in _CLASSES}
    for each in by_bucket.values():
        size = sum(op.bytes for op in each[0])
        started = max(op.started_us for members in each for op in members)
        ended = max(op.ended_us for members in each for op in members)
        if size and ended > started:
            name = next(name for most, name in _CLASSES if size <= most or most == 1 << 62)
            classes[name].append((size, ended - started))
    return [_bucket_row(name, seen) for name, seen in classes.items() if seen]


def _bucket_row(name: str, seen: Sequence[tuple[int, float]]) -> BucketRow:
    return BucketRow(
        name,
        len(seen),
        sum(size for size, _ in seen),
        statistics.median(time_us for _, time_us in seen),
        statistics.median(1e6 * size / time_us for size, time_us in seen),
    )


def hosts(ranks: Mapping[int, RankEvents]) -> list[HostRow]:
    """Return the rows of the hosts, in the order of their first ranks."""
    there: dict[str, list[int]] = {}
    for number, rank in ranks.items():
        there.setdefault(rank.host, []).append(number)
    return [
        HostRow(
            host, ranks[numbers[0]].machine, tuple(numbers), max(ranks[n].cores for n in numbers)
        )
        for host, numbers in there.items()
    ]
