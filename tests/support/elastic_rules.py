"""What must hold in a schedule (elastic_schedules) after each event, and at its end."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from kolovod.coordination import membership as m
from kolovod.coordination.consensus import Member, Proof, World
from kolovod.coordination.coordinator_state import CoordinatorState

if TYPE_CHECKING:
    from elastic_network import Process
    from elastic_schedules import Schedule


class Broken(AssertionError):
    """Something that must always hold does not."""


def check(right: bool, what: str) -> None:
    """Raise Broken, unless ``right``."""
    if not right:
        raise Broken(what)


def note_formed(play: Schedule, state: CoordinatorState, world: World) -> None:
    """Note a world that has formed: it may, it follows the one before, and it alone can work."""
    line = state.line()
    dead = world.numbers & state.proofs.keys()
    check(not dead, f"{dead} of epoch {world.epoch} were proven dead")
    missing = world.numbers - play.agreed.get(world.stamp, set())
    check(not missing, f"{missing} have not agreed to epoch {world.epoch}")
    halves = {x.slot // play.replica_size for x in world.members if not _is_whole(play, world, x)}
    check(not halves, f"epoch {world.epoch} has not all of the replicas {halves}")
    known = {w.epoch: w.stamp for w in play.formed}
    check(world.epoch not in known, f"epoch {world.epoch} has formed twice")
    if (line.lost and not line.idle) or world.joined == world.numbers:
        play.lossy.add(world.stamp)
    play.formed.append(world)
    play.formed.sort(key=lambda w: w.stamp)
    for before, after in zip(play.formed, play.formed[1:], strict=False):
        check(
            before.stamp in {w.stamp for w in after.basis},
            f"epoch {after.epoch} does not follow epoch {before.epoch}",
        )
        check(before.epoch < after.epoch, "epochs do not grow")
    able = [w.epoch for w in play.formed if can_work(play, w)]
    check(len(able) <= 1, f"worlds of epochs {able} could all work")
    check_state(play, world)


def _is_whole(play: Schedule, among: World | list[Member], member: Member) -> bool:
    """Whether the whole replica of ``member`` is there."""
    members = among.members if isinstance(among, World) else among
    size = play.replica_size
    return sum(x.slot // size == member.slot // size for x in members) == size


def check_history(play: Schedule, process: Process, number: int) -> None:
    """The worlds in which a member works follow each other, and what it agreed to."""
    world, agreed = process.record.works_in(number), process.record.agreed
    if world is None:
        return
    check(
        agreed is None or agreed.stamp <= world.stamp,
        f"{number} works in epoch {world.epoch} and has agreed to a later one",
    )
    check(world.epoch >= process.epoch, f"{number} goes back to epoch {world.epoch}")
    process.epoch = world.epoch


def check_state(play: Schedule, world: World) -> None:
    """Who does not count as a joiner has the result of the last step, or that is lost."""
    last = play.worked
    if last is None or last.stamp > world.stamp:
        return
    if any(last.stamp < stamp <= world.stamp for stamp in play.lossy):  # and no step since
        return
    for number in world.numbers - world.joined:
        process = play.by_number[number]
        check(
            process.state == last.stamp or process.number != number,
            f"{number} brings no state of epoch {last.epoch} to epoch {world.epoch}",
        )
    check(world.joined != world.numbers, f"epoch {world.epoch} has no state")
    first = world.members[0].number  # of whom joiners get it
    check(
        first not in world.joined or play.by_number[first].state == last.stamp,
        f"rank 0 of epoch {world.epoch} has no state",
    )


def check_stop(play: Schedule, reason: str) -> None:
    """A coordinator ends the job; it must not be one that works."""
    if "may have followed" not in reason and "reset limit" not in reason:
        able = [w for w in play.formed if w is play.worked and works(play, w)]
        few = play.policy.min_np > 1 and "at least" in reason
        check(not able or few or "leave" in reason, f"stopped a job that works: {reason}")


def can_work(play: Schedule, world: World) -> bool:
    """Whether no member is dead or has agreed to a newer world."""
    for number in world.numbers:
        process = play.by_number[number]
        if not process.alive or process.number != number:
            return False
        agreed = process.record.agreed
        if agreed is not None and agreed.stamp > world.stamp:
            return False
    return True


def works(play: Schedule, world: World) -> bool:
    """Whether all members live and take it for the world to work in."""
    for number in world.numbers:
        process = play.by_number[number]
        if not process.alive or process.number != number:
            return False
        here = process.record.works_in(number)
        if here is None or here.stamp != world.stamp:
            return False
    return True


def is_settled(play: Schedule) -> bool:
    """Whether the newest world works and has all that it may have."""
    world = play.formed[-1]
    if not works(play, world):
        return False
    state = next(p.coordinator_state for p in play.processes if p.number == world.members[0].number)
    assert state is not None
    rest = [x for x in world.members if not _leaves(play, state, x)]
    rest = [x for x in rest if _is_whole(play, rest, x)]
    staying = [x for x in world.members if x not in rest]
    if staying and len(staying) < len(world.members):
        return len(world.members) - len(staying) < play.policy.min_np or _limit(play, world)
    slots = {x.slot for x in world.members}
    outside = [
        p
        for p in play.living()
        if p.number not in world.numbers
        and p.slot not in slots
        and p.host not in play.unwanted
        and p.number not in state.leaving
    ]
    there = Counter(p.slot // play.replica_size for p in outside)
    outside = [p for p in outside if there[p.slot // play.replica_size] >= play.replica_size]
    return not outside or len(world.members) >= play.policy.max_np or _limit(play, world)


def _leaves(play: Schedule, state: CoordinatorState, member: Member) -> bool:
    return member.number in state.leaving or member.host in play.unwanted


def _limit(play: Schedule, world: World) -> bool:
    return play.policy.reset_limit is not None and world.resets >= play.policy.reset_limit


def expect_nothing(play: Schedule) -> None:
    """No world has formed though faults are over: only right if none could."""
    if _can_settle(play):
        world = play.formed[-1]
        raise Broken(
            f"no world forms after epoch {world.epoch} of "
            f"{sorted(world.numbers)} at {play.now_s:.1f} s, {play.sequence} events"
        )
    play.counts["without a quorum"] += 1


def _can_settle(play: Schedule) -> bool:
    """Whether a quorum of all that may have formed lives, and enough members.

    Of what somebody alive or a record tells: a world that only others knew of counts as open.
    """
    proofs: dict[int, Proof] = {}
    for _, _, proof in play.reports:
        if proof.number not in proofs or proofs[proof.number].record is None:
            proofs[proof.number] = proof
    alive = {p.number: p.record for p in play.living() if p.number is not None}
    records = [*alive.values(), *(p.record for p in proofs.values() if p.record is not None)]
    known = [
        p.coordinator_state.formed
        for p in play.processes
        if p.alive and p.coordinator_state is not None
    ]
    known += [record.formed for record in records if record.formed is not None]
    if not known:
        return False
    newest = max(known, key=lambda world: world.stamp)
    worlds = {newest.stamp: newest}
    for record in records:
        if record.agreed is not None and record.agreed.stamp > newest.stamp:
            worlds[record.agreed.stamp] = record.agreed
            worlds |= {w.stamp: w for w in record.agreed.basis if w.stamp > newest.stamp}
    if not all(_decides(world, set(alive), proofs) for world in worlds.values()):
        return False
    stay = [x for x in newest.members if x.number in alive and x.host not in play.unwanted]
    leaving = set().union(
        *(p.coordinator_state.leaving for p in play.living() if p.coordinator_state is not None)
    )
    stay = [x for x in stay if x.number not in leaving]
    stay = [x for x in stay if _is_whole(play, stay, x)]
    return len(stay) >= max(1, play.policy.min_np)


def _decides(world: World, alive: set[int], proofs: dict[int, Proof]) -> bool:
    """The quorum rule, written once more."""
    dead = {n for n in world.numbers if n in proofs}
    if len({member.host for member in world.members}) == 1:
        return world.numbers - dead <= alive
    voters = world.numbers - {n for n in dead if proofs[n].record is not None}
    half = len(voters) / 2
    here = voters & alive
    lowest = [x.number for x in world.members if x.number in voters][:1]
    return not voters or len(here) > half or (len(here) == half and here.issuperset(lowest))


def words_of(decision: Any) -> str:
    """Of a decision, for the trace."""
    name = type(decision).__name__
    if isinstance(decision, m.Ask):
        return f"{name} {tuple(decision.ballot)} {decision.numbers}"
    if isinstance(decision, m.Prepare):
        return f"{name} {decision.world.epoch} {sorted(decision.world.numbers)}"
    if isinstance(decision, m.Propose | m.Formed):
        world = decision.world
        basis = [w.epoch for w in world.basis]
        to = getattr(decision, "numbers", "")
        return (
            f"{name} {world.epoch} {sorted(world.numbers)} after {basis} to {to}: {decision.reason}"
        )
    return f"{name} {decision.reason}"
