"""Which world follows: who joins, leaves, is left out or is waited for; rules by example."""

from __future__ import annotations

from membership_job import LAUNCHER, POLICY, Job

from kolovod.coordination.consensus import NOTHING, Ballot, Proof, Record, has_quorum
from kolovod.coordination.coordinator_state import CoordinatorState, coordinator_of, first_world
from kolovod.coordination.membership import Formed, Policy, Propose, Stop, Wait, let_go


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


def test_a_rank_that_has_ended_well_is_not_called_lost():
    job = Job("aa")
    job.settle()
    job.state.prove(Proof(1, "ended with exit code 0", NOTHING, has_finished=True), 0.0)
    job.cut_off.add(1)
    assert job.settle()[0].reason == "rank 1 on host a has ended"


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


def grown_late() -> tuple[Job, int, int]:
    """A process has got its number before that of the only member that is left, and joins last."""
    job = Job("ab")
    job.settle()
    early = job.enter(2, "c")
    job.state.miss(early, 0.0)
    job.cut_off.add(early)
    job.now_s = 5.0
    job.state.see(Record(Ballot(job.state.top_term + 1, 1)))  # another coordinator was there
    job.settle()
    late = job.enter(3, "d")
    job.now_s = 10.0
    job.settle()
    job.state.has_state.add(late)
    for number in (0, 1):
        job.lose(number)
        job.settle()
    assert (early < late, job.hosts()) == (True, "d")
    job.state.hear(early)
    job.cut_off.discard(early)
    job.now_s = 20.0
    job.settle()
    return job, early, late


def test_who_joins_comes_last_however_low_its_number_is():
    """Or it would be rank 0, whose state all others are given."""
    job, early, late = grown_late()
    assert [member.number for member in job.world.members] == [late, early]
    assert job.world.joined == {early}


def test_of_two_halves_that_of_the_lowest_rank_goes_on_and_decides():
    job, early, late = grown_late()
    assert has_quorum(job.world, {late}, {})
    assert not has_quorum(job.world, {early}, {})
    assert coordinator_of(job.state.facts(), None, {early, late}) == late


def test_silence_leaves_a_member_out_only_with_a_majority():
    job = Job("abc")
    job.settle()
    job.state.miss(2, 0.0)
    job.cut_off.add(2)
    assert job.decide() == Wait(None, "the world is complete")
    job.now_s = 2.0
    assert job.settle()[0].reason == "rank 2 on host c cannot be reached"
    assert job.hosts() == "ab"
    assert job.state.left_behind == {2}
    job.state.miss(0, 2.0)
    job.now_s = 4.0
    wait = job.decide()
    assert isinstance(wait, Wait)
    assert wait.reason.startswith("no majority of the 2 members of epoch 2 can be reached")
    assert wait.reason.endswith("rank 0 on host a")
    job.now_s = 40.0
    assert isinstance(job.decide(), Stop)


def test_a_coordinator_that_was_cut_off_hears_whom_the_others_have_left_behind():
    away, here = Job("abbb"), CoordinatorState(first_world(enumerate("abbb")))
    for state in (away.state, here):
        state.leave(1, 0.0)
    away.settle()
    away.state.miss(0, 0.0)
    away.cut_off.add(0)
    away.now_s = 2.0
    away.settle()
    assert away.hosts() == "bb"
    here.merge(away.state.facts(), 3.0)
    assert here.left_behind == {0}  # 1 has left by itself


def test_who_has_ended_or_leaves_was_not_left_behind():
    job = Job("aabb")
    job.settle()
    job.lose(3)
    job.state.leave(1, 0.0)
    job.settle()
    assert (job.hosts(), job.state.left_behind) == ("ab", set())


def test_on_one_host_silence_never_leaves_a_member_out():
    job = Job("aaa")
    job.settle()
    job.state.miss(2, 0.0)
    job.now_s = 10.0
    assert isinstance(job.decide(), Wait)
    job.lose(2, read=False)
    job.settle()
    assert job.hosts() == "aa"


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
    job.state.has_state.add(number)
    job.settle()
    assert job.hosts() == "b"


def test_members_leave_at_a_step_boundary_but_one_stays_to_hand_the_state_over():
    job = Job("ab")
    job.settle()
    job.leave(0)
    leave = job.settle()[0]
    assert isinstance(leave, Propose)
    assert not leave.urgent
    assert leave.reason == "rank 0 on host a leaves"
    job.state.unwanted_hosts = frozenset("b")
    assert job.decide().reason == (
        "no member that has the state can be in a next world: rank 0 on host b leaves"
    )
    number = job.enter(2, "c")
    job.step(), job.step()
    job.step()
    assert job.hosts() == "bc"
    job.state.has_state.add(number)
    job.settle()
    assert job.hosts() == "c"


def test_who_leaves_waits_a_moment_for_others_that_are_told_to():
    """Else another rank 0 would leave after the first, and write another checkpoint."""
    job = Job("abc")
    job.settle()
    job.state.leave(0, 0.0)
    assert job.decide() == Wait(0.5, "others may leave with those that do")
    job.now_s = 0.3
    job.state.leave(2, 0.3)
    assert job.decide() == Wait(0.5, "others may leave with those that do")
    job.now_s = 0.5
    proposal = job.decide()
    assert isinstance(proposal, Propose)
    assert proposal.reason == "rank 0 on host a leaves, rank 2 on host c leaves"


def test_all_leave_after_the_same_step():
    """A step that some have completed, and others have not, is waited for; a dead one is not."""
    job = Job("ab")
    job.settle()
    epoch = job.state.formed.epoch
    for number in range(2):
        job.state.leave(number, 0.0)
    job.state.stopped = {0: epoch, 1: epoch - 1}
    assert isinstance(job.decide(), Wait)
    job.state.stopped[1] = epoch
    assert job.decide() == Stop(
        "all members leave: rank 0 on host a leaves, rank 1 on host b leaves"
    )
    job.state.stopped.clear()
    job.state.fail(epoch, "broken", 0.0, 0)
    job.now_s += 100
    assert isinstance(job.decide(), Stop)
    job = Job("ab")
    job.settle()
    job.state.leave(0, 0.0)
    job.state.prove(Proof(1, "was killed", NOTHING), 0.0)
    assert isinstance(job.decide(), Stop)


def test_those_who_leave_vote_on_the_world_without_them():
    job = Job("abc")
    job.settle()
    for n in (1, 2):
        job.leave(n)
    job.cut_off.update((1, 2))
    job.step()
    assert isinstance(job.decide(), Propose)
    assert job.decide().numbers == (1, 2)
    job.cut_off.remove(2)
    job.settle()
    assert job.hosts() == "a"


def test_hosts_that_cool_down_get_no_new_members():
    job = Job("ab")
    job.settle()
    job.state.refused_hosts = frozenset("c")
    job.enter(2, "c")
    job.now_s = 5.0
    assert job.decide() == Wait(None, "the world is complete")
    job.state.refused_hosts = frozenset()
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
    job.state.fail(1, "connection reset", 5.0, 0)
    job.now_s = 5.2
    assert isinstance(job.decide(), Wait)  # a proof may come
    job.now_s = 5.0 + POLICY.broken_s
    made = job.settle()
    assert made[0].urgent
    assert "epoch 1 has failed: connection reset" in made[0].reason
    assert job.hosts() == "ab"
    job.state.fail(1, "again", 6.0, 0)  # an old one's failure says nothing
    assert isinstance(job.decide(), Wait)


def test_a_world_that_fails_before_who_joined_has_the_state_is_formed_anew():
    job = Job("ab")
    job.settle()
    number = job.enter(2, "c")
    job.now_s = 5.0
    job.settle()
    assert job.world.joined == {number}
    job.state.fail(2, "connection reset", 6.0, 0)
    job.now_s = 7.0
    made = job.settle()
    assert len([step for step in made if isinstance(step, Propose)]) <= 2  # one world, asked twice
    assert job.hosts() == "abc"
    assert (job.world.epoch, job.world.joined) == (3, {number})


def test_whom_others_cannot_reach_twice_in_a_row_is_left_out():
    """Two hosts that cannot reach each other; the coordinator hears of both."""
    job = Job("abcd")
    job.settle()
    job.state.fail(1, "rank 3 is lost", 5.0, 2, 3)
    job.state.fail(1, "rank 3 is lost", 5.0, 3, 2)
    job.state.fail(1, "rank 3 is lost", 5.0, 0, 2)
    job.now_s = 6.0
    job.settle()
    assert job.hosts() == "abcd"  # a connection may break once
    job.state.fail(2, "rank 2 is lost", 7.0, 3, 2)
    job.state.fail(2, "rank 2 is lost", 7.0, 2, 2)  # it was told so itself
    job.now_s = 8.0
    made = job.settle()
    assert job.hosts() == "abd"
    assert made[0].urgent
    assert made[0].reason.startswith("rank 2 on host c is left out, which others cannot reach, ")
    job.state.fail(3, "rank 1 is lost", 9.0, 0, 1)
    job.now_s = 10.0
    job.settle()
    assert job.hosts() == "abd"  # of these members it is the first time


def test_of_two_that_cannot_reach_each_other_the_later_one_is_left_out():
    job = Job("ab")
    job.settle()
    for epoch, now_s in ((1, 5.0), (2, 7.0)):
        job.state.fail(epoch, "rank 1 is lost", now_s, 0, 1)
        job.state.fail(epoch, "rank 0 is lost", now_s, 1, 0)
        job.now_s = now_s + 1.0
        job.settle()
    assert job.hosts() == "a"


def test_who_has_no_state_yet_is_left_out_rather_and_never_the_only_one_that_has_it():
    job = Job("a")
    job.settle()
    late = [job.enter(slot, "bcd"[slot - 1]) for slot in (1, 2)]
    job.now_s = 5.0
    job.settle()
    assert job.hosts() == "abc"
    for epoch, now_s in ((2, 6.0), (3, 8.0)):
        for number in late:
            job.state.fail(epoch, "rank 0 is lost", now_s, number, 0)
        job.state.fail(epoch, "rank 1 is lost", now_s, 0, late[0])
        job.now_s = now_s + 1.0
        job.settle()
    assert job.hosts() == "ac"


def test_where_one_has_ended_nobody_else_is_left_out():
    job = Job("abc")
    job.settle()
    job.state.fail(1, "rank 1 is lost", 5.0, 0, 1)
    job.now_s = 6.0
    job.settle()
    job.state.fail(2, "rank 1 is lost", 7.0, 0, 1)
    job.lose(2)
    job.now_s = 8.0
    job.settle()
    assert job.hosts() == "ab"


def test_failures_far_apart_or_of_other_causes_leave_nobody_out():
    job = Job("abc")
    job.settle()
    for epoch, now_s, unreached in ((1, 5.0, 2), (2, 50.0, 2), (3, 51.0, None), (4, 52.0, 2)):
        job.state.fail(epoch, "it failed", now_s, 0, unreached)
        job.now_s = now_s + 0.9
        job.settle()
        assert job.hosts() == "abc"
        assert job.world.epoch == epoch + 1


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
    job.state.coming = {2, 3}
    job.enter(2, "a")
    assert job.decide() == Wait(30.0, "1 may join; more may come until 30")
    job.enter(3, "a")
    assert job.decide() == Wait(1.0, "2 may join; more may come until 1")
    job.state.coming = {2}  # who is there already
    job.now_s = 1.0
    assert isinstance(job.decide(), Propose)


def test_in_horovods_mode_it_ends_growth_by_the_job():
    job = Job("ab", Policy(gather_s=0.0, reset_limit=0, ends_for_growth=True))
    job.settle()
    assert job.decide() == Wait(None, "the world is complete")
    job.enter(2, "a")
    assert job.decide() == Stop("the reset limit of 0 is reached: others want to join")


def test_the_launcher_is_coordinator_then_the_lowest_that_can_be_reached():
    state = CoordinatorState(first_world(enumerate("abc")))
    assert coordinator_of(state.facts(), LAUNCHER, {0, 1, 2}) == LAUNCHER
    assert coordinator_of(state.facts(), None, {1, 2}) == 1
    state.prove(Proof(1, "killed", NOTHING), 0.0)
    assert coordinator_of(state.facts(), None, {1, 2}) == 2
    assert coordinator_of(state.facts(), None, set()) is None


def test_who_leaves_takes_its_replica_along_and_who_is_cut_off_was_not_let_go():
    job = Job("aabbcc")
    job.settle()
    job.leave(0)
    job.state.unwanted_hosts = frozenset("c")
    assert let_go([job.world], job.state, 1) == {0, 4, 5}
    assert let_go([job.world], job.state, 2) == {0, 1, 4, 5}
    job.lose(2)
    assert 2 not in let_go([job.world], job.state, 1)
