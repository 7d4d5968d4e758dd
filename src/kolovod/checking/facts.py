"""The facts that one rank's process has noted, as they go to the launcher: a file of JSON."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "Facts",
    "File",
    "Loader",
    "NotFinite",
    "Operation",
    "Optimizer",
    "Values",
    "load_all",
    "note_operation",
]


_MOST_OPERATIONS = 1000


@dataclass
class Values:
    """A tensor, as far as ranks are compared by it."""

    digest: str
    sample: list[float] = field(default_factory=list)
    """Evenly spaced over the tensor; all of a small one."""
    is_whole: bool = True
    """The digest is of all values, the sample has all of them."""
    not_finite: int = 0
    """The number of values that are NaN or infinite."""


@dataclass
class Optimizer:
    """An optimizer whose steps were seen."""

    name: str
    """Its class."""
    line: str
    """The script's line where it stepped first."""
    wrapped: bool | None
    """It steps with the gradients of all ranks; None: their values tell."""
    steps: int = 0
    rates: list[list[float]] = field(default_factory=list)
    """Learning rates of its groups, in each step."""
    parameters: list[str] = field(default_factory=list)
    gradients: list[dict[str, str]] = field(default_factory=list)
    """The digest of each parameter's gradient, in each step, as the optimizer has used it."""
    uses: str = "gradients"
    """The kind of these: "updates" where an optimizer has made that of gradients before."""


@dataclass
class Loader:
    """A source of batches for training."""

    line: str
    """The script's line where it was iterated first."""
    kind: str
    """ "DataLoader", or what else it is."""
    length: int | None = None
    """Batches of an epoch; None: unknown."""
    samples: int | None = None
    """The number of samples in its data set."""
    sampler: str = ""
    is_sharded: bool = False
    """Its sampler gives each rank a part of its own, or may do so."""
    is_whole: bool = False
    """It is the data set itself: the only digest is of all of it."""
    shuffles_by_epoch: bool = False
    """Its sampler makes another order when ``set_epoch`` is called."""
    trains: int = 0
    """Steps for which it gave a batch."""
    orders: list[list[str]] = field(default_factory=list)
    """For each epoch, the digest of the indices of each batch; "" where they are not known."""
    batches: list[list[str]] = field(default_factory=list)
    """For each epoch, the digest of each batch's content; "" where there is nothing to compare."""
    epochs_set: list[int] = field(default_factory=list)
    """The epochs that ``set_epoch`` was called with."""


@dataclass
class Operation:
    """A collective operation that the script itself has asked for."""

    verb: str
    name: str
    line: str
    count: int = 1


@dataclass
class NotFinite:
    """The first values of a kind that were NaN or infinite on this rank."""

    what: str
    """ "gradient", this rank's own; or "weight"."""
    name: str
    """The first parameter."""
    step: int
    """From 1."""


@dataclass
class File:
    """A file that was opened to be written."""

    path: str
    line: str
    appends: bool = False
    """Only added to: a log."""


@dataclass
class Facts:
    """The facts of one process. Lists and dictionaries are in the order of the events."""

    rank: int = 0
    pid: int = 0
    began: float = 0.0
    """``time.time()``."""
    frameworks: list[str] = field(default_factory=list)
    framework: str = ""
    """The framework whose steps were seen; for PyTorch also "ddp", or the library over it, such as
    "lightning". Before any step was seen that of Kolovod's front end."""
    world_rank: int | None = None
    world_size: int | None = None
    """None: ``init`` was not called, or has not returned."""
    init_line: str = ""
    other_world: str = ""
    """Another library that combines gradients: "torch.distributed (gloo)"."""
    apart: str = ""
    """The method by which ranks train apart on purpose: "DiLoCo"."""
    local_from: int | None = None
    """The step from which on DDP's hook for post-local SGD averages gradients within a group only;
    None: there is no such hook."""
    local_line: str = ""
    """The script's line where its state was made."""
    averages: str = ""
    """The callback that averages the numbers that are shown: "MetricAverageCallback"."""
    sharded: bool = False
    """Ranks have different parts of the parameters."""
    steps: int = 0
    step_line: str = ""
    """The script's line where the last step was."""
    optimizers: list[Optimizer] = field(default_factory=list)
    loaders: list[Loader] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    """The digest of what the model was given, for each step; "" where that is not known."""
    inputs_line: str = ""
    own_gradients: list[str] = field(default_factory=list)
    """The digest of this rank's gradients before they were combined, for each step; "" where they
    are not known, or are zeros."""
    seeds: dict[str, str] = field(default_factory=dict)
    """The digest of the state of each generator of random numbers, before the first step."""
    draws: list[str] = field(default_factory=list)
    """Layers that use random numbers in training."""
    weights_before: dict[str, Values] = field(default_factory=dict)
    weights_after: dict[str, Values] = field(default_factory=dict)
    buffers_after: dict[str, Values] = field(default_factory=dict)
    """Running statistics of normalization layers."""
    running: dict[str, list[Values]] = field(default_factory=dict)
    """The same in JAX, as each use of a layer in training has found them."""
    trainable: list[str] = field(default_factory=list)
    """The names of the weights that want a gradient."""
    not_finite: list[NotFinite] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    """The operations of the script, not of optimizers and broadcasts."""
    reductions: dict[str, int] = field(default_factory=dict)
    """The number of times that the engine has carried out each one, by name, also inside programs
    of JAX and of TensorFlow; among the last thousand operations or so."""
    joins: bool = False
    broadcasts: bool = False
    """A broadcast of parameters took place."""
    files: list[File] = field(default_factory=list)
    trouble: str = ""
    """The things that could not be watched, and why."""
    ended: str = ""
    """ "steps": after as many as were asked for; "script": at its end; "error"; "": not by itself.
    """
    error: str = ""
    error_kind: str = ""
    """The class of the exception, with its module."""
    error_line: str = ""
    error_rank: int | None = None
    """The rank that an error of kolovod's says is the culprit."""

    def save(self, folder: str) -> None:
        """Write the facts to rank.N-PID.json, at once or not at all."""
        path = os.path.join(folder, f"rank.{self.rank}-{self.pid}.json")
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)
        os.replace(f"{path}.new", path)


def note_operation(facts: Facts, verb: str, name: str, line: str) -> None:
    """Note that the script asks for an operation, at a line of it."""
    for operation in facts.operations:
        if (operation.verb, operation.line) == (verb, line):
            operation.count += 1
            return
    if len(facts.operations) < _MOST_OPERATIONS:
        facts.operations.append(Operation(verb, name, line))


def load_all(folder: Path, size: int) -> list[Facts | None]:
    """Return each rank's facts of the process that trains; None if none of its was watched."""
    found: list[Facts | None] = [None] * size
    for path in sorted(folder.glob("rank.*.json")):
        facts = _load(json.loads(path.read_text(encoding="utf-8")))
        if 0 <= facts.rank < size:
            other = found[facts.rank]
            if other is None or _weight(facts) > _weight(other):
                found[facts.rank] = facts
    return found


def _weight(facts: Facts) -> tuple[int, bool, bool, float]:
    in_world = facts.world_size is not None
    return facts.steps, in_world, bool(facts.frameworks), -facts.began


def _load(raw: dict[str, Any]) -> Facts:
    facts = Facts(**raw)
    facts.optimizers = [Optimizer(**each) for each in raw["optimizers"]]
    facts.loaders = [Loader(**each) for each in raw["loaders"]]
    facts.operations = [Operation(**each) for each in raw["operations"]]
    facts.not_finite = [NotFinite(**each) for each in raw["not_finite"]]
    facts.files = [File(**each) for each in raw["files"]]
    for name in ("weights_before", "weights_after", "buffers_after"):
        setattr(facts, name, {key: Values(**each) for key, each in raw[name].items()})
    facts.running = {
        key: [Values(**each) for each in of_uses] for key, of_uses in raw["running"].items()
    }
    return facts
