"""Facts of a training that a timeline shows: its steps, its links, its cores. PURE.

For each rank and step these are: how long the script computed (all time but that in which it waited
for communication), after how much of that it submitted which gradients, and when it waited. They
are medians of all ranks and of those steps in which the same was submitted as in most, without the
first two.

If ranks keep the cores of a machine busy, they compute slower than they would alone. Then a rank's
computing is taken to be that of its script's thread, without what the thread did while it waited.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from kolovod.errors import CommandArgumentError
from kolovod.observe.reading import (
    Events,
    Interval,
    Operation,
    RankEvents,
    clipped,
    length,
    of_ranks,
    union,
)
from kolovod.observe.recorder import AS, ON_GPU
from kolovod.observe.trace import Event
from kolovod.planning.costs import Cluster, Costs, Link, bucket_load, rounds, wire_bytes
from kolovod.planning.model import Request, Step, simulate

__all__ = ["Measured", "measured", "measured_sorted"]

_WARM_UP = 2  # steps: memory is touched first, ranks agree on names
_LEAST_STEPS = 3
_LATENCY_S = 50e-6  # where nothing says more
_LEAST_LINK_BYTES = 64 << 10  # of a bucket that says something of the rate
_RATE_SHARE = 0.75  # of the bytes went slower: they waited for cores, or for late ranks
_BUSY = 0.9  # of the cores of a machine: from here on they are what ranks wait for
_DEVIATION = 1.4826  # of a normal distribution, over its median absolute deviation
_MOST_JITTER = 0.25


class Kind(NamedTuple):
    """A kind of gradients, submitted at once."""

    bytes: int
    tensors: int
    dtype: str
    codec: str


Submitted = tuple[str, int, Kind]
"""Its row in the timeline, which one there within the step, and what it is."""


@dataclass(frozen=True)
class Measured:
    """The facts that a plan is made from."""

    step: Step
    cluster: Cluster
    costs: Costs
    steps_s: tuple[float, ...]
    """The duration of each measured step, on the first rank."""
    slowest: str
    """The rank that computes longest, and its host."""
    knows_link: bool
    """Operations have crossed between hosts."""
    knows_cores: bool
    """The timeline says how many there are; else they are taken to be enough."""

    @property
    def step_s(self) -> float:
        """The median."""
        return statistics.median(self.steps_s)

    @property
    def modelled_s(self) -> float:
        """The step that the model predicts for the run that was measured."""
        return simulate(self.step, self.cluster, self.costs).step_s


@dataclass
class _Seen:
    """One step of one rank; seconds from its begin."""

    duration_s: float
    waits: list[Interval]
    requests: dict[Submitted, float]
    """When each was submitted."""
    thread_s: float
    """The time that the script's thread has computed without waiting; 0 unknown."""
    process_s: float
    """The time that all threads have computed; 0 unknown."""
    waiting_cpu_s: float

    @property
    def computing_s(self) -> float:
        return self.duration_s - length(self.waits)

    def computed_by(self, at_s: float) -> float:
        """Return how much of the step's computing is done at that moment."""
        return at_s - length(clipped(self.waits, (0.0, at_s)))


def measured(events: Iterable[Event]) -> Measured:
    """Return what a timeline shows. Raises InvalidArgumentError if it is too little for a plan."""
    return measured_sorted(of_ranks(events))


def measured_sorted(found: Events) -> Measured:
    """Return what the events of a timeline show, which are sorted already; see ``measured``."""
    ranks = found.ranks
    steps = {number: _steps_of(rank) for number, rank in ranks.items()}
    _check(found, steps)
    usual = Counter(frozenset(seen.requests) for seen in _all(steps)).most_common(1)[0][0]
    steps = {n: [s for s in each if frozenset(s.requests) == usual] for n, each in steps.items()}
    _check(found, steps)
    cluster, knows_cores = _cluster(ranks)
    knows_link = cluster.hosts > 1 and any(
        op.verb == "ALLREDUCE" and op.bytes for op in ranks[min(ranks)].operations.values()
    )
    if knows_link:
        cluster = replace(cluster, link=_link(found, cluster))
    step = _step(steps, usual, cluster)
    costs = _costs(ranks)
    step = _freed(step, steps, cluster, costs)
    by_rank = {n: statistics.median(s.computing_s for s in each) for n, each in steps.items()}
    slowest = max(by_rank, key=lambda number: by_rank[number])
    return Measured(
        step,
        cluster,
        costs,
        tuple(seen.duration_s for seen in steps[min(steps)]),
        f"rank {slowest} on {ranks[slowest].host}",
        knows_link,
        knows_cores,
    )


def _all(steps: Mapping[int, Sequence[_Seen]]) -> list[_Seen]:
    return [seen for each in steps.values() for seen in each]


def _check(found: Events, steps: Mapping[int, Sequence[_Seen]]) -> None:
    least = min(len(each) for each in steps.values())
    if least < _LEAST_STEPS:
        count = max(len(rank.steps) for rank in found.ranks.values())
        raise CommandArgumentError(
            f"this timeline has {count} optimizer steps, of which {least} are alike on all ranks "
            f"and not among the first {_WARM_UP}; a plan needs {_LEAST_STEPS} of these: record ten "
            "steps or more. A script without kolovod's optimizer says with kolovod.span(\"optimizer"
            ' step"): where each step ends'
        )
    if not any(seen.requests for seen in _all(steps)):
        raise CommandArgumentError(
            "no allreduce of a gradient is in the steps of this timeline: record one with two ranks"
            " or more (with one nothing is exchanged)"
        )
    if not any(seen.waits for seen in _all(steps)):
        raise CommandArgumentError(
            "this timeline does not show when the script waits for communication, and without that "
            "nothing can be said of what is hidden: tf.function and jax.jit do not say it"
        )


# Steps ------------------------------------------------------------------------------------------


def _kind_of(op: Operation) -> Kind | None:
    """Return the kind of an operation; None unless it is an allreduce of something."""
    if op.verb != "ALLREDUCE" or not op.bytes:
        return None
    dtype, _, codec = op.dtype.partition(AS)
    return Kind(op.bytes, op.tensors, dtype, codec)


def _of_all(where: str) -> bool:
    """Return whether it is the world's, not a process set's."""
    return " in set " not in where


def _submitted(rank: RankEvents) -> list[tuple[float, str, Kind]]:
    """Return what a rank asked all others for, and when (us); ordered by time."""
    found = []
    for key, at_us in rank.submitted.items():
        op = rank.operations.get(key)
        kind = _kind_of(op) if op is not None and _of_all(key[0]) else None
        if op is not None and kind is not None:
            found.append((at_us, op.row, kind))
    return sorted(found)


def _steps_of(rank: RankEvents) -> list[_Seen]:
    """Return the steps of one rank, without the first ones."""
    ends = sorted(end for _, end in rank.steps)
    waits = union(rank.waits)
    starts, until = [start for start, _ in waits], [end for _, end in waits]
    wait_cpu = sorted(rank.wait_cpu)
    cpu_starts = [wait.start_us for wait in wait_cpu]
    submitted = _submitted(rank)
    times = [at for at, _, _ in submitted]
    cpu = {end.at_us: end for end in rank.step_ends}
    seen = []
    for begin, end in list(pairwise(ends))[_WARM_UP - 1 :]:
        requests: dict[Submitted, float] = {}
        rows: Counter[str] = Counter()
        for at, row, kind in submitted[bisect_left(times, begin) : bisect_left(times, end)]:
            requests[row, rows[row], kind] = (at - begin) / 1e6
            rows[row] += 1
        near = waits[bisect_right(until, begin) : bisect_left(starts, end)]
        inside = [((a - begin) / 1e6, (b - begin) / 1e6) for a, b in clipped(near, (begin, end))]
        waiting = wait_cpu[bisect_left(cpu_starts, begin) : bisect_left(cpu_starts, end)]
        thread = process = 0.0
        if begin in cpu and end in cpu:
            thread = cpu[end].thread_cpu_us - cpu[begin].thread_cpu_us
            thread -= sum(wait.thread_cpu_us for wait in waiting)
            process = cpu[end].process_cpu_us - cpu[begin].process_cpu_us
        in_waits = sum(wait.process_cpu_us for wait in waiting)
        one = _Seen((end - begin) / 1e6, inside, requests, thread / 1e6, process / 1e6,
                    in_waits / 1e6)  # fmt: skip
        if one.computing_s > 0:
            seen.append(one)
    return seen


def _step(
    steps: Mapping[int, Sequence[_Seen]],
    usual: frozenset[Submitted],
    cluster: Cluster,
) -> Step:
    """Return a usual step, as it was where it was measured."""
    every = _all(steps)
    compute_s = statistics.median(seen.computing_s for seen in every)
    at_s = {
        request: statistics.median(
            seen.computed_by(seen.requests[request]) / seen.computing_s for seen in every
        )
        for request in usual
    }
    # A group is ready when its last rank has it, but ranks are alike here; the order is the usual.
    requests = [
        Request(at_s[request] * compute_s, *request[2])
        for request in sorted(usual, key=lambda request: at_s[request])
    ]
    is_busy = _is_busy(every, compute_s, cluster)
    work = [[seen.thread_s if is_busy else seen.computing_s for seen in each]
            for each in steps.values()]  # fmt: skip
    medians = [statistics.median(each) for each in work]
    jitter = _DEVIATION * statistics.median(
        abs(time_s / median - 1) for each, median in zip(work, medians, strict=True)
        for time_s in each
    )  # fmt: skip
    return Step(
        compute_s,
        tuple(requests),
        _waits(every, compute_s),
        jitter=min(jitter, _MOST_JITTER),
        skew=max(1.0, max(medians) / statistics.median(medians)),
    )


def _waits(every: Sequence[_Seen], compute_s: float) -> tuple[float, ...]:
    """Return after how much computing the script waits, in steps that wait as often as most."""
    often = Counter(len(seen.waits) for seen in every).most_common(1)[0][0]
    alike = [seen for seen in every if len(seen.waits) == often]
    shares = (
        statistics.median(seen.computed_by(seen.waits[i][0]) / seen.computing_s for seen in alike)
        for i in range(often)
    )
    return tuple(sorted(share * compute_s for share in shares))


# Machines and links -----------------------------------------------------------------------------


def _cluster(ranks: Mapping[int, RankEvents]) -> tuple[Cluster, bool]:
    """Return the cluster of the ranks, its link still unknown, and whether cores are known."""
    hosts = Counter(rank.host for rank in ranks.values())
    by_machine: dict[str, list[RankEvents]] = {}
    for rank in ranks.values():
        by_machine.setdefault(rank.machine or f"of {rank.host}", []).append(rank)
    knows_cores = all(rank.cores > 0 for rank in ranks.values())
    cores = min(map(_cores, by_machine.values())) if knows_cores else float("inf")
    hosts_per_machine = max(len({r.host for r in there}) for there in by_machine.values())
    link = Link(float("inf"), _LATENCY_S)
    per_host = max(hosts.values())
    return Cluster(len(hosts), per_host, cores, link, hosts_per_machine), knows_cores


def _cores(ranks: Sequence[RankEvents]) -> float:
    """Return one machine's cores: all that a rank may use, or what quotas of its hosts allow."""
    mask = 0
    for rank in ranks:
        mask |= rank.mask
    by_host: dict[str, float] = {}
    for rank in ranks:
        own = rank.mask.bit_count()
        of_quota = rank.cores if rank.cores < own else float("inf")
        by_host[rank.host] = min(by_host.get(rank.host, float("inf")), of_quota)
    together = float(mask.bit_count()) or max(rank.cores for rank in ranks)
    return min(together, sum(by_host.values()))


def _link(found: Events, cluster: Cluster) -> Link:
    """Return the link by what buckets have reached: the rate of the fastest quarter of the bytes.

    Slower ones waited for cores, or for a rank that began late.
    """
    latency_s = found.link[1] if found.link is not None else _LATENCY_S
    guess = Link(found.link[0] if found.link and found.link[0] else 1e8, latency_s)
    assumed = replace(cluster, link=guess)
    seen = []
    for operations in _buckets(found.ranks).values():
        started = max(op.started_us for op in operations)
        ended = max(op.ended_us for op in operations)
        kinds = [kind for op in operations if (kind := _kind_of(op))]
        sent = [wire_bytes(kind.bytes, kind.dtype, kind.codec, assumed) for kind in kinds]
        total = sum(sent) / len(found.ranks)  # all carry the same
        in_a_row = max((rounds(k.bytes, k.dtype, k.codec, assumed) for k in kinds), default=0)
        time_s = (ended - started) / 1e6 - in_a_row * latency_s
        if total >= _LEAST_LINK_BYTES and time_s > 0:
            seen.append((total / time_s, total))
    if not seen:
        return guess
    seen.sort()
    until, passed = _RATE_SHARE * sum(bytes_ for _, bytes_ in seen), 0.0
    for rate, carried in seen:
        passed += carried
        if passed >= until:
            return Link(rate, latency_s)
    return Link(seen[-1][0], latency_s)


def _buckets(ranks: Mapping[int, RankEvents]) -> dict[tuple[str, int], list[Operation]]:
    """Return the world's operations on all ranks, by what carried them and the bucket."""
    buckets: dict[tuple[str, int], list[Operation]] = {}
    for rank in ranks.values():
        for (where, bucket, _, _), op in rank.operations.items():
            if _of_all(where):
                buckets.setdefault((where, bucket), []).append(op)
    return buckets


# Cores ------------------------------------------------------------------------------------------


def _costs(ranks: Mapping[int, RankEvents]) -> Costs:
    """Return the costs on processors: almost none for what NCCL carries on GPUs."""
    usual = Costs()
    carriers = {key[0] for key, op in ranks[min(ranks)].operations.items() if _kind_of(op)}
    if carriers and all(carrier.endswith(ON_GPU) for carrier in carriers):
        return replace(usual.times(0.0), operation_s=usual.operation_s)
    return usual


def _is_busy(every: Sequence[_Seen], compute_s: float, cluster: Cluster) -> bool:
    """Return whether computing ranks leave no core of their machine idle."""
    busy_s = statistics.median(seen.process_s - seen.waiting_cpu_s for seen in every)
    is_known = min(seen.thread_s for seen in every) > 0
    wanted = cluster.ranks_per_machine * busy_s / compute_s
    return is_known and wanted > _BUSY * cluster.cores


def _freed(
    step: Step, steps: Mapping[int, Sequence[_Seen]], cluster: Cluster, costs: Costs
) -> Step:
    """Return the step as it would be alone on the machine: nobody else takes cores from it.

    What a process computes while its script waits says nothing of what that costs: where cores are
    idle, whoever waits yields rather than sleeps.
    """
    every = _all(steps)
    busy_s = statistics.median(seen.process_s - seen.waiting_cpu_s for seen in every)
    thread_s = statistics.median(seen.thread_s for seen in every)
    if busy_s <= 0:
        return step
    alone_s = step.compute_s
    if _is_busy(every, step.compute_s, cluster):
        alone_s = min(thread_s, step.compute_s)
    carried = simulate(replace(step, cores=0.0), cluster, costs)
    hidden = 1 - min(1.0, carried.waiting_s / carried.carried_s) if carried.carried_s else 0.0
    cpu_s = sum(bucket_load(r.bytes, r.dtype, r.codec, cluster, costs).cpu_s for r in step.requests)
    share = alone_s / step.compute_s
    return replace(
        step,
        compute_s=alone_s,
        requests=tuple(replace(r, at_s=r.at_s * share) for r in step.requests),
        waits_s=tuple(at * share for at in step.waits_s),
        cores=max(busy_s - hidden * cpu_s, thread_s) / alone_s,
    )
