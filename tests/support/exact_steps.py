"""Steps of a front end in an elastic job of which a rank is killed, and their replay.

A test trains one weight in float64 whose gradient on a rank is ``share(rank, step)``, added up over
the ranks, with a rate of 1: so what it is after any step is exactly minus the sum of the shares of
those who took part. Other weights, whose gradients are of all sizes, must only be equal on all.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from survivors import Survivors, kill_soon

from kolovod.core.transaction import settle, transaction, use_transaction
from kolovod.core.world import current
from kolovod.elastic.steps import Steps

RANKS, STEPS = 3, 12
SIZES = (8, 600, 600, 4)  # of layers, whose gradients are several buckets


def share(rank: int, step: int) -> float:
    return float((rank + 1) * (step % STEPS + 1))  # small, so that sums of bfloat16 are exact, too


def begin(kv: Any, rank: int, victim: int) -> None:
    """Be a rank of an elastic job, and know who will be left."""
    kv.init()
    use_transaction(Steps(Survivors([r for r in range(RANKS) if r != victim]), current))


def killed(
    rank: int, victim: int, seed: int, step: Callable[[int], object], weight: Callable[[], float]
) -> list[tuple[tuple[int, ...], float]]:
    """Whose gradients each step used, and the weight after it; the victim is killed in a step.

    After the gradients' exchange a step may run further operations, and the kill may come between:
    so the world at a step's end is not always that of its gradients.
    """
    log: list[tuple[tuple[int, ...], float]] = []
    ongoing = transaction()
    assert isinstance(ongoing, Steps)
    # All take the same steps, until it is killed.
    while len(log) < STEPS or victim in log[-1][0]:
        number = len(log)
        if rank == victim and number == STEPS // 3:
            kill_soon(random.Random(seed).uniform(0, 0.02))
        step(number)
        settle()
        assert ongoing.counted is not None
        log.append((ongoing.counted, weight()))
    return log


def check(results: list[Any], victim: int) -> None:
    """``results``: of each rank, what ``killed`` has returned, and all weights' bytes."""
    survivors = [result for rank, result in enumerate(results) if rank != victim]
    assert survivors[0] == survivors[1]
    log, _ = survivors[0]
    assert log[0][0] == tuple(range(RANKS))
    assert log[-1][0] == tuple(rank for rank in range(RANKS) if rank != victim)
    weight = 0.0
    for number, (members, found) in enumerate(log):
        weight -= sum(share(rank, number) for rank in members)
        assert found == weight, f"after step {number} of {members}"
