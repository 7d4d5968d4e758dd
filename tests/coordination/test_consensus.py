"""What may have formed: quorums, records of the dead, open proposals; and random schedules."""

from __future__ import annotations

from collections import Counter

import elastic_schedules
import pytest
from membership_job import LAUNCHER, Job, newer_world, world

from kolovod.coordination.consensus import (
    NOTHING,
    Ballot,
    Proof,
    Record,
    World,
    has_quorum,
    line_of,
    voters_left,
)
from kolovod.coordination.coordinator_state import CoordinatorState, first_world
from kolovod.coordination.membership import Ask, Policy, Propose, Stop, Wait


def dead(*numbers: int, record: Record | None = NOTHING) -> dict[int, Proof]:
    return {n: Proof(n, "killed", record) for n in numbers}


@pytest.mark.parametrize(
    ("hosts", "voted", "proofs", "decides"),
    [
        ("abc", {0, 1}, {}, True),
        ("abc", {1, 2}, {}, True),
        ("abc", {2}, {}, False),
        ("abcd", {0, 3}, {}, True),  # of exactly half, the side of the lowest
        ("abcd", {1, 2}, {}, False),
        ("abcd", {1, 2}, dead(0), True),
        ("abcd", {1}, dead(0, 3), True),
        ("abcd", {2}, dead(0, 3), False),
        ("abcd", {1, 2}, dead(0, record=None), False),  # nobody knows what it agreed to
        ("abc", {1, 2}, dead(0, record=None), True),
        ("aaaa", {0, 1, 2}, {}, False),  # on one host nobody is cut off
        ("aaaa", {0, 1, 2}, dead(3), True),
        ("aaaa", {0, 1, 2}, dead(3, record=None), True),
        ("abc", set(), dead(0, 1, 2), True),
        ("abc", set(), dead(0, 1, 2, record=None), False),
    ],
)
def test_a_quorum_is_a_majority_of_those_who_may_disagree(hosts, voted, proofs, decides):
    assert has_quorum(world(hosts), voted, proofs) is decides


def test_a_death_without_a_record_counts_on_one_host_only_if_it_came_before_the_question():
    proofs = dead(2, record=None)
    assert has_quorum(world("aaa"), {0, 1}, proofs, excused={2})
    assert not has_quorum(world("aaa"), {0, 1}, proofs, excused=())
    assert voters_left(world("aaa"), proofs) == {0, 1}
    assert voters_left(world("aab"), proofs) == {0, 1, 2}


def test_a_member_keeps_its_promises():
    first, second = world("ab", 2), world("a", 3)
    record = NOTHING.promise(second.ballot)
    assert record is not None
    assert record.promise(Ballot(3, 7)) is None  # the term is another coordinator's
    assert record.promise(Ballot(2, 7)) is None
    assert record.agree(first) is None
    agreed = record.agree(second)
    assert agreed is not None
    assert agreed.agree(second) == agreed
    assert agreed.works_in(0) is None  # it has not formed yet
    earlier = World(second.ballot, second.epoch - 1, second.members)
    assert agreed.agree(earlier) is None  # of the same coordinator, late
    assert agreed.told(first).works_in(0) is None
    assert agreed.told(second).works_in(0) is second
    assert agreed.told(second).works_in(1) is None


def test_what_an_open_proposal_was_based_on_may_have_formed_as_well():
    first = world("abc")
    older = World(Ballot(3, 1), 3, first.members[1:], (first,))
    later = World(Ballot(4, 0), 4, first.members, (first, older.without_basis()))
    line = line_of(first, {0: Record(Ballot(9, 2), first, later)}, {}, Ballot(9, 2))
    assert [base.epoch for base in line.basis] == [1, 3, 4]
    denied = {n: Record(Ballot(9, 2), first) for n in (1, 2)}
    assert line_of(first, denied, {}, Ballot(9, 2)).basis == (first,)


def test_a_side_that_went_on_and_died_is_not_forgotten():
    """{1, 2} form epoch 5 while 0 is cut off, and die; their records tell."""
    job = Job("abc")
    newer = newer_world(job, {1, 2})
    for n in (1, 2):
        job.lose(n, Record(newer.ballot, newer, newer))
    stop = job.decide()
    assert isinstance(stop, Stop)
    assert stop.reason.startswith("no member of epoch 5 is left, so its steps are lost")


def test_it_may_be_gone_on_without_them():
    job = Job("abc", Policy(go_on_after_loss=True))
    newer = newer_world(job, {1, 2})
    for n in (1, 2):
        job.lose(n, Record(newer.ballot, newer, newer))
    made = job.settle()
    assert "steps may be lost" in made[1].reason
    assert job.world.epoch > newer.epoch
    assert job.world.ballot > newer.ballot
    assert job.hosts() == "a"


def test_a_side_that_had_only_agreed_has_lost_nothing():
    job = Job("abc")
    newer = newer_world(job, {1, 2})
    for n in (1, 2):
        job.lose(n, Record(newer.ballot, job.world, newer))
    job.settle()
    assert job.hosts() == "a"
    assert job.world.epoch > newer.epoch


def test_a_world_that_one_of_its_members_was_never_told_of_has_made_no_step():
    job = Job("abc")
    newer = newer_world(job, {1, 2})
    job.lose(1, Record(newer.ballot, newer, newer))
    job.lose(2, Record(newer.ballot, job.world, newer))
    made = job.settle()
    assert "steps may be lost" not in made[1].reason
    assert job.hosts() == "a"
    assert job.world.epoch > newer.epoch


def test_deaths_of_which_no_record_is_read_do_not_count():
    job = Job("abc")
    job.settle()
    job.lose(1, read=False)
    job.lose(2, read=False)
    wait = job.decide()
    assert isinstance(wait, Wait)
    assert "may have gone on: rank 1 on host b, rank 2 on host c" in wait.reason


def test_a_proposal_that_may_have_formed_needs_its_own_quorum():
    """The launcher has proposed two members and three joiners, and died before it told anyone."""
    job = Job("ab")
    job.settle()
    joiners = [job.enter(slot, "c") for slot in (2, 3, 4)]
    job.now_s = 5.0
    job.step()
    job.step()
    successor = CoordinatorState(first_world(enumerate("ab")))
    successor.merge(job.state.facts(), job.now_s)
    successor.see(job.records[0])
    job.state = successor
    for n in joiners:
        job.state.miss(n, 0.0)
    job.cut_off.update(joiners)
    job.step(0)
    wait = job.decide(0)
    assert isinstance(wait, Wait)
    assert "of the 5 members of epoch 2" in wait.reason
    for n in joiners:
        job.state.hear(n)
    job.cut_off.clear()
    job.settle(0)
    assert job.hosts() == "ab"  # first those who have the state, at once
    assert [base.epoch for base in job.world.basis] == [1, 2]
    job.now_s = 10.0
    job.settle(0)
    assert job.hosts() == "abccc"


def test_voters_that_have_not_answered_are_asked_again_since_they_may_have_stopped():
    job = Job("abc")
    job.cut_off.add(2)
    job.step()
    assert job.decide().numbers == (2,)
    newer = newer_world(job, {0, 2})
    agreed = job.records[2].agree(World(Ballot(0, LAUNCHER), 4, newer.members))
    job.records[2] = agreed
    job.cut_off.clear()
    made = job.settle()
    assert "members have stopped for a proposal that failed" in made[1].reason
    assert job.hosts() == "abc"


def test_a_proposal_goes_when_a_newer_world_is_heard_of():
    job = Job("abc")
    job.state.top_term = 8
    job.step()
    job.lose(2)
    job.step()
    newer = newer_world(job, {0, 1, 2})
    job.state.merge(CoordinatorState(newer).facts(), 0.0)
    made = job.settle()
    assert isinstance(made[0], Ask | Propose)
    assert job.world.basis[0].stamp == newer.stamp


def test_a_voter_that_dies_without_a_record_after_the_question_ends_the_proposal():
    job = Job("aaa")
    job.settle()
    job.leave(2)
    job.cut_off.add(2)
    first = job.step()
    job.lose(2, read=False)
    second = job.decide()
    assert isinstance(second, Propose)
    assert second.world.epoch > first.world.epoch


def test_a_world_that_may_have_worked_unseen_is_not_passed_over():
    """All of its members are dead without a record; one that left had agreed to it."""
    job = Job("abc", Policy(go_on_after_loss=True))
    newer = World(Ballot(7, 1), 5, job.world.members[1:2], (job.world.without_basis(),))
    job.lose(1, read=False)
    job.lose(2, Record(newer.ballot, job.world, newer))
    stop = job.decide()
    assert isinstance(stop, Stop)
    assert "a newer world may have followed" in stop.reason


def test_nobody_goes_on_after_a_loss_that_may_hide_a_world_that_lives():
    job = Job("abc", Policy(go_on_after_loss=True))
    newer = newer_world(job, {1, 2})
    job.lose(1, Record(newer.ballot, newer, newer))
    job.lose(2, read=False)
    assert isinstance(job.decide(), Stop)


def explore(seeds: range, replica_size: int = 1) -> Counter[str]:
    """Play all; how many schedules had what."""
    had: Counter[str] = Counter()
    for seed in seeds:
        had.update(set(+elastic_schedules.run(seed, replica_size).counts))
    return had


def test_random_schedules_keep_to_the_rules():
    had = explore(range(1000))
    for what in ("settled", "partitions", "takeovers", "launchers killed", "several coordinators"):
        assert had[what] > 50, had
    for what in ("of several worlds", "without silent members", "joined", "sides lost", "prepared"):
        assert had[what] > 50, had


@pytest.mark.slow
def test_random_schedules_of_replicas_keep_to_the_rules():
    had = explore(range(300), replica_size=2)
    for what in ("settled", "partitions", "joined", "prepared", "ended with their replica"):
        assert had[what] > 20, had


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(3000)
def test_a_hundred_thousand_random_schedules_keep_to_the_rules():
    had = explore(range(100_000))
    print(dict(had))
    assert had["settled"] > 50_000, had
