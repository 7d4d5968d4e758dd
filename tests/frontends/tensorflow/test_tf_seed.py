"""Allreduce inside tf.function, and the verbs on eager tensors, on two real ranks.

Starting TensorFlow takes longer than any check, so several of them share a job.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from forked import run_tensorflow_ranks
from frameworks import check_eager_verbs, check_in_graph, is_installed, take_part_backwards

import kolovod
from kolovod.core.ops import Average, Max, Sum
from kolovod.errors import InvalidArgumentError
from kolovod.testing import RankFailed

pytestmark = [
    pytest.mark.skipif(not is_installed("tensorflow"), reason="TensorFlow is not installed"),
    pytest.mark.timeout(300),
]


def check_optimizer_keeps_operations(tf, kv, rank):
    """Neither two that are alike nor one of constants is optimized away."""

    @tf.function
    def twice_the_same(x):
        return kv.allreduce(x, op=Sum), kv.allreduce(x, op=Sum)

    @tf.function
    def of_constants():
        return kv.grouped_allreduce([tf.constant([1.0, 2.0]), tf.constant(3)], op=Sum)

    def completed():
        return kolovod.core.world.current().engine.stats()["operations"]

    for _ in range(3):
        before = completed()
        for result in twice_the_same(tf.fill([5], rank + 1.0)):
            assert result.numpy().tolist() == [3] * 5
        assert completed() == before + 2
        assert [result.numpy().tolist() for result in of_constants()] == [[2, 4], 6]
        assert completed() == before + 3
    assert tf.function(lambda: kv.grouped_allreduce([]))() == []


def check_inputs_stay_as_they_are(tf, kv, rank):
    """Though a result is put into the memory of an input that nobody else needs."""
    x = tf.fill([5], rank + 1.0)
    variable = tf.Variable([rank + 1.0, 10.0])

    @tf.function
    def totals(x):
        return kv.allreduce(x, op=Sum), kv.allreduce(variable, op=Sum), variable.read_value()

    total, of_variable, same = totals(x)
    assert total.numpy().tolist() == [3] * 5
    assert of_variable.numpy().tolist() == [3, 20]
    assert same.numpy().tolist() == variable.numpy().tolist() == [rank + 1, 10]
    assert x.numpy().tolist() == [rank + 1] * 5


def check_gradients_of_a_model(tf, kv, rank):
    """Averaged over ranks with half of the data each, they are those of one process with all."""
    data = np.random.default_rng(7).normal(size=(2, 16, 8)).astype(np.float32)
    weights = [tf.Variable(tf.fill([8, 3], 0.1)), tf.Variable(tf.zeros([3]))]

    def loss_of(x):
        return tf.reduce_mean((tf.matmul(x, weights[0]) + weights[1] - 1.0) ** 2)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = loss_of(x)
        return [kv.allreduce(gradient) for gradient in tape.gradient(loss, weights)]

    with tf.GradientTape() as tape:
        loss = loss_of(tf.constant(data.reshape(32, 8)))
    wanted = tape.gradient(loss, weights)
    for _ in range(3):
        for got, want in zip(step(tf.constant(data[rank])), wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def check_gradients_through_allreduce(tf, kv, rank):
    """Rank r's loss is (r + 1) * sum(op(x)); the derivative of all losses has 1 + 2."""

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
                assert function(x, op, name).numpy().tolist() == [[18 * factor] * 2] * 2
    total = tf.function(lambda x: kv.allreduce(x, op=Sum))
    with tf.GradientTape() as tape:  # around the function
        tape.watch(x)
        loss = (rank + 1) * tf.reduce_sum(total(x) ** 2)
    assert tape.gradient(loss, x).numpy().tolist() == [[6] * 2] * 2
    # AutoGraph makes an error of its own of ours.
    with pytest.raises(Exception, match="op Max has no gradient"):
        tf.function(differentiated)(x, Max, None)


def check_graphs_in_graphs(tf, kv, rank):
    """A function that is called twice, a loop, and ranks that have traced unequally often."""
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
    def traced_often(x, turn):
        return kv.allreduce(x, op=Sum)

    x = tf.constant(rank + 1.0)
    for _ in range(3):
        assert outer(x).numpy() == 3 + 10 * 5
    assert loop(x).numpy() == 1.5
    for turn in range(4):  # rank 1 traces anew each time
        assert traced_often(x, turn if rank == 1 else 0).numpy() == 3


def check_process_sets(tf, kv, rank):
    """A graph belongs to a set as long as that is there, and to members only."""
    x = tf.constant(rank + 1.0)
    members = kv.add_process_set([1])
    alone = tf.function(lambda x: kv.allreduce(x, op=Sum, process_set=members))
    if rank == 1:
        assert alone(x).numpy() == 2
    else:
        with pytest.raises(Exception, match="rank 0 is not in"):
            alone(x)
    kv.remove_process_set(members)
    if rank == 1:
        with pytest.raises(tf.errors.AbortedError, match=r"process set \d+ is not part"):
            alone(x)


def check_eager(tf, kv, rank):
    """Every verb on eager tensors; those in place on variables."""
    check_eager_verbs(kv.collectives, "tensorflow", ("float32", "bfloat16", "int32", "bool"))
    variable = tf.Variable([rank + 1.0, 2.0])
    assert kv.allreduce_(variable, op=Sum) is variable
    assert variable.numpy().tolist() == [3, 4]
    variable.assign([rank, rank])
    assert kv.broadcast_async_(variable, 1).wait() is variable
    assert kv.allreduce(variable, op=Sum).numpy().tolist() == [2, 2]
    assert variable.numpy().tolist() == [1, 1]
    wrong = {"not ndarray": np.ones(2), "string is not": tf.constant(["a"])}
    for text, value in wrong.items():
        with pytest.raises(InvalidArgumentError, match=text):
            kv.broadcast(value)
    with pytest.raises(InvalidArgumentError, match=re.escape("only a tf.Variable")):
        kv.allreduce_(tf.ones([2]))
    assert kv.join() in (0, 1)


def check_refusals(tf, kv, rank):
    """What can never work says so while the function is traced, or as TensorFlow's own error."""
    x = tf.ones([3])
    with pytest.raises(tf.errors.InvalidArgumentError, match="bool cannot be averaged"):
        tf.function(lambda x: kv.allreduce(x))(tf.constant([True]))
    for arguments, text in (
        ((tf.constant(["text"]),), "string is not supported"),
        ((x, "x", 77), "op is 77"),
    ):
        with pytest.raises(Exception, match=text):
            tf.function(lambda *given: kv.allreduce(*given))(*arguments)
    for verb in (kv.allreduce_async, kv.allgather_async, kv.broadcast_async_):
        with pytest.raises(InvalidArgumentError, match="leave '_async' out"):
            tf.function(lambda x, verb=verb: verb(x))(x)


def check_errors(tf, kv, rank):
    """Those of the engine are TensorFlow's, name the ranks, and leave the world usable."""
    total = tf.function(lambda x: kv.allreduce(x, op=Sum))
    with pytest.raises(tf.errors.FailedPreconditionError) as caught:
        total(tf.zeros([3 + rank]))
    assert "rank 0 has (3,), rank 1 has (4,)" in str(caught.value)
    assert total(tf.ones([3])).numpy().tolist() == [2, 2, 2]

    named = tf.function(lambda x: kv.allreduce(x, "one name", Sum))
    if rank == 0:
        pending = kv.allreduce_async(tf.ones([3]), "one name", op=Sum)
        with pytest.raises(tf.errors.AlreadyExistsError, match="'one name' is already pending"):
            named(tf.ones([3]))
        total(tf.ones([3]))  # only now may rank 1 complete it
        assert pending.wait().numpy().tolist() == [2, 2, 2]
    else:
        total(tf.ones([3]))
        assert named(tf.ones([3])).numpy().tolist() == [2, 2, 2]


@pytest.mark.slow
def test_in_graphs_and_outside():
    def work(rank):
        import tensorflow as tf

        import kolovod.tensorflow as kv

        kv.init()
        check_in_graph(kv.collectives, "tensorflow", tf.function)
        check_optimizer_keeps_operations(tf, kv, rank)
        check_inputs_stay_as_they_are(tf, kv, rank)
        check_gradients_of_a_model(tf, kv, rank)
        check_gradients_through_allreduce(tf, kv, rank)
        check_graphs_in_graphs(tf, kv, rank)
        check_process_sets(tf, kv, rank)
        check_refusals(tf, kv, rank)
        check_eager(tf, kv, rank)
        total = tf.function(lambda x: kv.allreduce(x, op=Sum))
        assert total(tf.ones([3])).numpy().tolist() == [2, 2, 2]
        kv.shutdown()
        with pytest.raises(tf.errors.AbortedError, match=re.escape("call kolovod.init() first")):
            total(tf.ones([3]))
        kv.init()
        assert total(tf.ones([3])).numpy().tolist() == [2, 2, 2]

    run_tensorflow_ranks(2, work, timeout_s=240)


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

    assert run_tensorflow_ranks(2, work, timeout_s=240) == [12, None]


def test_errors():
    def work(rank):
        import tensorflow as tf
        from dying import die

        import kolovod.tensorflow as kv

        kv.init()
        check_errors(tf, kv, rank)
        many = tf.function(lambda xs: [kv.allreduce(x, op=Sum) for x in xs])
        many([tf.ones([1000])] * 5)
        die(rank, 1)
        with pytest.raises(tf.errors.AbortedError, match=r"rank 1 .*died"):
            many([tf.ones([1000])] * 5)
        return "noticed"

    results = run_tensorflow_ranks(2, work, timeout_s=240, keep_going=True)
    assert results[0] == "noticed"
    assert isinstance(results[1], RankFailed)
