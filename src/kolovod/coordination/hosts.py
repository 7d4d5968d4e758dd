"""The plan of which processes an elastic job's launcher starts on which hosts.

A slot whose process failed is started again, on the same host while that has places. A slot that
keeps failing there says something about the host: it *cools down*, each time twice as long. A
process that ran for long enough clears its host; where no other host has a place, much less is
enough, since a slot that stays empty helps nobody. Chance comes from outside (``Failure.jitter``),
so that many jobs do not come back to a host at one time and the same facts still give the same
answer. In Horovod's mode a host that is avoided loses the processes that still run there, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

__all__ = ["Failure", "Plan", "RetryPolicy", "Start", "cooling_until", "plan_starts"]


@dataclass(frozen=True)
class RetryPolicy:
    """The user's settings for starting processes again. Times are in seconds."""

    retries: int = 3
    """How often a slot is started again on a host before that is avoided; 0: its first failure
    counts, as in Horovod."""
    cooldown_s: tuple[float, float] | None = (10.0, 600.0)
    """The first and the longest time for which a host is avoided. None: for ever."""
    proven_s: float = 300.0
    """A process that ran so long clears its host of what was before."""
    whole_host: bool = False
    """Where a host is avoided the processes that run there are ended, as in Horovod."""


@dataclass(frozen=True)
class Failure:
    """The end of a process that was not told to end."""

    slot: int
    host: str
    at_s: float
    ran_s: float
    """How long it had run."""
    jitter: float = 0.0
    """From 0 to 1, drawn when it happened: up to a half is added to the cooldown."""
    was_cut_off: bool = False
    """Its host could not be reached, or the others had gone on without it: that says nothing about
    the host's processes, so no cooldown follows."""


@dataclass(frozen=True)
class Start:
    """An order to start a process."""

    slot: int
    host: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """The processes to start, and the hosts that get none."""

    starts: tuple[Start, ...]
    cooling: Mapping[str, str]
    """The reasons, by host, why hosts get no new members for now."""
    unwanted: frozenset[str]
    """Hosts of running processes that shall leave, since discovery names them no more."""
    ended: frozenset[str]
    """Hosts whose running processes are ended at once."""
    crowded: tuple[int, ...]
    """Slots of running processes that shall leave, since their host has fewer places now, or others
    of their replica leave."""
    until_s: float | None
    """When to look again though nothing has happened. None: never."""


def cooling_until(host: str, failures: Iterable[Failure], policy: RetryPolicy) -> float:
    """Return until when ``host`` is avoided: 0 if it never was, infinity if for ever."""
    until_s = 0.0
    times = 0
    tries: Counter[int] = Counter()
    for failure in sorted(failures, key=lambda failure: failure.at_s):
        if failure.host != host or failure.was_cut_off:
            continue
        if failure.ran_s >= policy.proven_s:
            times = 0
            tries.clear()
        tries[failure.slot] += 1
        if not times and tries[failure.slot] <= policy.retries:
            continue
        if failure.at_s < until_s:
            continue  # what ran there still; the host is avoided already
        times += 1
        until_s = failure.at_s + _cooldown_s(times, failure.jitter, policy)
    return until_s


def plan_starts(
    wanted: Mapping[str, int],
    running: Mapping[int, str],
    failures: Sequence[Failure],
    max_np: int,
    policy: RetryPolicy,
    now_s: float,
    *,
    lost: Collection[str] = (),
    twice: Sequence[str] = (),
    ordered: Collection[int] = (),
    replica_size: int = 1,
) -> Plan:
    """Plan what the launcher does next.

    ``wanted``: the places of each host, in the order of preference; ``running``: the host of each
    slot that has a process, or whose process has left; ``failures``: all so far. ``lost``: hosts
    that cannot be reached, where nothing is started and nobody is told to leave. ``twice``: the
    hosts of processes whose slots have others, too, since these hosts were lost meanwhile.
    ``ordered``: slots whose process is to be started, but is not there yet; it is the first to
    leave where places are fewer, since it may have got none. ``replica_size``: if above 1, this
    many slots in a row, from a multiple of it on, are started together or not at all, on one host
    if one has places.
    """
    known = {*wanted, *running.values(), *twice}
    untils = {host: cooling_until(host, failures, policy) for host in known}
    if policy.cooldown_s is not None and not policy.whole_host:
        alone = replace(policy, proven_s=min(policy.proven_s, policy.cooldown_s[0]))
        taken = Counter([*running.values(), *twice])
        usable = {h: wanted[h] - taken[h] for h in wanted if h not in lost and untils[h] <= now_s}
        if sum(max(0, count) for count in usable.values()) < replica_size:
            untils = {host: cooling_until(host, failures, alone) for host in known}
    cooling = {host: _why(until_s - now_s) for host, until_s in untils.items() if until_s > now_s}
    ended = frozenset(running.values()) & cooling.keys() if policy.whole_host else frozenset[str]()
    unwanted = frozenset(running.values()) - wanted.keys()
    on_host: dict[str, list[int]] = {host: [] for host in wanted}
    for slot, host in sorted(running.items(), key=lambda item: (item[0] in ordered, item[0])):
        if host in wanted and host not in ended:
            on_host[host].append(slot)
    crowded = [slot for host, slots in on_host.items() for slot in slots[max(0, wanted[host]) :]]
    if replica_size > 1:  # who is left of a replica leaves with it
        leaving = {s // replica_size for s, host in running.items() if host in unwanted}
        leaving |= {slot // replica_size for slot in crowded}
        staying_on = [slot for slots in on_host.values() for slot in slots]
        crowded = [slot for slot in staying_on if slot // replica_size in leaving]
    staying = sum(map(len, on_host.values())) - len(crowded) + len(twice)
    beside, avoided = Counter(twice), cooling.keys() | lost
    free = {h: wanted[h] - len(s) - beside[h] for h, s in on_host.items() if h not in avoided}
    free = {host: count for host, count in free.items() if count > 0}
    last = {failure.slot: failure for failure in sorted(failures, key=lambda f: f.at_s)}
    starts: list[Start] = []
    first = 0  # slot of a replica
    while sum(free.values()) >= replica_size and staying + len(starts) + replica_size <= max_np:
        slots = range(first, first + replica_size)
        first += replica_size
        if not running.keys().isdisjoint(slots):
            continue
        has_failed = not last.keys().isdisjoint(slots)
        for slot, host in zip(slots, _hosts_of(slots, free, last), strict=True):
            reason = _start_reason(slot, host, last.get(slot))
            if has_failed and slot not in last:
                reason = f"slot {slot} is started with its replica on host {host}"
            starts.append(Start(slot, host, reason))
            free[host] -= 1
        free = {host: count for host, count in free.items() if count}
    later = [until_s for until_s in untils.values() if now_s < until_s < math.inf]
    until_s = min(later, default=None)
    return Plan(tuple(starts), cooling, unwanted, ended, tuple(crowded), until_s)


def _hosts_of(
    slots: Sequence[int], free: Mapping[str, int], last: Mapping[int, Failure]
) -> Sequence[str]:
    """Return a host for each of these slots: where they were, or the first hosts with places.

    ``last``: the last failure of each slot that had any.
    """
    before = [last[slot].host for slot in slots if slot in last]
    for host in (*before, *free):
        if free.get(host, 0) >= len(slots):
            return [host] * len(slots)
    places = [host for host, count in free.items() for _ in range(count)]
    return places[: len(slots)]


def _cooldown_s(times: int, jitter: float, policy: RetryPolicy) -> float:
    if policy.cooldown_s is None:
        return math.inf
    first_s, longest_s = policy.cooldown_s
    doubled_s = first_s * 2.0 ** min(times - 1, 60)
    return min(longest_s, doubled_s * (1 + jitter / 2))


def _why(left_s: float) -> str:
    if math.isinf(left_s):
        return "processes failed there: it is not used any more"
    return f"processes failed there: it is not used for another {left_s:.3g} s"


def _start_reason(slot: int, host: str, before: Failure | None) -> str:
    if before is None:
        return f"slot {slot} has a place on host {host}"
    how = "was cut off" if before.was_cut_off else "failed"
    if before.host == host:
        return f"slot {slot} {how} on host {host} and is started again"
    return f"slot {slot} {how} on host {before.host} and is started on host {host}"
