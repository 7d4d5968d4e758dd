"""Many process sets in one world, and many worlds in one process, through Horovod's names."""

import contextlib
import itertools
import threading

import left_behind
import pytest
from leaks import of_this_process_again

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from forked import run_torch_ranks as run_ranks  # noqa: E402
from leaks import of_this_process  # noqa: E402

import horovod.torch as hvd  # noqa: E402
import kolovod.torch as kvt  # noqa: E402

SETS = 36


def add_many(names, rank, size):
    """As many at a time as there are, but never two alike, until there were 36."""
    members = [
        list(ranks) for n in range(1, size) for ranks in itertools.combinations(range(size), n)
    ]
    ids, live = [], []
    for turn in range(SETS):
        if len(live) == len(members):
            assert names.remove_process_set(live.pop(0)) is True
        added = names.add_process_set(names.ProcessSet(members[turn % len(members)]))
        ids.append(added.process_set_id)
        live.append(added)
        for group in live[-1], live[0]:
            if group.included():
                total = names.allreduce(torch.ones(2), op=names.Sum, process_set=group)
                assert total.tolist() == [len(group.ranks)] * 2
    for group in live:
        assert names.remove_process_set(group) is True
        assert group.process_set_id is None
        assert names.remove_process_set(group) is False
    return ids


def many_sets(rank, size):
    torch.set_num_threads(1)
    found = []
    for names in (hvd, kvt):
        names.init()
        for _ in range(2):
            names.remove_process_set(names.add_process_set([0]))  # what is made once is made now
        before = of_this_process_again(found[0][0]) if found else of_this_process()
        ids = add_many(names, rank, size)
        found.append((before, of_this_process_again(before)))
        assert ids == list(range(3, 3 + SETS))
        # The last one is given up by the end of the world; the same object joins the next world.
        kept = names.ProcessSet([size - 1])
        for number in (3 + SETS, 1):  # numbers begin again
            names.add_process_set(kept)
            assert kept.process_set_id == number
            names.shutdown()
            assert kept.process_set_id is None
            names.init()
        names.shutdown()
    return found


@pytest.mark.slow
def test_36_process_sets():
    for worlds in run_ranks(4, many_sets, 4, timeout_s=110):
        for before, after in worlds:
            assert after[0] - before[0] < 8 * 1024  # KiB; the segments of 36 sets are more
            first = worlds[0][0]  # of the world before, too
            for number in (1, 2):
                assert after[number] <= before[number] <= first[number]


WORLDS, WARM_UP = 100, 40


def many_worlds(rank):
    """Each with verbs, a step of an optimizer of its own, and one of the optimizer of all."""
    torch.set_num_threads(1)
    hvd.init()
    net = torch.nn.Linear(4, 2)
    old = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    before = None
    for turn in range(WORLDS):
        if turn == WARM_UP:
            before = of_this_process(), left_behind.memory_files()
        hvd.init()
        size = hvd.size()
        hvd.broadcast_parameters(net.state_dict(), root_rank=turn % size)
        handle = hvd.allreduce_async(torch.full((1000,), float(rank)), op=hvd.Sum)
        assert hvd.allgather(torch.full((rank,), turn)).tolist() == [turn] * (size - 1)
        group = hvd.add_process_set([turn % size]) if turn % 5 == 0 else None
        other = torch.nn.Linear(3, 3)
        new = hvd.DistributedOptimizer(torch.optim.Adam(other.parameters()))
        for model, optimizer in ((net, old), (other, new)):
            optimizer.zero_grad()
            model(torch.full((1, model.in_features), 1.0 + rank)).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        assert hvd.synchronize(handle)[0] == size * (size - 1) / 2
        if group is not None and turn % 2:
            hvd.remove_process_set(group)
        with contextlib.suppress(hvd.HorovodInternalError):  # the other has left with its own
            hvd.barrier()
            if turn % 3 == 0:
                hvd.allreduce_async(torch.ones(10), name=f"never waited for {rank}")
        hvd.shutdown()
    weights = net.weight.tolist()
    figures, files = before
    new = left_behind.memory_files() - files
    new -= left_behind.held_elsewhere(new)
    return figures, of_this_process_again(figures), sorted(new), threading.active_count(), weights


@pytest.mark.slow
def test_100_worlds_with_verbs_and_steps_leave_nothing_behind():
    results = run_ranks(2, many_worlds, timeout_s=110)
    for before, after, new_files, threads, weights in results:
        assert after[0] - before[0] < 8 * 1024  # KiB, over 60 worlds; a segment alone has 1024
        assert after[1] <= before[1]  # descriptors
        assert after[2] <= before[2]  # threads
        assert after[3] <= before[3] + 4  # the allocator may map another arena
        assert new_files == []
        assert threads == 1
        assert weights == results[0][-1]
