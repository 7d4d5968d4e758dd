"""Watches PyTorch's own local SGD: the state of DDP's hook for it, and what averages parameters."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from kolovod.checking.places import script_line
from kolovod.checking.recorder import Recorder

__all__ = ["imported"]


def imported(name: str, recorder: Recorder) -> None:
    """Watch ``name``: the module of ``PostLocalSGDState``, or that of ``ModelAverager``."""
    module: Any = sys.modules[name]
    facts = recorder.facts

    def note_state(state: Any) -> None:
        facts.local_from, facts.local_line = int(state.start_localSGD_iter), script_line()

    def note_averager(averager: Any) -> None:
        facts.apart = f"PyTorch's {type(averager).__name__}"

    if name.endswith(".averagers"):
        _watch(module.ModelAverager, note_averager)
    else:
        _watch(module.PostLocalSGDState, note_state)


def _watch(kind: Any, note: Callable[[Any], None]) -> None:
    make = kind.__init__

    @functools.wraps(make)
    def making(self: Any, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        note(self)

    kind.__init__ = making
