"""Horovod's tapes and optimizers for TensorFlow: what each argument does, and each error."""

from __future__ import annotations

import numpy as np
import pytest
from forked import run_tensorflow_ranks
from frameworks import is_installed, keras_variable

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.skipif(not is_installed("tensorflow"), reason="TensorFlow is not installed"),
    pytest.mark.timeout(200),
]

GRADIENTS = np.array([[1.0, 2.0, 4.0], [3.0, 6.0, 20.0]])  # of three variables, on two ranks
MEAN = GRADIENTS.mean(0).tolist()


def check_tapes(tf, hvd, rank):
    """Rank r's loss is its row of the table times the variables."""
    x = [tf.Variable(tf.zeros([], tf.float64)) for _ in range(3)]
    mine = GRADIENTS[rank]
    half, none = hvd.Compression.fp16, hvd.Compression.none

    def found(wrap=hvd.DistributedGradientTape, local=(), **options):
        def step():
            with tf.GradientTape() as tape:
                loss = tf.add_n([g * v for g, v in zip(mine, x, strict=True)])
            tape = wrap(tape, **options)
            assert isinstance(tape, tf.GradientTape)
            for source in local:
                tape.register_local_source(source)
            return tape.gradient(loss, x, use_generic_names=True)

        eager = [g.numpy() for g in step()]
        assert eager == [g.numpy() for g in tf.function(step)()]
        return eager

    for options in (
        {},
        {"compression": half},
        {"compression": none, "groups": 2},
        {"groups": [[x[0], x[2]]]},
        {"gradient_predivide_factor": 2.0},
        {"device_dense": "/cpu:0"},
        {"process_set": hvd.global_process_set},
    ):
        assert found(**options) == MEAN
    with pytest.warns(DeprecationWarning, match="num_groups"):
        assert found(num_groups=2) == MEAN
    assert found(op=hvd.Sum) == (2 * np.array(MEAN)).tolist()
    assert found(local=[x[1]]) == [MEAN[0], mine[1] / 2, MEAN[2]]
    assert found(local=[x[1]], scale_local_gradients=False) == [MEAN[0], mine[1], MEAN[2]]
    with tf.GradientTape() as tape:
        loss = tf.add_n([g * v for g, v in zip(mine, x, strict=True)])
    own, total = hvd.DistributedGradientTape(tape).get_local_and_global_gradients(loss, x)
    assert [g.numpy() for g in own] == mine.tolist()
    assert [g.numpy() for g in total] == MEAN


def check_partial(tf, hvd, rank):
    layers = [tf.keras.layers.Dense(1, use_bias=False, dtype="float64") for _ in range(2)]
    for local in (layers[1], [layers[1]], None):
        with tf.GradientTape() as tape:
            loss = (rank + 1.0) * tf.add_n(
                [tf.reduce_sum(layer(np.ones([1, 1]))) for layer in layers]
            )
        tape = hvd.PartialDistributedGradientTape(tape, local_layers=local)
        found = tape.gradient(loss, [v for layer in layers for v in layer.trainable_weights])
        own = 1.5 if local is None else (rank + 1) / 2
        assert [g.numpy().item() for g in found] == [1.5, own]
    with pytest.raises(ValueError, match="give layers of Keras"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[3])


def check_optimizer(tf, hvd, rank):
    """One of TensorFlow 1, in TensorFlow 2."""
    descent = tf.compat.v1.train.GradientDescentOptimizer
    for passes, options, factor in (
        (1, {}, 1),
        (1, {"op": hvd.Sum, "name": "x", "use_locking": True}, 2),
        (2, {}, 2),
        (2, {"average_aggregated_gradients": True}, 1),
    ):
        for to_step in (lambda step: step, tf.function):
            x = [tf.Variable(tf.zeros([], tf.float64)) for _ in range(3)]
            optimizer = hvd.DistributedOptimizer(
                descent(0.5), backward_passes_per_step=passes, **options
            )
            assert type(optimizer).__name__ == "GradientDescentOptimizer"

            def step(x=x, optimizer=optimizer):
                pairs = optimizer.compute_gradients(
                    lambda: tf.add_n([g * v for g, v in zip(GRADIENTS[rank], x, strict=True)]), x
                )
                optimizer.apply_gradients(pairs)

            run = to_step(step)
            for _ in range(passes):
                run()
            assert [v.numpy() for v in x] == [-0.5 * factor * m for m in MEAN]


def check_keras(tf, hvd, rank):
    """What is for an optimizer of Keras reaches horovod.tensorflow.keras, and steps with it."""
    for options, factor in (({}, 1), ({"op": hvd.Sum}, 2), ({"groups": [[]]}, 1)):
        x = keras_variable(tf, 0.0)
        optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.5), **options)
        assert type(optimizer).__name__ == "SGD"
        optimizer.apply_gradients([(tf.constant(rank + 1.0), x)])
        assert np.array(x) == -0.75 * factor
    with pytest.raises(ValueError, match="give an optimizer of Keras"):
        hvd.DistributedOptimizer(3)


def check_helpers(tf, hvd, rank):
    """The classes that Horovod's own optimizers are made of, eager and within a function."""
    from horovod.tensorflow.gradient_aggregation_eager import LocalGradientAggregationHelperEager

    def reduce(grads, _):
        return [hvd.allreduce(g, op=hvd.Sum) for g in grads]

    of_graphs = hvd.LocalGradientAggregationHelper
    kind = of_graphs._OPTIMIZER_TYPE_KERAS
    for to_pass, make, options, share in (
        (lambda f: f, LocalGradientAggregationHelperEager, {}, 2.0),
        (tf.function, LocalGradientAggregationHelperEager, {"scale_local_gradients": False}, 1.0),
        (tf.function, of_graphs, {"rank": rank, "optimizer_type": kind, "name": "x"}, 2.0),
    ):

        class Optimizer:
            iterations = tf.Variable(0)

        x, y, applied = tf.Variable(0.0), tf.Variable(0.0), tf.Variable(0)
        helper = make(2, reduce, True, True, **options)
        helper.register_local_var(y)

        def run(grads, helper=helper, variables=(x, y), applied=applied, kind=Optimizer):
            grads = helper.compute_gradients(grads, variables)
            helper.apply_gradients(lambda: applied.assign_add(1), kind)
            return grads

        run = to_pass(run)
        for step in range(1, 5):
            grads = run([tf.constant(rank + 1.0), tf.constant(8.0)])
            assert helper.counter.numpy() == step % 2
            wanted = [rank + 1.0, 8.0] if step % 2 else [3.0, 8.0 / share]
            assert [g.numpy() for g in grads] == wanted
            assert (applied.numpy(), Optimizer.iterations.numpy()) == (step // 2, (step + 1) // 2)
        assert [total.numpy() for total in helper.locally_aggregated_grads] == [0.0, 0.0]
        assert helper.backward_passes_per_step == 2
        assert helper.average_aggregated_gradients
        assert helper.sparse_as_dense
    with pytest.raises(ValueError, match="sparse_as_dense"):
        hvd.LocalGradientAggregationHelper(2, None, False, False).compute_gradients(
            [tf.IndexedSlices(tf.ones([1]), tf.constant([0]))], [x]
        )
    with pytest.raises(ValueError, match="int >= 1"):
        hvd.LocalGradientAggregationHelper(0, None, False, False)


def check_errors(tf, hvd, rank):
    descent = tf.compat.v1.train.GradientDescentOptimizer
    tape, optimizer = hvd.DistributedGradientTape, hvd.DistributedOptimizer
    wrong = (
        (lambda: tape(3), "give a tf.GradientTape"),
        (lambda: tape(tape(tf.GradientTape())), "wrap it once"),
        (lambda: tape(tf.GradientTape(), gradient_predivide_factor=2.0, op=hvd.Sum), "op Average"),
        (lambda: tape(tf.GradientTape(), groups="x"), "lists of variables"),
        (lambda: tape(tf.GradientTape(), process_set=[0]), "give a ProcessSet"),
        (lambda: optimizer(descent(0.1), gradient_predivide_factor=2.0, op=hvd.Sum), "op Average"),
        (lambda: optimizer(descent(0.1), groups=-1), "0 for none"),
        (
            lambda: optimizer(descent(0.1), op=hvd.Adasum, average_aggregated_gradients=True),
            "average_aggregated_gradients",
        ),
        (lambda: optimizer(tf.keras.optimizers.SGD(), op=hvd.Adasum), "optimizers of Keras"),
    )
    for call, text in wrong:
        with pytest.raises(ValueError, match=text) as caught:
            call()
        assert isinstance(caught.value, tf.errors.InvalidArgumentError)
    table = tf.Variable(tf.ones([3, 2]))
    with tf.GradientTape() as recorded:
        loss = tf.reduce_sum(tf.gather(table, [1]))
    with pytest.raises(NotImplementedError, match="sparse"):
        tape(recorded, op=hvd.Adasum).gradient(loss, table)


def check_sessions(tf, hvd, rank):
    """TensorFlow 1: two ranks with half of the rows each, and one process with all."""
    v1, data = tf.compat.v1, np.random.default_rng(1).normal(size=(3, 2, 4, 2))
    for use_resource in (False, True):
        with tf.Graph().as_default():
            x = v1.placeholder(tf.float64, [None, 2])
            first = tf.constant([[1.0 + rank], [2.0]], tf.float64)
            w = v1.get_variable("w", initializer=first, use_resource=use_resource)
            loss = tf.reduce_mean(tf.matmul(x, w) ** 2)
            optimizer = hvd.DistributedOptimizer(v1.train.MomentumOptimizer(0.125, 0.5))
            train = optimizer.minimize(loss, v1.train.get_or_create_global_step())
            constant = hvd.allreduce(tf.constant([1.0]), op=hvd.Sum)
            with v1.train.MonitoredTrainingSession(
                hooks=[hvd.BroadcastGlobalVariablesHook(0)]
            ) as session:
                for rows in data:
                    session.run(train, {x: rows[rank]})
                found, total = session.run([w, constant])
        wanted, momentum = np.array([[1.0], [2.0]]), 0.0
        for rows in data.reshape(3, 8, 2):
            momentum = 0.5 * momentum + 2 * rows.T @ (rows @ wanted) / 8
            wanted = wanted - 0.125 * momentum
        np.testing.assert_allclose(found, wanted, rtol=1e-12)
        assert total.tolist() == [2]
    with tf.Graph().as_default():
        w = v1.get_variable("w", initializer=1.0)
        passes = hvd.DistributedOptimizer(
            v1.train.GradientDescentOptimizer(0.1), backward_passes_per_step=2
        )
        with pytest.raises(ValueError, match="need TensorFlow 2"):
            passes.minimize(w * w)


def test_training():
    def work(rank):
        import tensorflow as tf

        import horovod.tensorflow as hvd

        hvd.init()
        check_tapes(tf, hvd, rank)
        check_optimizer(tf, hvd, rank)
        check_helpers(tf, hvd, rank)
        check_sessions(tf, hvd, rank)
        check_errors(tf, hvd, rank)
        check_partial(tf, hvd, rank)
        check_keras(tf, hvd, rank)

    run_tensorflow_ranks(2, work, timeout_s=150)


def test_sessions_whose_operations_are_deterministic():
    """Then TensorFlow refuses what asks for the time, say."""

    def work(rank):
        import tensorflow as tf

        import horovod.tensorflow as hvd

        hvd.init()
        tf.keras.utils.set_random_seed(1)
        tf.config.experimental.enable_op_determinism()
        check_sessions(tf, hvd, rank)

    run_tensorflow_ranks(2, work, timeout_s=100)
