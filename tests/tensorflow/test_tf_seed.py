"""Allreduce inside tf.function, and the verbs on eager tensors, on two real ranks each."""

from __future__ import annotations

import re

import numpy as np
import pytest
from frameworks import check_eager_verbs, check_in_graph, is_installed, take_part_backwards

import kolovod
from kolovod.errors import InvalidArgumentError
from kolovod.ops import Average, Max, Sum
from kolovod.testing import RankFailed, run_ranks

pytestmark = [
    pytest.mark.skipif(not is_installed("tensorflow"), reason="TensorFlow is not installed"),
    pytest.mark.timeout(300),
]
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}


def run_two(work):
    """``work(rank)`` on two ranks, one thread of each computing, and the results."""
    return run_ranks(2, work, timeout_s=240, env=QUIET)


def operations():
    """How many operations this rank has completed."""
    return kolovod.world.current().engine.stats()["operations"]


def test_in_graph_as_outside():
    """The conformance table in graphs, and how many ops a graph is left with."""

    def work(rank):
        import tensorflow as tf

        import kolovod.tensorflow as kv

        kv.init()
        check_in_graph(kv.collectives, "tensorflow", tf.function)

        x = tf.fill([5], rank + 1.0)

        @tf.function
        def twice_the_same(x):
            return kv.allreduce(x, op=Sum), kv.allreduce(x, op=Sum)

        @tf.function
        def of_constants():
            return kv.grouped_allreduce([tf.constant([1.0, 2.0]), tf.constant(3)], op=Sum)

        for function, arguments, ops in ((twice_the_same, (x,), 2), (of_constants, (), 1)):
            for _ in range(3):
                before = operations()
                a, b = function(*arguments)
                assert operations() - before == ops
            assert b.numpy().flat[0] == (3 if ops == 2 else 6)
            assert a.numpy()[-1] == (3 if ops == 2 else 4)
        assert x.numpy().tolist() == [rank + 1.0] * 5

        variable = tf.Variable([rank + 1.0, 10.0])
        of_variable = tf.function(lambda: (kv.allreduce(variable, op=Sum), variable.read_value()))
        total, same = of_variable()
        assert total.numpy().tolist() == [3.0, 20.0]
        assert same.numpy().tolist() == variable.numpy().tolist() == [rank + 1.0, 10.0]
        assert tf.function(lambda: kv.grouped_allreduce([]))() == []
        kv.shutdown()

    run_two(work)


def test_several_are_on_their_way_at_once():
    """Rank 1 asks for them in the opposite order, and for one only when it has the other."""
    sizes = {f"t{i}": 1 + 30_000 * i for i in range(12)}

    def work(rank):
        kolovod.init()
        if rank == 1:
            take_part_backwards(sizes)
            return None
        import tensorflow as tf

        import kolovod.tensorflow as kv

        @tf.function
        def all_of_them(*tensors):
            return [
                kv.allreduce(tensor, name, Sum) for name, tensor in zip(sizes, tensors, strict=True)
            ]

        results = all_of_them(*(tf.ones([size]) for size in sizes.values()))
        assert all((result.numpy() == 2).all() for result in results)
        return len(results)

    assert run_two(work) == [12, None]


def test_gradients():
    """Of several tensors, in and outside of tf.function, equal to those of one process."""

    def work(rank):
        import tensorflow as tf

        import kolovod.tensorflow as kv

        kv.init()
        data = np.random.default_rng(7).normal(size=(2, 16, 8)).astype(np.float32)
        weights = [tf.Variable(tf.fill([8, 3], 0.1)), tf.Variable(tf.zeros([3]))]

        def loss_of(x):
            return tf.reduce_mean((tf.matmul(x, weights[0]) + weights[1] - 1.0) ** 2)

        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                loss = loss_of(x)
            gradients = tape.gradient(loss, weights)
            return [kv.allreduce(gradient) for gradient in gradients]

        with tf.GradientTape() as tape:
            loss = loss_of(tf.constant(data.reshape(32, 8)))
        wanted = tape.gradient(loss, weights)
        for _ in range(3):
            for got, want in zip(step(tf.constant(data[rank])), wanted, strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)

        # Through the allreduce: rank r's loss is (r + 1) * sum(op(x)), over all ranks 1 + 2.
        def differentiated(x, op, name):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y, z = kv.grouped_allreduce([x, 2 * x], name, op, 0.5, 4.0)
                loss = (rank + 1) * tf.reduce_sum(y + z)
            return tape.gradient(loss, x)

        x = tf.fill([2, 2], float(rank))
        for op, factor in ((Sum, 1.0), (Average, 0.5)):
            for name in (None, f"named.{op}"):
                for function in (differentiated, tf.function(differentiated)):
                    gradient = function(x, op, name).numpy()
                    assert gradient.tolist() == [[18 * factor] * 2] * 2

        total = tf.function(lambda x: kv.allreduce(x, op=Sum))
        with tf.GradientTape() as tape:  # around the function
            tape.watch(x)
            loss = (rank + 1) * tf.reduce_sum(total(x) ** 2)
        assert tape.gradient(loss, x).numpy().tolist() == [[6.0] * 2] * 2
        with pytest.raises(InvalidArgumentError, match="op Max has no gradient"):
            tf.function(differentiated)(x, Max, None)

    run_two(work)


def test_graphs_of_graphs():
    """A function that is called twice, a loop, and ranks that have traced unequally often."""

    def work(rank):
        import tensorflow as tf

        import kolovod.tensorflow as kv

        kv.init()
        inner = tf.function(lambda x: kv.allreduce(x, op=Sum))

        @tf.function
        def outer(x):
            return inner(x) + 10 * inner(x * x)

        @tf.function
        def loop(x):
            for _ in tf.range(5):
                x = kv.allreduce(x)
            return x

        @tf.function
        def traced_often(x, flag):
            return kv.allreduce(x, op=Sum)

        x = tf.constant(rank + 1.0)
        assert outer(x).numpy() == 3 + 10 * 5
        assert loop(x).numpy() == 1.5
        for turn in range(4):  # rank 1 traces anew each time
            assert traced_often(x, turn if rank == 1 else 0).numpy() == 3
        members = kv.add_process_set([1])
        if rank == 1:
            alone = tf.function(lambda x: kv.allreduce(x, op=Sum, process_set=members))
            assert alone(x).numpy() == 2
        else:
            with pytest.raises(InvalidArgumentError, match=re.escape("rank 0 is not in")):
                tf.function(lambda x: kv.allreduce(x, process_set=members))(x)
        kv.remove_process_set(members)
        if rank == 1:
            with pytest.raises(tf.errors.AbortedError, match="process set 1 is not part"):
                alone(x)

    run_two(work)


def test_errors_are_tensorflows_and_name_the_ranks():
    def work(rank):
        import tensorflow as tf

        import kolovod.tensorflow as kv

        kv.init()
        total = tf.function(lambda x: kv.allreduce(x, op=Sum))
        with pytest.raises(tf.errors.FailedPreconditionError) as caught:
            total(tf.zeros([3 + rank]))
        assert "rank 0 has (3,), rank 1 has (4,)" in str(caught.value)
        assert total(tf.ones([3])).numpy().tolist() == [2, 2, 2]

        @tf.function
        def same_name(x):
            return kv.allreduce(x, "one name"), kv.allreduce(x + 1, "one name")

        with pytest.raises(tf.errors.AlreadyExistsError, match="'one name' is already pending"):
            same_name(tf.ones([3]))
        with pytest.raises(tf.errors.InvalidArgumentError, match="bool cannot be averaged"):
            tf.function(lambda x: kv.allreduce(x))(tf.constant([True]))
        with pytest.raises((TypeError, ValueError), match="complex64"):
            tf.function(lambda x: kv.allreduce(x))(tf.constant([1j], tf.complex64))
        with pytest.raises(InvalidArgumentError, match="op is 77"):
            tf.function(lambda x: kv.allreduce(x, op=77))(tf.ones([3]))
        for verb in (kv.broadcast, kv.allgather, kv.reducescatter, kv.allreduce_async):
            with pytest.raises(InvalidArgumentError):
                tf.function(verb)(tf.ones([4]))
        with pytest.raises(InvalidArgumentError, match="only allreduce and grouped_allreduce"):
            tf.function(kv.barrier)()
        kv.barrier()
        kv.shutdown()
        with pytest.raises(tf.errors.AbortedError, match=re.escape("call kolovod.init() first")):
            total(tf.ones([3]))

    run_two(work)


def test_a_lost_rank_ends_what_is_on_its_way():
    def work(rank):
        import os
        import signal

        import tensorflow as tf

        import kolovod.tensorflow as kv

        kv.init()
        many = tf.function(lambda xs: [kv.allreduce(x, op=Sum) for x in xs])
        many([tf.ones([1000])] * 5)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(tf.errors.UnavailableError, match=r"rank 1 .*died"):
            many([tf.ones([1000])] * 5)
        return "noticed"

    results = run_ranks(2, work, timeout_s=240, env=QUIET, keep_going=True)
    assert results[0] == "noticed"
    assert isinstance(results[1], RankFailed)


def test_eager_verbs():
    def work(rank):
        import tensorflow as tf

        import kolovod.tensorflow as kv

        kv.init()
        check_eager_verbs(
            kv.collectives, "tensorflow", ("float32", "bfloat16", "int32", "float16", "bool")
        )
        variable = tf.Variable([rank + 1.0, 2.0])
        assert kv.allreduce_(variable, op=Sum) is variable
        assert variable.numpy().tolist() == [3, 4]
        variable.assign([rank, rank])
        assert kv.broadcast_async_(variable, 1).wait() is variable
        assert variable.numpy().tolist() == [1, 1]
        assert kv.allreduce(variable, op=Sum).numpy().tolist() == [2, 2]
        assert variable.numpy().tolist() == [1, 1]
        with pytest.raises(InvalidArgumentError, match=re.escape("only a tf.Variable")):
            kv.allreduce_(tf.ones([2]))
        for wrong, text in ((np.ones(2), "not ndarray"), (tf.constant(["a"]), "string is not")):
            with pytest.raises(InvalidArgumentError, match=text):
                kv.allreduce(wrong) if isinstance(wrong, np.ndarray) else kv.broadcast(wrong)
        assert kv.join() in (0, 1)

    run_two(work)
