"""Payloads of steps of an elastic job, which may be sent twice but change a state only once."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from kolovod.core.transaction import Transaction, forgets, transaction
from kolovod.gradients.compression.compressor import Compressor, Payload


class _Made(NamedTuple):
    """The payload that was sent for a gradient."""

    source: Callable[[], Any]
    version: int | None
    """The version of a PyTorch tensor, which may be overwritten by another gradient."""
    payload: Payload


class _Step:
    """The payloads that a compressor has made in the step that is under way."""

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = weakref.ref(compressor)  # whose entry of a dict this is
        self._number = -1
        self._committed = -1
        self._made: dict[str, _Made] = {}
        self._before: dict[str, Any] | None = None

    def payload(
        self, ongoing: Transaction, key: str, tensor: Any, source: Any, compressor: Compressor
    ) -> Payload:
        if ongoing.recomputes and ongoing.committed != self._committed:
            self._before, self._committed = (
                copy.deepcopy(compressor.state_dict()),
                ongoing.committed,
            )
        if ongoing.passed != self._number:
            self._number = ongoing.passed
            self._made.clear()
        made, version = self._made.get(key), getattr(source, "_version", None)
        if made is not None and made.source() is source and made.version == version:
            return made.payload
        payload = compressor.compress(key, tensor)
        self._made[key] = _Made(_reference(source), version, payload)
        return payload

    def forget_step(self) -> None:
        """Forget what was made since the last commit: it is computed again, from the state then."""
        self._made.clear()
        compressor = self._compressor()
        if self._before is not None and compressor is not None:
            compressor.load_state_dict(copy.deepcopy(self._before))


_steps: weakref.WeakKeyDictionary[Compressor, _Step] = weakref.WeakKeyDictionary()


def payload_of(compressor: Compressor, key: str, tensor: Any, source: Any) -> Payload:
    """``compressor.compress(key, tensor)``; what that returned, where a step is repeated.

    ``source``: the gradient that ``tensor`` was made of, by which a repetition is known. Who
    reduces the payload's tensors leaves them as they are in an elastic job.
    """
    ongoing = transaction()
    if not ongoing.is_elastic or not compressor.keeps_state:
        return compressor.compress(key, tensor)
    step = _steps.get(compressor)
    if step is None:
        step = _steps[compressor] = _Step(compressor)
        forgets(step)
    return step.payload(ongoing, key, tensor, source, compressor)


def _reference(source: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(source)
    except TypeError:  # MXNet's arrays
        return lambda: source
