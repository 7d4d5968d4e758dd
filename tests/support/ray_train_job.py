"""An elastic loop for Ray Train, and what its workers leave behind."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import numpy as np

__all__ = ["die", "ends", "first_here", "train_until"]


def train_until(folder, enough, before=lambda state: None, after=lambda state: None):
    """An elastic loop: steps until ``enough(state)`` at a step of three ranks.

    ``before(state)``, ``after(state)``: called around each step. What there is at the end is
    written.
    """
    import ray.train

    import kolovod as kv
    from kolovod import elastic

    kv.init()
    state = elastic.State(total=np.zeros(1), sizes=0, step=0, size=0)

    @elastic.run
    def train(state):
        while not (state.size == 3 and enough(state)):
            before(state)
            total = elastic.exactly(partial(kv.allreduce, np.ones(1), op=kv.Sum, name="step"))
            state.total = state.total + total
            state.size = round(total[0])
            state.sizes += kv.size()
            state.step += 1
            after(state)
            time.sleep(0.02)
            state.commit()

    train(state)
    own = ray.train.get_context().get_world_rank()
    told = (os.getpid(), kv.rank(), kv.size(), state.step, float(state.total[0]), state.sizes)
    (folder / f"end {own}").write_text(" ".join(map(str, told)))


def ends(folder):
    """By Train's rank: process, rank, size, step, how often a rank has counted, sum of sizes."""
    found = {path.name.split()[1]: path.read_text().split() for path in folder.glob("end *")}
    return {int(rank): tuple(map(float, told)) for rank, told in found.items()}


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def first_here(path):
    """Whether this process is the first that asks for ``path``."""
    try:
        path.touch(exist_ok=False)
        return True
    except FileExistsError:
        return False
