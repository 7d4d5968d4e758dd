"""Gloo as the engine, beyond its rows in the conformance table: failures, and other groups."""

from __future__ import annotations

import os
import signal
import sys
import threading

import numpy as np
import pytest
from forked import run_torch_ranks as run_ranks

from kolovod.errors import BootstrapError, CollectiveAbortedError, RankLostError
from kolovod.testing import RankFailed

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

GLOO = {"KOLOVOD_BACKEND": "gloo"}


def sums_beside_a_default_group(rank, store):
    """The script's own process group is made before, used meanwhile, and left after."""
    import torch.distributed as dist

    import kolovod

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    default = dist.group.WORLD
    kolovod.init()
    assert dist.group.WORLD is default
    theirs = torch.ones(3)
    dist.all_reduce(theirs)
    ours = kolovod.allreduce(np.ones(3), op=kolovod.Sum)
    kolovod.shutdown()
    dist.all_reduce(theirs)
    dist.destroy_process_group()
    return theirs.tolist(), ours.tolist()


def test_the_default_process_group_is_none_of_our_business(tmp_path):
    results = run_ranks(2, sums_beside_a_default_group, str(tmp_path / "store"), env=GLOO)
    assert results == [([4.0] * 3, [2.0] * 3)] * 2


def one_is_killed(rank, verb):
    import kolovod

    kolovod.init()
    values = np.ones(3 << 18, np.float32)

    def work_on():
        while True:
            getattr(kolovod, verb)(values, name="work")

    if rank == 1:
        getattr(kolovod, verb)(values, name="work")
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankLostError) as caught:
        work_on()
    kolovod.shutdown()
    kolovod.init(comm=[0, 2])  # the survivors, over Gloo again
    total = kolovod.allreduce(np.array([rank]), op=kolovod.Sum)
    return caught.value.rank, total.tolist()


@pytest.mark.parametrize("verb", ["allreduce", "alltoall"])
def test_a_killed_rank_is_named_and_the_survivors_go_on(verb):
    first, second, third = run_ranks(3, one_is_killed, verb, env=GLOO, keep_going=True)
    assert isinstance(second, RankFailed)
    assert second.exit_code == 128 + signal.SIGKILL
    assert first == third == (1, [2])


def one_dies_inside(rank):
    """The others are in the foreign call when it happens."""
    import kolovod

    kolovod.init()
    kolovod.allreduce(np.ones(1))
    if rank == 1:
        from kolovod.backends.gloo import GlooBackend

        GlooBackend.allreduce = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankLostError) as caught:
        kolovod.allreduce(np.ones(1000))
    return caught.value.rank


def test_a_rank_that_dies_in_the_middle_is_named():
    first, second = run_ranks(2, one_dies_inside, env=GLOO, keep_going=True)
    assert isinstance(second, RankFailed)
    assert first == 1


def one_raises_inside(rank):
    import kolovod

    kolovod.init()
    if rank == 1:
        from kolovod.backends.gloo import GlooBackend

        def broken(*_):
            raise MemoryError("no pages left")

        GlooBackend.allreduce = broken
    with pytest.raises(Exception, match="MemoryError: no pages left"):
        kolovod.allreduce(np.ones(1000))
    (carrier,) = (each for each in threading.enumerate() if each.name == "kolovod-backend")
    kolovod.shutdown()  # which does not wait for it for ever
    return carrier.is_alive()


def test_an_error_in_one_rank_is_the_error_of_all_and_nobody_stays_in_the_call():
    assert run_ranks(2, one_raises_inside, env=GLOO) == [False, False]


def one_has_no_gloo(rank):
    import kolovod

    if rank == 1:
        sys.modules["torch.distributed"] = None
    try:
        kolovod.init()
    except (BootstrapError, kolovod.errors.InvalidArgumentError) as error:
        return f"{type(error).__name__}: {error}"
    return "formed"


def test_a_rank_without_gloo_is_named_on_all():
    first, second = run_ranks(2, one_has_no_gloo, env=GLOO)
    assert first.startswith("BootstrapError: rank 1 has no backend: SettingError: backend")
    assert second.startswith("SettingError: backend 'gloo' needs PyTorch with Gloo")


def one_dies_while_they_meet(rank):
    import kolovod
    from kolovod.backends import gloo

    if rank == 1:
        gloo.make_store = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CollectiveAbortedError) as caught:
        kolovod.init()
    return type(caught.value).__name__, caught.value.rank


def test_a_rank_that_dies_before_it_is_connected_is_named():
    first, second = run_ranks(2, one_dies_while_they_meet, env=GLOO, keep_going=True)
    assert isinstance(second, RankFailed)
    assert first == ("RankLostError", 1)


def forks_and_exits(rank):
    """A child of a rank ends as Python programs do; the parent leaves without a shutdown."""
    import kolovod

    kolovod.init()
    kolovod.allreduce(np.ones(3))
    assert not torch.distributed.is_initialized()
    child = os.fork()
    if child == 0:
        sys.exit(7)
    _, status = os.waitpid(child, 0)
    kolovod.allreduce(np.ones(3))
    return os.waitstatus_to_exitcode(status)


@pytest.mark.slow
def test_a_forked_child_leaves_the_parents_connections_alone():
    assert run_ranks(2, forks_and_exits, env=GLOO) == [7, 7]
