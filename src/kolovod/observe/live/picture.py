"""A job at one moment, as ``kolovod top`` and the status line show it. PURE."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kolovod.observe import summary
from kolovod.observe.live.watching import Seen
from kolovod.observe.live.window import Steps, Window, late_ranks, steps_of, worlds_said
from kolovod.observe.reading import Events

__all__ = ["Link", "Picture", "RankPicture", "Watched", "picture"]

_MOST_NOTICE = 500  # characters
_LITTLE = 0.05  # of the time: not worth a warning
_MUCH_WRITTEN = 1 << 20  # bytes per second
_LITTLE_MEMORY = 0.05


@dataclass(frozen=True)
class Watched:
    """The facts known of one process on this host."""

    number: int
    """Its rank at the start, or its slot in an elastic job."""
    pid: int
    state: str
    """The kernel's letter."""
    cpu: float
    """Cores in use since the last look."""
    memory_bytes: int
    written_bytes_per_s: float
    window: Window
    seen: Seen
    problem: str


@dataclass(frozen=True)
class RankPicture:
    """One rank. Shares are of the time that is shown, the last five seconds at most."""

    number: int
    rank: int | None
    pid: int
    host: str
    cpu: float
    memory_bytes: int
    steps: Steps | None
    compute: float | None
    """Share in which the script did not wait for communication; None: nothing was seen."""
    waiting: float | None
    communication: float | None
    hidden: float | None
    """Share of the communication behind which the script computed."""
    last: int
    """The number of times that it was the last to submit."""
    held_up: float | None
    """Share in which others did nothing but wait for it."""
    late: str
    """The operation that it has not submitted, and others wait for; "": none."""
    late_s: float
    problem: str


@dataclass(frozen=True)
class Link:
    """The traffic that the ranks of this host send to another one."""

    host: str
    bytes_per_s: float
    measured_bytes_per_s: float
    """The rate that the ranks assume for the link; 0 unknown."""


@dataclass(frozen=True)
class Picture:
    """The job, as the ranks of this host show it."""

    size: int
    epoch: int
    hosts: tuple[str, ...]
    backend: str
    ranks: list[RankPicture]
    links: list[Link]
    bytes_per_s: float
    """The rate at which operations carried bytes, on one rank."""
    operations_per_s: float
    dtypes: tuple[str, ...]
    """The dtypes in which gradients and others travel, most bytes first: "float32 as int8"."""
    events: list[str]
    warnings: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the picture as plain dicts and lists, for programs."""
        return asdict(self)


def picture(watched: Sequence[Watched], memory_left: float = 1.0) -> Picture:
    """Return the picture of the ranks on this host; ``memory_left``: the free share of memory."""
    by_rank = {each.seen.rank: each for each in watched if each.seen.rank is not None}
    newest = max(
        (each.seen.facts for each in by_rank.values()), key=lambda facts: facts["epoch"], default={}
    )
    hosts = tuple(newest.get("hosts", ()))
    found = Events({})
    for rank, each in sorted(by_rank.items()):
        events = each.window.events(str(each.seen.facts["host"]))
        if events.last > events.first:
            found.ranks[rank] = events
    sums = {each.rank: each for each in summary.of(found).ranks} if found.ranks else {}
    late = _late(by_rank)
    pictures = [_of_rank(each, sums, found, late) for each in watched]
    first = min(found.ranks, default=None)
    span_s, carried = 0.0, []
    if first is not None:
        span_s = (found.ranks[first].last - found.ranks[first].first) / 1e6
        carried = list(found.ranks[first].operations.values())
    dtypes: dict[str, int] = defaultdict(int)
    for operation in carried:
        dtypes[operation.dtype] += operation.bytes
    return Picture(
        size=int(newest.get("size", 0)),
        epoch=int(newest.get("epoch", 0)),
        hosts=tuple(dict.fromkeys(hosts)),
        backend=str(newest.get("backend", "")),
        ranks=pictures,
        links=_links(by_rank, hosts),
        bytes_per_s=sum(operation.bytes for operation in carried) / span_s if span_s else 0.0,
        operations_per_s=len(carried) / span_s if span_s else 0.0,
        dtypes=tuple(
            name
            for name in sorted(dtypes, key=lambda name: -dtypes[name])
            if dtypes[name] > _LITTLE * sum(dtypes.values())
        ),
        events=worlds_said(newest.get("worlds", ())),
        warnings=[
            *_notices(watched),
            *_warnings(watched, by_rank, list(sums.values()), memory_left),
        ],
    )


def _late(by_rank: Mapping[int, Watched]) -> dict[int, tuple[str, float]]:
    looks = {rank: each.seen.look for rank, each in by_rank.items()}
    before = {rank: each.seen.look_before for rank, each in by_rank.items()}
    return late_ranks(
        {rank: look for rank, look in looks.items() if look is not None},
        {rank: look for rank, look in before.items() if look is not None},
    )


def _of_rank(
    each: Watched,
    sums: Mapping[int, summary.RankSummary],
    found: Events,
    late: Mapping[int, tuple[str, float]],
) -> RankPicture:
    rank = each.seen.rank
    said = None if rank is None else sums.get(rank)
    what, late_s = ("", 0.0) if rank is None else late.get(rank, ("", 0.0))
    compute = waiting = communication = hidden = held_up = None
    if said is not None and said.window_us > 0:
        waiting = said.exposed_us / said.window_us
        compute = 1 - waiting
        communication = said.communication_us / said.window_us
        held_up = said.held_up_us / said.window_us
        if said.communication_us > 0:
            hidden = said.hidden_us / said.communication_us
    return RankPicture(
        number=each.number,
        rank=rank,
        pid=each.pid,
        host=str(each.seen.facts.get("host", "")),
        cpu=each.cpu,
        memory_bytes=each.memory_bytes,
        steps=None if said is None or rank is None else steps_of(found.ranks[rank]),
        compute=compute,
        waiting=waiting,
        communication=communication,
        hidden=hidden,
        last=0 if said is None else said.last,
        held_up=held_up,
        late=what,
        late_s=late_s,
        problem=_state(each.state) or each.problem,
    )


def _state(letter: str) -> str:
    return {"T": "it is stopped (SIGSTOP)", "t": "a debugger has stopped it"}.get(letter, "")


def _links(by_rank: Mapping[int, Watched], hosts: Sequence[str]) -> list[Link]:
    rates: dict[str, float] = defaultdict(float)
    measured = 0.0
    for each in by_rank.values():
        stats = each.seen.facts.get("stats") or {}
        measured = max(measured, float(stats.get("link_bytes_per_us", 0)) * 1e6)
        for peer, rate in each.seen.sent_bytes_per_s.items():
            if peer < len(hosts):
                rates[hosts[peer]] += rate
    return [Link(host, rate, measured) for host, rate in sorted(rates.items())]


def _notices(watched: Sequence[Watched]) -> list[str]:
    """Return what the ranks themselves have found wrong with the training."""
    said = (text for each in watched for text in each.seen.facts.get("notices", ()))
    return [text[:_MOST_NOTICE] for text in dict.fromkeys(map(str, said))]


def _warnings(
    watched: Sequence[Watched],
    by_rank: Mapping[int, Watched],
    sums: Sequence[summary.RankSummary],
    memory_left: float,
) -> list[str]:
    said = []
    if sums:
        said += [each for each in summary.straggler(sums) if each.startswith("Straggler")]
        if not said:  # larger batches would make its part longer, too
            said += [each for each in summary.batches(sums) if each.startswith("Batches may")]
        said += _slow_host(sums)
        said += _busy_rank_0(by_rank, sums)
    said += _shared_cores(by_rank)
    lost = sum(each.window.lost for each in watched)
    if lost:
        said.append(f"{lost} operations came faster than they can be shown.")
    if memory_left < _LITTLE_MEMORY:
        said.append(
            f"Memory: {memory_left:.0%} of this host's is left. Smaller batches or fewer data "
            "loaders take less; a process that finds none is killed."
        )
    return said


def _slow_host(sums: Sequence[summary.RankSummary]) -> list[str]:
    """Return a sentence on the host, one of several, whose ranks all hold up the others, if any."""
    by_host: dict[str, list[float]] = defaultdict(list)
    for each in sums:
        if each.window_us:
            by_host[each.host].append(each.held_up_us / each.window_us)
    if len(by_host) < 2 or min(map(len, by_host.values())) < 2:
        return []
    means = {host: statistics.fmean(shares) for host, shares in by_host.items()}
    slow = max(means, key=lambda host: means[host])
    rest = max(share for host, share in means.items() if host != slow)
    if min(by_host[slow]) <= max(2 * rest, _LITTLE):
        return []
    return [
        f"Host {slow} is slow: each of its ranks holds up others, {means[slow]:.0%} of the time on "
        "average. `kolovod doctor` compares hosts."
    ]


def _busy_rank_0(by_rank: Mapping[int, Watched], sums: Sequence[summary.RankSummary]) -> list[str]:
    """Return a warning if rank 0 writes files while others wait for it."""
    zero, shares = by_rank.get(0), {each.rank: each for each in sums if each.window_us}
    if zero is None or 0 not in shares or len(shares) < 2:
        return []
    held_up = shares[0].held_up_us / shares[0].window_us
    if held_up <= _LITTLE or zero.written_bytes_per_s < _MUCH_WRITTEN:
        return []
    return [
        f"Rank 0 writes files ({zero.written_bytes_per_s / 1e6:.0f} MB/s) while others wait for "
        f"it, {held_up:.0%} of the time: write checkpoints in a thread, or less often."
    ]


def _shared_cores(by_rank: Mapping[int, Watched]) -> list[str]:
    """Return a warning of more ranks than cores, or of several bound to one."""
    masks = {}
    for rank, each in by_rank.items():
        where = each.seen.facts.get("whereabouts")
        if where:
            masks[rank] = int(where[2], 16)
    if len(masks) < 2:
        return []
    same: dict[int, list[int]] = defaultdict(list)
    together = 0
    for rank, mask in sorted(masks.items()):
        together |= mask
        same[mask].append(rank)
    for mask, ranks in same.items():
        if len(ranks) > mask.bit_count():
            return [
                f"Ranks {', '.join(map(str, ranks))} share {mask.bit_count()} processor core(s): "
                "start fewer ranks on this host, or bind them to cores of their own."
            ]
    if together.bit_count() < len(masks):
        return [f"{len(masks)} ranks share {together.bit_count()} processor cores."]
    return []
