"""A rank of bench/chaos.py: trains one array, notes its steps, and saves its membership log.

``chaos_rank.py FOLDER [--compute-s SECONDS] [--memory-files]``. A line of its notes is as
bench/partitions.py has it: nanoseconds, step, size, rank, epoch, and a checksum of the weights.
Ranks stop after the step in which one of them has seen FOLDER/end. What a rank computes in a step
it sleeps. At the signal ``chaos_faults.LOOPS`` it is in an endless loop, wherever it was.

Without ``--memory-files`` these are refused to the engine, as some containers do; so the segments
of worlds are files in /dev/shm, which can be filled.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import time
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import elastic_rank
import numpy as np
from chaos_faults import LOOPS

import kolovod.numpy as kv
from kolovod import elastic
from kolovod.core import world

ELEMENTS = 2_000

_memory_file = os.memfd_create


def _refused(name: str, flags: int = os.MFD_CLOEXEC) -> int:
    if name == "kolovod-segment":
        raise OSError(errno.EPERM, "memory files are refused here")
    return _memory_file(name, flags)


def _loop(*_: object) -> None:
    while True:
        pass


class Model(elastic_rank.NumpyModel):
    """See kolovod.testing.replay. A gradient has one more element: whether a rank would stop."""

    def __init__(self) -> None:
        super().__init__(ELEMENTS)

    def compute(self, step: int, member: int) -> dict[str, np.ndarray]:
        """Return gradients, of a rank that would not stop."""
        gradient = super().compute(step, member)["weights"]
        return {"weights": np.append(gradient, np.float32(0))}

    def apply(self, gradients: dict[str, np.ndarray]) -> None:
        """Apply all but the last element, which is no gradient."""
        super().apply({"weights": gradients["weights"][:-1]})


def main() -> None:
    """Train until somebody says that it is enough."""
    signal.signal(LOOPS, _loop)
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--compute-s", type=float, default=0.01)
    parser.add_argument("--memory-files", action="store_true")
    options = parser.parse_args()
    folder, slot = options.folder, int(os.environ["KOLOVOD_SLOT"])
    name = f"{slot}.{time.monotonic_ns()}"
    notes = os.open(folder / name, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC)
    if not options.memory_files:
        os.memfd_create = _refused
    kv.init()
    model = Model()
    log = elastic.MembershipLog(lambda: model.tensors())
    state: Any = elastic.State(weights=model.weights, log=log, step=0, ends=False)

    @elastic.run
    def train(state: Any) -> None:
        while not state.ends:
            model.weights = state.weights
            time.sleep(options.compute_s)
            mine = model.compute(state.step, log.member)["weights"]
            mine[-1] = (folder / "end").exists()
            mean = elastic.exactly(partial(kv.allreduce, mine, "step"), counts=True)
            # Where it stops, the last element is not what a replay has; but it is no weight.
            model.apply({"weights": np.asarray(mean)})
            state.ends = bool(mean[-1])
            state.step += 1
            state.commit()
            line = f"{time.monotonic_ns()} {state.step} {kv.size()} {kv.rank()}"
            line += f" {world.current().epoch} {zlib.crc32(state.weights)}\n"
            os.write(notes, line.encode())

    train(state)
    log.save(folder.parent / "logs" / name)


if __name__ == "__main__":
    main()
