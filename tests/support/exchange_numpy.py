"""Rows of the exchange (exchanges.py) on NumPy's arrays: a bucket's way by the verbs themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
from compressors import ByTurns, SignsWithFeedback
from exchanges import MOMENTUM, RATE, Replay, Row, Taken, check, own_gradients, start

from kolovod.core import ops
from kolovod.gradients import exchange
from kolovod.gradients.compression import Compression
from kolovod.gradients.spec import ReduceSpec
from kolovod.testing.loopback import loopback


def run(row: Row) -> None:
    """Train, and compare each step of each rank."""
    (hosts,) = row.worlds
    with loopback(len(hosts), hosts=hosts) as world:
        results = world.run(lambda kv: _trained(row, kv), timeout_s=30.0)
    wanted = Replay(row).all()
    for rank, found in enumerate(results):
        check(row, rank, [found], wanted)


def _trained(row: Row, kv: Any) -> list[Taken]:
    made = {"signs": lambda: SignsWithFeedback(np.asarray), "by turns": ByTurns}
    compression = made.get(row.compression, lambda: getattr(Compression, row.compression))()
    spec = ReduceSpec.checked(
        compression, getattr(ops, row.op), row.predivide, None, (ops.Average, ops.Sum)
    )
    weights = start(row)
    velocities = [np.zeros_like(weight) for weight in weights]
    found = []
    for number, step in enumerate(row.steps):
        passes = own_gradients(row, 0, number, step, kv.world().rank)
        sums = [np.asarray(sum(of[1:], of[0].copy())) for of in zip(*passes, strict=True)]
        combined = exchange.start(
            spec,
            f"step {number}",
            [(str(index), grad) for index, grad in enumerate(sums)],
            exchange.by(kv, spec, in_place=number % 2 == 1 and row.compression in ("none", "fp16")),
            exchange.scaling(kv, spec),
        )()
        for index, grad in enumerate(combined):
            factors = np.array([MOMENTUM, RATE]).astype(grad.dtype)
            velocities[index] = np.asarray(velocities[index] * factors[0] + grad)
            weights[index] = np.asarray(weights[index] - velocities[index] * factors[1])
        gradients: list[Any] = [np.asarray(grad).copy() for grad in combined]
        found.append(Taken(gradients, [weight.copy() for weight in weights]))
    return found
