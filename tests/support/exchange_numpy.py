"""Rows of the exchange (exchanges.py) on NumPy's arrays: a bucket's way by the verbs themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from compressors import ByTurns, SignsWithFeedback
from exchanges import (
    MOMENTUM,
    RATE,
    Replay,
    Row,
    Taken,
    check,
    entering,
    own_gradients,
    start,
)

from kolovod.core import ops
from kolovod.gradients import exchange
from kolovod.gradients.compression import Compression
from kolovod.gradients.spec import ReduceSpec
from kolovod.testing.loopback import loopback


def run(row: Row) -> None:
    """Train on threads, and compare each step of each rank."""
    (hosts,) = row.worlds
    with loopback(len(hosts), hosts=hosts) as world:
        results = world.run(
            lambda kv: _trained(row, kv.world().rank, kv, lambda _: None), timeout_s=30.0
        )
    wanted = Replay(row).all()
    for rank, found in enumerate(results):
        check(row, rank, found, wanted)


def on_processes(rank: int, rows: list[Row]) -> list[list[list[Taken]]]:
    """What this rank, a process, comes to in each row."""
    import kolovod.numpy as kv

    return [_trained(row, rank, kv.collectives, entering(row, rank)) for row in rows]


def _trained(row: Row, rank: int, kv: Any, enter: Callable[[int], None]) -> list[list[Taken]]:
    made = {"signs": lambda: SignsWithFeedback(np.asarray), "by turns": ByTurns}
    compression = made.get(row.compression, lambda: getattr(Compression, row.compression))()
    spec = ReduceSpec.checked(
        compression, getattr(ops, row.op), row.predivide, None, (ops.Average, ops.Sum)
    )
    weights = start(row)
    velocities = [np.zeros_like(weight) for weight in weights]
    found: list[list[Taken]] = []
    for world, hosts in enumerate(row.worlds):
        found.append([])
        if rank >= len(hosts):
            continue
        enter(world)
        if world:
            weights = [kv.broadcast(weight, 0) for weight in weights]
            velocities = [kv.broadcast(velocity, 0) for velocity in velocities]
        for number, step in enumerate(row.steps):
            passes = own_gradients(row, world, number, step, rank)
            sums = [np.asarray(sum(of[1:], of[0].copy())) for of in zip(*passes, strict=True)]
            combined = exchange.start(
                spec,
                f"step {number}",
                [(str(index), grad) for index, grad in enumerate(sums)],
                exchange.by(
                    kv, spec, in_place=number % 2 == 1 and row.compression in ("none", "fp16")
                ),
                exchange.scaling(kv, spec),
            )()
            for index, grad in enumerate(combined):
                factors = np.array([MOMENTUM, RATE]).astype(grad.dtype)
                velocities[index] = np.asarray(velocities[index] * factors[0] + grad)
                weights[index] = np.asarray(weights[index] - velocities[index] * factors[1])
            gradients: list[Any] = [np.asarray(grad).copy() for grad in combined]
            found[-1].append(Taken(gradients, [weight.copy() for weight in weights]))
    return found
