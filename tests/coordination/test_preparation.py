"""The next world's engine forms beside the present one: when it is asked for, and what is used."""

from __future__ import annotations

from dataclasses import replace

import pytest
from membership_job import POLICY, Job

from kolovod.coordination.membership import Formed, Prepare, Propose, Wait

WARM = replace(POLICY, gather_s=0.0, prepare_s=5.0)


def growing() -> Job:
    job = Job("ab", WARM)
    job.settle()
    job.enter(2, "b")
    return job


def kinds(made: list) -> list[type]:
    return [type(decision) for decision in made]


def test_it_is_prepared_before_anybody_is_asked_to_agree():
    job = growing()
    first = job.step()
    assert isinstance(first, Prepare)
    assert set(first.numbers) == first.world.numbers
    assert not job.state.candidacy.asked
    made = job.settle()
    assert kinds(made) == [Propose, Propose, Formed, Wait]
    assert made[2].world is first.world
    assert job.hosts() == "abb"


@pytest.mark.parametrize("policy", [replace(WARM, prepare_s=0.0), WARM])
def test_a_loss_waits_for_no_preparation(policy):
    job = Job("abc", policy)
    job.settle()
    job.lose(1)
    assert Prepare not in kinds(job.settle())
    assert job.hosts() == "ac"


def test_a_loss_ends_a_preparation():
    job = growing()
    job.slow.add(1)
    prepared = job.step().world
    job.lose(1)
    made = job.settle()
    formed = next(decision.world for decision in made if isinstance(decision, Formed))
    assert formed.members == (prepared.members[0],)
    assert formed.epoch > prepared.epoch
    assert Prepare in kinds(made)  # of the world with the joiner, which follows
    assert job.hosts() == "ab"


def test_what_one_cannot_prepare_nobody_uses():
    job = growing()
    job.unable.add(1)
    prepared = job.step().world
    made = job.settle()
    assert kinds(made) == [Propose, Propose, Formed, Wait]
    assert job.world.members == prepared.members
    assert job.world.stamp > prepared.stamp


def test_a_preparation_has_its_time():
    job = growing()
    job.slow.add(0)
    first = job.step()
    again = job.step()
    assert (again.world, again.numbers) == (first.world, (0,))
    assert again.until_s == first.until_s
    job.now_s = first.until_s
    made = job.settle()
    assert kinds(made) == [Propose, Propose, Formed, Wait]
    assert job.world.stamp > first.world.stamp


def test_a_joiner_that_dies_while_it_prepares_stops_nobody():
    job = growing()
    job.slow.add(0)
    joiner = job.step().world.members[-1].number
    job.lose(joiner)
    assert kinds(job.settle()) == [Wait]
    assert job.world.epoch == 1


def test_who_comes_while_others_prepare_is_in_the_world_after_it():
    job = growing()
    job.slow.add(0)
    first = job.step().world
    job.enter(3, "a")
    assert job.step().world is first
    job.slow.clear()
    worlds = [decision.world for decision in job.settle() if isinstance(decision, Formed)]
    assert worlds[0] is first
    job.settle()
    assert job.hosts() == "abba"


def test_what_is_said_of_another_preparation_does_not_count():
    job = growing()
    job.slow.update((0, 1))
    first = job.step().world
    later = replace(first, epoch=first.epoch + 1)
    job.state.prepared(0, later.stamp, True)
    job.state.prepared(1, later.stamp, False)
    assert set(job.step().numbers) == {0, 1}


def test_who_leaves_is_prepared_for_by_the_others():
    job = Job("abc", WARM)
    job.settle()
    job.leave(1)
    first = job.step()
    assert isinstance(first, Prepare)
    assert set(first.numbers) == {0, 2}
    assert job.settle()[-2].world is first.world


def test_nothing_is_prepared_for_one_that_goes_on_alone():
    job = Job("ab", WARM)
    job.settle()
    job.leave(1)
    assert Prepare not in kinds(job.settle())
    assert job.hosts() == "a"
