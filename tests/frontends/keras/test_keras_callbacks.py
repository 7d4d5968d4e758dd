"""Callbacks, saving, scaled losses and errors, on two ranks, whatever Keras runs on."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
from keras_jobs import (
    BATCH,
    EAGER,
    KERAS_2,
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
from kolovod.errors import InvalidArgumentError, MismatchError

pytestmark = pytest.mark.timeout(300)


def sgd(keras, rate=0.1, momentum=0.0):
    return keras.optimizers.SGD(rate, momentum=momentum)


def check_broadcast(keras, kv, which):
    """Rank 1 has other weights and no optimizer state; afterwards both are where rank 0 was."""
    broadcast = kv.callbacks.BroadcastGlobalVariablesCallback
    alone = alone_from(new_model(keras, sgd(keras)), momentum=0.875).fit(epochs=2)
    model = new_model(keras, sgd(keras, momentum=0.875), seed=3 + kv.rank())
    if kv.rank() == 0:
        fit(quick(model, which), epochs=1)
    kv.DistributedOptimizer(model.optimizer)
    model.compile(model.optimizer, "mse")
    local = model.layers[-1].bias if which == "tensorflow" else None
    callback = broadcast(0, local_variables=[])
    fit(model, kv.rank(), kv.size(), 1, callbacks=[callback])
    assert_close(model, alone)
    assert_same_everywhere(kv, model)
    if local is not None:
        local.assign([kv.rank()] * 4)
        callback = broadcast(0)
        callback.register_local_var(local)
        kv.broadcast_model(model, 0, None, [local])
        assert np.asarray(local).tolist() == [kv.rank()] * 4
    unbuilt = keras.Sequential([keras.layers.Dense(4)])
    with pytest.raises(InvalidArgumentError, match="no variables yet"):
        kv.broadcast_model(unbuilt)
    unbuilt.compile(kv.DistributedOptimizer(sgd(keras)), "mse")
    fit(unbuilt, kv.rank(), kv.size(), 1, callbacks=[broadcast(0)])
    assert_same_everywhere(kv, unbuilt)


def check_metrics(keras, kv, which):
    """Means over ranks, of training and of validation, weighted on request."""
    callbacks, rank = kv.callbacks, kv.rank()

    class Own(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs.clear()
            logs.update({"loss": 1.0 + rank, "val_loss": 5.0 * rank, "text": "x"})

    class Seen(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.logs = dict(logs)

    if which != EAGER:
        logs = {"loss": 1.0 + rank, "val_loss": 5.0 * rank, "text": "x"}
        callbacks.MetricAverageCallback(samples=1 + 2 * rank).on_epoch_end(0, logs)
        assert logs == {"loss": 1.75, "val_loss": 2.5, "text": "x"}
        return
    for options, wanted in (
        ({}, {"loss": 1.5, "val_loss": 2.5, "text": "x"}),
        ({"samples": 1 + 2 * rank, "val_samples": 4}, {"loss": 1.75, "val_loss": 2.5, "text": "x"}),
    ):
        seen = Seen()
        model = new_model(keras, sgd(keras))
        average = callbacks.MetricAverageCallback(**options)
        fit(model, rank, kv.size(), 1, callbacks=[Own(), average, seen])
        assert seen.logs == wanted
    with pytest.raises(MismatchError, match="rank 1 has 'b', rank 0 not"):
        callbacks.MetricAverageCallback().on_epoch_end(0, {"ab"[rank]: 1.0})


def check_ends_on_nan(keras, kv, which):
    """One rank's batch ends all ranks at the same batch, and that rank is named."""
    ended, said = [], []
    module = importlib.import_module("kolovod.keras.callbacks")
    module.report_to_stderr = said.append

    class Counts(keras.callbacks.Callback):
        def on_batch_end(self, batch, logs=None):
            ended.append(batch)

    rows = np.ones((8 * BATCH, 5), np.float32)
    if kv.rank() == 1:
        rows[3 * BATCH + 1] = np.inf
    model = new_model(keras, kv.DistributedOptimizer(sgd(keras, 0.001)))
    callbacks = [Counts(), kv.callbacks.TerminateOnNaN()]
    model.fit(rows, np.ones((len(rows), 4)), BATCH, 5, 0, callbacks, shuffle=False)
    assert ended == list(range(4))
    text = "the loss of rank 1 is not finite in batch 3: training ends on all ranks"
    assert said == [text] * kv.rank()


def keep_time(callbacks, epochs):
    """Call ``callbacks`` as training does."""
    callbacks.set_params({"steps": STEPS})
    callbacks.on_train_begin()
    for epoch in range(epochs):
        callbacks.on_epoch_begin(epoch)
        for step in range(STEPS):
            callbacks.on_train_batch_begin(step)
            callbacks.on_train_batch_end(step)
        callbacks.on_epoch_end(epoch, {})
    callbacks.on_train_end()


def check_rates(keras, kv, which):
    """The rate of each batch; and what changes with it, as by hand."""
    callbacks = kv.callbacks

    class Rates(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.rates, self.logs = [], []

        def on_train_batch_begin(self, batch, logs=None):
            self.rates.append(float(np.asarray(self.model.optimizer.learning_rate)))

        def on_epoch_end(self, epoch, logs=None):
            self.logs.append(logs["learning_rate"])

    def rates(callback, epochs=3):
        seen = Rates()
        model = new_model(keras, sgd(keras, 0.8, 0.9))
        if which == EAGER:
            fit(model, epochs=epochs, callbacks=[callback, seen])
        else:  # which would make a program for each model
            keep_time(keras.callbacks.CallbackList([callback, seen], model=model), epochs)
        return seen

    warmup = rates(callbacks.LearningRateWarmupCallback(0.8, 2))
    wanted = [0.4 + 0.4 * (step + 1) / 8 for step in range(2 * STEPS)] + [0.8] * STEPS
    np.testing.assert_allclose(warmup.rates, wanted, rtol=1e-6)
    np.testing.assert_allclose(warmup.logs, [0.6, 0.8, 0.8], rtol=1e-6)
    power = rates(callbacks.LearningRateScheduleCallback(0.8, 0.1, start_epoch=1))
    np.testing.assert_allclose(power.rates, [0.8] * 8 + [0.08] * 4, rtol=1e-6)
    schedule = callbacks.LearningRateScheduleCallback(
        1.0, lambda epoch: 1 + epoch, end_epoch=2, staircase=False
    )
    wanted = [1 + step / STEPS for step in range(2 * STEPS)] + [3 - 1 / STEPS] * STEPS
    np.testing.assert_allclose(rates(schedule).rates, wanted, rtol=1e-6)
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    schedule.set_model(new_model(keras, sgd(keras, decay)))
    with pytest.raises(InvalidArgumentError, match="schedule of its own"):
        schedule.on_train_begin()
    unknown = callbacks.LearningRateWarmupCallback(0.1)
    unknown.set_params({"steps": None})
    unknown.set_model(new_model(keras, sgd(keras)))
    with pytest.raises(InvalidArgumentError, match="steps_per_epoch"):
        unknown.on_train_begin()


def check_momentum_correction(keras, kv, which):
    """Where the rate halves, what was gathered at the old one halves, too."""
    schedule = kv.callbacks.LearningRateScheduleCallback
    finals = {}
    for corrects in (True, False):
        model = new_model(keras, sgd(keras, 0.1, 0.875))
        halves = schedule(0.1, 0.5, momentum_correction=corrects)
        by_hand = alone_from(model, 0.875).fit(epochs=1)
        fit(model, callbacks=[halves])
        rate = float(np.asarray(model.optimizer.learning_rate))
        if corrects:
            by_hand.slow_down(rate)
        by_hand.rate = rate
        by_hand.fit(epochs=1)
        assert_close(model, by_hand)
        finals[corrects] = weights(model)[0]
        if which != EAGER:
            return
    assert np.abs(finals[True] - finals[False]).max() > 1e-6
    adam = new_model(keras, keras.optimizers.Adam(0.01))
    plain = new_model(keras, keras.optimizers.Adam(0.01))
    fit(adam, epochs=1, callbacks=[schedule(0.01, 1.0)])
    fit(plain, epochs=1)
    assert_close(adam, plain)
    if hasattr(keras.optimizers, "Muon"):
        muon = keras.optimizers.Muon(0.1)
        muon.build(plain.trainable_variables)
        muon.momentums[0].assign(keras.ops.ones_like(muon.momentums[0]))
        rates = schedule(0.1, 0.5)
        rates.set_model(new_model(keras, muon))
        rates.on_epoch_begin(1)
        rates.on_train_batch_begin(0)
        assert float(np.asarray(muon.learning_rate)) == np.float32(0.05)
        assert (np.asarray(muon.momentums[0]) == 1).all()  # these have no rate in them


def check_saving(keras, kv, which, folder):
    """Read by Keras alone and by us; written by rank 0 where it is the best."""
    from kolovod.keras.copies import plainly

    callbacks, rank = kv.callbacks, kv.rank()
    model = new_model(keras, kv.DistributedOptimizer(sgd(keras, momentum=0.875)))
    whole = alone_from(model, momentum=0.875).fit(epochs=4)
    fit(quick(model, which), rank, kv.size())
    path = f"{folder}/{which}{rank}.keras"
    model.save(path)
    with plainly():
        plain = keras.models.load_model(path)
    assert not hasattr(plain.optimizer, "_kolovod_reducer")
    fit(quick(plain, which))
    assert_close(plain, whole)
    again = kv.load_model(path, compression=kv.Compression.none)
    assert hasattr(again.optimizer, "_kolovod_reducer")
    fit(again, rank, kv.size())
    assert_close(again, whole)
    assert_same_everywhere(kv, again)

    best = callbacks.BestModelCheckpoint(f"{folder}/best{which}{{epoch}}.{rank}.keras")
    average = callbacks.MetricAverageCallback()

    class Own(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["val_loss"] = [3.0, 2.0, 2.5][epoch] + rank * [0, 2, 0][epoch]  # means 3, 3, 2.5

    fit(again, rank, kv.size(), 3, callbacks=[Own(), average, best])
    kv.barrier()
    names = sorted(found.name for found in Path(folder).glob(f"best{which}*"))
    assert names == [f"best{which}1.0.keras", f"best{which}3.0.keras"]
    lost = callbacks.BestModelCheckpoint(None)
    lost.set_model(again)
    lost.on_epoch_begin(0)
    if rank == 0:
        with pytest.raises(InvalidArgumentError, match="assign its filepath"):
            lost.on_epoch_end(0, {"val_loss": 1.0})


def check_custom_optimizer(keras, kv, which, folder):
    """A class of the user's own, registered under a name of its own."""
    saving = getattr(keras, "saving", keras.utils)

    @saving.register_keras_serializable("ours")
    class Slow(keras.optimizers.SGD):
        pass

    class Unknown(keras.optimizers.SGD):
        pass

    path = f"{folder}/custom{which}{kv.rank()}.keras"
    for cls, options in ((Slow, {}), (Unknown, {"custom_optimizers": [Unknown]})):
        model = new_model(keras, kv.DistributedOptimizer(cls(0.1)))
        model.save(path)
        loaded = kv.load_model(path, **options)
        assert isinstance(loaded.optimizer, cls)
        assert hasattr(loaded.optimizer, "_kolovod_reducer")
        fit(quick(loaded, which), kv.rank(), kv.size(), 1)
        assert_same_everywhere(kv, loaded)


def check_scaled_loss(keras, kv, which):
    """All ranks skip a step in which one has an infinity, and go on together."""
    for outside in (True, False):
        optimizer = scaled(keras, kv, outside)
        model = new_model(keras, optimizer)
        start = weights(model)
        skipped(keras, kv, model, 8)
        for now, before in zip(weights(model), start, strict=True):
            np.testing.assert_array_equal(now, before)
        alone = alone_from(model).fit()
        fit(model, kv.rank(), kv.size())
        assert_close(model, alone, 1e-6)
        assert_same_everywhere(kv, model)


def scaled(keras, kv, outside, **options):
    """An optimizer with its loss scaled, whose gradients are combined outside of that or inside."""
    scaler = keras.mixed_precision.LossScaleOptimizer
    if outside:
        optimizer = kv.DistributedOptimizer(scaler(sgd(keras)), **options)
    else:  # as model.compile does it with mixed_float16
        optimizer = scaler(kv.DistributedOptimizer(sgd(keras), **options))
    assert isinstance(optimizer, kv.keras_optimizer.Distributed)
    return optimizer


def skipped(keras, kv, model, batch_size):
    """Train with one batch that has infinities on rank 1."""
    inputs = np.ones((batch_size, 5)) * (np.inf if kv.rank() == 1 else 1.0)
    model.fit(inputs, np.ones((batch_size, 4)), batch_size=batch_size, verbose=0)


def check_scaled_passes(keras, kv, which):
    """Gradients travel in the last of several passes; a pass that one rank cannot use, nobody does.

    Keras 3 leaves that pass out, Keras 2 the whole step.
    """
    options = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}

    def bytes_of_pass():
        weights(model)  # waits for them
        before = current().engine.stats()["bytes"]
        fit(model, kv.rank(), kv.size(), 1, steps_per_epoch=1)
        weights(model)
        return current().engine.stats()["bytes"] - before

    for outside in (True, False):
        model = new_model(keras, scaled(keras, kv, outside, **options))
        alone = alone_from(model).fit(batch_size=32)
        fit(model, kv.rank(), kv.size())
        assert_close(model, alone, 1e-6)
        assert_same_everywhere(kv, model)
        start, iterations = weights(model), int(np.asarray(model.optimizer.iterations))
        skipped(keras, kv, model, BATCH // 2)
        for now, before in zip(weights(model), start, strict=True):
            np.testing.assert_array_equal(now, before)
        if which == "tf_keras":
            fit(model, kv.rank(), kv.size(), 1, steps_per_epoch=1)
        else:
            assert int(np.asarray(model.optimizer.iterations)) == iterations
            alone.fit(epochs=1, batch_size=32)
            fit(model, kv.rank(), kv.size(), 1)
            assert_close(model, alone, 1e-6)
        between, last = bytes_of_pass(), bytes_of_pass()
        assert between <= 100 < 8 * sum(weight.size for weight in start) <= last
        assert_same_everywhere(kv, model)


def check_values(keras, kv, which):
    """Numbers, arrays, tensors and variables."""
    rank = kv.rank()
    assert kv.allreduce(rank).tolist() == 0
    assert kv.allreduce(1.0 + rank, op=kv.Sum, postscale_factor=2.0) == 6
    variable = keras.layers.Dense(1)
    variable.build((None, 2))
    variable.kernel.assign([[rank], [1.0]])
    assert kv.allgather(variable.kernel).ravel().tolist() == [0, 1, 1, 1]
    assert kv.broadcast(np.float32([rank, 2]), 1).tolist() == [1, 2]
    tensor = variable(np.ones((2, 2)))
    assert kv.reducescatter(tensor, op=kv.Sum).tolist() == [[3.0]]
    assert kv.allreduce(np.float64([1 + rank]), compression=kv.Compression.fp16) == 1.5
    with pytest.raises(InvalidArgumentError, match="no number"):
        kv.allreduce("text")
    kv.broadcast_variables([variable.kernel], 1)
    assert np.asarray(variable.kernel).ravel().tolist() == [1, 1]
    with pytest.raises(MismatchError, match="rank 1 has none"):
        kv.broadcast_variables([variable.kernel, variable.bias][: 2 - rank])


def check_errors(keras, kv, which):
    def wrap(**options):
        return kv.DistributedOptimizer(sgd(keras), **options)

    wrong = (
        ({"op": kv.Adasum}, "op is .*Average or Sum"),
        ({"gradient_predivide_factor": 2.0, "op": kv.Sum}, "gradient_predivide_factor is 2.0"),
        ({"gradient_predivide_factor": 0.0}, "gradient_predivide_factor is 0.0"),
        ({"compression": "fp16"}, "compression is 'fp16'"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step is 0"),
        ({"groups": -1}, "groups is -1"),
        ({"groups": "two"}, "groups is 'two'"),
        ({"local_sources": [3]}, "local_sources contains 3"),
    )
    for options, text in wrong:
        with pytest.raises(InvalidArgumentError, match=text):
            wrap(**options)
    with pytest.raises(InvalidArgumentError, match="'sgd': give an optimizer of Keras"):
        kv.DistributedOptimizer("sgd")
    with pytest.raises(InvalidArgumentError, match="already distributed"):
        kv.DistributedOptimizer(wrap())
    if which != "tf_keras":
        built = sgd(keras)
        built.build([])
        for optimizer in (built, keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)):
            with pytest.raises(InvalidArgumentError, match="gradient_accumulation_steps=2"):
                kv.DistributedOptimizer(optimizer, backward_passes_per_step=2)
    other = new_model(keras, "sgd").layers[-1].bias
    with pytest.raises(Exception, match="does not change"):
        fit(quick(new_model(keras, wrap(groups=[[other]])), which), epochs=1)
    model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(4 + kv.rank())])
    model.compile(wrap(), lambda true, out: (out[:, :4] - true) ** 2)
    with pytest.raises(Exception, match=r"optimizer parameter 0 differs: rank 0 has 'kernel'"):
        fit(model, epochs=1)
    if which == KERAS_2:  # a model of Keras 3, with callbacks of Keras 2
        import keras as keras_3

        for callback in (
            kv.callbacks.MetricAverageCallback(),
            kv.callbacks.BestModelCheckpoint(""),
        ):
            with pytest.raises(InvalidArgumentError, match="set TF_USE_LEGACY_KERAS=0"):
                callback.set_model(keras_3.Sequential())


@pytest.mark.parametrize("which", slow_but(("torch",), RUNNERS))
def test_callbacks_and_all_else(which, tmp_path):
    def work(rank):
        keras, kv = prepared(which)
        import kolovod.keras.optimizer as keras_optimizer

        kv.keras_optimizer = keras_optimizer
        check_broadcast(keras, kv, which)
        check_metrics(keras, kv, which)
        check_ends_on_nan(keras, kv, which)
        check_rates(keras, kv, which)
        check_momentum_correction(keras, kv, which)
        check_saving(keras, kv, which, str(tmp_path))
        check_custom_optimizer(keras, kv, which, str(tmp_path))
        check_scaled_loss(keras, kv, which)
        check_scaled_passes(keras, kv, which)
        check_values(keras, kv, which)
        check_errors(keras, kv, which)
        return True

    assert all(runs(which)(work))
