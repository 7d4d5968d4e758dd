"""Two ranks train as one process with all data does, whatever Keras runs on."""

from __future__ import annotations

import numpy as np
import pytest
from keras_jobs import (
    EAGER,
    RUNNERS,
    STEPS,
    alone_from,
    assert_close,
    assert_same_everywhere,
    fit,
    new_model,
    prepared,
    quick,
    runs,
    weights,
)
from slow import slow_but

from kolovod.core.world import current

pytestmark = pytest.mark.timeout(300)


def train_both(keras, kv, optimizer, alone, wrapped=None, tolerance=1e-12, **compiled):
    """With two ranks; ``alone``, to be trained as one process, is to come to the same."""
    model = new_model(keras, kv.DistributedOptimizer(optimizer, **(wrapped or {})), **compiled)
    alone = alone_from(model, momentum=alone) if isinstance(alone, float) else alone
    alone.fit() if hasattr(alone, "slow_down") else fit(alone)
    fit(model, kv.rank(), kv.size())
    assert_close(model, alone, tolerance)
    assert_same_everywhere(kv, model)
    return model


def check_optimizers(keras, kv, which):
    """Those with and without state, traced and, but on JAX, which takes seconds then, eager."""
    optimizers = keras.optimizers
    alone = quick(new_model(keras, optimizers.Adam(0.01, clipnorm=0.01)), which)
    model = train_both(keras, kv, optimizers.Adam(0.01, clipnorm=0.01), alone)
    assert isinstance(model.optimizer, optimizers.Adam)
    if which == EAGER:
        alone = new_model(keras, optimizers.SGD(0.1, momentum=0.875, nesterov=True))
        train_both(keras, kv, optimizers.SGD(0.1, momentum=0.875, nesterov=True), alone)
    elif which != "jax":
        train_both(keras, kv, optimizers.SGD(0.1, momentum=0.875), 0.875, run_eagerly=True)
    if which == "tf_keras":
        train_both(keras, kv, optimizers.legacy.SGD(0.1, momentum=0.875), 0.875)


def check_ways(keras, kv, which):
    """How gradients travel does not matter; that they do, and how many at once, is counted."""

    def sgd(rate=0.1):
        return keras.optimizers.SGD(rate)

    options = {"gradient_predivide_factor": 4.0, "groups": 2}
    model = train_both(keras, kv, sgd(), 0.0, options)
    assert operations_of(model, kv) == (2 + 1) * STEPS  # and one that compares the ranks
    check_another_world(kv, model)
    if which != EAGER:
        return
    twice = alone_from(new_model(keras, sgd(0.2)))
    train_both(keras, kv, sgd(), twice, {"op": kv.Sum})
    alone = alone_from(new_model(keras, sgd()))
    model = train_both(keras, kv, sgd(), alone, {"compression": kv.Compression.fp16}, 1e-3)
    assert any((a != b).any() for a, b in zip(weights(model), alone.weights, strict=True))
    for groups, operations in ((None, 1), (99, 4), ("lists", 3)):
        model = new_model(keras, sgd())
        hidden, last = model.layers[-2:]
        given = [[hidden.kernel, last.bias], [last.kernel]] if groups == "lists" else groups
        model.compile(kv.DistributedOptimizer(sgd(), groups=given), "mse")
        assert operations_of(model, kv) == (operations + 1) * STEPS, groups


def check_another_world(kv, model):
    """Of ranks that have agreed before one makes its program anew, and does not wait for it."""
    kv.shutdown()
    kv.init()
    if kv.rank() == 1:
        model.make_train_function(force=True)
    alone = alone_from(model).fit(epochs=1)
    fit(model, kv.rank(), kv.size(), 1)
    assert_close(model, alone)
    assert_same_everywhere(kv, model)


def operations_of(model, kv):
    """How many operations one epoch of ``model`` takes, once it is traced."""
    fit(model, kv.rank(), kv.size(), 1)
    counts = []
    for _ in range(2):
        weights(model)  # waits for them
        counts.append(current().engine.stats()["operations"])
        fit(model, kv.rank(), kv.size(), 1)
    return counts[1] - counts[0]


def check_passes(keras, kv, which):
    """Several steps before one is taken, as a larger batch would be; communicating once."""

    def sgd(rate=0.1):
        return keras.optimizers.SGD(rate)

    twice = alone_from(new_model(keras, sgd())).fit(batch_size=32)
    passes = {"backward_passes_per_step": 2}
    ways = [(passes | {"average_aggregated_gradients": True}, 0.1), (passes, 0.05)]
    for options, rate in ways if which == EAGER else ways[which == "jax" :][:1]:
        optimizer = kv.DistributedOptimizer(sgd(rate), **options)
        model = new_model(keras, optimizer)
        fit(model, kv.rank(), kv.size())
        assert_close(model, twice)
        assert_same_everywhere(kv, model)
        assert operations_of(model, kv) == 2 * (STEPS // 2)  # the ranks are compared as often
    if which == EAGER:
        own = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        model = new_model(keras, kv.DistributedOptimizer(own))
        fit(model, kv.rank(), kv.size())
        assert_close(model, twice)


def check_local(keras, kv, which):
    """A layer whose gradients stay the rank's own, and count as a share or in full."""
    ways = [(True, 1 / kv.size()), (False, 1.0)]
    for scales, factor in ways if which == EAGER else ways[:1]:
        model = new_model(keras, "sgd")
        hidden, last = model.layers[-2:]
        start = [np.asarray(w) for w in (*hidden.get_weights(), *last.get_weights())]
        alone = alone_from(new_model(keras, keras.optimizers.SGD(0.1)))
        alone.fit(kv.rank(), kv.size(), epochs=1, steps=1)  # with the rank's own batch
        own = [w - s for w, s in zip(weights(alone), start, strict=True)]
        both = [kv.allreduce(change) for change in own]
        optimizer = kv.DistributedOptimizer(
            keras.optimizers.SGD(0.1), local_sources=[hidden], scale_local_gradients=scales
        )
        optimizer.register_local_var(last.bias)
        model.compile(optimizer, "mse")
        fit(model, kv.rank(), kv.size(), epochs=1, steps_per_epoch=1)
        wanted = [factor * own[0], factor * own[1], both[2], factor * own[3]]
        for now, before, change in zip(weights(model), start, wanted, strict=True):
            np.testing.assert_allclose(now - before, change, rtol=1e-9, atol=1e-15)


def check_process_sets(keras, kv, which):
    """Members average among themselves; others step alone."""
    members = kv.add_process_set([1])
    optimizer = kv.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=members)
    model = new_model(keras, optimizer)
    alone = alone_from(model).fit(kv.rank(), kv.size())
    fit(model, kv.rank(), kv.size())
    assert_close(model, alone)
    kv.remove_process_set(members)


def check_changes_in_place(keras, kv, which):
    """The object stays, with what it knows."""
    optimizer = keras.optimizers.SGD(0.1, momentum=0.875)
    fit(quick(new_model(keras, optimizer), which), epochs=1)
    state = [np.asarray(v).copy() for v in optimizer.variables]
    assert kv.DistributedOptimizer(optimizer) is optimizer
    assert type(optimizer).__name__ == "SGD"
    for before, now in zip(state, optimizer.variables, strict=True):
        np.testing.assert_array_equal(before, np.asarray(now))


def check_sparse(keras, kv, which):
    """An embedding, of which ranks use some of the same rows."""
    rows = np.array([[0, 1], [1, 2], [3, 3], [4, 0]], np.int32)

    def build(optimizer):
        keras.utils.set_random_seed(5)
        layers = keras.layers
        model = keras.Sequential(
            [layers.Input((2,), dtype="int32"), layers.Embedding(6, 3), layers.Flatten()]
        )
        model.compile(optimizer, "mse")
        return model

    alone = quick(build(keras.optimizers.SGD(0.5)), which)
    alone.fit(rows, np.ones((4, 6)), batch_size=4, epochs=2, verbose=0)
    for as_dense in (False, True):
        sgd = keras.optimizers.SGD(0.5)
        model = build(kv.DistributedOptimizer(sgd, sparse_as_dense=as_dense))
        own = rows[2 * kv.rank() :][:2]
        model.fit(own, np.ones((2, 6)), batch_size=2, epochs=2, verbose=0)
        assert_close(model, alone)
        assert_same_everywhere(kv, model)
        rank = kv.rank()
        kv.shutdown()
        kv.init(comm=[rank])  # for a program that was traced among two
        again = keras.models.clone_model(alone)
        again.set_weights(alone.get_weights())
        again.compile(keras.optimizers.SGD(0.5), "mse", run_eagerly=True)
        for each in (again, model):
            each.fit(own, np.ones((2, 6)), batch_size=2, verbose=0)
        assert_close(model, again)
        kv.shutdown()
        kv.init()


def check_xla(keras, kv):
    """Refused with the way out, which the broadcasting callback takes by itself."""
    optimizer = kv.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model = new_model(keras, optimizer, jit_compile=True)
    with pytest.raises(Exception, match="give jit_compile=False"):
        fit(model, kv.rank(), kv.size(), 1)
    model = new_model(keras, optimizer, jit_compile=True)
    start_equal = kv.callbacks.BroadcastGlobalVariablesCallback(0)
    fit(model, kv.rank(), kv.size(), 1, callbacks=[start_equal])
    assert_same_everywhere(kv, model)


def check_join(keras, kv):
    """Rank 1 has a step less, and does not keep rank 0 waiting."""
    model = new_model(keras, kv.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    fit(model, kv.rank(), kv.size(), 1, steps_per_epoch=STEPS - kv.rank())
    assert kv.join() == 0
    steps = int(np.asarray(model.optimizer.iterations))
    assert kv.allgather([steps]).tolist() == [STEPS, STEPS - 1]
    kv.broadcast_model(model)
    assert_same_everywhere(kv, model)


def check_unused(keras, kv):
    """A layer that one rank uses in one step, and none in the next."""
    import torch

    used = keras.layers.Dense(1)
    used.build((None, 2))
    optimizer = kv.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.5))
    for step, wanted in enumerate((-0.5, 0.0)):
        start = used.get_weights()[0]
        own = torch.ones((2, 1), dtype=torch.float64) if kv.rank() == 1 and step == 0 else None
        optimizer.apply([own, torch.zeros(1, dtype=torch.float64)], [used.kernel, used.bias])
        np.testing.assert_allclose(used.get_weights()[0] - start, wanted)


@pytest.mark.parametrize("which", slow_but(("torch",), RUNNERS))
def test_as_one_process_would(which):
    def work(rank):
        keras, kv = prepared(which)
        check_optimizers(keras, kv, which)
        check_ways(keras, kv, which)
        check_passes(keras, kv, which)
        check_local(keras, kv, which)
        check_process_sets(keras, kv, which)
        check_changes_in_place(keras, kv, which)
        if which in ("tensorflow", "tf_keras"):
            check_sparse(keras, kv, which)
        if which == "tensorflow":
            check_xla(keras, kv)
        if which == "torch":
            check_unused(keras, kv)
            check_join(keras, kv)
        return True

    assert all(runs(which)(work))
