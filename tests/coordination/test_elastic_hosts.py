"""kolovod.coordination.hosts: which slots are started where."""

from __future__ import annotations

import math

import pytest

from kolovod.coordination.hosts import Failure, RetryPolicy, cooling_until, plan_starts

POLICY = RetryPolicy(retries=1, cooldown_s=(10.0, 35.0), proven_s=100.0)


def places(plan):
    return [(start.slot, start.host) for start in plan.starts]


def failing(*times_s, slot=0, host="a", ran_s=1.0, jitter=0.0):
    return [Failure(slot, host, at_s, ran_s, jitter) for at_s in times_s]


def test_a_job_starts_where_discovery_says_up_to_max_np():
    plan = plan_starts({"a": 2, "b": 2}, {}, [], 3, POLICY, 0.0)
    assert places(plan) == [(0, "a"), (1, "a"), (2, "b")]
    assert (plan.cooling, plan.unwanted, plan.crowded, plan.until_s) == ({}, set(), (), None)


def test_a_slot_that_failed_is_started_again_on_its_host():
    running = {0: "a", 1: "a", 3: "b"}
    plan = plan_starts({"a": 3, "b": 2}, running, failing(5.0, slot=2, host="b"), 4, POLICY, 5.0)
    assert places(plan) == [(2, "b")]
    assert plan.starts[0].reason == "slot 2 failed on host b and is started again"


def test_beyond_its_retries_it_goes_elsewhere_and_the_host_cools_down():
    failures = failing(1.0, 2.0, slot=1, host="b")
    plan = plan_starts({"a": 2, "b": 1}, {0: "a"}, failures, 2, POLICY, 3.0)
    assert places(plan) == [(1, "a")]
    assert plan.starts[0].reason == "slot 1 failed on host b and is started on host a"
    assert plan.cooling == {"b": "processes failed there: it is not used for another 9 s"}
    assert plan.until_s == 12.0
    assert not plan_starts({"b": 1}, {}, failures, 2, POLICY, 12.0).cooling


@pytest.mark.parametrize(
    ("failures", "until_s"),
    [
        (failing(), 0.0),
        (failing(1.0), 0.0),
        (failing(1.0, slot=0) + failing(2.0, slot=1), 0.0),  # each has a retry
        (failing(1.0, 2.0), 12.0),
        (failing(1.0, 2.0, 5.0), 12.0),  # what ran there still
        (failing(1.0, 2.0, 20.0), 40.0),
        (failing(1.0, 2.0, 20.0, 50.0, 100.0), 135.0),  # no longer than the longest
        (failing(1.0, 2.0, jitter=1.0), 17.0),
        (failing(1.0, 2.0, 20.0, 50.0, 100.0, jitter=1.0), 135.0),
        (failing(1.0, 2.0) + failing(200.0, ran_s=150.0), 12.0),  # it was proven meanwhile
        (failing(1.0, 2.0) + failing(200.0, ran_s=150.0) + failing(201.0), 211.0),
        (failing(1.0, 2.0, host="b"), 0.0),
    ],
)
def test_each_time_a_host_cools_down_for_twice_as_long(failures, until_s):
    assert cooling_until("a", reversed(failures), POLICY) == until_s


@pytest.mark.parametrize(
    ("wanted", "running", "is_alone"),
    [
        ({"a": 1}, {}, True),
        ({"a": 1, "b": 1}, {1: "b"}, True),
        ({"a": 1, "b": 1}, {1: "c"}, False),
        ({"a": 1, "b": 2}, {1: "b"}, False),
        ({"a": 1, "lost": 5}, {}, True),
    ],
)
def test_where_no_other_host_has_a_place_only_one_that_fails_soon_is_avoided(
    wanted, running, is_alone
):
    failures = failing(20.0, 40.0, 60.0, ran_s=19.0)
    plan = plan_starts(wanted, running, failures, 2, POLICY, 60.0, lost={"lost"})
    assert places(plan) == [(0, "a" if is_alone else "b")]
    assert set(plan.cooling) == (set() if is_alone else {"a"})
    soon = failing(40.0, 41.0, 42.0, ran_s=9.0)
    assert set(plan_starts(wanted, running, soon, 2, POLICY, 43.0, lost={"lost"}).cooling) == {"a"}


def test_a_host_that_all_places_are_on_is_avoided_in_horovods_mode():
    policy = RetryPolicy(retries=0, cooldown_s=(10.0, 10.0), whole_host=True)
    assert plan_starts({"a": 1}, {}, failing(60.0, ran_s=59.0), 1, policy, 60.0).cooling


def test_without_a_cooldown_it_is_avoided_for_ever():
    policy = RetryPolicy(retries=0, cooldown_s=None)
    plan = plan_starts({"a": 1}, {}, failing(1.0), 1, policy, 1e9)
    assert places(plan) == []
    assert plan.until_s is None
    assert cooling_until("a", failing(1.0), policy) == math.inf


def test_who_was_cut_off_comes_back_to_its_host_however_often():
    failures = [Failure(1, "b", at_s, 1.0, was_cut_off=True) for at_s in (1.0, 2.0, 3.0)]
    assert cooling_until("b", failures, POLICY) == 0.0
    plan = plan_starts({"a": 2, "b": 1}, {0: "a"}, failures, 2, POLICY, 3.0)
    assert places(plan) == [(1, "b")]
    assert plan.starts[0].reason == "slot 1 was cut off on host b and is started again"
    failures += failing(4.0, 5.0, slot=1, host="b")
    assert cooling_until("b", failures, POLICY) == 15.0


def test_a_process_whose_slot_has_another_one_takes_a_place_all_the_same():
    """Its host was lost, and is reached again."""
    running = {0: "a", 1: "c"}
    plan = plan_starts({"a": 1, "b": 1, "c": 1, "d": 1}, running, [], 3, POLICY, 0.0, twice=["b"])
    assert places(plan) == []
    plan = plan_starts({"a": 1, "b": 1, "c": 1, "d": 1}, running, [], 4, POLICY, 0.0, twice=["b"])
    assert places(plan) == [(2, "d")]


def test_hosts_and_places_that_are_gone():
    running = {0: "a", 1: "b", 2: "b", 3: "c"}
    plan = plan_starts({"b": 1, "d": 1}, running, [], 8, POLICY, 0.0)
    assert plan.unwanted == {"a", "c"}
    assert plan.crowded == (2,)
    assert places(plan) == [(4, "d")]


def test_who_is_not_there_yet_goes_first_where_places_are_fewer():
    """As where a process was ordered for a place that had gone already."""
    running = {0: "a", 1: "a", 2: "a"}
    plan = plan_starts({"a": 2}, running, [], 8, POLICY, 0.0, ordered={0})
    assert (plan.crowded, places(plan)) == ((0,), [])
    plan = plan_starts({"a": 1}, running, [], 8, POLICY, 0.0, ordered={0})
    assert plan.crowded == (2, 0)


def test_in_horovods_mode_a_host_that_is_avoided_loses_its_other_processes():
    policy = RetryPolicy(retries=0, cooldown_s=(10.0, 10.0), whole_host=True)
    running = {0: "a", 1: "b", 3: "b", 4: "c"}
    failures = failing(5.0, slot=2, host="b") + failing(5.0, slot=5, host="c")
    plan = plan_starts({"a": 1, "b": 3, "d": 9}, running, failures, 3, policy, 6.0)
    assert plan.ended == {"b", "c"}  # also where discovery does not name it any more
    assert places(plan) == [(2, "d"), (5, "d")]  # the places of those that are ended are free
    assert plan.crowded == ()
    later = plan_starts({"a": 1, "b": 3}, {0: "a"}, failures, 3, policy, 15.0)
    assert later.ended == set()
    assert places(later) == [(1, "b"), (2, "b")]
    kolovods = RetryPolicy(retries=0, cooldown_s=(10.0, 10.0))
    assert plan_starts({"b": 3}, running, failures, 3, kolovods, 6.0).ended == set()


def test_of_a_host_out_of_reach_nobody_is_told_to_leave_and_nothing_starts_there():
    running = {0: "a", 1: "a", 3: "b"}  # the last has left
    plan = plan_starts({"a": 2, "b": 2}, running, [], 4, POLICY, 0.0, lost={"b"})
    assert (places(plan), plan.unwanted, plan.crowded) == ([], set(), ())
    plan = plan_starts({"a": 3, "b": 2}, running, [], 4, POLICY, 0.0, lost={"b"})
    assert places(plan) == [(2, "a")]


def of_replicas(wanted, running, failures=(), max_np=8, now_s=5.0):
    return plan_starts(wanted, running, failures, max_np, POLICY, now_s, replica_size=2)


def test_a_replica_is_started_as_a_whole_and_on_one_host_if_it_can():
    plan = of_replicas({"a": 3, "b": 2, "c": 2}, {})
    assert places(plan) == [(0, "a"), (1, "a"), (2, "b"), (3, "b"), (4, "c"), (5, "c")]
    plan = of_replicas({"a": 1, "b": 1, "c": 1}, {})
    assert places(plan) == [(0, "a"), (1, "b")]
    assert of_replicas({"a": 1}, {}).starts == ()
    assert places(of_replicas({"a": 8}, {}, max_np=4)) == [(slot, "a") for slot in range(4)]


def test_it_comes_again_where_it_was_when_all_of_it_has_ended():
    failed = failing(5.0, slot=3, host="b")
    assert of_replicas({"a": 4, "b": 2}, {0: "a", 1: "a", 2: "b"}, failed, 4).starts == ()
    plan = of_replicas({"a": 4, "b": 2}, {0: "a", 1: "a"}, failed, 4)
    assert places(plan) == [(2, "b"), (3, "b")]
    assert [start.reason for start in plan.starts] == [
        "slot 2 is started with its replica on host b",
        "slot 3 failed on host b and is started again",
    ]


def test_who_is_left_of_a_replica_on_another_host_leaves_with_it():
    running = {0: "a", 1: "a", 2: "a", 3: "b", 4: "b", 5: "b"}
    assert of_replicas({"a": 3}, running).crowded == (2,)
    assert of_replicas({"a": 2, "b": 3}, running).crowded == (2, 3)
