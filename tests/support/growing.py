"""Training in worlds that grow and shrink, and what one process comes to with the same data.

A test trains with the same optimizer, and what it has traced once, in each world that its rank is
in, and returns the weights after each. ``check`` compares them with a replay in NumPy.
"""

from __future__ import annotations

import numpy as np

WORLDS = ([0], [0, 1], [0], [0, 1, 2])
"""The launcher's ranks that are in each, one world after the other."""
STEPS, RATE, MOMENTUM = 2, 0.25, 0.5
_SHAPES = ((3, 2), (2,))


def start(dtype="float64"):
    """The first weights: a matrix and a vector."""
    draw = np.random.default_rng(0)
    return [draw.normal(size=shape).astype(dtype) for shape in _SHAPES]


def batch(phase, step, rank, dtype="float64"):
    """Inputs (4, 3) and targets (4, 2), of each rank in each step other ones."""
    draw = np.random.default_rng([1, phase, step, rank])
    return draw.normal(size=(4, 3)).astype(dtype), draw.normal(size=(4, 2)).astype(dtype)


def worlds_of(kv, launched_as, worlds=WORLDS):
    """Enter, one after the other, the worlds that this process is in; yield each one's number."""
    for phase, members in enumerate(worlds):
        if launched_as in members:
            kv.init(comm=members)
            assert (kv.rank(), kv.size()) == (members.index(launched_as), len(members))
            yield phase
            kv.shutdown()


def replayed(worlds=WORLDS, passes=1, momentum=MOMENTUM, steps=STEPS, dtype="float64"):
    """The weights after each world: SGD with the mean of all ranks' gradients (of mean squares).

    ``passes``: their gradients are added up before each of the ``steps``.
    """
    weights = start(dtype)
    velocities = [np.zeros_like(weight) for weight in weights]
    found = []
    for phase, members in enumerate(worlds):
        for step in range(steps if members else 0):
            rows = range(step * passes, (step + 1) * passes)
            each = [
                gradients(weights, *batch(phase, row, rank, dtype))
                for rank in range(len(members))
                for row in rows
            ]
            for i, weight in enumerate(weights):
                total = sum(grads[i] for grads in each) / len(members)
                velocities[i] = momentum * velocities[i] + total
                weight -= RATE * velocities[i]
        found.append([weight.copy() for weight in weights])
    return found


def gradients(weights, inputs, targets):
    """Of the mean of squared errors."""
    kernel, bias = weights
    slope = 2.0 * (inputs @ kernel + bias - targets) / targets.size
    return inputs.T @ slope, slope.sum(0)


def check(results, wanted, worlds=WORLDS, rtol=1e-12):
    """``results``: of each process, the weights after each of its worlds."""
    for phase, members in enumerate(worlds):
        first = results[members[0]][phase]
        for rank in members:
            for mine, theirs in zip(results[rank][phase], first, strict=True):
                np.testing.assert_array_equal(mine, theirs, f"rank {rank} in world {phase}")
        for mine, weight in zip(first, wanted[phase], strict=True):
            np.testing.assert_allclose(mine, weight, rtol=rtol, atol=rtol, err_msg=f"world {phase}")
