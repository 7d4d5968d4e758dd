"""A step by hand, and what must hold of every one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kolovod.planning.costs import Cluster, Costs, Link, Load
from kolovod.planning.model import (
    Request,
    Step,
    alone_s,
    largest_deviate,
    simulate,
    without_stragglers,
)

MIB = 1 << 20
FREE = Costs(0, 0, 0, 0, 0, 0, 0)
ENDLESS = Link(math.inf, 0.0)
STEP = Step(0.04, (Request(0.02, MIB), Request(0.03, MIB)), (0.04,))


def cluster(hosts: int = 2, cores: float = math.inf, link: Link = ENDLESS, on: int = 1) -> Cluster:
    return Cluster(hosts, 1, cores, link, on)


def of_time(fixed_s: float, link_s: float, cpu_s: float = 0.0, messages: float = 0.0):
    """Each bucket takes that much, for each MiB."""

    def load_of(bytes_: float, dtype: str, codec: str, cluster: Cluster, costs: Costs) -> Load:
        mib = bytes_ / MIB
        return Load(fixed_s, link_s * mib, cpu_s * mib, messages * mib)

    return load_of


def test_endless_links_and_cores_are_like_one_rank() -> None:
    for hosts in (1, 2, 64):
        outcome = simulate(STEP, cluster(hosts), FREE)
        assert outcome.step_s == pytest.approx(0.04)
        assert outcome.waiting_s == 0


def test_one_bucket_by_hand() -> None:
    """Ready after 30 of 40 ms, carried for 25: 15 ms are waited for."""
    step = Step(0.04, (Request(0.03, MIB),), (0.04,))
    outcome = simulate(step, cluster(), FREE, load_of=of_time(0.005, 0.020))
    assert outcome.step_s == pytest.approx(0.055)
    assert outcome.waiting_s == pytest.approx(0.015)
    assert outcome.carried_s == pytest.approx(0.025)
    assert outcome.buckets == 1


def test_what_is_ready_meanwhile_is_one_bucket() -> None:
    """The first is carried from 10 to 30 ms; what came until then goes together: 30 to 70."""
    at = (0.01, 0.015, 0.02, 0.04)
    step = Step(0.04, tuple(Request(each, MIB) for each in at), (0.04,))
    outcome = simulate(step, cluster(), FREE, load_of=of_time(0.0, 0.020))
    assert outcome.buckets == 3
    assert outcome.step_s == pytest.approx(0.09)
    one_by_one = simulate(step, cluster(), FREE, load_of=of_time(0.01, 0.010), fusion_bytes=MIB)
    assert one_by_one.buckets == 4


def test_computing_goes_on_after_a_wait() -> None:
    """A wait in the middle, of 10 ms, and an update after the last."""
    step = Step(0.04, (Request(0.02, MIB), Request(0.03, MIB)), (0.02, 0.035))
    outcome = simulate(step, cluster(), FREE, load_of=of_time(0.0, 0.010))
    assert outcome.step_s == pytest.approx(0.04 + 0.010 + 0.005)


def test_what_nobody_waits_for_is_late_in_the_end() -> None:
    step = Step(0.04, (Request(0.04, MIB),), ())
    assert simulate(step, cluster(), FREE, load_of=of_time(0, 0.01)).step_s == pytest.approx(0.04)
    assert simulate(step, cluster(), FREE, load_of=of_time(0, 0.09)).step_s == pytest.approx(0.09)


def test_hosts_that_share_cores_compute_slower() -> None:
    """Four ranks of one thread on two cores: computing takes twice as long."""
    shared = simulate(STEP, cluster(4, 2, on=4), FREE)
    assert shared.step_s == pytest.approx(0.08)
    assert simulate(STEP, cluster(4, 2, on=1), FREE).step_s == pytest.approx(0.04)
    assert alone_s(STEP, 2) == 0.04
    assert alone_s(replace(STEP, cores=4), 2) == 0.08


def test_communication_takes_cores_from_computing() -> None:
    """A core for each rank; carrying wants 0.2 of one, which computing lacks for 20 ms at most."""
    load = of_time(0.0, 0.02, 0.004)
    step = Step(0.04, (Request(0.0, MIB),), (0.04,))
    assert simulate(step, cluster(2, 2, on=2), FREE, load_of=load).step_s == pytest.approx(0.044)
    assert simulate(step, cluster(2, 4, on=2), FREE, load_of=load).step_s == pytest.approx(0.04)
    # It wants a whole one: each thread gets half of it, until it is carried.
    busy = of_time(0.0, 0.01, 0.01)
    assert simulate(step, cluster(2, 2, on=2), FREE, load_of=busy).step_s == pytest.approx(0.05)


def test_messages_wait_for_turns_where_threads_outnumber_cores() -> None:
    load = of_time(0.0, 0.010, messages=20)
    costs = replace(FREE, turn_s=1e-3)
    step = Step(0.04, (Request(0.0, MIB),), (0.04,))
    free = simulate(step, cluster(2, 2, on=2), costs, load_of=load)
    full = simulate(step, cluster(4, 2, on=4), costs, load_of=load)
    assert free.carried_s == pytest.approx(0.010)
    assert full.carried_s == pytest.approx(0.010 + 20 * 1e-3)


def test_an_operation_begins_when_the_slowest_rank_has_it() -> None:
    assert largest_deviate(1) == 0
    # H. Harter, "Expected values of normal order statistics", Biometrika 48, 1961.
    for count, expected in {2: 0.5642, 10: 1.5388, 100: 2.5076, 400: 2.9682}.items():
        assert largest_deviate(count) == pytest.approx(expected, rel=0.05), count
    jittery = replace(STEP, jitter=0.1, skew=1.2)
    slow = 1.2 * (1 + 0.1 * largest_deviate(64))
    assert simulate(jittery, cluster(64), FREE).step_s == pytest.approx(0.04 * slow)
    assert simulate(jittery, cluster(1), FREE).step_s == pytest.approx(0.04)
    assert simulate(without_stragglers(jittery), cluster(64), FREE).step_s == pytest.approx(0.04)


steps = st.builds(
    lambda compute_s, shares, sizes, cores, jitter: Step(
        compute_s,
        tuple(
            Request(share * compute_s, size)
            for share, size in zip(sorted(shares), sizes, strict=True)
        ),
        (compute_s,),
        cores,
        jitter,
    ),
    st.floats(1e-3, 1.0),
    st.lists(st.floats(0, 1), min_size=5, max_size=5),
    st.lists(st.integers(1, 64 * MIB), min_size=5, max_size=5),
    st.floats(0.1, 8),
    st.floats(0, 0.2),
)


def by_rate(bytes_: float, dtype: str, codec: str, cluster: Cluster, costs: Costs) -> Load:
    """An algorithm that is the same for all links: the engine's choice may cost processors more."""
    return Load(cluster.link.latency_s, 2 * bytes_ / cluster.link.bytes_per_s, 1e-10 * bytes_)


@settings(max_examples=60, deadline=None)
@given(steps, st.integers(1, 40), st.integers(1, 4), st.floats(1, 16), st.floats(1e6, 1e10))
def test_better_links_and_more_cores_do_not_make_it_slower(
    step: Step, hosts: int, ranks: int, cores: float, rate: float
) -> None:
    here = Cluster(hosts, ranks, cores, Link(rate, 1e-4), 1)
    took = simulate(step, here, FREE, load_of=by_rate).step_s
    least = alone_s(step, cores) if ranks == 1 else step.compute_s
    assert took >= least * (1 - 1e-9)
    # What is ready sooner may go in more buckets, each with a latency of its own; what is carried
    # faster takes cores when ranks compute, rather than when they wait.
    more_s = len(step.requests) * 1e-4 + 1e-10 * step.bytes * max(1.0, 4 / cores)
    endless = replace(here, link=Link(math.inf, 1e-4))
    assert simulate(step, endless, FREE, load_of=by_rate).step_s <= took * 1.01 + more_s
    idle = replace(here, cores=math.inf)
    assert simulate(step, idle, FREE, load_of=by_rate).step_s <= took * 1.01 + more_s
    alone = replace(here, hosts=1, ranks_per_host=1)
    assert simulate(step, alone, Costs()).step_s == pytest.approx(alone_s(step, cores))


def test_a_slower_link_is_never_faster() -> None:
    last = math.inf
    for rate in (1e6, 1e7, 1e8, 1e9, 1e10):
        took = simulate(STEP, cluster(4, link=Link(rate, 1e-4)), Costs()).step_s
        assert took <= last
        last = took
    assert last < 0.06
