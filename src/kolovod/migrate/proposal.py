"""The proposal of ``kolovod init`` for a script: its framework, and the changes to make."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from kolovod.errors import CommandArgumentError
from kolovod.migrate import (
    ddp,
    horovod_script,
    jax_script,
    keras_script,
    tensorflow_script,
    torch_script,
)
from kolovod.migrate.edits import Edits, Remark
from kolovod.migrate.script import Script, attribute_call

__all__ = ["Outcome", "Proposal", "propose"]

_TRAINERS = {
    "accelerate": "Accelerate", "deepspeed": "DeepSpeed", "ignite": "Ignite",
    "lightning": "Lightning", "pytorch_lightning": "Lightning", "ray": "Ray",
    "transformers": "the Trainer of transformers",
}  # fmt: skip


class Outcome(enum.Enum):
    """The kind of a proposal: whether a script can be changed."""

    CHANGES = "changes"
    NOTHING_LEFT = "nothing left"
    """It is distributed."""
    UNKNOWN = "unknown"
    """It is not, and nothing in it can be changed safely."""


@dataclass(frozen=True)
class Proposal:
    """The proposal for one script."""

    what: str
    """The framework, and from what it comes."""
    outcome: Outcome
    summary: str
    """A sentence for the user."""
    new: bytes
    """The changed script; the same bytes if nothing changes."""
    reasons: list[Remark] = field(default_factory=list)
    needs: list[Remark] = field(default_factory=list)
    looks: list[Remark] = field(default_factory=list)
    starts_itself: bool = False
    """True: the script starts its ranks."""


def propose(content: bytes, path: str, *, rename: bool = False) -> Proposal:
    """Propose the changes that make a script distributed; nothing is run.

    ``content``: the file's bytes; ``path``: for messages. ``rename``: replace Horovod's imports.
    Raises InvalidArgumentError if the script is no Python.
    """
    script = Script(content, path)
    edits = Edits(script)
    if script.imports("horovod"):
        return _from_horovod(edits, content, rename)
    if rename:
        raise CommandArgumentError(f"--rename: {path} imports nothing of horovod")
    if found := script.imports("kolovod"):
        line = script.line(found[0][0])
        return Proposal(
            "Kolovod", Outcome.NOTHING_LEFT,
            f"it imports {found[0][1]} in line {line}: nothing is left to do "
            "that this command can see (`kolovod check` runs the script, and sees more)", content,
        )  # fmt: skip
    if ddp.is_distributed(script):
        return _from_ddp(edits, content)
    return _from_one_process(edits, content)


def _from_horovod(edits: Edits, content: bytes, rename: bool) -> Proposal:
    module = edits.script.imports("horovod")[0][1]
    if rename:
        horovod_script.rename(edits)
    if not edits:
        advice = "" if rename else " (--rename: with Kolovod's names)"
        return Proposal(
            f"{module}, from Horovod", Outcome.NOTHING_LEFT,
            "Kolovod has Horovod's modules, and the script runs with them as it is: nothing is "
            f"left to do{advice}. docs/from-horovod.md says what newer frameworks lack", content,
            looks=sorted(edits.looks),
        )  # fmt: skip
    return _made(edits, f"{module}, from Horovod")


def _from_ddp(edits: Edits, content: bytes) -> Proposal:
    what = "PyTorch, from DistributedDataParallel"
    script = edits.script
    alone = ddp.starts_its_ranks(script)
    if ddp.move(edits):
        return Proposal(
            what, Outcome.NOTHING_LEFT, "its process groups are Kolovod's: nothing is left to do",
            content, starts_itself=alone,
        )  # fmt: skip
    return _made(edits, what, starts_itself=alone)


def _from_one_process(edits: Edits, content: bytes) -> Proposal:
    script = edits.script
    for node, name in script.imports(*_TRAINERS):
        root = name.split(".")[0]
        if root not in ("ray", "transformers") or "Trainer" in script.identifiers:
            edits.need(
                node,
                f"{_TRAINERS[root]} trains, and starts processes in its own way: see "
                "docs/integrations.md",
            )
            return _made(edits, _TRAINERS[root])
    for call in script.calls_of("tensorflow.distribute."):
        edits.need(
            call,
            "tf.distribute makes the script distributed in its own way: take it out "
            "first (strategy, scope)",
        )
        return _made(edits, "TensorFlow, from tf.distribute")
    what, distribute = _front_end(script)
    if distribute is None:
        return Proposal(
            what, Outcome.UNKNOWN,
            "PyTorch, Keras, TensorFlow or JAX (with optax) is not imported here. docs/start has a "
            "script for each, and for NumPy and MXNet", content,
        )  # fmt: skip
    distribute(edits)
    return _made(edits, f"{what}, from one process")


def _front_end(script: Script) -> tuple[str, Callable[[Edits], None] | None]:
    """Choose the framework by what trains the model, which need not be all that is imported."""
    tapes = script.calls_of(tensorflow_script.TAPE)
    in_fit = keras_script.fits(script) and all(map(script.class_of, tapes))
    if tapes and not in_fit:  # else a model's train_step, which fit calls
        return "TensorFlow", tensorflow_script.distribute
    if script.imports(*keras_script.ROOTS) and keras_script.fits(script):
        return "Keras", keras_script.distribute
    if script.imports("optax") or (script.imports("jax") and not script.imports("torch")):
        return "JAX", jax_script.distribute
    backward = any(attribute_call(call, "backward") is not None for call in script.calls)
    if script.imports("torch") and (backward or not script.imports(*keras_script.ROOTS)):
        return "PyTorch", torch_script.distribute
    if script.imports(*keras_script.ROOTS):
        return "Keras", keras_script.distribute
    return "no framework", None


def _made(edits: Edits, what: str, *, starts_itself: bool = False) -> Proposal:
    new = edits.applied().bytes
    if not edits:
        summary = "nothing that could be changed safely was found"
        outcome = Outcome.UNKNOWN
    else:
        summary, outcome = "these changes make it distributed", Outcome.CHANGES
        if edits.needs:
            summary = "these changes, and what must be done by hand, make it distributed"
    return Proposal(
        what, outcome, summary, new, sorted(edits.reasons), sorted(edits.needs),
        sorted(edits.looks),
        starts_itself=starts_itself,
    )  # fmt: skip
