"""A model of the time that a step of data-parallel training takes. PURE.

A rank computes; on its way it submits gradients, and waits for them, at fixed shares of its
computing. The engine carries buckets one after the other: each holds all that has become ready
while the former was on its way. A bucket takes the time of its messages, then that of the link or
of the thread which drives it, whichever is longer. On a machine all ranks do so at once, and if
their threads want more cores than there are, each gets an equal part unless it wants less (max-min
fairness: what Linux' scheduler does, I. Molnar's CFS and its successor). So time is simulated from
event to event, for one rank that stands for all.

Ranks differ: an operation begins when the last rank has submitted it. Among ``n`` ranks whose
computing has a relative deviation ``jitter``, the slowest takes longer by ``jitter`` times the
expected largest of ``n`` normal deviates (G. Blom, "Statistical Estimates and Transformed
Beta-Variables", 1958), and by the ``skew`` of a rank that is always slower.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist

from kolovod.planning.costs import Cluster, Costs, Load, bucket_load, negotiation_s

__all__ = ["Outcome", "Request", "Step", "alone_s", "largest_deviate", "simulate"]

FUSION_BYTES = 64 << 20  # the knob's default
_INFINITE = float("inf")


@dataclass(frozen=True)
class Request:
    """Gradients that a rank submits at once."""

    at_s: float
    """After so much computing."""
    bytes: int
    tensors: int = 1
    dtype: str = "float32"
    codec: str = ""
    """Between hosts: "int8", "int4", or "" for none."""


@dataclass(frozen=True)
class Step:
    """A step of one rank, alone on its machine."""

    compute_s: float
    requests: tuple[Request, ...]
    """The requests, ordered by time."""
    waits_s: tuple[float, ...]
    """After how much computing it waits for all that it has submitted; ascending."""
    cores: float = 1.0
    """The cores that it keeps busy while it computes."""
    jitter: float = 0.0
    """The standard deviation of a rank's computing from step to step, over the median."""
    skew: float = 1.0
    """The computing of the slowest rank over that of the median one."""

    @property
    def bytes(self) -> int:
        return sum(request.bytes for request in self.requests)

    def slowest(self, ranks: int) -> float:
        """Return the computing of the slowest of so many ranks, over that of the median one."""
        if ranks < 2:
            return 1.0
        return self.skew * (1 + self.jitter * largest_deviate(ranks))


@dataclass(frozen=True)
class Outcome:
    """The times of a step of many ranks; seconds."""

    step_s: float
    waiting_s: float
    """The time in which a rank does nothing but wait."""
    carried_s: float
    """The time in which the engine carries something."""
    buckets: int


def largest_deviate(count: int) -> float:
    """Return the expected largest of ``count`` standard normal deviates, as Blom has it."""
    return 0.0 if count < 2 else NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def alone_s(step: Step, cores: float) -> float:
    """Return how long a step takes one rank, without others on its machine."""
    return step.compute_s * max(1.0, step.cores / cores)


LoadOf = Callable[[float, str, str, Cluster, Costs], Load]
"""Bytes, dtype, codec of a bucket; where; at what costs: ``bucket_load``, or another's."""


def simulate(
    step: Step,
    cluster: Cluster,
    costs: Costs,
    *,
    fusion_bytes: float = FUSION_BYTES,
    load_of: LoadOf = bucket_load,
) -> Outcome:
    """Simulate a step on all ranks of ``cluster``; return its times.

    ``fusion_bytes``: the largest bucket. ``load_of``: returns the load of a bucket, if another
    engine than Kolovod's carries it.
    """
    run = _Run(step, cluster, costs, fusion_bytes, load_of)
    while not run.is_over:
        run.advance()
    # What nobody waits for goes on in the next step, where the engine may be the one who is late.
    rest_s = sum(_duration(load) for load in run.left_over())
    step_s = max(run.now_s, run.carried_s + rest_s)
    return Outcome(step_s, run.waiting_s, run.carried_s + rest_s, run.buckets)


def _duration(load: Load) -> float:
    return load.fixed_s + max(load.link_s, load.cpu_s)


@dataclass
class _Bucket:
    """A bucket on its way."""

    fixed_s: float
    work_s: float
    """The time that it still takes, if no core is missing."""
    demand: float
    """The share of a core that it needs meanwhile."""
    turns_s: float
    """The time that its messages wait for turns, over ``work_s``, if a core has one thread too
    many."""


@dataclass
class _Run:
    """The state of a simulated step."""

    step: Step
    cluster: Cluster
    costs: Costs
    fusion_bytes: float
    load_of: LoadOf
    now_s: float = 0.0
    computed_s: float = 0.0
    waiting_s: float = 0.0
    carried_s: float = 0.0
    buckets: int = 0
    submitted: int = 0
    waited: int = 0
    is_waiting: bool = False
    ready: list[tuple[float, Request]] = field(default_factory=list)
    bucket: _Bucket | None = None

    def __post_init__(self) -> None:
        self.slow = self.step.slowest(self.cluster.ranks)
        self.delay_s = negotiation_s(self.cluster)

    @property
    def is_over(self) -> bool:
        is_computed = self.computed_s >= self.step.compute_s * self.slow
        return is_computed and self.waited == len(self.step.waits_s) and not self.is_waiting

    def advance(self) -> None:
        """Advance to the next event."""
        self._submit_and_wait()
        self._close_bucket()
        if self.is_over:
            return
        computing, carrying = self._rates()
        time_s = min(self._until_computed() / computing if computing else _INFINITE,
                     self._until_carried(carrying), self._until_ready())  # fmt: skip
        self.now_s += time_s
        if self.is_waiting:
            self.waiting_s += time_s
        else:
            self.computed_s += time_s * computing
        self._carry(time_s, carrying)

    def left_over(self) -> Sequence[Load]:
        """Return the loads of what is not carried when the script has done its step."""
        self._submit_and_wait()
        loads = [self._load([request]) for _, request in self.ready]
        if self.bucket is not None:
            loads.append(Load(self.bucket.fixed_s, self.bucket.work_s, 0.0))
        return loads

    def _compute_s_at(self, at_s: float) -> float:
        """Return the computing after which the slowest rank comes to a moment of the step."""
        return min(at_s, self.step.compute_s) * self.slow

    def _submit_and_wait(self) -> None:
        """Do whatever the script does at this point of its computing."""
        step, least = self.step, 1e-12
        if self.is_waiting:
            self.is_waiting = self.bucket is not None or bool(self.ready)
        while not self.is_waiting:
            request = _INFINITE
            if self.submitted < len(step.requests):
                request = self._compute_s_at(step.requests[self.submitted].at_s)
            wait = _INFINITE
            if self.waited < len(step.waits_s):
                wait = self._compute_s_at(step.waits_s[self.waited])
            if min(request, wait) > self.computed_s + least:
                return
            if request <= wait:
                self.ready.append((self.now_s + self.delay_s, step.requests[self.submitted]))
                self.submitted += 1
            else:
                self.waited += 1
                self.is_waiting = self.bucket is not None or bool(self.ready)

    def _close_bucket(self) -> None:
        """Make a bucket of all that is ready, if none is on its way."""
        if self.bucket is not None or not self.ready or self.ready[0][0] > self.now_s + 1e-12:
            return
        taken: list[Request] = []
        bytes_ = 0
        while self.ready and self.ready[0][0] <= self.now_s + 1e-12:
            request = self.ready[0][1]
            if taken and bytes_ + request.bytes > self.fusion_bytes:
                break
            bytes_ += request.bytes
            taken.append(request)
            del self.ready[0]
        load = self._load(taken)
        work_s = max(load.link_s, load.cpu_s)
        demand = load.cpu_s / work_s if work_s else 0.0
        turns_s = load.messages * self.costs.turn_s / work_s if work_s else 0.0
        self.bucket = _Bucket(load.fixed_s, work_s, demand, turns_s)
        self.buckets += 1

    def _load(self, requests: Sequence[Request]) -> Load:
        """Return the load of a bucket, where requests of a dtype and codec are one range."""
        by_kind: dict[tuple[str, str], int] = {}
        for request in requests:
            kind = request.dtype, request.codec
            by_kind[kind] = by_kind.get(kind, 0) + request.bytes
        load = Load(0.0, 0.0, 0.0)
        for (dtype, codec), bytes_ in by_kind.items():
            load = load.plus(self.load_of(bytes_, dtype, codec, self.cluster, self.costs))
        return load

    def _rates(self) -> tuple[float, float]:
        """Return the rates of computing and of carrying, over those with enough cores."""
        threads = 0.0 if self.is_waiting else self.step.cores
        demand = self.bucket.demand if self.bucket is not None and not self.bucket.fixed_s else 0.0
        cores = self.cluster.cores / self.cluster.ranks_per_machine
        if threads + demand <= cores:
            return float(not self.is_waiting), 1.0
        # What computes less than all the time is one thread that wants so much of a core.
        fair = cores / (max(1.0, threads) + 1) if threads else cores
        given = min(demand, max(fair, cores - threads))
        computing = (cores - given) / threads if threads else 0.0
        carrying = given / demand if demand else 1.0
        turns_s = self.bucket.turns_s if self.bucket is not None else 0.0
        return computing, carrying / (1 + turns_s * max(0.0, threads / cores - 1))

    def _until_computed(self) -> float:
        """Return the computing that is left until the script submits or waits, or is done."""
        step = self.step
        until = step.compute_s * self.slow
        if self.submitted < len(step.requests):
            until = min(until, self._compute_s_at(step.requests[self.submitted].at_s))
        if self.waited < len(step.waits_s):
            until = min(until, self._compute_s_at(step.waits_s[self.waited]))
        return max(0.0, until - self.computed_s)

    def _until_carried(self, rate: float) -> float:
        if self.bucket is None:
            return _INFINITE
        return self.bucket.fixed_s or self.bucket.work_s / rate

    def _until_ready(self) -> float:
        if self.bucket is not None or not self.ready:
            return _INFINITE
        return max(0.0, self.ready[0][0] - self.now_s)

    def _carry(self, time_s: float, rate: float) -> None:
        if self.bucket is None:
            return
        self.carried_s += time_s
        if self.bucket.fixed_s:
            self.bucket.fixed_s = max(0.0, self.bucket.fixed_s - time_s)
            is_done = not self.bucket.fixed_s and not self.bucket.work_s
        else:
            self.bucket.work_s -= time_s * rate
            is_done = self.bucket.work_s <= 1e-12
        if is_done:
            self.bucket = None


def without_stragglers(step: Step) -> Step:
    """Return the step on ranks that are all alike."""
    return replace(step, jitter=0.0, skew=1.0)


def with_cores(cluster: Cluster, cores: float = math.inf) -> Cluster:
    """Return the cluster with so many cores in each machine."""
    return replace(cluster, cores=cores)
