"""Elastic membership: rules by example, and random schedules that must keep to them."""

from __future__ import annotations

from collections import Counter

import elastic_schedules
import pytest

from kolovod.elastic.ballots import (
    NOTHING,
    Ballot,
    Proof,
    Record,
    World,
    has_quorum,
    line_of,
    voters_left,
)
from kolovod.elastic.membership import Ask, Formed, Policy, Propose, Stop, Wait, decide
from kolovod.elastic.table import FIRST_LAUNCHER, Table, first_world, steward_of

LAUNCHER = FIRST_LAUNCHER
POLICY = Policy(gather_s=1.0, silence_s=2.0, elastic_timeout_s=30.0)


class Job:
    """A launcher, and members that answer it at once, unless they are cut off."""

    def __init__(self, hosts: str, policy: Policy = POLICY) -> None:
        """``hosts``: one letter for each member."""
        self.world = first_world(enumerate(hosts))
        self.table = Table(self.world)
        self.policy = policy
        self.records = {n: NOTHING.told(self.world) for n in self.world.numbers}
        self.cut_off: set[int] = set()
        self.now_s = 0.0

    def decide(self, steward: int = LAUNCHER):
        return decide(self.table, steward, self.policy, self.now_s)

    def lose(self, number: int, record: Record | None = None, read: bool = True) -> None:
        """It is proven dead."""
        left = (record or self.records[number]) if read else None
        self.table.prove(Proof(number, "killed by SIGKILL", left), self.now_s)
        self.cut_off.add(number)

    def enter(self, slot: int, host: str) -> int:
        member = self.table.enter(slot, host, self.now_s)
        assert member is not None
        self.records[member.number] = NOTHING
        return member.number

    def step(self, steward: int = LAUNCHER):
        """One decision, and what those who can be reached answer."""
        decision = self.decide(steward)
        if isinstance(decision, Ask):
            self.table.stand(decision.ballot)
            for n in set(decision.numbers) - self.cut_off:
                self.records[n] = self.records[n].promise(decision.ballot) or self.records[n]
                self.table.promised(n, self.records[n])
        elif isinstance(decision, Propose):
            self.table.propose(decision.world, decision.numbers, decision.urgent, decision.reason)
            for n in set(decision.numbers) - self.cut_off:
                self.records[n] = self.records[n].agree(decision.world) or self.records[n]
                self.table.agreed(n, decision.world.stamp, self.records[n])
        elif isinstance(decision, Formed):
            self.table.declare(decision.world, self.now_s)
            self.world = decision.world
            for n in decision.world.numbers - self.cut_off:
                self.records[n] = self.records[n].told(decision.world)
        return decision

    def settle(self, steward: int = LAUNCHER):
        """Until there is nothing to do. Returns all decisions."""
        made = []
        for _ in range(12):
            made.append(self.step(steward))
            if isinstance(made[-1], Wait | Stop):
                return made
        raise AssertionError(made)

    def hosts(self) -> str:
        return "".join(member.host for member in self.world.members)


def world(hosts: str, epoch: int = 1) -> World:
    members = first_world(enumerate(hosts)).members
    return World(Ballot(epoch, LAUNCHER), epoch, members)


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
    assert record.promise(Ballot(3, 7)) is None  # the term is another steward's
    assert record.promise(Ballot(2, 7)) is None
    assert record.agree(first) is None
    agreed = record.agree(second)
    assert agreed is not None
    assert agreed.agree(second) == agreed
    assert agreed.works_in(0) is None  # it has not formed yet
    earlier = World(second.ballot, second.epoch - 1, second.members)
    assert agreed.agree(earlier) is None  # of the same steward, late
    assert agreed.told(first).works_in(0) is None
    assert agreed.told(second).works_in(0) is second
    assert agreed.told(second).works_in(1) is None


def test_a_lost_rank_is_left_out_at_once_and_the_others_keep_their_order():
    job = Job("aabb")
    assert job.settle()[-1] == Wait(None, "the world is complete")
    job.lose(0)
    ask, formed, wait = job.settle()
    assert isinstance(ask, Propose)
    assert ask.urgent
    assert ask.reason == "rank 0 on host a was lost (killed by SIGKILL)"
    assert isinstance(formed, Formed)
    assert isinstance(wait, Wait)
    assert [member.number for member in job.world.members] == [1, 2, 3]
    assert (job.world.epoch, job.world.resets, job.world.joined) == (2, 1, frozenset())


def test_joiners_come_together_and_last_at_a_step_boundary():
    job = Job("ab")
    job.settle()
    job.enter(2, "c")
    assert job.decide() == Wait(1.0, "1 may join; more may come until 1")
    job.now_s = 0.5
    number = job.enter(0, "c")  # its slot has a member that lives
    job.enter(3, "c")
    job.now_s = 1.0
    ask, asked_all, formed, _ = job.settle()
    assert isinstance(ask, Propose)
    assert not ask.urgent
    assert ask.reason == "2 joined on c"
    assert set(ask.numbers) == ask.world.joined  # joiners are asked first
    assert isinstance(asked_all, Propose)
    assert set(asked_all.numbers) == {0, 1}
    assert isinstance(formed, Formed)
    assert job.hosts() == "abcc"
    assert number not in job.world.numbers


def test_a_slot_that_comes_back_is_another_member():
    job = Job("ab")
    job.settle()
    job.lose(0)
    job.settle()
    number = job.enter(0, "a")
    job.now_s = 5.0
    job.settle()
    assert [(member.number, member.slot) for member in job.world.members] == [(1, 1), (number, 0)]


def test_silence_leaves_a_member_out_only_with_a_majority():
    job = Job("abc")
    job.settle()
    job.table.miss(2, 0.0)
    job.cut_off.add(2)
    assert job.decide() == Wait(None, "the world is complete")
    job.now_s = 2.0
    assert job.settle()[0].reason == "rank 2 on host c cannot be reached"
    assert job.hosts() == "ab"
    job.table.miss(0, 2.0)
    job.now_s = 4.0
    wait = job.decide()
    assert isinstance(wait, Wait)
    assert wait.reason.startswith("no majority of the 2 members of epoch 2 can be reached")
    assert wait.reason.endswith("rank 0 on host a")
    job.now_s = 40.0
    assert isinstance(job.decide(), Stop)


def test_on_one_host_silence_never_leaves_a_member_out():
    job = Job("aaa")
    job.settle()
    job.table.miss(2, 0.0)
    job.now_s = 10.0
    assert isinstance(job.decide(), Wait)
    job.lose(2, read=False)
    job.settle()
    assert job.hosts() == "aa"


def newer_world(job: Job, numbers: set[int]) -> World:
    """What a side has formed while the launcher was cut off from it."""
    members = tuple(member for member in job.world.members if member.number in numbers)
    return World(Ballot(7, 1), 5, members, (job.world.without_basis(),), resets=1)


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
    successor = Table(first_world(enumerate("ab")))
    successor.merge(job.table.facts(), job.now_s)
    successor.see(job.records[0])
    job.table = successor
    for n in joiners:
        job.table.miss(n, 0.0)
    job.cut_off.update(joiners)
    job.step(0)
    wait = job.decide(0)
    assert isinstance(wait, Wait)
    assert "of the 5 members of epoch 2" in wait.reason
    for n in joiners:
        job.table.hear(n)
    job.cut_off.clear()
    job.settle(0)
    assert job.hosts() == "ab"  # first those who have the state, at once
    assert [base.epoch for base in job.world.basis] == [1, 2]
    job.now_s = 10.0
    job.settle(0)
    assert job.hosts() == "abccc"


def test_what_an_open_proposal_was_based_on_may_have_formed_as_well():
    first = world("abc")
    older = World(Ballot(3, 1), 3, first.members[1:], (first,))
    later = World(Ballot(4, 0), 4, first.members, (first, older.without_basis()))
    line = line_of(first, {0: Record(Ballot(9, 2), first, later)}, {}, Ballot(9, 2))
    assert [base.epoch for base in line.basis] == [1, 3, 4]
    denied = {n: Record(Ballot(9, 2), first) for n in (1, 2)}
    assert line_of(first, denied, {}, Ballot(9, 2)).basis == (first,)


def test_joiners_that_never_got_the_state_do_not_count_as_its_keepers():
    job = Job("a")
    job.settle()
    number = job.enter(1, "b")
    job.now_s = 5.0
    job.settle()
    job.lose(0)
    stop = job.settle()[-1]
    assert isinstance(stop, Stop)
    assert stop.reason.startswith("no member that has the state is left")
    job.table.has_state.add(number)
    job.settle()
    assert job.hosts() == "b"


def test_members_leave_at_a_step_boundary_but_one_stays_to_hand_the_state_over():
    job = Job("ab")
    job.settle()
    job.table.leave(0, 0.0)
    leave = job.settle()[0]
    assert isinstance(leave, Propose)
    assert not leave.urgent
    assert leave.reason == "rank 0 on host a leaves"
    job.table.unwanted_hosts = frozenset("b")
    assert job.decide().reason == (
        "no member that has the state can be in a next world: rank 0 on host b leaves"
    )
    number = job.enter(2, "c")
    job.step(), job.step()
    job.step()
    assert job.hosts() == "bc"
    job.table.has_state.add(number)
    job.settle()
    assert job.hosts() == "c"


def test_those_who_leave_vote_on_the_world_without_them():
    job = Job("abc")
    job.settle()
    for n in (1, 2):
        job.table.leave(n, 0.0)
    job.cut_off.update((1, 2))
    job.step()
    assert isinstance(job.decide(), Propose)
    assert job.decide().numbers == (1, 2)
    job.cut_off.remove(2)
    job.settle()
    assert job.hosts() == "a"


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
    job.table.top_term = 8
    job.step()
    job.lose(2)
    job.step()
    newer = newer_world(job, {0, 1, 2})
    job.table.merge(Table(newer).facts(), 0.0)
    made = job.settle()
    assert isinstance(made[0], Ask | Propose)
    assert job.world.basis[0].stamp == newer.stamp


def test_a_voter_that_dies_without_a_record_after_the_question_ends_the_proposal():
    job = Job("aaa")
    job.settle()
    job.table.leave(2, 0.0)
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


def test_hosts_that_cool_down_get_no_new_members():
    job = Job("ab")
    job.settle()
    job.table.refused_hosts = frozenset("c")
    job.enter(2, "c")
    job.now_s = 5.0
    assert job.decide() == Wait(None, "the world is complete")
    job.table.refused_hosts = frozenset()
    job.settle()
    assert job.hosts() == "abc"


def test_too_few_end_their_step_and_wait_for_more_until_the_elastic_timeout():
    job = Job("ab", Policy(min_np=2, gather_s=0.0, elastic_timeout_s=30.0))
    job.settle()
    job.now_s = 10.0
    job.lose(1)
    made = job.settle()
    assert made[0].urgent
    assert job.hosts() == "a"  # it may be in the middle of a step
    wait = job.decide()
    assert wait == Wait(
        40.0,
        "1 of the at least 2 members are there (too few were left); others are waited for until 40",
    )
    job.now_s = 40.0
    assert isinstance(job.decide(), Stop)
    job.enter(1, "b")
    made = job.settle()
    assert not made[0].urgent
    assert job.hosts() == "ab"


def test_a_world_that_its_members_say_has_failed_is_formed_anew():
    job = Job("ab")
    job.settle()
    job.table.fail(1, "connection reset", 5.0)
    job.now_s = 5.2
    assert isinstance(job.decide(), Wait)  # a proof may come
    job.now_s = 5.0 + POLICY.broken_s
    made = job.settle()
    assert made[0].urgent
    assert "epoch 1 has failed: connection reset" in made[0].reason
    assert job.hosts() == "ab"
    job.table.fail(1, "again", 6.0)  # an old one's failure says nothing
    assert isinstance(job.decide(), Wait)


def test_no_more_than_max_np():
    job = Job("ab", Policy(max_np=3, gather_s=60.0))
    job.settle()
    first, _ = job.enter(2, "a"), job.enter(3, "b")
    job.settle()  # all places are taken, so nobody else is waited for
    assert [member.number for member in job.world.members] == [0, 1, first]


def test_the_reset_limit_ends_growth_first_and_the_job_at_the_next_loss():
    job = Job("abc", Policy(gather_s=0.0, reset_limit=1))
    job.settle()
    job.enter(3, "a")
    job.settle()
    job.enter(4, "b")
    assert job.decide() == Wait(None, "the reset limit of 1 is reached: nobody joins any more")
    job.lose(0)
    stop = job.decide()
    assert isinstance(stop, Stop)
    assert stop.reason.startswith("the reset limit of 1 is reached: rank 0 on host a was lost")


def test_who_joins_waits_for_those_who_are_on_their_way():
    job = Job("ab", Policy(gather_s=1.0, gather_started_s=30.0))
    job.settle()
    job.table.coming = {2, 3}
    job.enter(2, "a")
    assert job.decide() == Wait(30.0, "1 may join; more may come until 30")
    job.enter(3, "a")
    assert job.decide() == Wait(1.0, "2 may join; more may come until 1")
    job.table.coming = {2}  # who is there already
    job.now_s = 1.0
    assert isinstance(job.decide(), Propose)


def test_in_horovods_mode_it_ends_growth_by_the_job():
    job = Job("ab", Policy(gather_s=0.0, reset_limit=0, ends_for_growth=True))
    job.settle()
    assert job.decide() == Wait(None, "the world is complete")
    job.enter(2, "a")
    assert job.decide() == Stop("the reset limit of 0 is reached: others want to join")


def test_the_launcher_is_steward_then_the_lowest_that_can_be_reached():
    table = Table(first_world(enumerate("abc")))
    assert steward_of(table.facts(), LAUNCHER, {0, 1, 2}) == LAUNCHER
    assert steward_of(table.facts(), None, {1, 2}) == 1
    table.prove(Proof(1, "killed", NOTHING), 0.0)
    assert steward_of(table.facts(), None, {1, 2}) == 2
    assert steward_of(table.facts(), None, set()) is None


def explore(seeds: range) -> Counter[str]:
    """Play all; how many schedules had what."""
    had: Counter[str] = Counter()
    for seed in seeds:
        had.update(set(+elastic_schedules.run(seed).counts))
    return had


def test_random_schedules_keep_to_the_rules():
    had = explore(range(1000))
    for what in ("settled", "partitions", "takeovers", "launchers killed", "several stewards"):
        assert had[what] > 50, had
    for what in ("of several worlds", "without silent members", "joined", "sides lost"):
        assert had[what] > 50, had


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_hundred_thousand_random_schedules_keep_to_the_rules():
    had = explore(range(100_000))
    print(dict(had))
    assert had["settled"] > 50_000, had
