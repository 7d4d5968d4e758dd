"""Watches TensorFlow's own training loops: the gradients that a distributed tape combines.

They are shown to Python before they are combined, within a ``tf.function``, too. A step lasts from
there to where the same variables' gradients come again, so the process ends between two steps.
"""

from __future__ import annotations

import functools
import random
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kolovod.checking.digests import array_values, digest_of, text_digest
from kolovod.checking.facts import NotFinite, Optimizer, Values
from kolovod.checking.places import script_line
from kolovod.checking.recorder import Recorder

__all__ = ["imported"]

_MOST_STEPS = 50  # whose gradients are compared


def imported(name: str, recorder: Recorder) -> None:
    """Watch ``name``: the module of the class by which tapes and optimizers combine gradients."""
    kind: Any = sys.modules[name].GradientExchange
    kind.__call__ = _Watcher(recorder).watching(kind.__call__)


class _Watcher:
    """The state that is kept between calls, which come from the script and from graphs."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._facts = recorder, recorder.facts
        self._lock = threading.RLock()
        self._optimizers: dict[tuple[str, ...], Optimizer] = {}
        self._variables: dict[str, Any] = {}
        self._own: list[str] = []
        self._is_open = False

    def watching(self, combine: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``combine(exchange, gradients, sources)``, watched."""

        @functools.wraps(combine)
        def combining(exchange: Any, gradients: Sequence[Any], sources: Sequence[Any]) -> Any:
            is_seen = self._recorder.is_on and exchange.spec.process_set is None
            if not is_seen or not tf.compat.v1.executing_eagerly_outside_functions():  # a session
                return combine(exchange, gradients, sources)
            local = {id(each) for each in exchange._all_local()}
            variables = {
                _name_of(each, i): each
                for i, each in enumerate(sources)
                if hasattr(each, "numpy") and id(each) not in local
            }
            line = script_line(sys._getframe(1))
            shown = [
                (_name_of(source, i), tensor)
                for i, (source, each) in enumerate(zip(sources, gradients, strict=True))
                if each is not None
                for tensor in tf.nest.flatten(each, expand_composites=True)
            ]

            def tell(*tensors: Any) -> None:
                arrays = [tensor.numpy() for tensor in tensors]
                names = [name for name, _ in shown]
                self._tell(line, variables, list(zip(names, arrays, strict=True)))

            flat = [tensor for _, tensor in shown]

            if tf.executing_eagerly():
                tell(*flat)
                return combine(exchange, gradients, sources)
            # The process may end in ``tell``, so no operation of this step may run before it, not
            # even one that the gradients are not needed for: the others would wait for the rest.
            with tf.control_dependencies([tf.py_function(tell, flat, [])]):
                passed = tf.nest.map_structure(tf.identity, list(gradients), expand_composites=True)
                return combine(exchange, passed, sources)

        return combining

    def _tell(self, line: str, variables: dict[str, Any], named: list[tuple[str, Any]]) -> None:
        """Gradients have values, and are about to be combined."""
        with self._lock:
            facts, key = self._facts, tuple(variables)
            known = self._optimizers.values()
            if not self._recorder.is_on or any(each not in known for each in facts.optimizers):
                return  # within ``fit``, which is watched
            if not self._optimizers:
                self._begin()
            if self._is_open and key == next(iter(self._optimizers)):
                self._note_step()
                self._recorder.step_ends()
            if key not in self._optimizers:
                made = Optimizer("DistributedGradientTape", line, True, parameters=list(variables))
                self._optimizers[key] = made
                facts.optimizers.append(made)
                self._variables.update(variables)
                facts.weights_before.update(_values(variables))
            self._is_open, facts.inputs_line = True, line
            self._optimizers[key].steps += 1
            self._recorder.step_begins(line)
            self._note_not_finite(named)
            arrays = [array for _, array in named]
            if len(facts.own_gradients) < _MOST_STEPS and any(map(np.any, arrays)):
                self._own.append(digest_of(arrays, _nothing))

    def _begin(self) -> None:
        self._facts.framework = "tensorflow"
        self._recorder.before_first_step[:] = []
        self._recorder.at_end[:] = [self._look_after]
        self._facts.seeds = {
            "numpy": digest_of(list(np.random.get_state(legacy=True)), _nothing),
            "random": text_digest(repr(random.getstate())),
        }

    def _note_step(self) -> None:
        self._facts.own_gradients.append(text_digest("".join(self._own)) if self._own else "")
        self._own, self._is_open = [], False

    def _note_not_finite(self, named: list[tuple[str, Any]]) -> None:
        if self._facts.not_finite:
            return
        for name, array in named:
            if array_values(array).not_finite:
                self._facts.not_finite.append(NotFinite("gradient", name, self._facts.steps + 1))
                return

    def _look_after(self) -> None:
        facts = self._facts
        if self._is_open:  # the script has ended with this step
            self._note_step()
            facts.steps += 1
        facts.weights_after = _values(self._variables)
        facts.trainable = list(facts.weights_after)


def _name_of(source: Any, place: int) -> str:
    """Return a name that no other source of one tape has."""
    return f"{getattr(source, 'path', None) or getattr(source, 'name', 'variable')} ({place})"


def _values(variables: dict[str, Any]) -> dict[str, Values]:
    return {name: array_values(each.numpy()) for name, each in variables.items()}


def _nothing(value: Any) -> Any:
    return None
