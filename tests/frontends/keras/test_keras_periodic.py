"""LocalSGD and DiLoCo in ``model.fit``: against the same in one process; what they refuse."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import numpy as np
import periodic_replay as replay
import pytest
from keras_jobs import RUNNERS, assert_same_everywhere, prepared, runs, weights
from periodic_replay import model_of
from slow import slow_but

from kolovod.errors import InvalidArgumentError, MismatchError

pytestmark = pytest.mark.timeout(200)
SIZE, BATCHES, EVERY = 2, 11, 4


def train(model, rank, callbacks, first=0, last=BATCHES):
    """A ``fit`` on batches from ``first`` on, each of one row."""
    rows = np.array([replay.factors(rank, step) for step in range(first, last)])
    model.fit(rows, rows[:, 0], batch_size=1, shuffle=False, verbose=0, callbacks=callbacks)


def seen_by(keras, act):
    """A callback that does something after each batch."""

    class Seen(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            assert self.model.built  # Keras writes back what it has learned, on JAX
            act(batch)

    return Seen()


def assert_near(found, wanted, which):
    tolerance = 1e-6 if which == "jax" else 1e-12  # Keras rounds numbers of the optimizer there
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, tolerance, tolerance)


CASES = {
    "plain": ({}, {}),
    "parts that are late, after a warm-up": (
        {"fragments": 3, "fragment_sync_delay": 1, "local_share": 0.25, "warm_up_steps": 3},
        {"fragments": ((0,), (1,), (2,)), "delay": 1, "share": 0.25, "warm": 3},
    ),
}


def check_diloco(keras, kv, which):
    """After each batch; at the end of ``fit`` all have the same; and from a checkpoint."""
    rank = kv.rank()
    for case, (options, same) in CASES.items():
        model = model_of(keras, which)
        if case == "plain":
            a, b, c = model.trainable_variables
            options = {"fragments": [[a, c], [b]]}
            same = {"fragments": ((0, 2), (1,))}
        diloco = kv.callbacks.DiLoCo(EVERY, **options)
        alone, saved = replay.DiLoCo(SIZE, EVERY, **same), []

        def check(batch, model=model, diloco=diloco, alone=alone, saved=saved):
            assert_near(weights(model), alone.run(1)[rank], which)
            optimizer = [np.asarray(v) for v in variables_of(model.optimizer)]
            saved.append(pickle.dumps((weights(model), optimizer, diloco.state_dict())))

        train(model, rank, [diloco, seen_by(keras, check)])
        assert len(saved) == BATCHES
        assert_same_everywhere(kv, model)
        last = pickle.loads(saved[-1])[0]
        assert any((one != other).any() for one, other in zip(weights(model), last, strict=True))
        assert_near(diloco.state_dict()["common"], weights(model), which)
        for after in (EVERY + 2,):
            go_on(keras, kv, which, options if case != "plain" else None, saved, after)


def variables_of(optimizer):
    variables = optimizer.variables
    return list(variables() if callable(variables) else variables)


def go_on(keras, kv, which, options, saved, after):
    """Train what is left, from a checkpoint after so many batches."""
    model = model_of(keras, which)
    if options is None:
        a, b, c = model.trainable_variables
        options = {"fragments": [[a, c], [b]]}
    kept, optimizer, state = pickle.loads(saved[after - 1])
    model.set_weights(kept)
    model.optimizer.build(model.trainable_variables)
    for variable, value in zip(variables_of(model.optimizer), optimizer, strict=True):
        variable.assign(value)
    diloco = kv.callbacks.DiLoCo(EVERY, **options)
    diloco.load_state_dict(state)
    found = []
    note = seen_by(keras, lambda batch: found.append(weights(model)))
    train(model, kv.rank(), [diloco, note], first=after)
    assert_near(found[-1], pickle.loads(saved[-1])[0], which)
    with pytest.raises(InvalidArgumentError, match=r"the state has \['steps'\], which is none of"):
        diloco.load_state_dict({"steps": 1})
    diloco.load_state_dict({**state, "momentum": []})
    with pytest.raises(InvalidArgumentError, match="the state is of variables of shapes"):
        train(model, kv.rank(), [diloco])


def check_local_sgd(keras, kv, which):
    """With a warm-up; several batches in one execution; a second ``fit``."""
    rank, found = kv.rank(), {}
    for warm, together in ((3, 1), (0, 2)):
        several = {} if which == "torch" else {"steps_per_execution": together}  # it has no others
        model = model_of(keras, which, **several)
        local_sgd = kv.callbacks.LocalSGD(EVERY, warm_up_steps=warm)
        note = seen_by(keras, lambda batch, model=model: found.update({batch: weights(model)}))
        train(model, rank, [local_sgd, note], last=BATCHES - 1)
        for batches in (6, 8, 10):
            alone = replay.local_sgd(SIZE, batches, EVERY, warm)[rank]
            assert_near(found[batches - 1], alone, which)
        assert_same_everywhere(kv, model)
        assert local_sgd.state_dict() == {"steps": BATCHES - 1}
    hasty = kv.callbacks.LocalSGD(1)
    hasty.set_model(model)
    hasty.on_train_batch_begin(4)
    with pytest.raises(InvalidArgumentError, match="sync_every is 1, but Keras trains on 2"):
        hasty.on_train_batch_end(5)


def check_statistics(keras, kv, which):
    """Moving ones are averaged, frozen weights are not sent."""
    frozen = keras.layers.Dense(3)
    layers = [keras.layers.Input((2,)), frozen, keras.layers.BatchNormalization()]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    frozen.trainable = False
    model.compile("sgd", "mse", run_eagerly=which in ("tensorflow", "tf_keras"))
    diloco = kv.callbacks.DiLoCo(2, compression=kv.Compression.fp16, warm_up_steps=1)
    kv.broadcast_model(model)
    train(model, kv.rank(), [diloco], last=4)
    assert_same_everywhere(kv, model)
    names = [variable.name.split("/")[-1].split(":")[0] for variable in diloco._statistics]
    assert names == ["moving_mean", "moving_variance"]


def check_refusals(keras, kv, which):
    from kolovod.core.transaction import use_transaction

    rank, callbacks = kv.rank(), kv.callbacks
    for wrong, text in (
        ({"sync_every": 0}, "sync_every is 0: give an int of at least 1"),
        ({"fragments": 5}, "5 fragments cannot take turns in 4 steps"),
        ({"fragment_sync_delay": 4}, "must be less than sync_every, which is 4"),
        ({"local_share": -1}, "local_share is -1: give a number from 0 to 1"),
        ({"outer_learning_rate": "big"}, "outer_learning_rate is 'big': give a number"),
        ({"outer_momentum": 2}, "outer_momentum is 2: give a number from 0 to 1"),
        ({"warm_up_steps": None}, "warm_up_steps is None"),
        ({"compression": "int8"}, "compression is 'int8'"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            callbacks.DiLoCo(**{"sync_every": 4, **wrong})
    model = model_of(keras, which, **({"run_eagerly": True} if which == "tensorflow" else {}))
    with pytest.raises(InvalidArgumentError, match="fragments is 4: there are 3 parameters"):
        train(model, rank, [callbacks.DiLoCo(4, fragments=4)])
    with pytest.raises(InvalidArgumentError, match="each of the model's variables"):
        train(model, rank, [callbacks.DiLoCo(4, fragments=[model.trainable_variables[1:]])])
    with pytest.raises(InvalidArgumentError, match="none of LocalSGD's"):
        callbacks.LocalSGD(4).load_state_dict({})
    with pytest.raises(MismatchError, match="rank 0 has 'sync_every' 4, rank 1 has 'sync_every' 5"):
        train(model, rank, [callbacks.LocalSGD(4 + rank)])
    use_transaction(SimpleNamespace(is_elastic=True))
    with pytest.raises(InvalidArgumentError, match="local_sgd is not in the state of this elastic"):
        train(model, rank, [callbacks.LocalSGD(4)])
    use_transaction(None)
    model.trainable_variables[1].assign(np.full(4, float(rank)))
    with pytest.raises(MismatchError, match="the values of b"):
        train(model, rank, [callbacks.DiLoCo(4)])
    alone = kv.add_process_set([1])
    before = weights(model)
    train(model, rank, [callbacks.LocalSGD(4, process_set=alone)])
    assert not np.array_equal(before[0], weights(model)[0])


@pytest.mark.parametrize("which", slow_but(("torch",), RUNNERS))
def test_periodic_averaging(which):
    def work(rank):
        keras, kv = prepared(which)
        check_diloco(keras, kv, which)
        check_local_sgd(keras, kv, which)
        check_statistics(keras, kv, which)
        check_refusals(keras, kv, which)
        return True

    assert all(runs(which)(work))


def between_hosts(rank, compression):
    """Synchronous within a host, DiLoCo between the two, in four bits."""
    import keras

    import kolovod.keras as kv

    kv.init()
    host = [kv.add_process_set(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Input((64,)), keras.layers.Dense(64), keras.layers.Dense(8)]
    model = keras.Sequential(layers)
    inner = kv.DistributedOptimizer(keras.optimizers.Adam(0.01), process_set=host)
    model.compile(inner, "mse")
    compression = getattr(kv.Compression, compression)
    diloco = kv.callbacks.DiLoCo(4, fragments=2, fragment_sync_delay=1, compression=compression)
    seen = []

    def compare(batch):
        of_all = kv.allgather(weights(model)[0][None])
        assert np.array_equal(of_all[0], of_all[1])
        assert np.array_equal(of_all[2], of_all[3])
        seen.append(np.array_equal(of_all[0], of_all[2]))

    rows = np.random.default_rng(rank).normal(size=(80, 64)).astype(np.float32)
    callbacks = [diloco, seen_by(keras, compare)]
    model.fit(rows, rows[:, :8], batch_size=8, verbose=0, callbacks=callbacks)
    assert seen == [False] * 10  # a half of each rank's own remains
    kernel = weights(model)[0]
    of_all = kv.allgather(kernel[None])
    assert all(np.array_equal(kernel, each) for each in of_all)
    return kernel


@pytest.mark.slow
def test_between_hosts_with_ranks_that_step_together():
    runs("torch")
    hosts = ["a", "a", "b", "b"]
    exact = RUNNERS["torch"](4, between_hosts, "none", hosts=hosts)[0]
    coded = RUNNERS["torch"](4, between_hosts, "int4", hosts=hosts)[0]
    assert 0 < abs(exact - coded).max() < 0.05
