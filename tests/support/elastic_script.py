"""A training of an elastic job, whose processes kill themselves as its arguments say.

Run by the launcher: ``elastic_script.py numpy 3 2,1,0`` is three ranks with NumPy of which,
whenever all three are there, the one in slot 2 ends, then that in 1, then that in 0. Each process
that comes to the end prints one line of JSON: which slots took part in each step, as bits, and the
weights.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from typing import Any

import numpy as np

from kolovod import elastic

STEPS_BETWEEN = 10
PAUSE_S = 0.004
SLOT = int(os.environ["KOLOVOD_SLOT"])


class WithNumpy:
    """Weights that are the sum of all that was ever added, in float64: exact."""

    def __init__(self) -> None:
        import kolovod.numpy as kv

        kv.init()
        self.kv = kv
        self.weights = np.zeros(5_000)

    def values(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def step(self, state: Any) -> int:
        share = np.full(5_000, float(1 << SLOT))
        total = elastic.exactly(lambda: self.kv.allreduce(share, "share", self.kv.Sum))
        state.weights = state.weights + total
        return int(total[0])

    def result(self, state: Any) -> Any:
        return float(state.weights[0])


class WithTorch:
    """One parameter whose gradient tells who takes part, and some that make buckets."""

    def __init__(self) -> None:
        import torch

        import kolovod.torch as kv

        kv.init()
        torch.manual_seed(SLOT)  # the weights are rank 0's all the same
        self.torch = torch
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 500), torch.nn.Linear(500, 8))
        self.bits = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.model.register_parameter("bits", self.bits)
        sgd = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.9)
        self.optimizer = kv.DistributedOptimizer(sgd, self.model.named_parameters(), op=kv.Sum)

    def values(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self, state: Any) -> int:
        self.optimizer.zero_grad()
        seed = self.torch.Generator().manual_seed(100 * state.step + SLOT)
        loss = self.model(self.torch.randn(4, 8, generator=seed)).square().mean()
        (0.01 * loss + (self.bits * (1 << SLOT)).sum()).backward()
        self.optimizer.step()
        return int(self.bits.grad)

    def result(self, state: Any) -> Any:
        return [float(parameter.detach().double().sum()) for parameter in self.model.parameters()]


def of_framework(kind: str) -> Any:
    from elastic_frameworks import KINDS as of_frameworks

    return of_frameworks[kind]()


KINDS = {"numpy": WithNumpy, "torch": WithTorch}


def main() -> None:
    kind, full, plan = sys.argv[1], int(sys.argv[2]), [int(s) for s in sys.argv[3].split(",") if s]
    work = KINDS[kind]() if kind in KINDS else of_framework(kind)
    state = elastic.State(step=0, log=[], since=0, kills=0, **work.values())
    longest_s = 0.0

    @elastic.run
    def train(state: Any) -> None:
        nonlocal longest_s
        while True:
            state.since += 1
            if state.since == STEPS_BETWEEN:
                if state.kills == len(plan):
                    return
                state.kills += 1
                if plan[state.kills - 1] == SLOT:
                    delay_s = random.uniform(0, 2 * PAUSE_S)
                    threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
            before_s = time.monotonic()
            state.log.append(work.step(state))
            longest_s = max(longest_s, time.monotonic() - before_s)
            is_whole = state.log[-1] == (1 << full) - 1
            if not is_whole:
                state.since = 0
            state.step += 1
            state.commit()
            # A process that imports a framework needs the cores to come.
            time.sleep(PAUSE_S if is_whole or kind in KINDS else 0.2)

    train(state)
    facts = {"slot": SLOT, "log": state.log, "result": work.result(state), "longest_s": longest_s}
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
