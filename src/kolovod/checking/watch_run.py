"""Watches worlds, and the operations that the script itself asks for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from kolovod.checking.facts import note_operation
from kolovod.checking.places import modules_above, script_line
from kolovod.checking.recorder import Recorder
from kolovod.core import submission, world
from kolovod.core.verbs import ALLTOALL, BARRIER, BROADCAST, JOIN
from kolovod.core.world import World, when_entered

__all__ = ["imported"]

_VERBS_ONLY = ("core", "surface", "numpy", "metrics")
_LAST_PARTS = (
    "verbs",
    "autograd",
    "frontend",
    "mpi_ops",
    "reductions",
    "moves",
    "handles",
    "callbacks",
)


def imported(name: str, recorder: Recorder) -> None:
    """``kolovod.core.submission`` has been imported: no front end has made its verbs yet."""

    def entered(formed: World) -> None:
        facts = recorder.facts
        facts.world_rank, facts.world_size = formed.rank, formed.size
        facts.init_line = facts.init_line or script_line(sys._getframe(1))
        recorder.save()

    def leaving() -> World | None:
        if recorder.is_on and world.is_initialized():
            _note_reductions(recorder)
        return take()

    when_entered(entered)
    take = world.take
    world.take = leaving
    of_class: Any = submission.Submitter
    of_class.run = _noting(of_class.run, recorder)
    of_class.start = _noting(of_class.start, recorder)
    of_class.takes_all = True


def _note_reductions(recorder: Recorder) -> None:
    found = recorder.facts.reductions = {}
    for record in world.current().engine.last_operations():
        if record["verb"] in ("allreduce", "reducescatter") and record["state"] == "done":
            found[record["name"]] = found.get(record["name"], 0) + 1


def _noting(method: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    def noting(self: Any, request: Any, *arguments: Any, **named: Any) -> Any:
        if recorder.is_on:
            _note(request, sys._getframe(1), recorder)
        return method(self, request, *arguments, **named)

    return noting


def _note(request: submission.Request, frame: FrameType, recorder: Recorder) -> None:
    facts = recorder.facts
    if request.verb is JOIN:
        facts.joins = True
    modules = modules_above(frame)
    if request.verb is BROADCAST and not all(map(_is_verb, modules)):
        facts.broadcasts = True
    if request.verb in (BARRIER, JOIN, BROADCAST, ALLTOALL) or not all(map(_is_verb, modules)):
        return
    note_operation(facts, request.verb.name, request.name or "", script_line(frame))


def _is_verb(module: str) -> bool:
    """Return whether a module is on the way from a script's own call to the engine.

    The modules of an optimizer, say, are not.
    """
    root, _, rest = module.partition(".")
    if root not in ("kolovod", "horovod") or rest.startswith("checking"):
        return True
    parts = rest.split(".")
    return parts[0] in _VERBS_ONLY or parts[-1] in _LAST_PARTS or rest == "elastic.steps"
