"""What an elastic job's steps cost more while nothing fails: a rank of bench/elastic.py.

``elastic_cost_rank.py FOLDER STEPS COMPUTE_S``, started by ``kolovod run --elastic``. The gradients
are as large as ResNet-50's. By turns of five steps the same processes, in the same world, step as
in an elastic job and as in another one; computing takes COMPUTE_S, which are slept.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from models import MODELS

import kolovod.torch as kv
from kolovod import elastic
from kolovod.core.transaction import transaction, use_transaction
from kolovod.elastic.steps import Steps

TURN = 5
WARMUP = 4  # steps of each turn that are not counted; the first makes buckets or memory anew


def main() -> None:
    """Measure, and write what this rank has found."""
    folder, count, compute_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    kv.init()
    torch.set_num_threads(1)
    model = MODELS["resnet50"][0]()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-6)
    optimizer = kv.DistributedOptimizer(optimizer, model.named_parameters())
    tickets: list[float] = []
    taken: dict[str, list[float]] = {"elastic": [], "fixed": []}
    passing = Steps._pass

    def timed_pass(self: Steps) -> None:
        kv.barrier()  # so that no rank waits for another in its ticket
        begin = time.monotonic_ns()
        passing(self)
        tickets.append((time.monotonic_ns() - begin) / 1e3)

    def step() -> float:
        optimizer.zero_grad()
        begin = time.monotonic_ns()
        time.sleep(compute_s)
        torch.stack([p.sum() for p in model.parameters()]).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return (time.monotonic_ns() - begin) / 1e6

    @elastic.run
    def train(state: Any) -> None:
        own = transaction()
        for turn in range(2 * count // TURN):
            kind = "fixed" if turn % 2 else "elastic"
            use_transaction(own if kind == "elastic" else None)
            for number in range(WARMUP + TURN):
                value = step()
                if number >= WARMUP:
                    taken[kind].append(value)
        use_transaction(own)
        Steps._pass = timed_pass  # type: ignore[method-assign]
        for _ in range(count):
            step()

    train(elastic.State(model=model, optimizer=optimizer))
    found = {"tickets_us": tickets, **taken}
    (folder / f"cost.{kv.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
