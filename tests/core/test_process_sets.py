"""Process sets: some ranks that communicate among themselves, over threads and over processes."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time

import numpy as np
import pytest
from forked import run_ranks
from waiting import Marks, until

import kolovod
from kolovod.core.ops import Adasum, Average, Max, Sum
from kolovod.errors import (
    InvalidArgumentError,
    KolovodError,
    MismatchError,
    RankLostError,
)
from kolovod.testing.loopback import loopback

# --- over threads ---------------------------------------------------------------------------------


def again_and_again(call):
    """Until it raises, which it is about to do."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        call()
        time.sleep(0.001)


def check_every_verb(kv, group):
    """Each verb among the members, against what NumPy makes of their ranks."""
    ranks = group.ranks
    me, place, n = kv.world().rank, group.position(kv.world().rank), len(group.ranks)
    mine = np.full(5, me, np.float32)
    total = np.full(5, sum(ranks), np.float32)
    np.testing.assert_array_equal(kv.allreduce(mine, op=Sum, process_set=group), total)
    np.testing.assert_allclose(kv.allreduce(mine, process_set=group), total / n)
    grouped = kv.grouped_allreduce([mine, mine[:2]], op=Max, process_set=group)
    np.testing.assert_array_equal(grouped[1], np.full(2, max(ranks), np.float32))
    for root in ranks:
        got = kv.broadcast(np.array([me, root]), root, process_set=group)
        np.testing.assert_array_equal(got, [root, root])
    rows = np.full((place + 1, 2), me)
    expected = np.concatenate([np.full((i + 1, 2), r) for i, r in enumerate(ranks)])
    np.testing.assert_array_equal(kv.allgather(rows, process_set=group), expected)
    sent = np.arange(n) + 100 * me
    got, received = kv.alltoall(sent, process_set=group)
    np.testing.assert_array_equal(got, [100 * r + place for r in ranks])
    assert received == [1] * n
    part = kv.reducescatter(np.arange(n + 1.0), op=Sum, process_set=group)
    np.testing.assert_array_equal(part, np.array_split(n * np.arange(n + 1.0), n)[place])
    kv.barrier(process_set=group)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_every_verb_in_overlapping_sets(size):
    members = [list(range(0, size, 2)), list(range(1, size)), [0, size - 1], [size - 1]]
    with loopback(size) as world:
        sets = [world.process_set(ranks) for ranks in members]

        def work(kv):
            for group in sets:
                if kv.world().rank in group.ranks:
                    check_every_verb(kv, group)
            return kv.allreduce(np.ones(3), op=Sum)

        for result in world.run(work):
            np.testing.assert_array_equal(result, np.full(3, size))


@pytest.mark.parametrize("turn", range(6))
def test_overlapping_sets_in_any_order(turn):
    """{0,1}, {1,2} and {0,2} at once, submitted in another order by every rank, same names."""
    with loopback(3) as world:
        sets = [world.process_set(ranks) for ranks in ([0, 1], [1, 2], [0, 2])]
        orders = list(itertools.permutations(sets))

        def work(kv):
            me = kv.world().rank
            totals = []
            for step in range(8):
                order = orders[(turn + me * (step + 1)) % 6]
                tensors = {id(s): np.full(3000, me + step, np.float32) for s in sets}
                handles = [
                    (s, kv.allreduce_async(tensors[id(s)], "t", op=Sum, process_set=s))
                    for s in order
                    if me in s.ranks
                ]
                for group, handle in handles[:: -1 if step % 2 else 1]:
                    expected = sum(group.ranks) + 2 * step
                    totals.append(np.all(handle.wait() == expected))
            return all(totals)

        assert world.run(work, timeout_s=30) == [True] * 3


def test_names_of_sets_and_messages_are_of_the_world():
    with loopback(4) as world:
        group = world.process_set([1, 3])

        def work(kv):
            if kv.world().rank not in group.ranks:
                return ""
            with pytest.raises(MismatchError) as raised:
                kv.allreduce(np.ones(kv.world().rank), "t", process_set=group)
            return str(raised.value)

        text = world.run(work)[3]
        assert "rank 1 has (1,), rank 3 has (3,)" in text


def test_adasum_within_a_set_of_a_world_that_could_not():
    with loopback(3) as world:
        group = world.process_set([0, 2])

        def work(kv):
            me = kv.world().rank
            if me == 1:
                return None
            unit = np.array([1.0, 0.0]) if me == 0 else np.array([0.0, 1.0])
            return kv.allreduce(unit, op=Adasum, process_set=group)

        for result in world.run(work)[::2]:
            np.testing.assert_allclose(result, [1, 1])


def test_a_rank_that_dies_ends_the_sets_it_is_not_in():
    with loopback(3) as world:
        group = world.process_set([0, 1])

        def work(kv):
            me = kv.world().rank
            if me == 2:
                world.kill(2)
                return None
            with pytest.raises(RankLostError) as raised:
                again_and_again(lambda: kv.allreduce(np.ones(2), process_set=group))
            return raised.value.rank

        assert world.run(work)[:2] == [2, 2]


# --- over processes -------------------------------------------------------------------------------


def of_ranks(rank, *members):
    kolovod.init()
    return [kolovod.add_process_set(list(ranks)) for ranks in members]


def all_verbs(rank):
    from kolovod import numpy as kv

    evens, odds, pair = of_ranks(rank, [2, 0], [1, 3], [1, 2])
    for group in (pair, evens, odds):
        if group.included():
            check_every_verb(kv.collectives, group)
            assert kolovod.broadcast_object({"from": rank}, group.ranks[1], process_set=group) == {
                "from": group.ranks[1]
            }
            assert kolovod.allgather_object(rank, process_set=group) == group.ranks
            assert group.rank() == group.ranks.index(rank)
        else:
            with pytest.raises(InvalidArgumentError, match=f"rank {rank} is not in"):
                kolovod.allreduce(np.ones(1), process_set=group)
    check_every_verb(kv.collectives, kolovod.global_process_set)
    return [(g.process_set_id, g.ranks, g.size(), g.included()) for g in (evens, odds, pair)]


def test_sets_of_processes():
    results = run_ranks(4, all_verbs)
    for rank, facts in enumerate(results):
        assert [fact[:3] for fact in facts] == [(1, [0, 2], 2), (2, [1, 3], 2), (3, [1, 2], 2)]
        assert [fact[3] for fact in facts] == [rank in fact[1] for fact in facts]


def static_then_dynamic(rank):
    first = kolovod.ProcessSet([0, 1])
    kolovod.init(process_sets=[first, [1, 2]])
    ids = [first.process_set_id]
    again = kolovod.add_process_set(kolovod.ProcessSet([2, 0]))
    ids.append(again.process_set_id)
    assert kolovod.remove_process_set(first)
    assert first.process_set_id is None
    assert not kolovod.remove_process_set(first)
    assert not kolovod.remove_process_set(kolovod.global_process_set)
    with pytest.raises(InvalidArgumentError, match="add_process_set"):
        kolovod.allreduce(np.ones(1), process_set=first)
    kolovod.add_process_set(first)  # the same object once more, with a new number
    ids.append(first.process_set_id)
    if first.included():
        total = kolovod.allreduce(np.ones(2), op=Sum, process_set=first)
        np.testing.assert_array_equal(total, [2, 2])
    kolovod.shutdown()
    assert first.process_set_id is None
    kolovod.init()
    with pytest.raises(InvalidArgumentError, match="add_process_set"):
        kolovod.allreduce(np.ones(1), process_set=first)
    return ids


def test_static_sets_and_removing():
    assert run_ranks(3, static_then_dynamic) == [[1, 3, 4]] * 3


def wrong_sets(rank):
    kolovod.init()
    errors = []
    for call in (
        lambda: kolovod.ProcessSet([]),
        lambda: kolovod.ProcessSet([0, 0]),
        lambda: kolovod.ProcessSet(["a"]),
        lambda: kolovod.add_process_set([0, 2]),
        lambda: kolovod.add_process_set([0, 1]),
        lambda: kolovod.add_process_set([rank]),
        lambda: [kolovod.add_process_set([1]), kolovod.add_process_set([1])],
    ):
        with pytest.raises(KolovodError) as raised:
            call()
        errors.append(f"{type(raised.value).__name__}: {raised.value}")
    root = kolovod.add_process_set([0])
    if rank == 0:
        with pytest.raises(InvalidArgumentError, match="rank 1 is not in process set"):
            kolovod.broadcast(np.ones(1), 1, process_set=root)
    return errors


def test_what_cannot_be_a_set():
    errors = run_ranks(2, wrong_sets)
    assert errors[0] == errors[1]
    wanted = (
        "at least one rank",
        "each once",
        "whole numbers",
        "rank 2 is not in 0..1",
        "the global process set",
        "rank 0 calls add_process_set([0]), rank 1 add_process_set([1])",
        "same members as process set [1] (id 1)",
    )
    for text, error in zip(wanted, errors[0], strict=True):
        assert text in error
    assert errors[0][5].startswith("MismatchError")


def busy_set(rank):
    (group,) = of_ranks(rank, [0, 1])
    handle = None
    if rank == 0:
        handle = kolovod.allreduce_async(np.ones(1), "late", process_set=group)
    with pytest.raises(InvalidArgumentError, match="rank 0 has operations of it pending"):
        kolovod.remove_process_set(group)
    if rank == 1:
        kolovod.allreduce(np.ones(1), "late", process_set=group)
    if handle is not None:
        handle.wait()
    return kolovod.remove_process_set(group)


def test_a_set_in_use_is_not_removed():
    assert run_ranks(3, busy_set) == [True] * 3


def add_and_remove(rank):
    kolovod.init()

    def resources():
        return len(os.listdir("/proc/self/fd")), threading.active_count(), _threads()

    for turn in range(3):
        kolovod.remove_process_set(kolovod.add_process_set([turn % 2]))
    # A thread that was waited for is listed for a moment more.
    before = until(lambda: (found := resources()) == resources() and found, "nothing ends any more")
    for _ in range(20):
        group = kolovod.add_process_set([0, 1])
        if group.included():
            kolovod.allreduce(np.ones(10), process_set=group)
        kolovod.remove_process_set(group)
    until(lambda: resources() == before, f"as before: {before}")


def _threads():
    return len(os.listdir("/proc/self/task"))


def test_adding_and_removing_leaves_nothing_behind():
    run_ranks(3, add_and_remove)


def killed_member(rank, marks):
    (group,) = of_ranks(rank, [0, 1])
    marks.make(rank)
    if rank == 2:
        marks.wait_for(0, 1)  # who have the set, too
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankLostError) as raised:
        again_and_again(lambda: kolovod.allreduce(np.ones(4), process_set=group))
    return raised.value.rank


def test_the_death_of_any_rank_ends_every_set(tmp_path):
    results = run_ranks(3, killed_member, Marks(tmp_path), keep_going=True)
    assert results[:2] == [2, 2]


def forked_member(rank):
    (group,) = of_ranks(rank, [0, 1])
    if rank == 2:
        return 3.0
    group_sum = kolovod.allreduce(np.ones(1), op=Sum, process_set=group)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            kolovod.allreduce(np.ones(1), process_set=group)
        except KolovodError:
            status = 0
        os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    return group_sum[0] + kolovod.allreduce(np.ones(1), op=Average, process_set=group)[0]


def test_a_forked_child_cannot_use_a_set():
    assert run_ranks(3, forked_member) == [3.0] * 3
