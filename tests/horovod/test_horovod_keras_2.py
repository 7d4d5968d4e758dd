"""Optimizers of Keras 2 under Horovod's names: what subclasses override, and scripts' tests use.

With tf_keras, or with a TensorFlow before 2.16, whose Keras this is.
"""

from __future__ import annotations

import numpy as np
import pytest
from forked import KERAS_2, KERAS_RUNNERS
from frameworks import is_installed

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.skipif(not is_installed(KERAS_2), reason="there is no Keras 2"),
    pytest.mark.timeout(300),
]

INFINITY = float("inf")


def build_in_keras_2(optimizer, variables):
    from kolovod.keras import optimizer as optimizers

    optimizers.build_in_keras_2(optimizer, variables)


def legacy(keras, **overrides):
    """An optimizer of a user's, which adds each gradient to its variable: as in test suites."""

    def _resource_apply_dense(self, grad, var, apply_state=None):
        return var.assign_add(grad)

    fields = {"_resource_apply_dense": _resource_apply_dense, **overrides}
    return type("Adding", (keras.optimizers.legacy.Optimizer,), fields)("adding")


def both(keras):
    """An optimizer of each kind with a learning rate of -1: adding gradients, too."""
    return legacy(keras), keras.optimizers.SGD(-1.0)


def computed(optimizer, loss, variables):
    """What ``minimize`` of either kind calls."""
    compute = getattr(optimizer, "_compute_gradients", None) or optimizer.compute_gradients
    return compute(loss, variables)


def check_computed(tf, keras, hvd, rank):
    """Combined where they are computed, and not again where they are applied, also if changed."""
    for number in range(2):
        for passed in ({}, {"experimental_aggregate_gradients": False}):
            for to_step in (lambda step: step, tf.function):
                x = tf.Variable([0.0, 0.0])
                optimizer = hvd.DistributedOptimizer(both(keras)[number], op=hvd.Sum)

                def step(optimizer=optimizer, x=x, passed=passed):
                    pairs = computed(optimizer, lambda: x * [rank + 1.0, 2.0], [x])
                    optimizer.apply_gradients([(g * 10.0, v) for g, v in pairs], **passed)
                    return pairs[0][0]

                step = to_step(step)
                for count in (1.0, 2.0):
                    assert step().numpy().tolist() == [3.0, 4.0]
                    assert x.numpy().tolist() == [30.0 * count, 40.0 * count]
                assert int(optimizer.iterations) == 2


def check_given(tf, keras, hvd, rank):
    """Gradients that were computed elsewhere are combined before they are applied."""
    for optimizer in both(keras):
        x, y = tf.Variable(0.0), tf.Variable(0.0)
        optimizer = hvd.DistributedOptimizer(optimizer)
        build_in_keras_2(optimizer, [x, y])
        computed(optimizer, lambda x=x: 5.0 * x, [x])  # looked at only
        optimizer.apply_gradients(iter([(tf.constant(rank + 1.0), y)]))
        assert y.numpy() == 1.5
        pairs = computed(optimizer, lambda x=x, y=y: (rank + 1.0) * (x + y), [x, y])
        optimizer.apply_gradients(pairs[:1])
        optimizer.apply_gradients(pairs[1:])  # in two parts
        assert (x.numpy(), y.numpy()) == (1.5, 3.0)

        @tf.function
        def step(optimizer=optimizer, x=x):
            optimizer.apply_gradients([(tf.constant(rank + 1.0), x)])

        computed(optimizer, lambda x=x: 5.0 * x, [x])  # and is no gradient of the function's
        step()
        step()
        assert x.numpy() == 4.5


def check_several_computed(tf, keras, hvd, rank):
    """Two losses, one optimizer: computed one after the other, then applied, none combined twice.

    Each way of applying has both gradients (3 and 30, of both ranks) in their variables once.
    """

    def together(apply, first, second):
        apply([*first, *second])

    def crosswise(apply, first, second):
        apply(second)
        apply(first)

    def changed(apply, first, second):
        first, second = ([(g * 1.0, v) for g, v in pairs] for pairs in (first, second))
        apply(first)
        apply(second)

    def one_changed(apply, first, second):
        apply(first)
        apply([(g * 1.0, v) for g, v in second])

    for number in range(2):
        for way in (together, crosswise, changed, one_changed):
            for shared in (False, True):
                for to_step in (lambda step: step, tf.function):
                    if shared and way in (together, changed):
                        continue  # of a variable nothing tells changed gradients from one another
                    x, y = tf.Variable(0.0), tf.Variable(0.0)
                    optimizer = hvd.DistributedOptimizer(both(keras)[number], op=hvd.Sum)
                    build_in_keras_2(optimizer, [x, y])
                    last = x if shared else y

                    def step(optimizer=optimizer, x=x, last=last, way=way):
                        first = computed(optimizer, lambda: (rank + 1.0) * x, [x])
                        second = computed(optimizer, lambda: 10.0 * (rank + 1.0) * last, [last])
                        way(optimizer.apply_gradients, first, second)

                    step = to_step(step)
                    for count in (1.0, 2.0):
                        step()
                        wanted = [33.0, 0.0] if shared else [3.0, 30.0]
                        found = [x.numpy(), y.numpy()]
                        assert found == [count * w for w in wanted], (way.__name__, shared)


def check_handed_out_once(tf, keras, hvd, rank):
    """What was computed and not applied stands for the next of its variable only, and is known."""
    for optimizer in both(keras):
        x, y = tf.Variable(0.0), tf.Variable(0.0)
        optimizer = hvd.DistributedOptimizer(optimizer, op=hvd.Sum)
        build_in_keras_2(optimizer, [x, y])
        own = tf.constant(rank + 1.0)
        pairs = computed(optimizer, lambda x=x: (rank + 1.0) * x, [x])
        for count in (1.0, 2.0):  # the same ones again are as combined as before
            optimizer.apply_gradients(pairs)
            assert x.numpy() == 3.0 * count
        optimizer.apply_gradients([(own, x)])
        assert x.numpy() == 9.0
        computed(optimizer, lambda x=x: 5.0 * x, [x])  # looked at only
        pairs = computed(optimizer, lambda x=x: (rank + 1.0) * x, [x])
        optimizer.apply_gradients([(own, y), *pairs])  # one of them is this rank's own
        assert (x.numpy(), y.numpy()) == (12.0, 3.0)
        optimizer.apply_gradients([(own, x), (own, y)])
        assert (x.numpy(), y.numpy()) == (15.0, 6.0)
        del pairs
        assert not optimizer._kolovod_reducer.handed_out


def check_overridden(tf, keras, hvd, rank):
    """A subclass sees its own gradients where it computes, and all ranks' where it aggregates."""
    seen = []
    base = keras.optimizers.legacy.Optimizer

    def _compute_gradients(self, loss, var_list, grad_loss=None, tape=None):
        pairs = base._compute_gradients(self, loss, var_list, grad_loss, tape)
        seen.append(("computed", pairs[0][0].numpy()))
        return [(2.0 * g, v) for g, v in pairs]

    def _aggregate_gradients(self, grads_and_vars):
        pairs = list(grads_and_vars)
        seen.append(("aggregated", pairs[0][0].numpy()))
        return [(g + 0.5, v) for g, v in pairs]

    x = tf.Variable(0.0)
    optimizer = hvd.DistributedOptimizer(
        legacy(
            keras, _compute_gradients=_compute_gradients, _aggregate_gradients=_aggregate_gradients
        )
    )
    optimizer.minimize(lambda: (rank + 1.0) * x, [x])
    assert seen == [("computed", rank + 1.0), ("aggregated", 3.0)]
    assert x.numpy() == 3.5
    copy = type(optimizer).from_config(optimizer.get_config())
    assert copy.get_config() == optimizer.get_config()


def check_passes(tf, keras, hvd, rank):
    """Sums of four passes, of a row that is looked up too; the counter, and the iterations."""
    for number in range(2):
        for takes_mean, scale in ((False, 4.0), (True, 1.0)):
            for to_step in (lambda step: step, tf.function):
                x, y = tf.Variable([0.0]), tf.Variable([1.0, 2.0])
                optimizer = hvd.DistributedOptimizer(
                    both(keras)[number],
                    backward_passes_per_step=4,
                    average_aggregated_gradients=takes_mean,
                    sparse_as_dense=True,
                )

                def loss(x=x, y=y):
                    return x - (rank + 1.0) * tf.gather(y, [0])

                def step(optimizer=optimizer, loss=loss, variables=(x, y)):
                    pairs = computed(optimizer, loss, variables)
                    optimizer.apply_gradients(pairs, experimental_aggregate_gradients=False)

                step = to_step(step)
                for done in range(1, 11):
                    step()
                    steps = done // 4
                    np.testing.assert_allclose(x, [scale * steps])
                    np.testing.assert_allclose(y, [1.0 - 1.5 * scale * steps, 2.0])
                    assert int(optimizer.iterations) == done
                    assert optimizer._agg_helper.counter.numpy() == done % 4
                assert optimizer._agg_helper.locally_aggregated_grads[0].numpy().tolist() == [2.0]
    optimizer = hvd.DistributedOptimizer(legacy(keras), backward_passes_per_step=2)
    table = tf.Variable([1.0, 2.0])
    with pytest.raises(ValueError, match="give sparse_as_dense=True"):
        computed(optimizer, lambda: tf.gather(table, [0]), [table])
    assert hvd.DistributedOptimizer(legacy(keras))._agg_helper is None


def check_legacy_names(tf, keras, hvd, rank):
    """What scripts of earlier releases call of a new optimizer, too."""
    for passes in (1, 2):
        for to_step in (lambda step: step, tf.function):
            x = tf.Variable([0.0])
            optimizer = hvd.DistributedOptimizer(
                keras.optimizers.SGD(-1.0), op=hvd.Sum, backward_passes_per_step=passes
            )
            build_in_keras_2(optimizer, [x])

            def step(optimizer=optimizer, x=x):
                grads = optimizer._aggregate_gradients(iter([(tf.constant([rank + 1.0]), x)]))
                optimizer.apply_gradients(
                    zip(grads, [x], strict=True), experimental_aggregate_gradients=False
                )
                return grads[0]

            step = to_step(step)
            for done in (1, 2):
                total = step().numpy().tolist()
                is_last = done % passes == 0
                assert total == ([3.0 * passes] if is_last else [rank + 1.0])
                assert x.numpy().tolist() == [3.0 * (done if is_last else 0)]
    x = tf.Variable([0.0, 0.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(-1.0), op=hvd.Sum)
    pairs = optimizer._compute_gradients(lambda: (rank + 1.0) * x, [x], tf.constant([1.0, 2.0]))
    assert pairs[0][0].numpy().tolist() == [3.0, 6.0]
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((rank + 1.0) * x)
    assert optimizer._compute_gradients(loss, [x], tape=tape)[0][0].numpy().tolist() == [3.0, 3.0]
    with pytest.raises(ValueError, match="needs a callable as loss"):
        optimizer._compute_gradients(loss, [x], tf.constant(2.0), tape)


def check_infinities(tf, keras, hvd, rank):
    """One of one rank reaches all, and does not stay in the sums."""
    for number in range(2):
        for to_step in (lambda step: step, tf.function):
            x = tf.Variable(0.0)
            optimizer = hvd.DistributedOptimizer(both(keras)[number], backward_passes_per_step=2)

            def step(factor, optimizer=optimizer, x=x):
                pairs = computed(optimizer, lambda: factor * x, [x])
                optimizer.apply_gradients(pairs)
                return pairs[0][0]

            step = to_step(step)
            found = []
            for factor in (1.0, INFINITY if rank == 1 else 1.0, 1.0, 3.0):
                found.append(step(tf.constant(factor)).numpy())
                if found[1:] == [INFINITY]:
                    x.assign(0.0)
            assert found == [1.0, INFINITY, 1.0, 4.0]
            if number == 0:  # Keras's own SGD keeps the infinity, times a momentum of 0
                assert x.numpy() == 4.0


def check_scaler(tf, keras, hvd, rank):
    """Around it, and within: the scale falls on both ranks, and the step is left out on both."""
    scaler_of = keras.mixed_precision.LossScaleOptimizer
    for number in range(2):
        for outside in (True, False):
            inner = both(keras)[number]
            options = {"dynamic": True, "initial_scale": 4.0, "dynamic_growth_steps": 100}
            if outside:
                optimizer = scaler_of(hvd.DistributedOptimizer(inner), **options)
            else:
                optimizer = hvd.DistributedOptimizer(scaler_of(inner, **options))
            x = tf.Variable(0.0)

            @tf.function
            def step(factor, optimizer=optimizer, x=x):
                optimizer.minimize(lambda: factor * x, [x])

            step(tf.constant(rank + 1.0))
            assert x.numpy() == 1.5
            step(tf.constant(INFINITY if rank == 1 else 1.0))
            assert x.numpy() == 1.5
            assert float(optimizer.loss_scale) == 2.0
            step(tf.constant(rank + 1.0))
            assert x.numpy() == 3.0


def check_partial(tf, keras, hvd, rank):
    """Of a layer that is local half of the rank's own gradient; of the other the mean."""
    for passes in (1, 2):
        for scales, share in ((True, 2.0), (False, 1.0)):
            layers = [keras.layers.Dense(2, use_bias=False) for _ in range(2)]
            model = keras.Sequential([keras.layers.Input((3,)), *layers])
            model.set_weights([np.ones((3, 2)), np.ones((2, 2))])
            inputs = np.full((1, 3), rank + 1.0, np.float32)
            optimizer = hvd.PartialDistributedOptimizer(
                both(keras)[passes - 1],
                local_layers=layers[:1],
                scale_local_gradients=scales,
                backward_passes_per_step=passes,
                sparse_as_dense=True,
            )
            for _ in range(passes):
                with tf.GradientTape(persistent=True) as tape:
                    loss = tf.reduce_sum(model(inputs, training=True))
                own = tape.gradient(loss, model.trainable_weights)
                pairs = optimizer._compute_gradients(loss, model.trainable_weights, tape=tape)
            mean = 1.5 / (rank + 1.0)
            np.testing.assert_allclose(pairs[0][0] * share, passes * own[0], rtol=1e-6)
            np.testing.assert_allclose(pairs[1][0], passes * mean * own[1], rtol=1e-6)
            assert [id(v) for _, v in pairs] == [id(v) for v in model.trainable_weights]


def check_sparse(tf, keras, hvd, rank):
    """A looked-up row as indices and values of both ranks, or as a whole."""
    for as_dense in (False, True):
        table = tf.Variable([[0.0], [0.0], [0.0]])
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.legacy.SGD(-1.0), sparse_as_dense=as_dense
        )
        pairs = optimizer._compute_gradients(lambda t=table: tf.gather(t, [rank, 2]), [table])
        assert isinstance(pairs[0][0], tf.IndexedSlices) != as_dense
        optimizer.apply_gradients(pairs)
        assert table.numpy().tolist() == [[0.5], [0.5], [1.0]]


def check_fit(tf, keras, hvd, rank):
    """``model.fit`` with each kind, and as scripts for earlier releases call ``compile``."""
    inputs = np.arange(12.0).reshape(4, 3)[rank::2] / 10
    for make in (keras.optimizers.legacy.SGD, keras.optimizers.SGD):
        for passes in (1, 2):
            model = keras.Sequential([keras.layers.Dense(1, use_bias=False, input_shape=(3,))])
            model.set_weights([np.full((3, 1), 0.5)])
            optimizer = hvd.DistributedOptimizer(make(0.25), backward_passes_per_step=passes)
            model.compile(optimizer, "mse", experimental_run_tf_function=False)
            model.fit(inputs, np.ones((2, 1)), batch_size=2 // passes, shuffle=False, verbose=0)
            rows = np.arange(12.0).reshape(4, 3) / 10
            gradient = passes * rows.T @ (rows.sum(1, keepdims=True) / 2 - 1) / 2
            np.testing.assert_allclose(model.get_weights()[0], 0.5 - 0.25 * gradient, rtol=1e-5)
            losses = tf.convert_to_tensor(model.history.history["loss"])
            assert hvd.broadcast(losses, root_rank=0).shape == losses.shape


def check_graphs(tf, keras, hvd, rank):
    """In TensorFlow 1's graphs, where Keras asks for gradients by another name."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.compat.v1.get_variable("x", initializer=1.0, use_resource=True)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.legacy.SGD(0.5))
        (update,) = optimizer.get_updates((rank + 1.0) * x, [x])
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(optimizer.iterations.initializer)
        session.run(update)
        assert session.run(x) == 0.25


@pytest.mark.slow
def test_what_scripts_reach_for():
    def work(rank):
        import tensorflow as tf

        import horovod.keras as partial
        import horovod.tensorflow.keras as hvd
        from kolovod.keras.framework_detection import chosen

        keras = chosen()
        hvd.init()
        check_computed(tf, keras, hvd, rank)
        check_given(tf, keras, hvd, rank)
        check_several_computed(tf, keras, hvd, rank)
        check_handed_out_once(tf, keras, hvd, rank)
        check_overridden(tf, keras, hvd, rank)
        check_passes(tf, keras, hvd, rank)
        check_legacy_names(tf, keras, hvd, rank)
        check_infinities(tf, keras, hvd, rank)
        check_scaler(tf, keras, hvd, rank)
        check_partial(tf, keras, partial, rank)
        check_sparse(tf, keras, hvd, rank)
        check_fit(tf, keras, hvd, rank)
        check_graphs(tf, keras, hvd, rank)
        return True

    assert all(KERAS_RUNNERS["tf_keras"](2, work, timeout_s=200))
