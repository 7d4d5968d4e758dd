"""A rank of bench/joining.py: trains a model with Adam, and notes what each step has taken.

``joining_rank.py FOLDER PARAMETERS COMPUTE_S JOIN``; JOIN: see ``elastic.run``. A line of its file:
when the step was committed (ns of CLOCK_MONOTONIC), its number, ranks, whether this one is rank 0,
the ms of the step and of its commit, the ms in which the state was shared (0: it was not), and,
every tenth step and after each change of ranks, a checksum of the weights.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import torch

import kolovod.torch as kv
from kolovod import elastic

TENSORS = 20


class State(elastic.State):
    """Notes how long it takes to share it."""

    share_ms = 0.0

    def hand_over(self, *, during_step: bool) -> list[Any]:
        """Share the state, and note how long that takes."""
        start_s = time.monotonic()
        later = super().hand_over(during_step=during_step)
        self.share_ms += 1000 * (time.monotonic() - start_s)
        return later


def main() -> None:
    """Train until the file ``stop`` is there."""
    folder, parameters, compute_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    join: Any = sys.argv[4]
    torch.set_num_threads(1)
    kv.init()
    torch.manual_seed(1)
    size = parameters // TENSORS
    model = torch.nn.ParameterList(torch.randn(size) for _ in range(TENSORS))
    gradients = [torch.randn(size) for _ in range(TENSORS)]
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer = kv.DistributedOptimizer(adam, model.named_parameters())
    state: Any = State(model=model, optimizer=optimizer, step=0, ends=False)
    notes = os.open(
        folder / f"{time.monotonic_ns()}.notes", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC
    )

    @elastic.run(join=join)
    def train(state: Any) -> None:
        size_before = kv.size()
        while not state.ends:
            begin_s = time.monotonic()
            time.sleep(compute_s)
            for parameter, gradient in zip(model, gradients, strict=True):
                parameter.grad = gradient * (1 + state.step % 3)
            optimizer.step()
            asked = torch.tensor(float((folder / "stop").exists()))
            ends = elastic.exactly(partial(kv.allreduce, asked, op=kv.Max))
            state.ends, state.step = bool(ends), state.step + 1
            commit_s = time.monotonic()
            state.commit()
            end_s = time.monotonic()
            total = 0
            if state.step % 10 == 0 or kv.size() != size_before:
                total = zlib.crc32(memoryview(model[state.step % TENSORS].detach().numpy()))
            size_before = kv.size()
            line = [
                time.monotonic_ns(),
                state.step,
                kv.size(),
                kv.rank() == 0,
                1000 * (end_s - begin_s),
                1000 * (end_s - commit_s),
                state.share_ms,
                total,
            ]
            state.share_ms = 0.0
            os.write(notes, (json.dumps(line) + "\n").encode())

    train(state)


main()
