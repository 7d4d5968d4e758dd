"""Graphs that are run again: in loops whose iterations overlap, and in a world of another size."""

from __future__ import annotations

import pytest
from forked import run_tensorflow_ranks
from frameworks import is_installed
from growing import WORLDS, worlds_of

from kolovod.errors import InvalidArgumentError, MismatchError

pytestmark = [
    pytest.mark.skipif(not is_installed("tensorflow"), reason="TensorFlow is not installed"),
    pytest.mark.timeout(150),
]

ROWS = 40


def check_loops(tf, kv, rank):
    """Several iterations of an operation are on their way, and matched each with its own."""
    x = tf.reshape(tf.range(2.0 * ROWS), [ROWS, 2]) + 2.0 * rank
    wanted = (x + 1.0 - 2.0 * rank).numpy().tolist()

    @tf.function
    def by_range(x):
        rows = tf.TensorArray(tf.float32, ROWS)
        for i in tf.range(ROWS):
            rows = rows.write(i, kv.allreduce(x[i]))
        return rows.stack()

    @tf.function
    def by_map(x):
        return tf.map_fn(lambda row: kv.broadcast(kv.allgather(row), 1)[:2], x)

    @tf.function
    def in_order(x):
        for _ in tf.range(ROWS):
            x = kv.allreduce(x) + 1.0
        return x

    for _ in range(5):
        assert by_range(x).numpy().tolist() == wanted
        assert by_map(x).numpy().tolist() == (x - 2.0 * rank).numpy().tolist()
        assert in_order(x).numpy().tolist() == (x + 1.0 - 2.0 * rank + ROWS).numpy().tolist()


def test_loops_and_errors():
    def work(rank):
        import tensorflow as tf

        import kolovod.tensorflow as kv

        kv.init()
        check_loops(tf, kv, rank)
        check_errors(tf, kv, rank)

    run_tensorflow_ranks(2, work, timeout_s=120)


def check_errors(tf, kv, rank):
    """Those of all functions are of both classes."""
    mismatch = tf.errors.FailedPreconditionError
    with pytest.raises(mismatch, match="variable 0 differs") as caught:
        kv.broadcast_variables([tf.Variable(tf.ones([rank + 1]))])
    assert isinstance(caught.value, MismatchError)
    for call in (
        lambda: kv.broadcast_variables([7]),
        lambda: kv.DistributedGradientTape(tf.GradientTape(), op=7),
        lambda: kv.DistributedGradientTape(tf.GradientTape(), process_set=[0]),
        lambda: kv.DistributedGradientTape(tf.GradientTape(), local_sources=tf.Variable([1.0])),
        lambda: tf.function(kv.allreduce)(tf.constant("text")),
        lambda: kv.DistributedOptimizer(None, backward_passes_per_step=0),
        lambda: kv.size_op(99),
        lambda: kv.alltoall((1.0, 2.0)),  # no tensor
    ):
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            call()
        assert isinstance(caught.value, InvalidArgumentError)
    check_arguments(tf, kv)


def check_arguments(tf, kv):
    """What was given is in the message, and the way out."""
    x, variable = tf.ones([2]), tf.Variable([1.0])
    verbs = (kv.allreduce, kv.broadcast, kv.allgather, kv.alltoall, kv.reducescatter)
    verbs += (kv.allreduce_async, kv.broadcast_async, lambda x, **set: kv.barrier(**set))
    verbs += (lambda x, **set: kv.join(**set), lambda x, **set: kv.broadcast_(variable, **set))
    for verb in verbs:
        for call in (verb, tf.function(verb))[: 1 if "async" in verb.__name__ else 2]:
            with pytest.raises(InvalidArgumentError, match="process_set is 7: give a ProcessSet"):
                call(x, process_set=7)
    for factor in ("2", None, [2.0], 0, float("nan"), float("inf")):
        with pytest.raises(InvalidArgumentError, match=r"predivide_factor is .*above 0"):
            kv.DistributedGradientTape(tf.GradientTape(), gradient_predivide_factor=factor)
    with pytest.raises(InvalidArgumentError, match=r"process_set is .* give a ProcessSet"):
        kv.SyncBatchNormalization(process_set=[0])
    for call, text in (
        (lambda x: kv.allreduce(x, prescale_factor="a"), "prescale_factor is 'a'"),
        (lambda x: kv.broadcast(x, "a"), "root_rank is 'a'"),
        (lambda x: kv.allgather(x, 7), "name is 7"),
    ):
        for way in (call, tf.function(call)):
            with pytest.raises(InvalidArgumentError, match=text):
                way(x)


def test_a_world_of_another_size():
    """What was traced in a world of two divides by one in a world of one."""

    def work(rank):
        import tensorflow as tf

        import horovod.tensorflow as hvd
        import kolovod.tensorflow as kv

        table, own = tf.Variable(tf.ones([3, 2])), tf.Variable([1.0])

        @tf.function
        def gradients():
            with kv.DistributedGradientTape(tf.GradientTape(), local_sources=[own]) as tape:
                loss = tf.reduce_sum(tf.gather(table, [0])) + tf.reduce_sum(own)
            of_table, of_own = tape.gradient(loss, [table, own])
            return tf.convert_to_tensor(of_table)[0], of_own

        @tf.function
        def of_horovod(x):
            slices = tf.IndexedSlices(x, tf.constant([0]), tf.constant([1]))
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(hvd.allgather(x)) + tf.reduce_sum(hvd.broadcast(x, 0))
                loss += tf.reduce_sum(hvd.reducescatter(x))
            average = tf.convert_to_tensor(hvd.allreduce(slices))
            return average, tape.gradient(loss, x)

        kv.init()
        assert [g.numpy().tolist() for g in gradients()] == [[1, 1], [0.5]]
        average, gradient = of_horovod(tf.ones([1]))
        assert average.numpy().tolist() == [1]
        assert gradient.numpy().tolist() == [3 - rank]
        kv.shutdown()
        if rank == 0:
            kv.init(comm=[0])
            assert [g.numpy().tolist() for g in gradients()] == [[1, 1], [1]]
            average, gradient = of_horovod(tf.ones([1]))
            assert average.numpy().tolist() == [1]
            assert gradient.numpy().tolist() == [3]

    run_tensorflow_ranks(2, work, timeout_s=120)


def test_adasum_in_worlds_of_one_two_and_three():
    """Steps of two are combined, those of three refused before anything has changed."""

    def work(launched_as):
        import tensorflow as tf

        import kolovod.tensorflow as kv

        kv.init(comm=[launched_as])
        gradients = tf.compat.v1.train.GradientDescentOptimizer
        owned = [tf.Variable([0.0]), tf.Variable([0.0])]
        optimizers = [kv.DistributedOptimizer(gradients(1.0), op=kv.Adasum) for _ in owned]
        kv.shutdown()

        def step(i, slope):
            optimizers[i].minimize(lambda: tf.reduce_sum(slope * owned[i]), var_list=[owned[i]])

        traced = tf.function(lambda slope: step(0, slope))
        for phase in worlds_of(kv, launched_as):
            for variable, run in zip(owned, (traced, lambda slope: step(1, slope)), strict=True):
                variable.assign([0.0])
                slope = tf.constant([launched_as + 1.0])
                if len(WORLDS[phase]) == 3:
                    with pytest.raises(tf.errors.InvalidArgumentError, match="not a power of two"):
                        run(slope)
                    assert variable.numpy() == 0
                else:
                    run(slope)
                    assert variable.numpy() == (-1.0, -1.5)[phase % 2]

    run_tensorflow_ranks(3, work, timeout_s=120)
