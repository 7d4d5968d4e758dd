"""join: ranks with uneven data."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from forked import run_ranks

import kolovod
from kolovod.core.ops import Adasum, Average, Max, Min, Product, Sum
from kolovod.errors import InvalidArgumentError, MismatchError, RankLeftError, RankLostError
from kolovod.testing.loopback import loopback


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_a_joined_rank_contributes_zeros(size, named):
    """Rank r has r + 2 batches; cached names too, since the first ones come again."""
    with loopback(size) as world:

        def work(kv):
            me = kv.world().rank
            for epoch in range(2):
                for batch in range(me + 2):
                    name = f"grad.{batch % 2}" if named else None
                    there = size if batch < 2 else size - (batch - 1)
                    summed = kv.allreduce(np.ones(300, np.float32), name, op=Sum)
                    assert np.all(summed == there), (epoch, batch, summed[0])
                    mean = kv.allreduce_async(np.ones((2, 3)), name and f"{name}.mean").wait()
                    np.testing.assert_allclose(mean, np.full((2, 3), there / size))
                assert kv.join() == size - 1
                np.testing.assert_array_equal(kv.allgather(np.array([me])), np.arange(size))
            return True

        assert all(world.run(work))


def test_ops_of_a_joined_rank():
    """Zeros take part in every op, as in Horovod."""
    with loopback(2) as world:

        def work(kv):
            if kv.world().rank == 0:
                return kv.join(), None
            values = np.array([-2.0, 3.0])
            results = [
                kv.allreduce(values, op=op).tolist() for op in (Sum, Average, Min, Max, Product)
            ]
            results.append(kv.allreduce(values, op=Adasum).tolist())
            integers = kv.grouped_allreduce([np.array([5, 7]), np.array([True])], op=Sum)
            results.append([array.tolist() for array in integers])
            return kv.join(), results

        (last, _), (other, results) = world.run(work)
        assert last == other == 1
        assert results == [
            [-2, 3],
            [-1, 1.5],
            [-2, 0],
            [0, 3],
            [0, 0],
            [-2, 3],
            [[5, 7], [True]],
        ]


def test_other_verbs_say_who_has_joined():
    with loopback(3) as world:

        def work(kv):
            me = kv.world().rank
            texts = []
            if me > 0:
                for call in (
                    lambda: kv.allgather(np.ones(1), "a"),
                    lambda: kv.broadcast(np.ones(1), 1, "b"),
                    lambda: kv.alltoall(np.ones(3), name="c"),
                    lambda: kv.reducescatter(np.ones(3), "d"),
                    lambda: kv.barrier("e"),
                ):
                    with pytest.raises(MismatchError) as raised:
                        call()
                    texts.append(str(raised.value))
                kv.allreduce(np.ones(1))  # the world is usable
            return kv.join(), texts

        results = world.run(work)
        assert len({last for last, _ in results}) == 1
        assert results[1][1] == results[2][1]
        verbs = ("allgather", "broadcast", "alltoall", "reducescatter", "barrier")
        for verb, text in zip(verbs, results[1][1], strict=True):
            assert text.startswith(verb)
            assert "rank 0 has joined" in text


def test_what_was_submitted_before_is_completed_first():
    with loopback(2) as world:

        def work(kv):
            me = kv.world().rank
            values = [np.full(4, me + 1.0), np.full(4, me + 1.0)]
            if me == 0:
                early = [kv.allreduce_async(v, f"n{i}", op=Sum) for i, v in enumerate(values)]
                last = kv.join()
                return last, [handle.wait()[0] for handle in early]
            one = kv.allreduce(values[0], "n0", op=Sum)[0]
            return kv.join(), [one]  # n1 is never submitted here: a joined rank contributes zeros

        (last, zero), (other, one) = world.run(work)
        assert last == other
        assert zero == [3.0, 1.0]
        assert one == [3.0]


def test_a_joined_rank_submits_nothing():
    with loopback(2) as world:
        refused = []
        go = threading.Event()

        def work(kv):
            if kv.world().rank == 1:
                go.wait(30)
                return kv.join()

            def meanwhile():
                while not refused:
                    try:
                        kv.poll(kv.allreduce_async(np.ones(1), "early"))
                    except InvalidArgumentError as error:
                        if "already pending" not in str(error):
                            refused.append(str(error))
                go.set()

            thread = threading.Thread(target=meanwhile)
            thread.start()
            last = kv.join()
            thread.join()
            return last

        assert len(set(world.run(work))) == 1
        assert "rank 0 has joined" in refused[0]


def test_mismatch_among_the_others_names_them():
    with loopback(3) as world:

        def work(kv):
            me = kv.world().rank
            if me > 0:
                with pytest.raises(MismatchError, match=r"rank 1 has \(1,\), rank 2 has \(2,\)"):
                    kv.allreduce(np.ones(me), "t")
            return kv.join()

        assert len(set(world.run(work))) == 1


def test_join_within_a_process_set():
    with loopback(4) as world:
        group = world.process_set([1, 3])

        def work(kv):
            me = kv.world().rank
            if me not in group.ranks:
                return None
            if me == 3:
                total = kv.allreduce(np.ones(2), op=Sum, process_set=group)
                np.testing.assert_array_equal(total, [1, 1])
            return kv.join(group)

        assert world.run(work) == [None, 3, None, 3]


def test_a_rank_that_dies_or_leaves_ends_the_join():
    for ending, error in (("kill", RankLostError), ("leave", RankLeftError)):
        with loopback(3) as world:

            def work(kv, world=world, ending=ending, error=error):
                me = kv.world().rank
                if me == 2:
                    world.kill(2) if ending == "kill" else kv.world().engine.shutdown()
                    return 2
                with pytest.raises(error) as raised:
                    kv.join()
                return raised.value.rank

            assert world.run(work) == [2, 2, 2]


def uneven(rank):
    kolovod.init()
    weight = np.zeros(3)
    for step in range(5 + 3 * rank):
        weight += kolovod.allreduce(np.full(3, 1.0 + step), "gradient", op=Sum)
    return kolovod.join(), weight[0]


def test_processes_with_uneven_data():
    results = run_ranks(3, uneven)
    assert [last for last, _ in results] == [2, 2, 2]
    lengths = [5, 8, 11]
    sums = [sum((1 + step) * sum(n > step for n in lengths) for step in range(m)) for m in lengths]
    assert [weight for _, weight in results] == sums
