"""Verbs on MXNet's arrays and starting equal, on real ranks; the rest of the table: worlds.py."""

from __future__ import annotations

import re

import numpy as np
import pytest
from forked import ranks_after, run_mxnet_ranks
from frameworks import is_installed

from kolovod.core.ops import Sum
from kolovod.errors import InvalidArgumentError, MismatchError
from kolovod.testing import RankFailed

pytestmark = pytest.mark.skipif(not is_installed("mxnet"), reason="MXNet is not installed")


def test_results_are_in_the_order_of_what_mxnet_is_told():
    """MXNet computes behind Python's back; verbs come between what is before and after them."""

    def work(rank):
        import mxnet as mx

        import kolovod.mxnet as kv

        kv.init()
        big = mx.nd.ones((600, 600)) * 0.5
        for turn in range(5):
            x = mx.nd.dot(big, big) * (rank + 1 + turn)  # 150 everywhere, some time from now
            reader = mx.nd.dot(x, big)  # before x is overwritten
            assert kv.allreduce_(x, "x", Sum) is x
            after = x + 1
            total = 150 * (3 + 2 * turn)
            assert after.min().asscalar() == after.max().asscalar() == total + 1
            assert reader[0, 0].asscalar() == 150 * (rank + 1 + turn) * 300
        handles = [kv.allreduce_async_(mx.nd.dot(big, big), f"{i}", Sum) for i in range(5)]
        assert [handle.wait()[7, 7].asscalar() for handle in handles] == [300] * 5

    run_mxnet_ranks(2, work)


def test_memory_of_other_layouts_and_of_parts():
    """OneDNN keeps what convolutions make in blocks; a slice shares its array's memory."""

    def work(rank):
        import mxnet as mx

        import kolovod.mxnet as kv

        kv.init()
        mx.random.seed(3)
        images, weight = mx.nd.random.uniform(shape=(2, 16, 9, 9)), mx.nd.ones((32, 16, 3, 3))
        made = mx.nd.Convolution(images, weight, kernel=(3, 3), num_filter=32, no_bias=True)
        values = made.asnumpy()
        again = mx.nd.Convolution(images, weight, kernel=(3, 3), num_filter=32, no_bias=True)
        np.testing.assert_array_equal(kv.allreduce(again, op=Sum).asnumpy(), 2 * values)
        kv.allreduce_(again, op=Sum)
        np.testing.assert_array_equal((again + 0).asnumpy(), 2 * values)

        rows = mx.nd.array(np.arange(12.0).reshape(4, 3))
        kv.allreduce_(rows[1:3], op=Sum)
        np.testing.assert_array_equal(
            rows.asnumpy(), [[0, 1, 2], [6, 8, 10], [12, 14, 16], [9, 10, 11]]
        )
        columns = mx.np.arange(6).reshape(2, 3).T
        assert kv.broadcast(columns, 1).tolist() == [[0, 3], [1, 4], [2, 5]]

    run_mxnet_ranks(2, work)


def test_under_set_np_and_without_threads():
    """Scripts that begin with npx.set_np(), and MXNet's engine for debugging."""

    def work(rank, engine):
        import os

        import mxnet as mx

        import kolovod.mxnet as kv

        mx.npx.set_np()
        kv.init()
        assert os.environ.get("MXNET_ENGINE_TYPE", "") == engine
        rows, received = kv.alltoall(mx.np.arange(4) + 10 * rank, [1, 3])
        assert type(rows) is mx.np.ndarray
        assert (rows.tolist(), received) == [([0, 10], [1, 1]), ([1, 2, 3, 11, 12, 13], [3, 3])][
            rank
        ]
        assert kv.reducescatter(mx.np.ones((3, 0)), op=Sum).shape == (2 - rank, 0)
        assert kv.allreduce(mx.np.array(2.5), op=Sum).item() == 5

    run_mxnet_ranks(2, work, "")
    ranks_after("kolovod.mxnet", MXNET_ENGINE_TYPE="NaiveEngine")(2, work, "NaiveEngine")


def test_process_sets_objects_and_join():
    def work(rank):
        import mxnet as mx

        import kolovod.mxnet as kv

        kv.init()
        pair = kv.add_process_set([0, 2])
        if rank != 1:
            assert kv.allreduce(mx.nd.ones(2) * rank, op=Sum, process_set=pair)[0].asscalar() == 2
            assert kv.broadcast_object(rank, 2, process_set=pair) == 2
        else:
            with pytest.raises(InvalidArgumentError, match="rank 1 is not in"):
                kv.allreduce(mx.nd.ones(2), process_set=pair)
        assert kv.allgather_object({"rank": rank}) == [{"rank": r} for r in range(3)]
        for _ in range(rank):
            kv.allreduce(mx.nd.ones(3), f"turn {_}", Sum)
        assert kv.join() == 2

    run_mxnet_ranks(3, work)


def test_broadcast_parameters():
    def work(rank):
        import mxnet as mx

        import kolovod.mxnet as kv

        kv.init()
        mx.random.seed(rank)
        params = {"b": mx.nd.ones(3) * rank, "a": mx.np.ones((2, 2)) * rank}
        kv.broadcast_parameters(params, 1)
        assert {**params}["b"].asnumpy().tolist() == [1] * 3
        assert params["a"].tolist() == [[1, 1], [1, 1]]

        known = mx.gluon.nn.Dense(3, in_units=4, prefix="known_")
        later = mx.gluon.nn.HybridSequential(prefix="later_")
        with later.name_scope():
            later.add(mx.gluon.nn.Dense(5), mx.gluon.nn.Dense(2))
        for net in (known, later):
            net.initialize(mx.init.Xavier(), ctx=[mx.cpu(0), mx.cpu(1)])
            kv.broadcast_parameters(net.collect_params(), prefix=f"{net.name}.")
        x = mx.nd.ones((1, 4))
        later(x)  # now its shapes are known
        values = [p.data(ctx) for net in (known, later) for p in net.collect_params().values()
                  for ctx in (mx.cpu(0), mx.cpu(1))]  # fmt: skip
        everyone = kv.allgather_object([value.asnumpy() for value in values])
        assert len(everyone[0]) == 12
        for zero, one in zip(*everyone, strict=True):
            np.testing.assert_array_equal(zero, one)
        assert np.abs(everyone[0][0]).max() > 0
        later.initialize(mx.init.Constant(rank), force_reinit=True)  # as usual again
        assert later[1].weight.data()[0, 0].asscalar() == rank

    run_mxnet_ranks(2, work)


def test_what_cannot_be_sent():
    def work(rank):
        import mxnet as mx

        import kolovod.mxnet as kv

        with pytest.raises(ValueError, match=re.escape("call init() first")):
            kv.allreduce(mx.nd.ones(3))
        kv.init()
        sparse = mx.nd.ones((4, 2)).tostype("row_sparse")
        for verb in (kv.allreduce, kv.allreduce_, kv.broadcast_async, kv.allgather):
            with pytest.raises(InvalidArgumentError, match=re.escape("mx.nd.array() or mx.np.")):
                verb(np.ones(3))
            with pytest.raises(InvalidArgumentError, match=re.escape("tostype('default')")):
                verb(sparse)
        with pytest.raises(InvalidArgumentError, match="name is 3"):
            kv.allreduce(mx.nd.ones(3), 3)
        with pytest.raises(InvalidArgumentError, match="params is a list"):
            kv.broadcast_parameters([mx.nd.ones(3)])
        with pytest.raises(InvalidArgumentError, match=r"params\['a'\] is a float"):
            kv.broadcast_parameters({"a": 1.0})
        with pytest.raises(InvalidArgumentError, match=re.escape("call initialize() before")):
            kv.broadcast_parameters(mx.gluon.nn.Dense(2).collect_params())
        with pytest.raises(InvalidArgumentError, match="is sparse"):
            kv.broadcast_parameters({"a": sparse})
        with pytest.raises(MismatchError, match=r"rank 0 has 'a0'.*, rank 1 has 'a1'"):
            kv.broadcast_parameters({f"a{rank}": mx.nd.ones(3)})
        with pytest.raises(MismatchError, match=re.escape("rank 0 has (3,), rank 1 has (4,)")):
            kv.allreduce(mx.nd.ones(3 + rank), "x")
        net = mx.gluon.nn.Dense(2, in_units=2 if rank else 0, prefix="same_")
        net.initialize()
        with pytest.raises(MismatchError, match="rank 0 has 'same_weight' not initialized before"):
            kv.broadcast_parameters(net.collect_params())
        assert kv.allreduce(mx.nd.ones(3), op=Sum)[2].asscalar() == 2  # all is well again

    run_mxnet_ranks(2, work)


def test_a_lost_rank_ends_what_waits_for_it():
    def work(rank):
        import mxnet as mx
        from dying import die

        import kolovod.mxnet as kv
        from kolovod.errors import RankLostError

        kv.init()
        die(rank, 1)
        with pytest.raises(RankLostError, match="rank 1"):
            kv.allreduce(mx.nd.ones(3))
        return "noticed"

    results = run_mxnet_ranks(2, work, keep_going=True)
    assert results[0] == "noticed"
    assert isinstance(results[1], RankFailed)
