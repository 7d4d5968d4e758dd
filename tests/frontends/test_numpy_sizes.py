"""Verbs on arrays in worlds that grow and shrink: what a training loop of one's own does."""

from __future__ import annotations

from forked import run_ranks
from growing import RATE, STEPS, batch, check, gradients, replayed, start, worlds_of


def test_a_loop_of_ones_own_in_worlds_that_grow_and_shrink():
    def work(launched_as):
        import kolovod.numpy as kv

        weights = [value + launched_as for value in start()]
        found = []
        for phase in worlds_of(kv, launched_as):
            kv.broadcast_parameters({str(i): weight for i, weight in enumerate(weights)})
            for row in range(STEPS):
                slopes = gradients(weights, *batch(phase, row, launched_as))
                for weight, slope in zip(weights, kv.grouped_allreduce(slopes), strict=True):
                    weight -= RATE * slope
            found += [None] * (phase - len(found)) + [[weight.copy() for weight in weights]]
        return found

    check(run_ranks(3, work), replayed(momentum=0.0))
