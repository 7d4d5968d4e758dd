"""The decision which world a job needs next, and what its coordinator does about it.

The launcher is coordinator while it lives, else the lowest rank that can be reached
(`coordinator_state.coordinator_of`); since a coordinator tells its members all that another one
needs, any of them can take over. `decide` is what a coordinator does next, with the reason in
words. Two coordinators at a time do no harm: `consensus` has the rules that see to it. The caller
has the sockets, the timers and the step counter:

- `Ask`: ``state.stand(ballot)``, ask ``numbers`` to promise it, ``state.promised(...)``.
- `Prepare`: ``state.prepare(world, now_s)``, ask ``numbers`` to form the engine of ``world`` beside
  the present one, whose steps go on, ``state.prepared(...)``. Nobody agrees to anything by it.
- `Propose`: ``state.propose(...)``, ask ``numbers`` to agree, at the next step boundary that all
  ranks share unless it is urgent, ``state.agreed(...)``; again while it is told so.
- `Formed`: ``state.declare(world, now_s)``, tell its members, who then work there.
- `Wait`: nothing until a fact changes or ``until_s`` is there.
- `Stop`: end the job with the reason.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kolovod.coordination.consensus import (
    Ballot,
    Line,
    Member,
    Proof,
    World,
    has_quorum,
    voters_left,
)
from kolovod.coordination.coordinator_state import Candidacy, CoordinatorState

__all__ = [
    "PREPARE_S",
    "Ask",
    "Decision",
    "Formed",
    "Policy",
    "Prepare",
    "Propose",
    "Stop",
    "Wait",
    "decide",
]


PREPARE_S = 5.0
"""``Policy.prepare_s`` of a job."""
_TOGETHER_S = 0.5
"""Members that are told to leave at the same time go at the same step, each as the rank that it was
among all; else rank 0 would leave, and another one after it that had become rank 0."""


@dataclass(frozen=True)
class Policy:
    """The user's settings for the membership. Times are of the coordinator's clock, in seconds."""

    min_np: int = 1
    max_np: int = 1 << 20
    elastic_timeout_s: float = 600.0
    """How long too few members wait for more."""
    gather_s: float = 1.0
    """How long the first joiner waits for others, so that many come in one step."""
    gather_started_s: float = 0.0
    """The same while processes are known to come (``CoordinatorState.coming``), if longer."""
    silence_s: float = 1.0
    """How long a member may give no sign of life before a world is sought without it."""
    prepare_s: float = 0.0
    """How long the next world's engine may take to form beside the present one, before ranks stop
    for that instead; 0: they stop at once."""
    broken_s: float = 0.5
    """How long a world that its members say has failed waits for proof that one of them has
    ended, before it is formed anew of the same members."""
    hang_s: float = 0.0
    """How long the others wait for a member that does not notice that its world has failed, before
    it hangs; 0: for ever."""
    reset_limit: int | None = None
    """How many worlds may follow the first. Afterwards nobody joins, and a loss ends the job."""
    ends_for_growth: bool = False
    """Whether beyond that limit a joiner ends the job, too, as in Horovod."""
    go_on_after_loss: bool = False
    """Whether those of an older world go on if all that had the newest state are dead."""
    replica_size: int = 1
    """How many slots, from a multiple of it on, hold one model together: none of their members is
    in a world without the others."""
    replaced_are_dead: bool = False
    """Whether whoever starts a process in a slot vouches that the one before it has ended."""


@dataclass(frozen=True)
class Ask:
    """Stand under ``ballot``: ask ``numbers`` for their promises."""

    ballot: Ballot
    numbers: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Prepare:
    """Have ``numbers`` form the engine of ``world``, to which they will be asked to agree."""

    world: World
    numbers: tuple[int, ...]
    until_s: float
    """When ``world`` is proposed though its engine has not formed everywhere."""


@dataclass(frozen=True)
class Propose:
    """Ask ``numbers`` to agree to ``world``."""

    world: World
    numbers: tuple[int, ...]
    urgent: bool
    """Now, since a member is lost; else at a step boundary that all ranks share."""
    reason: str


@dataclass(frozen=True)
class Formed:
    """``world`` has formed."""

    world: World
    reason: str


@dataclass(frozen=True)
class Wait:
    """There is nothing to do before ``until_s``; None: before a fact changes."""

    until_s: float | None
    reason: str


@dataclass(frozen=True)
class Stop:
    """The job cannot go on."""

    reason: str


Decision = Ask | Prepare | Propose | Formed | Wait | Stop


@dataclass(frozen=True)
class _Plan:
    """The members of the next world, if one is needed, and the reasons for it."""

    members: tuple[Member, ...] = ()
    joined: frozenset[int] = frozenset()
    urgent: bool = False
    reasons: tuple[str, ...] = ()
    """Why it is needed, apart from others that join."""
    otherwise: Wait | Stop | None = None
    """What to do instead."""


def decide(state: CoordinatorState, coordinator: int, policy: Policy, now_s: float) -> Decision:
    """Decide what the coordinator of that number does next. Equal states have equal answers."""
    line = state.line()
    if line.lost and (line.ended or not (line.idle or policy.go_on_after_loss)):
        return Stop(_loss(line, state.proofs))
    gone = state.gone(policy.silence_s, now_s)
    missing = _missing_quorum(state, line, policy, gone, now_s)
    if missing is not None:
        return missing
    if not state.is_elected(line):
        return _ask(state, line, coordinator, ())
    candidacy = state.candidacy
    assert candidacy is not None
    is_broken = state.failures.of(line.formed) is not None
    stands = candidacy.proposal is not None and state.stands(candidacy.proposal, line, gone)
    brings_others = (
        candidacy.proposal is not None and candidacy.proposal.numbers - line.formed.numbers
    )
    if candidacy.proposal is not None and stands and not (is_broken and brings_others):
        urgent = bool(_lost(state, line.formed, gone))
        return _pursue(state, candidacy, candidacy.proposal, policy, urgent)
    plan = _plan(state, line, policy, gone, now_s)
    if plan.otherwise is not None:
        # Whoever has not answered may have agreed to something, and stopped.
        rest = _ask(state, line, coordinator, gone)
        return rest if rest.numbers and isinstance(plan.otherwise, Wait) else plan.otherwise
    world = World(
        candidacy.ballot,
        state.top_epoch + 1,
        plan.members,
        line.basis,
        plan.joined,
        max(base.resets for base in line.basis) + 1,
    )
    if not plan.urgent and policy.prepare_s > 0 and len(plan.members) > 1:
        step = _prepare(state, candidacy, world, policy.prepare_s, now_s)
        if isinstance(step, Prepare):
            return step
        world = step
    reason = _with_joiners(plan.reasons, world)
    return Propose(world, _to_ask(world, state.proofs.keys()), plan.urgent, reason)


def _prepare(
    state: CoordinatorState,
    candidacy: Candidacy,
    world: World,
    prepare_s: float,
    now_s: float,
) -> Prepare | World:
    """Return what is to be prepared before ranks stop, or the world that they stop for then.

    A world whose preparation has begun stays the next one, whoever else comes meanwhile. An engine
    that not all members could form is used by none: its epoch is used for no other world.
    """
    under_way = candidacy.preparation
    if under_way is None or not _is_due_still(state, under_way.world, world):
        return Prepare(world, tuple(sorted(world.numbers)), now_s + prepare_s)
    until_s = under_way.since_s + prepare_s
    missing = under_way.world.numbers - under_way.works
    if under_way.world is candidacy.proposal:
        return world  # it was asked for, and does not stand any more
    if not missing:
        return under_way.world
    if under_way.has_failed or now_s >= until_s:
        return world
    return Prepare(under_way.world, tuple(sorted(missing)), until_s)


def _is_due_still(state: CoordinatorState, before: World, now: World) -> bool:
    """Return whether ``before``, planned a while ago, does what ``now`` does, or less of it."""
    return (
        before.epoch == state.top_epoch
        and [w.stamp for w in before.basis] == [w.stamp for w in now.basis]
        and [m for m in before.members if m.number not in before.joined]
        == [m for m in now.members if m.number not in now.joined]
        and before.joined <= now.joined
        and bool(before.joined) == bool(now.joined)
    )


def _ask(state: CoordinatorState, line: Line, coordinator: int, gone: Collection[int]) -> Ask:
    """Ask for the promises that are missing."""
    ballot, candidacy = state.next_ballot(coordinator), state.candidacy
    voters = {n for world in line.basis for n in world.numbers}.difference(state.proofs, gone)
    if candidacy is not None and candidacy.ballot == ballot:
        voters -= candidacy.answers.keys()
    reason = f"coordinator {coordinator} asks for promises before it decides what follows"
    return Ask(ballot, tuple(sorted(voters)), reason)


def _lost(state: CoordinatorState, world: World, gone: Collection[int]) -> list[Member]:
    """Return the members that a world has no more."""
    return [m for m in world.members if m.number in state.proofs or m.number in gone]


def _pursue(
    state: CoordinatorState,
    candidacy: Candidacy,
    proposal: World,
    policy: Policy,
    urgent: bool,
) -> Decision:
    """Take the next step towards a proposal for which ``CoordinatorState.stands`` holds."""
    if proposal.numbers <= candidacy.agreed and all(
        has_quorum(world, candidacy.agreed, state.proofs, candidacy.excused)
        for world in proposal.basis
    ):
        if proposal.numbers == proposal.joined and not policy.go_on_after_loss:
            return Stop(f"no member that has the state is left: {candidacy.reason}")
        return Formed(proposal, candidacy.reason)
    numbers = _to_ask(proposal, candidacy.agreed | state.proofs.keys())
    return Propose(proposal, numbers, urgent or candidacy.urgent, candidacy.reason)


def _to_ask(world: World, done: Collection[int]) -> tuple[int, ...]:
    """Return who has to agree next.

    Joiners come first: if one fails then, no voter has agreed yet.
    """
    voters = {number for base in world.basis for number in base.numbers}
    joiners = world.numbers.difference(voters, done)
    return tuple(sorted(joiners or (world.numbers | voters).difference(done)))


def _missing_quorum(
    state: CoordinatorState,
    line: Line,
    policy: Policy,
    gone: Collection[int],
    now_s: float,
) -> Wait | Stop | None:
    """Wait or stop if too many cannot be reached to decide anything; None: enough can."""
    for world in line.basis:
        if not has_quorum(world, world.numbers.difference(gone, state.proofs), state.proofs):
            silent = voters_left(world, state.proofs).intersection(gone)
            dead = {n for n in world.numbers & state.proofs.keys() if not state.proofs[n].record}
            names = ", ".join(world.name(number) for number in sorted(silent | dead))
            said = (
                f"no majority of the {len(world.members)} members of epoch {world.epoch} can be "
                f"reached, and those that cannot may have gone on: {names}"
            )
            since_s = max(state.silent_s.get(n, state.since_s.get(n, 0.0)) for n in silent | dead)
            until_s = since_s + policy.elastic_timeout_s
            return Wait(until_s, said) if now_s < until_s else Stop(said)
    return None


def _plan(
    state: CoordinatorState, line: Line, policy: Policy, gone: Collection[int], now_s: float
) -> _Plan:
    """Choose the next world's members: first those who are left, then joiners as far as needed."""
    world = line.formed
    source = line.basis[0] if line.lost else world
    alive = [m for m in source.members if m.number not in state.proofs and m.number not in gone]
    lost = _lost(state, world, gone)
    failure, without_state = state.failures.of(world), world.joined - state.has_state
    unreached = None if lost else state.failures.to_leave_out(world, without_state)
    size = policy.replica_size
    stay = _whole_replicas([m for m in alive if not _leaves(m, state)], size)
    reached = _whole_replicas([m for m in stay if m.number != unreached], size)
    stay, unreached = (reached, unreached) if reached else (stay, None)
    asked = set() if state.candidacy is None else state.candidacy.asked
    stopped = line.stopped or not asked.isdisjoint(world.numbers)
    urgent = bool(lost or line.open or stopped or failure is not None)
    joiners = _joiners(state, line, gone, {member.slot for member in stay})
    joiners = _whole_replicas(joiners, size)
    reasons = [_name_lost(world, m, state.proofs) for m in lost]
    reasons += [f"{world.name(m.number)} leaves" for m in alive if _leaves(m, state)]
    if failure is not None and not lost:
        until_s = failure.since_s + policy.broken_s
        if now_s < until_s:
            return _Plan(otherwise=Wait(until_s, "its members say that the world has failed"))
        if unreached is not None:
            reasons.append(f"{world.name(unreached)} is left out, which others cannot reach")
        reasons.append(f"epoch {world.epoch} has failed: {failure.reason}")
    leaving = [m.number for m in alive if m.number in state.leaving]
    if leaving and stay and not urgent:
        until_s = min(state.since_s[number] for number in leaving) + _TOGETHER_S
        if now_s < until_s:
            return _Plan(otherwise=Wait(until_s, "others may leave with those that do"))
    if line.open:
        reasons.append("a proposal may have formed that nobody here was told of")
    elif stopped:
        reasons.append("members have stopped for a proposal that failed")
    if line.lost and not line.idle:
        reasons.append("all that had the newest state are dead: steps may be lost")
    if not stay and joiners:
        stay = _whole_replicas(alive, size)[:size]  # they hand the state over, and leave then
    if not stay:
        works = not (lost or line.open) and failure is None
        return _Plan(otherwise=_without_survivor(state, world, gone, works, reasons))
    if urgent:
        joiners = []  # the others are in the middle of a step; they come at its end
    elif len(world.members) < policy.min_np:
        reasons.append("too few were left")
    places = policy.max_np - len(stay)
    if not reasons:
        waiting = _wait_for_more(state, joiners, places, policy, now_s)
        if waiting is not None:
            return _Plan(otherwise=waiting)
    limit = policy.reset_limit
    if limit is not None and world.resets >= limit:
        said = f"the reset limit of {limit} is reached"
        if not reasons and not policy.ends_for_growth:
            return _Plan(otherwise=Wait(None, f"{said}: nobody joins any more"))
        return _Plan(otherwise=Stop(f"{said}: {', '.join(reasons) or 'others want to join'}"))
    joiners = joiners[: max(0, places) // size * size]
    if len(stay) + len(joiners) < policy.min_np and not urgent:
        return _Plan(otherwise=_too_few(state, world, stay, joiners, policy, now_s, reasons))
    members = (*stay, *joiners)  # in this order: rank 0 has the state that joiners are given
    joined = {member.number for member in joiners}
    joined |= (source.joined - state.has_state) & {member.number for member in stay}
    return _Plan(members, frozenset(joined), urgent, tuple(reasons))


def _with_joiners(reasons: tuple[str, ...], world: World) -> str:
    """Return why ``world`` is needed, for users."""
    new = [member for member in world.members if member.number not in world.basis[0].numbers]
    if new:
        reasons += (f"{len(new)} joined on {', '.join(sorted({m.host for m in new}))}",)
    return ", ".join(reasons)


def _leaves(member: Member, state: CoordinatorState) -> bool:
    return member.number in state.leaving or member.host in state.unwanted_hosts


def let_go(worlds: Iterable[World], state: CoordinatorState, size: int) -> set[int]:
    """Return the members of ``worlds`` that leave as they were asked to, with their replicas.

    Who is in no later world and none of these was cut off: somebody is to take its place.
    """
    members = {member for world in worlds for member in world.members}
    replicas = {member.slot // size for member in members if _leaves(member, state)}
    return {member.number for member in members if member.slot // size in replicas}


def _whole_replicas(members: Sequence[Member], size: int) -> list[Member]:
    """Return the members whose whole replica is among ``members``.

    Their order stays, except that the members of a replica stand together. A member that is alone
    with a part of a model can neither compute with it nor hand it over.
    """
    if size == 1:
        return list(members)
    replicas: dict[int, list[Member]] = {}
    for member in members:
        replicas.setdefault(member.slot // size, []).append(member)
    whole = [found for found in replicas.values() if len(found) == size]
    return [member for found in whole for member in sorted(found, key=lambda m: m.slot)]


def _joiners(
    state: CoordinatorState, line: Line, gone: Collection[int], taken: Collection[int]
) -> list[Member]:
    """Return those who wait for a world and may have one, in the order in which they came.

    Of two of one slot it is the later one, and none whose slot has a member that lives.
    """
    waiting = dict(state.entrants)
    for world in line.open:  # they were offered one
        waiting.update((m.number, m) for m in world.members if m.number in world.joined)
    by_slot: dict[int, Member] = {}
    for number in sorted(waiting):
        member = waiting[number]
        if (
            number not in state.proofs
            and number not in gone
            and number not in line.formed.numbers
            and member.slot not in taken
            and member.host not in state.refused_hosts
            and not _leaves(member, state)
        ):
            by_slot[member.slot] = member
    return sorted(by_slot.values(), key=lambda member: member.number)


def _wait_for_more(
    state: CoordinatorState,
    joiners: list[Member],
    places: int,
    policy: Policy,
    now_s: float,
) -> Wait | None:
    """Wait if it is not yet time to grow; nobody is lost and nobody leaves."""
    if not joiners or places <= 0:
        return Wait(None, "the world is complete")
    first_s = min(state.since_s.get(member.number, now_s) for member in joiners)
    coming = state.coming - {member.slot for member in joiners}
    gather_s = max(policy.gather_s, policy.gather_started_s if coming else 0.0)
    if len(joiners) < places and now_s < first_s + gather_s:
        until_s = first_s + gather_s
        return Wait(until_s, f"{len(joiners)} may join; more may come until {until_s:g}")
    return None


def _too_few(
    state: CoordinatorState,
    world: World,
    stay: list[Member],
    joiners: list[Member],
    policy: Policy,
    now_s: float,
    reasons: list[str],
) -> Wait | Stop:
    """Wait for more members, or stop: fewer than min_np are there."""
    staying = {member.number for member in stay}
    left_s = sorted(
        state.silent_s.get(n, state.since_s.get(n, now_s)) for n in world.numbers - staying
    )
    count = len(stay) + len(joiners)
    said = f"{count} of the at least {policy.min_np} members are there ({', '.join(reasons)})"
    if left_s:
        since_s = left_s[min(max(0, len(world.members) - policy.min_np), len(left_s) - 1)]
    elif state.formed_s is not None:
        since_s = state.formed_s
    else:
        return Wait(None, said)
    until_s = since_s + policy.elastic_timeout_s
    if now_s < until_s:
        return Wait(until_s, f"{said}; others are waited for until {until_s:g}")
    return Stop(f"{said}; nobody came in {policy.elastic_timeout_s:g} s")


def _without_survivor(
    state: CoordinatorState,
    world: World,
    gone: Collection[int],
    works: bool,
    reasons: list[str],
) -> Wait | Stop:
    """Nobody with the state is left for the next world, so there is none.

    Where the present one ``works`` they end their step first: all have the same state then.
    """
    why = ", ".join(reasons)
    left = [n for n in world.numbers if n not in state.proofs]
    if not left:
        return Stop(f"no member is left: {why}")
    if all(n in state.leaving for n in left):
        if works and any(state.stopped.get(n) != world.epoch for n in left if n not in gone):
            return Wait(None, f"all members leave when they have stopped alike: {why}")
        return Stop(f"all members leave: {why}")
    return Wait(None, f"no member that has the state can be in a next world: {why}")


def _name_lost(world: World, member: Member, proofs: Mapping[int, Proof]) -> str:
    name = world.name(member.number)
    proof = proofs.get(member.number)
    if proof is None:
        return f"{name} cannot be reached"
    return f"{name} has ended" if proof.has_finished else f"{name} was lost ({proof.cause})"


def _loss(line: Line, proofs: Mapping[int, Proof]) -> str:
    """Return why a job ends that nobody with its state has survived."""
    world = line.formed
    names = ", ".join(_name_lost(world, member, proofs) for member in world.members)
    if any(proofs[number].record is None for number in world.numbers):
        names += "; a newer world may have followed"
    return f"no member of epoch {world.epoch} is left, so its steps are lost: {names}"
