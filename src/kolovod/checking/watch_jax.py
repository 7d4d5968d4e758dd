"""Watches JAX: functions that compute gradients, and those that change parameters by them.

``jax.grad`` and ``jax.value_and_grad`` are given the parameters and the batch, and return this
rank's own gradients; ``optax.apply_updates`` and Equinox's have the parameters before and after a
step. Flax and scripts call them by these public names. A step lasts from a gradient to the one that
follows a change of parameters, so that the process ends between two programs, not within one.
"""

from __future__ import annotations

import functools
import random
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from kolovod.checking.digests import array_values, digest_of, text_digest
from kolovod.checking.facts import NotFinite, Optimizer
from kolovod.checking.places import modules_above, script_line
from kolovod.checking.recorder import Recorder
from kolovod.checking.values_of_jax import Arrays, data_given, leaves_of, names_of_leaves, shown

__all__ = ["Watcher", "imported", "watcher_of"]

_MOST_STEPS = 50  # whose gradients are compared
_OWN_UPDATE = "the script's own update"


def imported(name: str, recorder: Recorder) -> None:
    """Watch ``name``: jax, a library whose ``apply_updates`` steps, or a module of Kolovod's."""
    module: Any = sys.modules[name]
    watcher = watcher_of(recorder)
    if name == "jax":
        module.grad = watcher.watching_gradients(module.grad, 0)
        module.value_and_grad = watcher.watching_gradients(module.value_and_grad, 1)
    elif name in ("optax", "equinox"):
        module.apply_updates = watcher.watching_updates(module.apply_updates, name)
    else:
        function = "diloco" if name.endswith("diloco") else "local_sgd"
        setattr(module, function, watcher.watching_apart(getattr(module, function), function))


_watchers: dict[int, Watcher] = {}


def watcher_of(recorder: Recorder) -> Watcher:
    """Return the one watcher of a process."""
    return _watchers.setdefault(id(recorder), Watcher(recorder))


class Watcher:
    """The state that is kept between calls, which come from the script and from programs."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._facts = recorder, recorder.facts
        self._lock = threading.RLock()
        self._inside = threading.local()
        self._begun = False
        self._is_open = False  # a step was taken, and the next one has not begun
        self._has_gradients = self._has_updates = False
        self._inputs: list[str] = []
        self._own: list[str] = []
        self._weights: dict[str, np.ndarray[Any, Any]] = {}
        self._by_line: dict[str, Optimizer] = {}

    # --- functions of libraries ---

    def watching_gradients(self, differentiate: Callable[..., Any], place: int) -> Any:
        """Return a function such as ``jax.grad``, watched. ``place``: of gradients in a result."""

        @functools.wraps(differentiate)
        def differentiating(fun: Any, argnums: Any = 0, *options: Any, **named: Any) -> Any:
            gradient = differentiate(fun, argnums, *options, **named)
            is_pair = bool(place or (options[0] if options else named.get("has_aux")))

            @functools.wraps(gradient)
            def computing(*given: Any, **by_name: Any) -> Any:
                frame = sys._getframe(1)
                if self._is_part_of_another(frame):
                    return gradient(*given, **by_name)
                self._inside.one, self._inside.layers = True, 0
                try:
                    given = self._showing_given(fun, argnums, given, by_name, script_line(frame))
                    result = gradient(*given, **by_name)
                finally:
                    self._inside.one = False
                gradients = result[place] if is_pair else result
                tell = functools.partial(self._have_gradients, names_of_leaves(gradients))
                gradients = self._shown(gradients, tell)
                if not is_pair:
                    return gradients
                return (result[0], gradients) if place else (gradients, result[1])

            return computing

        return differentiating

    def _is_part_of_another(self, frame: Any) -> bool:
        """Return whether the gradient is one within another, or of ``fit``, which is watched."""
        if getattr(self._inside, "one", False) or not self._recorder.is_on:
            return True
        return any(module.partition(".")[0] == "keras" for module in modules_above(frame))

    def _showing_given(
        self, fun: Any, argnums: Any, given: tuple[Any, ...], named: dict[str, Any], line: str
    ) -> tuple[Any, ...]:
        places = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        places = tuple(place % len(given) for place in places if -len(given) <= place < len(given))
        params = [given[place] for place in places]
        names = names_of_leaves(params[0] if len(params) == 1 else params)
        others = [each for i, each in enumerate(given) if i not in places]
        data = data_given(fun, [*others, named], params)
        traced = [array for array in data if isinstance(array, jax.core.Tracer)]
        known = [np.asarray(array) for array in data if not isinstance(array, jax.core.Tracer)]

        def tell(arrays: Arrays) -> None:
            batch = [*known, *arrays[: len(traced)]]
            self._has_gradients = True
            self._begins()
            self._computes(line, names, arrays[len(traced) :], digest_of(batch, _nothing))

        new = dict(zip(places, self._shown(params, tell, traced), strict=True))
        return tuple(new.get(i, each) for i, each in enumerate(given))

    def watching_updates(self, apply: Callable[..., Any], library: str) -> Any:
        """Return ``apply_updates`` of a library, watched."""

        @functools.wraps(apply)
        def applying(params: Any, updates: Any) -> Any:
            after, frame = apply(params, updates), sys._getframe(1)
            if not self._recorder.is_on or any(map(_is_of_optimizer, modules_above(frame))):
                return after
            if not self._has_updates:  # what was taken for steps were parts of one
                self._has_updates, self._is_open, self._facts.steps = True, False, 0
            line, names = script_line(frame), names_of_leaves(params)
            others = [*leaves_of(params), *leaves_of(updates)]

            def tell(arrays: Arrays) -> None:
                count = len(names)
                parts = arrays[:count], arrays[count : len(others)], arrays[len(others) :]
                self._stepped(f"{library}.apply_updates", line, names, *parts)

            return self._shown(after, tell, others)

        return applying

    def is_in_training(self) -> bool:
        """Return whether a gradient is being computed, or traced, in this thread."""
        return self._recorder.is_on and getattr(self._inside, "one", False)

    def noting_statistics(self, name: str, known: dict[str, Any]) -> dict[str, Any]:
        """Return ``known``, a layer's running statistics by name, whose values are noted.

        ``name``: the layer's; "": it has none but its place in the function.
        """
        name = name or f"BatchNorm_{self._inside.layers}"
        self._inside.layers += 1
        names = [f"{name}.{each}" for each in known]

        def tell(arrays: Arrays) -> None:
            for each, array in zip(names, arrays, strict=True):
                seen = self._facts.running.setdefault(each, [])
                if len(seen) < _MOST_STEPS:
                    seen.append(array_values(array))

        arrays = self._shown(list(known.values()), tell)
        return dict(zip(known, arrays, strict=True))

    def watching_apart(self, make: Callable[..., Any], name: str) -> Any:
        """Return a function that makes a way in which ranks train apart, watched."""

        @functools.wraps(make)
        def making(*given: Any, **named: Any) -> Any:
            self._facts.apart = name
            return make(*given, **named)

        return making

    def _shown(self, tree: Any, tell: Callable[[Arrays], None], others: Sequence[Any] = ()) -> Any:
        def telling(arrays: Arrays) -> None:
            if not self._recorder.is_on:
                return
            with self._lock:
                try:
                    tell(arrays)
                except Exception as error:  # of arrays of an unknown kind: the script goes on
                    trouble = f"JAX's arrays cannot be watched: {type(error).__name__}: {error}"
                    self._facts.trouble = trouble

        return shown(tree, telling, others)

    # --- values ---

    def _begins(self) -> None:
        """A step begins, so the one before is over, if there was one."""
        recorder, facts = self._recorder, self._facts
        if not self._begun:
            self._begun, facts.framework = True, "jax"
            recorder.before_first_step[:] = [self._look_before]
            recorder.at_end[:] = [self._look_after]
        if self._is_open:
            self._note_step()
            recorder.step_ends()

    def _computes(self, line: str, names: list[str], params: Arrays, data: str) -> None:
        """A gradient is about to be computed."""
        facts = self._facts
        if all(each.name == _OWN_UPDATE for each in facts.optimizers):
            if not facts.optimizers:
                self._optimizer(_OWN_UPDATE, line, names)
            self._keep(names, params)
        self._is_open = not self._has_updates
        facts.inputs_line = line
        self._recorder.step_begins(line)
        if data:
            self._inputs.append(data)

    def _have_gradients(self, names: list[str], arrays: Arrays) -> None:
        self._note_not_finite("gradient", names, arrays)
        if len(self._facts.own_gradients) < _MOST_STEPS and any(map(np.any, arrays)):
            self._own.append(digest_of(list(arrays), _nothing))

    def _stepped(
        self, name: str, line: str, names: list[str], before: Arrays, updates: Arrays, after: Arrays
    ) -> None:
        facts = self._facts
        if not self._has_gradients:  # jax.vjp was called, say
            self._begins()
            self._recorder.step_begins(line)
        if any(each.name == _OWN_UPDATE for each in facts.optimizers):
            for noted in (facts.optimizers, facts.weights_before, self._weights, self._by_line):
                noted.clear()
        optimizer = self._by_line.get(line)
        if optimizer is None:
            optimizer = self._optimizer(name, line, names)
            pairs = zip(optimizer.parameters, before, strict=True)
            facts.weights_before.update({key: array_values(each) for key, each in pairs})
        own = optimizer.parameters
        self._keep(own, after)
        if len(optimizer.gradients) < _MOST_STEPS and len(updates) == len(own):
            digests = [digest_of(each, _nothing) for each in updates]
            optimizer.gradients.append(dict(zip(own, digests, strict=True)))
        optimizer.steps += 1
        self._note_not_finite("weight", own, after)
        self._is_open = True

    def _optimizer(self, name: str, line: str, names: list[str]) -> Optimizer:
        where = f" ({line})" if self._by_line else ""
        made = Optimizer(name, line, None, parameters=[f"{each}{where}" for each in names])
        made.uses = "updates"
        self._by_line[line] = made
        self._facts.optimizers.append(made)
        return made

    def _keep(self, names: list[str], arrays: Arrays) -> None:
        pairs = zip(names, arrays, strict=True)
        self._weights.update({name: np.array(array) for name, array in pairs})

    def _note_not_finite(self, what: str, names: list[str], arrays: Arrays) -> None:
        if any(each.what == what for each in self._facts.not_finite):
            return
        for name, array in zip(names, arrays, strict=True):
            if array_values(array).not_finite:
                step = self._facts.steps + 1
                self._facts.not_finite.append(NotFinite(what, name, step))
                return

    def _note_step(self) -> None:
        facts = self._facts
        facts.inputs.append(text_digest("".join(self._inputs)) if self._inputs else "")
        facts.own_gradients.append(text_digest("".join(self._own)) if self._own else "")
        self._inputs, self._own, self._is_open = [], [], False
        for each in facts.optimizers:
            if each.name == _OWN_UPDATE:
                each.steps += 1
        loaders: Any = sys.modules.get("kolovod.checking.watch_loaders")
        if loaders is not None:
            loaders.step_ends()

    def _look_before(self) -> None:
        facts = self._facts
        facts.weights_before = {name: array_values(each) for name, each in self._weights.items()}
        facts.seeds = {
            "numpy": digest_of(list(np.random.get_state(legacy=True)), _nothing),
            "random": text_digest(repr(random.getstate())),
        }

    def _look_after(self) -> None:
        facts = self._facts
        if self._is_open:  # the script has ended with this step
            self._note_step()
            facts.steps += 1
        facts.weights_after = {name: array_values(each) for name, each in self._weights.items()}
        facts.trainable = list(facts.weights_after)


def _is_of_optimizer(module: str) -> bool:
    """Return whether a module applies updates as a part of what computes them."""
    return module.startswith(("kolovod.jax.", "optax."))


def _nothing(value: Any) -> Any:
    return None
