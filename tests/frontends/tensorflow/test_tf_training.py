"""Tapes and optimizers of TensorFlow 1 on two ranks, against one process with all the data.

In float64, so that what differs is rounding alone; and the ranks are equal to the bit.
"""

from __future__ import annotations

import numpy as np
import pytest
from forked import run_tensorflow_ranks
from frameworks import is_installed, keras_variable

import kolovod
from kolovod.errors import InvalidArgumentError

pytestmark = [
    pytest.mark.skipif(not is_installed("tensorflow"), reason="TensorFlow is not installed"),
    pytest.mark.timeout(200),
]

STEPS, ROWS = 4, 6  # rates are powers of two: optimizers of TensorFlow 1 keep them in float32
DATA = np.random.default_rng(5).normal(size=(2 * STEPS, 2, ROWS, 4))  # step or pass, rank, row


def operations():
    """How many the engine has completed."""
    return kolovod.core.world.current().engine.stats()["operations"]


def new_model(tf):
    """Two layers, the first variable of 12 and the last of 2 elements."""
    rng = np.random.default_rng(3)
    shapes = ((4, 3), (3,), (3, 2), (2,))
    return [tf.Variable(rng.normal(size=shape)) for shape in shapes]


def loss_of(tf, variables, x):
    first, bias, second, last = variables
    hidden = tf.tanh(tf.matmul(x, first) + bias)
    return tf.reduce_mean((tf.matmul(hidden, second) + last - 1.0) ** 2)


def alone(tf, passes=1, factor=1.0, rate=0.125):
    """One process that sees both ranks' rows."""
    variables = new_model(tf)
    for step in range(STEPS):
        totals = [tf.zeros_like(v) for v in variables]
        for part in range(passes):
            rows = tf.constant(DATA[step * passes + part].reshape(2 * ROWS, 4))
            with tf.GradientTape() as tape:
                loss = factor * loss_of(tf, variables, rows)
            totals = [a + b for a, b in zip(totals, tape.gradient(loss, variables), strict=True)]
        for variable, total in zip(variables, totals, strict=True):
            variable.assign_sub(rate * total)
    return variables


def both(tf):
    """A step as it is, and as a graph."""
    return (lambda step: step), tf.function


def same(kv, found, wanted, tolerance=1e-12):
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=tolerance, atol=tolerance)
    digests = kv.allgather_object([v.numpy().tobytes() for v in found])
    assert digests[0] == digests[1]


def trained(tf, kv, rank, to_step, **options):
    """A model that a distributed tape has trained, and how many operations a step took."""
    variables = new_model(tf)
    if callable(options.get("groups")):
        options["groups"] = options["groups"](variables)

    def step(x):
        with kv.DistributedGradientTape(tf.GradientTape(), **options) as tape:
            loss = loss_of(tf, variables, x)
        assert isinstance(tape, tf.GradientTape)
        gradients = tape.gradient(loss, variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(0.125 * gradient)
        return loss

    run, before = to_step(step), operations()
    for i in range(STEPS):
        run(tf.constant(DATA[i, rank]))
    return variables, (operations() - before) // STEPS


def check_options(tf, kv, rank):
    """Each option does what it says, and how many operations a step takes shows the groups."""
    half = {"tolerance": 5e-3}
    cases = (
        ({}, {}, 1),
        ({"op": kv.Sum}, {"factor": 2.0}, 1),
        ({"gradient_predivide_factor": 3.0}, {}, 1),
        ({"groups": 2}, {}, 2),
        ({"groups": 99}, {}, 4),
        ({"groups": 0}, {}, 1),
        ({"groups": lambda v: [[v[0], v[3]], [v[1]]]}, {}, 3),
        ({"compression": kv.Compression.fp16}, half, 1),
        ({"compression": kv.Compression.bf16}, {"tolerance": 5e-2}, 1),
    )
    for options, expected, operations_of_step in cases:
        expected = dict(expected)
        tolerance = expected.pop("tolerance", 1e-12)
        wanted = alone(tf, **expected)
        for to_step in both(tf):
            found, count = trained(tf, kv, rank, to_step, **options)
            same(kv, found, wanted, tolerance)
            # One of the kinds of gradients, and one that compares variables.
            assert count == 2 + operations_of_step, options


def check_buckets(tf, kv, rank):
    """In a graph large gradients travel apart, the last first; outside all are there at once."""
    variables = [tf.Variable(tf.ones([400_000])), *(tf.Variable(tf.ones([9])) for _ in range(3))]

    def step():
        with kv.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.add_n([tf.reduce_sum(v * (rank + 1.0)) for v in variables])
        return tape.gradient(loss, variables)

    for to_step, count in zip(both(tf), (3, 4), strict=True):
        before = operations()
        assert [set(g.numpy()) for g in to_step(step)()] == [{1.5}] * 4
        assert operations() - before == count  # with the two beside the gradients


def check_structures(tf, kv, rank):
    """Sources may be nested; what the target does not depend on has no gradient, as always."""
    a, b, c = (tf.Variable(float(i)) for i in range(3))
    for to_step in both(tf):

        def step():
            with tf.GradientTape(persistent=True) as tape:
                loss = (rank + 1) * (3 * a + 5 * b)
            tape = kv.DistributedGradientTape(tape, op=kv.Sum)  # after the block is as good
            first = tape.gradient(loss, {"a": a, "rest": [b, c]})
            again = tape.gradient(loss, c, unconnected_gradients=tf.UnconnectedGradients.ZERO)
            return first["a"], first["rest"][0], first["rest"][1], again

        found = to_step(step)()
        assert [None if g is None else g.numpy() for g in found] == [9, 15, None, 0]


def check_sparse(tf, kv, rank):
    """An embedding: rank r touches rows r and 2, the latter twice."""
    start = np.arange(12.0).reshape(4, 3)
    for to_step in both(tf):
        for as_dense in (False, True):
            table, scale = tf.Variable(start), tf.Variable(tf.ones([], tf.float64))

            def step(rows, table=table, scale=scale, as_dense=as_dense):
                tape = tf.GradientTape()
                with kv.DistributedGradientTape(tape, sparse_as_dense=as_dense) as tape:
                    loss = tf.reduce_sum(tf.gather(table, rows)) * scale
                gradient, _ = tape.gradient(loss, [table, scale])
                assert isinstance(gradient, tf.IndexedSlices) != as_dense
                return tf.convert_to_tensor(gradient)

            gradient = to_step(step)(tf.constant([rank, 2, 2])).numpy()
            assert gradient.tolist() == [[0.5] * 3, [0.5] * 3, [2.0] * 3, [0.0] * 3]


def check_local_sources(tf, kv, rank):
    """Their gradients stay this rank's, as parts of the mean loss."""
    shared, own = tf.Variable(1.0), tf.Variable(float(rank))
    layer = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")

    for scaled in (True, False):
        for to_step in both(tf):

            def step(scaled=scaled):
                tape = kv.DistributedGradientTape(
                    tf.GradientTape(), local_sources=[layer], scale_local_gradients=scaled
                )
                tape.register_local_source(own)
                with tape:
                    loss = (rank + 1) * (shared + own + tf.reduce_sum(layer(tf.ones([1, 2]))))
                return tape.gradient(loss, [shared, own, *layer.trainable_weights])

            common, mine, kernel = to_step(step)()
            factor = (rank + 1) / (2 if scaled else 1)
            assert (common.numpy(), mine.numpy()) == (1.5, factor)
            assert kernel.numpy().tolist() == [[factor]] * 2


def check_process_sets(tf, kv, rank):
    """Others than the members keep their gradients, and need not call."""
    alone = kv.add_process_set([1])
    x = tf.Variable(2.0)
    for to_step in both(tf):

        def step():
            with kv.DistributedGradientTape(tf.GradientTape(), process_set=alone) as tape:
                loss = (rank + 1) * x
            return tape.gradient(loss, x)

        before = operations()
        assert to_step(step)().numpy() == rank + 1
        assert operations() == before
    kv.remove_process_set(alone)
    tape = kv.DistributedGradientTape(tf.GradientTape(), process_set=alone)
    with tape:
        loss = 2 * x
    with pytest.raises(InvalidArgumentError, match="not part of this world"):
        tape.gradient(loss, x)


def legacy(tf, kv, rank, to_step, optimizer, passes=1, **options):
    variables = new_model(tf)
    optimizer = kv.DistributedOptimizer(optimizer, backward_passes_per_step=passes, **options)

    def step(x, turn):
        optimizer.minimize(lambda: loss_of(tf, variables, x), var_list=variables)

    run = to_step(step)
    for i in range(STEPS * passes):
        start = [v.numpy() for v in variables]
        run(tf.constant(DATA[i, rank]), i if rank == 1 else 0)  # rank 1 traces anew each time
        if (i + 1) % passes:
            assert all((a == b.numpy()).all() for a, b in zip(start, variables, strict=True))
    return variables, optimizer


def check_optimizers(tf, kv, rank):
    train = tf.compat.v1.train
    for to_step in both(tf):
        optimizer = train.GradientDescentOptimizer(0.125)
        found, distributed = legacy(tf, kv, rank, to_step, optimizer)
        assert distributed is optimizer
        assert isinstance(optimizer, train.GradientDescentOptimizer)
        same(kv, found, alone(tf))
        for average in (False, True):
            found, _ = legacy(
                tf, kv, rank, to_step, train.GradientDescentOptimizer(0.125), 2,
                average_aggregated_gradients=average, sparse_as_dense=True,
            )  # fmt: skip
            same(kv, found, alone(tf, passes=2, rate=0.0625 if average else 0.125))
        momentum, _ = legacy(tf, kv, rank, to_step, train.AdamOptimizer(0.1), 2)
        assert len({v.numpy().tobytes() for v in momentum}) == 4


def check_passes_without_a_gradient(tf, kv, rank):
    """A sum is sent in the last pass, whichever pass has given it, and on whichever rank."""
    descent = tf.compat.v1.train.GradientDescentOptimizer
    for to_step in both(tf):
        x, y = tf.Variable(0.0), tf.Variable(0.0)
        optimizer = kv.DistributedOptimizer(descent(1.0), backward_passes_per_step=2)

        def step(of, x=x, y=y, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = {"xy": x + y, "x": 8 * x, "y": 4 * y, "": tf.constant(1.0)}[of]
            return optimizer._kolovod_aggregation.add(tape.gradient(loss, [x, y]), [x, y])

        run = to_step(step)
        is_eager = run is step
        passes = [("x", "y"), ("y", "")][rank if is_eager else 0]  # a graph cannot ask the others
        assert [bool(run("xy")[1]) for _ in range(2)] == [False, True]  # makes all sums
        for _ in range(3):
            _, is_last = run(passes[0])
            assert not is_last
            combined, is_last = run(passes[1])
            assert is_last
            assert [float(g) for g in combined] == [4.0 if is_eager else 8.0, 4.0]
        for turn in range(3 * 2):  # no gradient at all
            combined, is_last = run("")
            assert bool(is_last) == (turn % 2 == 1)
        assert optimizer._kolovod_aggregation.count.numpy() == 0


def check_keras(tf, kv, rank):
    """An optimizer of Keras is kolovod.keras's."""
    shared, layer = keras_variable(tf, 0.0), tf.keras.layers.Dense(1, kernel_initializer="zeros")
    layer.build((1, 1))
    optimizer = kv.DistributedOptimizer(tf.keras.optimizers.SGD(0.5), local_sources=[layer])
    grads = [tf.constant(rank + 1.0), tf.constant([[rank + 1.0]])]
    optimizer.apply_gradients(zip(grads, [shared, layer.kernel], strict=True))
    assert np.array(shared) == -0.75
    assert layer.kernel.numpy().tolist() == [[-0.25 * (rank + 1)]]


def check_adasum(tf, kv, rank):
    """Each rank steps alone; the steps a and b are combined as in the paper."""
    train, gradients = tf.compat.v1.train, ([3.0, 4.0], [4.0, -1.0])
    mine = tf.constant(gradients[rank], tf.float64)
    a, b = (-0.125 * np.array(g) for g in gradients)
    product = a @ b
    wanted = (1 - product / (2 * a @ a)) * a + (1 - product / (2 * b @ b)) * b
    for to_step in both(tf):
        for passes in (1, 2):
            x = tf.Variable(tf.zeros([2], tf.float64))
            optimizer = kv.DistributedOptimizer(
                train.GradientDescentOptimizer(0.125 / passes),
                op=kv.Adasum,
                backward_passes_per_step=passes,
            )

            def step(x=x, optimizer=optimizer):
                optimizer.minimize(lambda: tf.reduce_sum(mine * x), var_list=[x])

            run = to_step(step)
            for _ in range(passes):
                run()
            np.testing.assert_allclose(x.numpy(), wanted, rtol=1e-12)


def check_refusals(tf, kv, rank):
    """What can never work, before anything is sent."""
    Tape, Optimizer = kv.DistributedGradientTape, kv.DistributedOptimizer
    old = tf.compat.v1.train.GradientDescentOptimizer(0.125)
    x = tf.Variable([1.0])
    wrong = (
        (lambda: Tape(x), "give a tf.GradientTape"),
        (lambda: Tape(Tape(tf.GradientTape())), "wrap it once"),
        (lambda: Tape(tf.GradientTape(), op=kv.Max), "Average, Sum or Adasum"),
        (lambda: Tape(tf.GradientTape(), compression="fp16"), "Compression.none"),
        (
            lambda: Tape(tf.GradientTape(), gradient_predivide_factor=2.0, op=kv.Sum),
            "only with op Average",
        ),
        (lambda: Tape(tf.GradientTape(), gradient_predivide_factor=0.0), "above 0"),
        (lambda: Tape(tf.GradientTape(), groups=-1), "0 for none"),
        (lambda: Tape(tf.GradientTape(), groups="all"), "lists of variables"),
        (lambda: Tape(tf.GradientTape(), groups=[[1.0]]), "give lists of variables"),
        (lambda: Tape(tf.GradientTape(), groups=[[x], [x]]), r"groups 0 and 1"),
        (lambda: Tape(tf.GradientTape(), local_sources=["x"]), "a variable, or a Keras layer"),
        (lambda: Optimizer(old, backward_passes_per_step=0), "give an int >= 1"),
        (lambda: Optimizer(Optimizer(old)), "wrap it once"),
    )
    for call, text in wrong:
        with pytest.raises(InvalidArgumentError, match=text):
            call()
    table = tf.Variable(tf.ones([3, 2]))
    passes = Optimizer(tf.compat.v1.train.MomentumOptimizer(0.1, 0.9), backward_passes_per_step=2)
    with pytest.raises(InvalidArgumentError, match="sparse_as_dense=True"):
        passes.minimize(lambda: tf.reduce_sum(tf.gather(table, [1])), var_list=[table])
    with Tape(tf.GradientTape(), op=kv.Adasum) as tape:
        loss = tf.reduce_sum(tf.gather(table, [1]))
    with pytest.raises(NotImplementedError, match="sparse_as_dense=True"):
        tape.gradient(loss, table)
    # Ranks with other variables all hear of it, and go on.
    for to_step in both(tf):
        own = tf.Variable(tf.ones([2 + rank]))

        def step(own=own):
            with Tape(tf.GradientTape()) as tape:
                loss = tf.reduce_sum(own)
            return tape.gradient(loss, own)

        with pytest.raises(tf.errors.FailedPreconditionError, match="rank 1 has"):
            to_step(step)()


@pytest.mark.slow
def test_training():
    def work(rank):
        import tensorflow as tf

        import kolovod.tensorflow as kv

        kv.init()
        check_options(tf, kv, rank)
        check_buckets(tf, kv, rank)
        check_structures(tf, kv, rank)
        check_sparse(tf, kv, rank)
        check_optimizers(tf, kv, rank)
        check_passes_without_a_gradient(tf, kv, rank)
        check_adasum(tf, kv, rank)
        check_refusals(tf, kv, rank)
        check_process_sets(tf, kv, rank)
        check_local_sources(tf, kv, rank)  # these last: they import Keras
        check_keras(tf, kv, rank)

    run_tensorflow_ranks(2, work, timeout_s=150)


def test_a_world_of_one():
    def work(rank):
        import tensorflow as tf

        import kolovod.tensorflow as kv

        x = tf.Variable(2.0)
        with kv.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = 3 * x
        with pytest.raises(kolovod.errors.NotInitializedError, match=r"init\(\)"):
            tape.gradient(loss, x)
        kv.init()
        for to_step in both(tf):

            def step():
                with kv.DistributedGradientTape(tf.GradientTape()) as tape:
                    loss = 3 * x
                return tape.gradient(loss, x)

            assert to_step(step)().numpy() == 3
        kv.broadcast_variables([x])
        assert x.numpy() == 2

    run_tensorflow_ranks(1, work, timeout_s=100)
