"""Replicas of several slots: none of their members is in a world without the others."""

from __future__ import annotations

from dataclasses import replace

from membership_job import POLICY, Job

from kolovod.coordination.membership import Formed, Propose, Wait


def of_replicas(hosts: str, **changes: float) -> Job:
    """Slots 0 and 1 hold one model together, and 2 and 3, and so on."""
    job = Job(hosts, replace(POLICY, replica_size=2, min_np=2, **changes))
    job.settle()
    return job


def test_who_is_left_of_a_replica_is_in_no_world_without_the_others():
    job = of_replicas("aabbcc")
    job.lose(3)
    ask, formed, _ = job.settle()
    assert isinstance(ask, Propose)
    assert ask.urgent
    assert ask.reason == "rank 3 on host b was lost (killed by SIGKILL)"
    assert 2 in ask.numbers  # its voice counts still
    assert isinstance(formed, Formed)
    assert [member.number for member in job.world.members] == [0, 1, 4, 5]


def test_a_replica_joins_as_a_whole():
    job = of_replicas("aabb")
    job.lose(0)
    job.lose(1)
    job.settle()
    job.enter(1, "a")
    job.now_s = 10.0
    assert job.decide() == Wait(None, "the world is complete")
    job.enter(5, "c")
    job.enter(0, "a")
    job.now_s = 20.0
    job.settle()
    assert [member.slot for member in job.world.members] == [2, 3, 0, 1]


def test_a_replica_leaves_as_a_whole_and_the_last_one_hands_its_state_over():
    job = of_replicas("aabb")
    job.leave(2)
    job.settle()
    assert job.hosts() == "aa"
    job.leave(1)
    assert job.decide() == Wait(
        None,
        "no member that has the state can be in a next world: rank 1 on host a leaves",
    )
    joined = {job.enter(2, "c"), job.enter(3, "c")}
    job.settle()
    assert [member.slot for member in job.world.members] == [0, 1, 2, 3]
    job.state.has_state |= joined
    job.settle()
    assert [member.slot for member in job.world.members] == [2, 3]


def test_nobody_is_left_out_of_the_last_replica():
    job = of_replicas("ab", broken_s=0.0)
    for _ in range(2):
        epoch = job.world.epoch
        job.state.fail(epoch, "rank 1 was not reached", job.now_s, 0, 1)
        job.state.fail(epoch, "rank 0 was not reached", job.now_s, 1, 0)
        job.settle()
        assert job.world.epoch == epoch + 1
    assert [member.number for member in job.world.members] == [0, 1]
