"""monitored_barrier of the torch.distributed backend: rank 0 names who has not come."""

from __future__ import annotations

import concurrent.futures
import datetime
import time

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.distributed as dist  # noqa: E402
from forked import run_torch_ranks as run_ranks  # noqa: E402
from waiting import until  # noqa: E402

import kolovod.torch  # noqa: E402 - registers the backend
from kolovod.c10d.monitored import MonitoredBarrier, seconds  # noqa: E402
from kolovod.errors import InvalidArgumentError, WaitTimeoutError  # noqa: E402

LONG_S = 30.0


def outcomes(members, ranks, size, timeout_s=LONG_S, wait_all_ranks=False):
    """What each of ``ranks`` meets in a barrier of ``size``: None, or the error's text."""

    def call(rank):
        try:
            members[rank].wait(timeout_s, wait_all_ranks)
        except WaitTimeoutError as error:
            return str(error)
        return None

    with concurrent.futures.ThreadPoolExecutor(size) as pool:
        return dict(zip(ranks, pool.map(call, ranks), strict=True))


def members_of(store, size):
    return [MonitoredBarrier(store, rank, size) for rank in range(size)]


def test_all_pass_again_and_again_and_leave_one_key():
    store = dist.HashStore()
    members = members_of(store, 4)
    for _ in range(5):
        assert outcomes(members, range(4), 4) == dict.fromkeys(range(4))
    assert store.num_keys() == 1, "the last verdict"


def test_nobody_passes_before_all_have_come():
    store = dist.HashStore()
    members = members_of(store, 3)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        early = [pool.submit(members[rank].wait, LONG_S, False) for rank in (0, 1)]
        time.sleep(0.3)
        assert not any(future.done() for future in early)
        members[2].wait(LONG_S, False)
        for future in early:
            future.result(LONG_S)


@pytest.mark.parametrize(
    ("wait_all_ranks", "who"), [(False, "Rank 1 failed"), (True, "Ranks 1, 3 failed")]
)
def test_rank_0_names_who_is_missing(wait_all_ranks, who):
    store = dist.HashStore()
    members = members_of(store, 4)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        # A long limit of rank 2, which is to hear of rank 0's verdict and not to have its own.
        waiting = pool.submit(outcomes, members, [2], 4)
        until(lambda: store.num_keys() == 1, "rank 2 has come")
        said = outcomes(members, [0], 4, 0.2, wait_all_ranks) | waiting.result(LONG_S)
    assert said[0].startswith(f"{who} to pass monitoredBarrier in 200 ms")
    assert "Rank 2 successfully reached monitoredBarrier, but received errors" in said[2]
    assert who in said[2]


def test_a_rank_that_comes_too_late_learns_why_nobody_waits():
    store = dist.HashStore()
    members = members_of(store, 3)
    assert "Ranks 1, 2 failed" in outcomes(members, [0], 3, 0.0, wait_all_ranks=True)[0]
    assert "Ranks 1, 2 failed" in outcomes(members, [1], 3)[1]
    assert "Ranks 1, 2 failed" in outcomes(members, [2], 3)[2]
    assert outcomes(members, range(3), 3) == dict.fromkeys(range(3)), "the next one passes"


def test_without_rank_0():
    store = dist.HashStore()
    said = outcomes(members_of(store, 2), [1], 2, 0.1)
    assert "rank 0 has not answered within 100 ms" in said[1]


def test_long_limits_are_told_in_milliseconds(monkeypatch):
    monkeypatch.setattr(MonitoredBarrier, "_appears", lambda *_: False)
    said = outcomes(members_of(dist.HashStore(), 2), [0, 1], 2, 1800.0)
    assert "in 1800000 ms" in said[0]
    assert "within 1800000 ms" in said[1]


def test_time_limits():
    assert seconds(datetime.timedelta(milliseconds=1500), 7.0) == 1.5
    assert seconds(0.25, 7.0) == 0.25
    assert seconds(None, 7.0) == 7.0
    with pytest.raises(InvalidArgumentError, match=r"'soon': give a datetime\.timedelta"):
        seconds("soon", 7.0)


def by_torch(rank):
    dist.init_process_group("kolovod", timeout=datetime.timedelta(seconds=60))
    pair = dist.new_group([0, 1])
    for group in (None, pair):
        dist.monitored_barrier(group, timeout=datetime.timedelta(seconds=30))
    dist.distributed_c10d.monitored_barrier(timeout=30.0, wait_all_ranks=True)
    # While an operation is stuck, which is what it is there for.
    stuck = dist.all_reduce(torch.ones(2), async_op=True) if rank != 1 else None
    said = ""
    if rank != 1:
        with pytest.raises(RuntimeError, match="monitoredBarrier") as raised:
            dist.monitored_barrier(timeout=datetime.timedelta(seconds=0.5))
        said = str(raised.value)
    gloo = dist.new_group(backend="gloo")
    dist.monitored_barrier(gloo)  # gloo's own
    if rank == 1:
        dist.all_reduce(torch.ones(2))
    else:
        stuck.wait()
    dist.destroy_process_group(pair)
    if rank != 2:
        with pytest.raises(InvalidArgumentError, match="was destroyed"):
            pair.monitored_barrier()
    dist.destroy_process_group()
    return said


def test_by_torch_distributed():
    zero, one, two = run_ranks(3, by_torch)
    assert zero.startswith("Rank 1 failed to pass monitoredBarrier in 500 ms")
    assert one == ""
    assert two.startswith("Rank 2 successfully reached monitoredBarrier")


def of_another_backend(rank):
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=2)
    refused = "only implemented for GLOO|only GLOO supports"  # by 2.13, and by 2.14
    with pytest.raises((ValueError, RuntimeError), match=refused):
        dist.monitored_barrier()
    return kolovod.torch.__name__


def test_what_others_do_not_have_they_still_refuse():
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - makes it known

    assert run_ranks(1, of_another_backend) == ["kolovod.torch"]
