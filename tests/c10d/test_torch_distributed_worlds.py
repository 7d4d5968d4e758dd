"""Groups, worlds, and what goes wrong with them, of the torch.distributed backend."""

from __future__ import annotations

import datetime
import os
import time

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.distributed as dist  # noqa: E402
from dying import die  # noqa: E402
from forked import run_torch_ranks as run_ranks  # noqa: E402
from waiting import Marks, until  # noqa: E402

import kolovod  # noqa: E402
import kolovod.torch  # noqa: E402 - registers the backend
from kolovod.errors import InvalidArgumentError, RankLostError, WaitTimeoutError  # noqa: E402
from kolovod.testing import RankFailed  # noqa: E402


def of_sub_groups(rank):
    dist.init_process_group("kolovod")
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 2])]
    everyone = dist.new_group()
    results = {}
    for name, group in [("01", pairs[0]), ("12", pairs[1]), ("02", pairs[2]), ("all", everyone)]:
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            continue
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=group)
        root = dist.get_global_rank(group, dist.get_world_size(group) - 1)
        from_last = torch.tensor([rank])
        dist.broadcast(from_last, src=root, group=group)
        results[name] = (tensor.item(), from_last.item())
    dist.destroy_process_group(everyone)
    with pytest.raises(InvalidArgumentError, match="was destroyed"):
        everyone.barrier()
    dist.barrier()
    if rank != 1:
        with pytest.raises(InvalidArgumentError, match="ascending"):
            dist.new_group([2, 0], sort_ranks=False)
    return results


def test_sub_groups():
    zero, one, two = run_ranks(3, of_sub_groups)
    assert zero == {"01": (1.0, 1), "02": (2.0, 2), "all": (3.0, 2)}
    assert one == {"01": (1.0, 1), "12": (3.0, 2), "all": (3.0, 2)}
    assert two == {"12": (3.0, 2), "02": (2.0, 2), "all": (3.0, 2)}


def beside_own_verbs(rank):
    kolovod.init()
    dist.init_process_group("kolovod")
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    kolovod.torch.allreduce_(tensor, op=kolovod.Sum)
    dist.destroy_process_group()
    assert kolovod.torch.allreduce(tensor, op=kolovod.Sum).tolist() == [8.0, 8.0]
    kolovod.shutdown()


def again(rank):
    for number in range(3):
        # A TCPStore at the same port as the one before would be met while that one goes away.
        method = f"{os.environ['MEETING']}{number}"
        dist.init_process_group("kolovod", init_method=method, rank=rank, world_size=2)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        dist.destroy_process_group()
        assert tensor.item() == 2.0


def other_numbers(rank):
    with pytest.raises(InvalidArgumentError, match=f"rank {1 - rank} of 2.*rank {rank} of 2"):
        dist.init_process_group(
            "kolovod", init_method=f"{os.environ['MEETING']}-", rank=1 - rank, world_size=2
        )


def worlds(rank):
    beside_own_verbs(rank)
    again(rank)
    other_numbers(rank)
    return True


def test_worlds(tmp_path):
    assert all(run_ranks(2, worlds, env={"MEETING": f"file://{tmp_path}/meeting"}))


def all_reduce():
    return dist.all_reduce(torch.ones(1), async_op=True)


def killed(rank):
    dist.init_process_group("kolovod")
    tensor = torch.ones(10)
    die(rank, 1, all_reduce)
    begin = time.monotonic()
    with pytest.raises(RankLostError, match="rank 1"):
        dist.all_reduce(tensor)
    with pytest.raises(RankLostError):
        dist.barrier()
    return time.monotonic() - begin


def test_a_killed_rank_is_an_error_within_seconds():
    took_s, failure = run_ranks(2, killed, keep_going=True)
    assert isinstance(failure, RankFailed)
    assert took_s < 25  # five times the slack


def killed_in_backward(rank):
    dist.init_process_group("kolovod")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    loss = model(torch.ones(1, 4)).sum()
    die(rank, 1, all_reduce)
    with pytest.raises(RankLostError, match="rank 1"):
        loss.backward()
    return True


def test_a_killed_rank_is_an_error_of_backward():
    result, failure = run_ranks(2, killed_in_backward, keep_going=True)
    assert result is True
    assert isinstance(failure, RankFailed)


def cannot_copy_back(rank):
    """The result's way to a tensor with gaps fails by something that is no error of Kolovod's."""
    from kolovod.c10d.flat import Flat

    def fail(flat):
        raise ValueError("no way back")

    dist.init_process_group("kolovod")
    copy_back, Flat.copy_back = Flat.copy_back, fail
    work = dist.all_reduce(torch.ones(4, 4)[:, 0], async_op=True)
    for _ in range(2):
        with pytest.raises(ValueError, match="no way back"):
            work.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), ValueError)
    with pytest.raises(ValueError, match="no way back"):
        work.get_future().wait()

    watched = dist.all_reduce(torch.ones(4, 4)[:, 0], async_op=True).get_future()
    until(watched.done)
    with pytest.raises(ValueError, match="no way back"):
        watched.value()
    Flat.copy_back = copy_back
    strided = torch.ones(4, 4)[:, 0]
    until(dist.all_reduce(strided, async_op=True).get_future().done)
    assert strided.tolist() == [2.0] * 4
    dist.destroy_process_group()
    return True


def test_whatever_fails_a_work_is_its_error_and_the_watcher_goes_on():
    assert run_ranks(2, cannot_copy_back) == [True, True]


def late(rank, marks):
    dist.init_process_group("kolovod")
    pair = dist.new_group([0, 1])
    if rank == 1:
        marks.wait_for("given up")
        dist.barrier()
        dist.barrier(pair)
        marks.make("passed")
        return True
    # Only here and now: making the groups, and the other rank's barriers, may take any time.
    dist.group.WORLD.set_timeout(datetime.timedelta(seconds=1))
    explicit = dist.barrier(async_op=True)
    with pytest.raises(WaitTimeoutError, match=r"barrier .* not complete after 0.1"):
        explicit.wait(datetime.timedelta(seconds=0.1))
    for _ in range(2):
        # Scripts look for "Timed out", which gloo says.
        with pytest.raises(WaitTimeoutError, match=r"after 1.* Timed out waiting 1000ms.*cannot"):
            explicit.wait()
    with pytest.raises(WaitTimeoutError, match=r" Timed out waiting 100ms"):
        dist.barrier(pair, timeout=datetime.timedelta(seconds=0.1))
    assert not explicit.is_success()
    marks.make("given up")
    marks.wait_for("passed")
    return True


def test_timeouts(tmp_path):
    assert all(run_ranks(2, late, Marks(tmp_path)))


def test_long_limits_are_told_in_milliseconds_as_gloo_does():
    from kolovod.c10d.work import _final

    assert " Timed out waiting 1800000ms, " in str(_final(WaitTimeoutError("late; go on"), 1800.0))


def test_a_pytorch_whose_operations_cannot_be_waited_for_is_refused(monkeypatch):
    from kolovod.c10d import reducing

    monkeypatch.setattr(dist, "AllreduceOptions", object)
    with pytest.raises(InvalidArgumentError, match=r"needs PyTorch 2\.8 or later, and this is 2"):
        reducing.create(None)
