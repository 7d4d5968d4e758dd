"""Watches ``model.fit`` of Keras 3 and Keras 2, whatever they compute with."""

from __future__ import annotations

import inspect
import random
import sys
from typing import Any

import numpy as np

from kolovod.checking.digests import array_values, digest_of, text_digest
from kolovod.checking.facts import Loader, NotFinite, Optimizer, Values
from kolovod.checking.places import script_line
from kolovod.checking.recorder import Recorder

__all__ = ["imported"]

_APART = ("DiLoCo", "LocalSGD")
_AVERAGES = "MetricAverageCallback"
_STATISTICS = ("moving_mean", "moving_variance")


def imported(name: str, recorder: Recorder) -> None:
    """Watch ``name``, a Keras that has been imported."""
    keras: Any = sys.modules[name]
    fit = keras.Model.fit

    class Watch(keras.callbacks.Callback):  # type: ignore[misc]
        """Comes last, so that it sees what the script's own callbacks have done."""

        def __init__(self, training: _Training) -> None:
            super().__init__()
            self.training = training

        def on_train_begin(self, logs: Any = None) -> None:
            self.training.begins()

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.training.step_begins()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.training.step_ends()

    signature = inspect.signature(fit)

    def fitting(*given: Any, **by_name: Any) -> Any:
        if not recorder.is_on:
            return fit(*given, **by_name)
        named = dict(signature.bind(*given, **by_name).arguments)
        model, named = next(iter(named.values())), dict([*named.items()][1:])
        named.update(named.pop("kwargs", {}))
        line = script_line(sys._getframe(1))
        training = _Training(model, recorder, line, named.get("callbacks"))
        training.note_data(named.get("x"), named)
        if recorder.most_batches < sys.maxsize:
            training.shorten(named, recorder.most_batches)
        callbacks = named.get("callbacks") or []
        if isinstance(callbacks, list | tuple):
            named["callbacks"] = [*callbacks, Watch(training)]
        else:  # a CallbackList
            callbacks.append(Watch(training))
        return fit(model, **named)

    keras.Model.fit = fitting


class _Training:
    """One call of ``fit``."""

    def __init__(self, model: Any, recorder: Recorder, line: str, callbacks: Any) -> None:
        self._model, self._recorder, self._line = model, recorder, line
        self._facts = recorder.facts
        self._optimizer: Optimizer | None = None
        self._loader: Loader | None = None
        kinds = [type(each).__name__ for each in callbacks or () if not isinstance(each, str)]
        apart = [kind for kind in kinds if kind in _APART]
        if apart:
            self._facts.apart = apart[0]
        if _AVERAGES in kinds:
            self._facts.averages = _AVERAGES

    def note_data(self, x: Any, named: dict[str, Any]) -> None:
        """Note the data that ``fit`` is given: arrays, or an object that has batches."""
        loader = Loader(self._line, "")
        if hasattr(x, "element_spec") and hasattr(x, "take"):
            loader.kind, found = "tf.data.Dataset", next(iter(x.take(1)), None)
            loader.is_sharded = True  # as far as can be seen: by shard(), before it was batched
            length = int(x.cardinality())
            loader.length = length if length >= 0 else None
        elif hasattr(x, "shape") or isinstance(x, list | tuple | dict):
            loader.kind, found, loader.is_whole = "array", x, True
            first = x
            while isinstance(first, list | tuple | dict) and first:
                first = next(iter(first.values() if isinstance(first, dict) else first))
            loader.samples = len(first)
            loader.is_sharded = named.get("steps_per_epoch") is not None
            loader.length = named.get("steps_per_epoch")
            if loader.length is None:
                loader.length = -(-loader.samples // (named.get("batch_size") or 32))
        elif hasattr(x, "__getitem__") and hasattr(x, "__len__"):
            loader.kind, found, loader.length = type(x).__name__, x[0], len(x)
        else:  # a generator, of which a batch can be had only once; or a DataLoader
            return
        loader.batches.append([digest_of(found, _array)])
        self._loader = loader
        self._facts.loaders.append(loader)

    def shorten(self, named: dict[str, Any], most: int) -> None:
        """Let an epoch have ``most`` batches at most."""
        if named.get("validation_steps") is None or named["validation_steps"] > most:
            named["validation_steps"] = most
        loader, size = self._loader, named.get("batch_size") or 32
        if loader is None or loader.kind != "array":
            if named.get("steps_per_epoch") is None and hasattr(named.get("x"), "take"):
                named["x"] = named["x"].take(most)  # steps_per_epoch would go on where it was
            elif named.get("steps_per_epoch") is None or named["steps_per_epoch"] > most:
                named["steps_per_epoch"] = most
            return
        for name in ("x", "y", "sample_weight"):
            if named.get(name) is not None:
                named[name] = _first(named[name], most * size)
        named.pop("steps_per_epoch", None)

    def begins(self) -> None:
        """The variables are there, unless the first step makes them."""
        self._facts.framework = "keras"
        if self._facts.steps == 0:
            self._recorder.before_first_step[:] = []
            self._recorder.at_end[:] = [self._look_after]
            if self._model.built:
                self._look_before()
        optimizer = self._model.optimizer
        inner = getattr(optimizer, "inner_optimizer", None)
        kinds = [*type(optimizer).__mro__, *type(inner).__mro__]
        wrapped = any(f"{k.__module__}.{k.__name__}" == _DISTRIBUTED for k in kinds)
        self._optimizer = Optimizer(type(optimizer).__name__, self._line, wrapped)
        self._facts.optimizers.append(self._optimizer)

    def step_begins(self) -> None:
        """A batch is about to be trained on."""
        assert self._optimizer is not None
        self._have_values()
        self._recorder.step_begins(self._line)
        rate = getattr(self._model.optimizer, "learning_rate", 0.0)
        self._optimizer.rates.append([float(_array(rate) if hasattr(rate, "shape") else rate)])
        self._optimizer.steps = len(self._optimizer.rates)

    def step_ends(self) -> None:
        """A batch was trained on."""
        self._have_values()
        if not self._facts.weights_before:
            self._look_before()
        self._note_not_finite()
        if self._loader is not None:
            self._loader.trains += 1
        self._recorder.step_ends()

    def _note_not_finite(self) -> None:
        if self._facts.not_finite:
            return
        for name, values in _values(self._model.trainable_variables).items():
            if values.not_finite:
                step = self._facts.steps + 1
                self._facts.not_finite.append(NotFinite("weight", name, step))
                return

    def _have_values(self) -> None:
        """Give variables their values: on JAX they have them between epochs only, or if asked."""
        synchronize = getattr(self._model, "jax_state_sync", None)
        if synchronize is not None:
            synchronize()

    def _look_before(self) -> None:
        facts = self._facts
        facts.weights_before = _values(self._model.trainable_variables)
        facts.trainable = list(facts.weights_before)
        facts.seeds = {
            "numpy": digest_of(list(np.random.get_state(legacy=True)), _array),
            "random": text_digest(repr(random.getstate())),
        }
        kinds = {type(layer).__name__ for layer in self._model._flatten_layers()}
        facts.draws = sorted(kind for kind in kinds if "Dropout" in kind or "Random" in kind)

    def _look_after(self) -> None:
        self._facts.weights_after = _values(self._model.trainable_variables)
        others = _values(self._model.non_trainable_variables)
        self._facts.buffers_after = {
            name: value for name, value in others.items() if any(s in name for s in _STATISTICS)
        }
        if self._optimizer is not None:
            self._optimizer.parameters = list(self._facts.weights_after)


def _first(value: Any, count: int) -> Any:
    """Return the first samples of arrays, one or several."""
    if isinstance(value, dict):
        return {key: _first(each, count) for key, each in value.items()}
    if isinstance(value, list | tuple) and value and hasattr(value[0], "shape"):
        return type(value)(_first(each, count) for each in value)
    return value[:count]


_DISTRIBUTED = "kolovod.keras.optimizer.Distributed"


def _values(variables: Any) -> dict[str, Values]:
    found = {}
    for number, variable in enumerate(variables):
        name = getattr(variable, "path", None) or variable.name
        name = name if name not in found else f"{name} ({number})"
        array = _array(variable)
        found[name] = Values("") if array is None else array_values(array)
    return found


def _array(value: Any) -> Any:
    """Return the NumPy array of a variable or a tensor, of whatever framework."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    if not hasattr(value, "shape") and not hasattr(value, "numpy"):
        return None
    if hasattr(value, "value") and hasattr(value.value, "detach"):  # a variable on PyTorch
        value = value.value.detach().cpu()
    try:
        return np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    except Exception:  # of a kind that has no array: strings, ragged tensors
        return None
