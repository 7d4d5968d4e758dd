"""Functions that TensorFlow has traced once, in worlds that grow and shrink."""

from __future__ import annotations

import pytest
from forked import run_tensorflow_ranks
from frameworks import is_installed
from growing import MOMENTUM, RATE, STEPS, WORLDS, batch, check, replayed, start, worlds_of

pytestmark = [
    pytest.mark.skipif(not is_installed("tensorflow"), reason="TensorFlow is not installed"),
    pytest.mark.timeout(150),
]
PASSES = {"tape": 1, "eager": 1, "legacy": 1, "passes": 2}


def steps_of(tf, kv, launched_as):
    """By name: a step on inputs and targets, and the variables that it changes."""

    def variables():
        return [tf.Variable(value + launched_as) for value in start()]

    def loss_of(model, inputs, targets):
        return tf.reduce_mean(tf.square(inputs @ model[0] + model[1] - targets))

    def by_tape():
        model = variables()
        speeds = [tf.Variable(tf.zeros_like(v)) for v in model]

        def step(inputs, targets):
            with kv.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = loss_of(model, inputs, targets)
            for v, speed, slope in zip(model, speeds, tape.gradient(loss, model), strict=True):
                v.assign_sub(RATE * speed.assign(MOMENTUM * speed + slope))

        return step, [*model, *speeds]

    def by_optimizer(**options):
        model = variables()
        plain = tf.compat.v1.train.MomentumOptimizer(RATE, MOMENTUM)
        optimizer = kv.DistributedOptimizer(plain, **options)

        def step(inputs, targets):
            optimizer.minimize(lambda: loss_of(model, inputs, targets), var_list=model)

        optimizer._create_slots(model)
        return step, [*model, *(optimizer.get_slot(v, "momentum") for v in model)]

    made = {
        "tape": by_tape(),
        "eager": by_tape(),
        "legacy": by_optimizer(),
        "passes": by_optimizer(backward_passes_per_step=2),
    }
    return {
        name: (step if name == "eager" else tf.function(step), owned)
        for name, (step, owned) in made.items()
    }


def test_steps_in_worlds_that_grow_and_shrink():
    def work(launched_as):
        import tensorflow as tf

        import kolovod.tensorflow as kv

        kv.init(comm=[launched_as])  # all are made in a world of one
        trained = steps_of(tf, kv, launched_as)
        kv.shutdown()
        found = {name: [] for name in trained}
        traced = [step for name, (step, _) in trained.items() if name != "eager"]
        counts = []
        for phase in worlds_of(kv, launched_as):
            for name, (step, owned) in trained.items():
                kv.broadcast_variables(owned)
                for row in range(STEPS * PASSES[name]):
                    step(*map(tf.constant, batch(phase, row, launched_as)))
                now = [v.numpy() for v in owned[:2]]
                found[name] += [None] * (phase - len(found[name])) + [now]
            counts.append([step.experimental_get_tracing_count() for step in traced])
        assert counts == counts[:1] * len(counts)
        return found

    results = run_tensorflow_ranks(3, work, timeout_s=120)
    for name, passes in PASSES.items():
        check([each[name] for each in results], replayed(passes=passes))


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
