"""A rank of bench/elastic.py: trains, and writes what it has done and when into a file of its own.

``elastic_rank.py SYSTEM FOLDER``; SYSTEM is kolovod, kolovod-numpy, torchft or torchrun. Each is
used as its own documentation shows. Needs of Kolovod only what the first two import, so that it
runs in torchft's environment, too.

A line of the file is a list: what, nanoseconds (CLOCK_MONOTONIC, the same for all processes), and
more. A step computes for 5 ms, which are slept, and has gradients that follow from the step and the
process, so that the steps can be replayed.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

COMPUTE_S = 0.005
PARAMETERS, ELEMENTS = 10, 10_000
CHECKPOINT_EVERY = 10
"""Steps between two checkpoints of torchrun's job, which goes on from the last one."""

Say = Callable[..., None]


class Notes:
    """What a process notes in its file, and the step at which all stop."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._fd = os.open(
            folder / f"{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        )
        self._stop = str(folder / "stop")

    def say(self, what: str, *more: Any) -> None:
        """Append a line, whole, whoever kills this process."""
        os.write(self._fd, (json.dumps([what, time.monotonic_ns(), *more]) + "\n").encode())

    def stops(self, step: int) -> bool:
        """Return whether ``step`` is not to be made, nor later ones; all ranks are told in time."""
        try:
            with open(self._stop) as file:
                return step >= int(file.read() or 1 << 60)
        except FileNotFoundError:
            return False


def factor(step: int, member: int) -> float:
    """Return what the gradients of a process in a step are made of."""
    return math.sin(7 * step + member)


class Model:
    """Ten tensors, with momentum; the gradient of each is known."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        torch.set_num_threads(1)
        torch.manual_seed(1)
        values = [torch.nn.Parameter(torch.randn(ELEMENTS)) for _ in range(PARAMETERS)]
        self.bases = [torch.randn(ELEMENTS) for _ in range(PARAMETERS)]
        self.module = _module(torch, values)
        self.optimizer: Any = torch.optim.SGD(self.module.parameters(), lr=0.01, momentum=0.9)

    def backward(self, step: int, member: int, module: Any = None) -> None:
        """Make the gradients of one process. ``module``: what wraps ours."""
        loss = (module or self.module)(self.bases, factor(step, member))
        loss.backward()

    def compute(self, step: int, member: int) -> dict[str, Any]:
        """Return what ``backward`` computes, in a tenth of the time, for kolovod.testing.replay."""
        by = factor(step, member)
        names = (name for name, _ in self.module.named_parameters())
        return {name: base * by for name, base in zip(names, self.bases, strict=True)}

    def apply(self, gradients: dict[str, Any]) -> None:
        """Apply gradients, for kolovod.testing.replay."""
        for name, parameter in self.module.named_parameters():
            parameter.grad = gradients[name]
        self.optimizer.step()

    def tensors(self) -> dict[str, Any]:
        """Return the tensors, for kolovod.testing.replay."""
        state: dict[str, Any] = self.module.state_dict()
        return state


def _module(torch: Any, values: list[Any]) -> Any:
    class Sum(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.values = torch.nn.ParameterList(values)

        def forward(self, bases: list[Any], by: float) -> Any:
            return sum((v * base).sum() * by for v, base in zip(self.values, bases, strict=True))

    return Sum()


def kolovod_torch(notes: Notes) -> None:
    """Train with a DistributedOptimizer in an elastic job."""
    import kolovod.torch as kv
    from kolovod import elastic

    kv.init()
    model = Model()
    optimizer = kv.DistributedOptimizer(model.optimizer, model.module.named_parameters())
    model.optimizer = optimizer
    log = elastic.MembershipLog(model.tensors, every=10)
    state: Any = elastic.State(model=model.module, optimizer=optimizer, log=log, step=0)

    def take_step() -> None:
        optimizer.zero_grad()
        time.sleep(COMPUTE_S)
        model.backward(state.step, log.member)
        optimizer.step()

    _train_elastically(notes, state, take_step)


def kolovod_numpy(notes: Notes) -> None:
    """Train the same with NumPy, which starts in a tenth of the time."""
    import numpy as np

    import kolovod.numpy as kv
    from kolovod import elastic

    kv.init()
    numbers = NumpyModel()
    log = elastic.MembershipLog(numbers.tensors, every=10)
    state: Any = elastic.State(weights=numbers.weights, log=log, step=0)

    def take_step() -> None:
        numbers.weights = state.weights
        time.sleep(COMPUTE_S)
        mine = numbers.compute(state.step, log.member)["weights"]
        mean = elastic.exactly(partial(kv.allreduce, mine, "step"), counts=True)
        numbers.apply({"weights": np.asarray(mean)})

    _train_elastically(notes, state, take_step)


def _train_elastically(notes: Notes, state: Any, take_step: Callable[[], None]) -> None:
    """Make steps, and note each, until all stop. ``state`` has ``step`` and ``log``."""
    import kolovod
    from kolovod import elastic

    _show_phases(notes)

    @elastic.run
    def train(state: Any) -> None:
        while not notes.stops(state.step):
            take_step()
            notes.say("step", state.step, kolovod.size(), kolovod.rank(), 0)
            state.step += 1
            state.commit()

    notes.say("ready")
    train(state)
    state.log.save(notes.folder / f"{os.getpid()}.members")


class NumpyModel:
    """One array of so many elements."""

    def __init__(self, count: int = PARAMETERS * ELEMENTS) -> None:
        import numpy as np

        self.np = np
        draw = np.random.default_rng(1)
        self.weights, self.base = (draw.normal(size=count).astype(np.float32) for _ in range(2))

    def compute(self, step: int, member: int) -> dict[str, Any]:
        """Return the gradients, for kolovod.testing.replay."""
        return {"weights": self.base * self.np.float32(factor(step, member))}

    def apply(self, gradients: dict[str, Any]) -> None:
        """Apply gradients, for kolovod.testing.replay."""
        self.weights -= self.np.float32(0.01) * gradients["weights"]

    def tensors(self) -> dict[str, Any]:
        """Return the tensors, for kolovod.testing.replay."""
        return {"weights": self.weights}


MODELS: dict[str, Callable[[], Any]] = {"kolovod": Model, "kolovod-numpy": NumpyModel}


def _show_phases(notes: Notes) -> None:
    """After a loss say when the script heard of it, when the world was agreed upon, and formed."""
    from kolovod.elastic import membership_client
    from kolovod.elastic.steps import Steps

    moments: list[int] = []
    recover, meet = Steps.recover, Steps.meet
    next_world = membership_client.MembershipClient.next_world

    def noted_next_world(self: Any) -> Any:
        place = next_world(self)
        moments.append(time.monotonic_ns())
        return place

    def noted_meet(self: Any) -> None:
        moments.append(time.monotonic_ns())
        meet(self)

    def noted_recover(self: Any, error: Any) -> None:
        moments[:] = [time.monotonic_ns()]
        recover(self, error)
        heard, agreed, formed = moments[0], moments[-2], moments[-1]
        notes.say("phases", heard, agreed, formed)

    membership_client.MembershipClient.next_world = noted_next_world  # type: ignore[method-assign]
    Steps.meet = noted_meet  # type: ignore[method-assign]
    Steps.recover = noted_recover  # type: ignore[method-assign]


def torchft(notes: Notes) -> None:
    """Train as a replica group of one process, with torchft's optimizer.

    Gradients are reduced by the manager's own allreduce, as one tensor: torchft 0.2's DDP may end a
    survivor by an AssertionError when a reduction has failed.
    """
    import logging
    from datetime import timedelta

    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torchft import Manager, Optimizer, ProcessGroupGloo  # type: ignore[import-not-found]

    logging.disable(logging.CRITICAL)
    options = json.loads(os.environ["BENCH_TORCHFT"])
    model = Model()
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    more: dict[str, Any] = {}
    if "timeout_s" in options:
        more["heartbeat_interval"] = timedelta(milliseconds=options["heartbeat_ms"])
        more["timeout"] = timedelta(seconds=options["timeout_s"])
    held: dict[str, Any] = {}

    def load(state: dict[str, Any]) -> None:
        model.module.load_state_dict(state["model"])
        held["optimizer"].load_state_dict(state["optimizer"])

    def save() -> dict[str, Any]:
        return {"model": model.module.state_dict(), "optimizer": held["optimizer"].state_dict()}

    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=save,
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=options["lighthouse"],
        replica_id=os.environ["BENCH_NAME"],
        hostname="localhost",
        **more,
    )
    optimizer = Optimizer(manager, model.optimizer)
    parameters = list(model.module.parameters())
    held["optimizer"] = optimizer
    notes.say("ready")
    wasted = 0
    while not notes.stops(manager.current_step()):
        step = manager.current_step()
        optimizer.zero_grad()
        time.sleep(COMPUTE_S)
        model.backward(step, 0)
        flat = torch.cat([parameter.grad for parameter in parameters])
        manager.allreduce(flat).wait()
        for parameter, mean in zip(parameters, torch.split(flat, ELEMENTS), strict=True):
            parameter.grad.copy_(mean)
        optimizer.step()
        if manager.current_step() == step:
            wasted += 1
            continue
        notes.say("step", step, manager.num_participants(), -1, wasted)
        wasted = 0
    manager.shutdown(wait=False)


def torchrun(notes: Notes) -> None:
    """Train with DDP over gloo, and a checkpoint to go on from after a new start."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = Model()
    path = notes.folder / "checkpoint"
    step = 0
    if path.exists():
        saved = torch.load(path)
        step = saved["step"]
        model.module.load_state_dict(saved["model"])
        model.optimizer.load_state_dict(saved["optimizer"])
    wrapped = torch.nn.parallel.DistributedDataParallel(model.module)
    rank = dist.get_rank()
    notes.say("ready")
    while not notes.stops(step):
        model.optimizer.zero_grad()
        time.sleep(COMPUTE_S)
        model.backward(step, rank, wrapped)
        model.optimizer.step()
        notes.say("step", step, dist.get_world_size(), rank, 0)
        step += 1
        if rank == 0 and step % CHECKPOINT_EVERY == 0:
            saved = {
                "step": step,
                "model": model.module.state_dict(),
                "optimizer": model.optimizer.state_dict(),
            }
            torch.save(saved, notes.folder / "fresh")
            os.replace(notes.folder / "fresh", path)


SYSTEMS: dict[str, Callable[[Notes], None]] = {
    "kolovod": kolovod_torch,
    "kolovod-numpy": kolovod_numpy,
    "torchft": torchft,
    "torchrun": torchrun,
}


def born_ns() -> int:
    """Return when this process was started; 10 ms are the finest step."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    ns: int = ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    return ns + time.monotonic_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)


if __name__ == "__main__":
    notes = Notes(Path(sys.argv[2]))
    notes.say("born", born_ns())
    SYSTEMS[sys.argv[1]](notes)
