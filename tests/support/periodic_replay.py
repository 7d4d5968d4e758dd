"""Local SGD and DiLoCo in one process, in NumPy: what all front ends must come to.

The gradients are linear in the parameters, so that each front end can compute them in a line.
"""

from __future__ import annotations

import numpy as np

NAMES, SHAPES = ("a", "b", "c"), ((3, 2), (4,), (2, 2))
RATE, MOMENTUM = 0.125, 0.5  # of the inner SGD
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9


def start():
    """The parameters that all ranks begin with, float64."""
    draw = np.random.default_rng(5)
    return [draw.normal(size=shape) for shape in SHAPES]


def factors(rank, step):
    """What a rank's gradients are made of in a step, from 0: see ``gradient``."""
    return 0.25 + 0.125 * rank, 0.25 * (rank - 1) + 0.125 * step


def gradient(parameter, rank, step, place):
    """Of any framework's array; ``step`` from 0."""
    slope, constant = factors(rank, step)
    return (slope + 0.0625 * place) * parameter + constant


class _Rank:
    def __init__(self):
        self.parameters = start()
        self.velocities = [np.zeros(shape) for shape in SHAPES]

    def gradients(self, rank, step):
        return [gradient(p, rank, step, place) for place, p in enumerate(self.parameters)]

    def step(self, gradients):
        for p, v, g in zip(self.parameters, self.velocities, gradients, strict=True):
            v *= MOMENTUM
            v += g
            p -= RATE * v


def _mean(values):
    return [sum(each) / len(values) for each in zip(*values, strict=True)]


def _inner_step(ranks, step, warm):
    gradients = [each.gradients(number, step - 1) for number, each in enumerate(ranks)]
    if step <= warm:
        gradients = [_mean(gradients)] * len(ranks)
    for each, own in zip(ranks, gradients, strict=True):
        each.step(own)


def local_sgd(size, steps, every, warm=0):
    """Each rank's parameters after so many steps."""
    ranks = [_Rank() for _ in range(size)]
    for step in range(1, steps + 1):
        _inner_step(ranks, step, warm)
        if step >= warm and (step - warm) % every == 0:
            mean = _mean([each.parameters for each in ranks])
            for each in ranks:
                each.parameters = [p.copy() for p in mean]
    return [each.parameters for each in ranks]


class DiLoCo:
    """As the papers say it; Nesterov momentum outside."""

    def __init__(self, size, every, *, fragments=((0, 1, 2),), delay=0, share=0.0, warm=0):
        self.ranks = [_Rank() for _ in range(size)]
        self.every, self.fragments, self.warm = every, fragments, warm
        self.delay, self.share = delay, share
        self.common = start()
        self.momentum = [np.zeros(shape) for shape in SHAPES]
        self.step, self.pending = 0, {}
        self.equal_after = dict.fromkeys(range(len(fragments)), 0)

    def run(self, steps):
        """So many further steps of all ranks; each rank's parameters."""
        for _ in range(steps):
            self.step += 1
            _inner_step(self.ranks, self.step, self.warm)
            since = self.step - self.warm
            if since == 0:
                self.common = [p.copy() for p in self.ranks[0].parameters]
            for number, fragment in enumerate(self.fragments):
                turn = (number + 1) * self.every // len(self.fragments)
                if since >= turn and (since - turn) % self.every == 0:
                    self._send(number, fragment)
            for number in sorted(n for n, (due, _) in self.pending.items() if due <= self.step):
                self._apply(number, self.share)
        return [each.parameters for each in self.ranks]

    def synchronize(self):
        """Everything, now; the parameters of all."""
        for number in sorted(self.pending):
            self._apply(number, 0.0)
        for number, fragment in enumerate(self.fragments):
            if self.equal_after[number] != self.step:  # else a step of momentum alone
                self._send(number, fragment)
                self._apply(number, 0.0)
        return self.common

    def _send(self, number, fragment):
        outer = {
            place: _mean([[self.common[place] - r.parameters[place]] for r in self.ranks])[0]
            for place in fragment
        }
        self.pending[number] = self.step + self.delay, outer

    def _apply(self, number, share):
        if not share:
            self.equal_after[number] = self.step
        for place, gradient in self.pending.pop(number)[1].items():
            self.momentum[place] = gradient + OUTER_MOMENTUM * self.momentum[place]
            change = gradient + OUTER_MOMENTUM * self.momentum[place]
            self.common[place] = self.common[place] - OUTER_RATE * change
            for rank in self.ranks:
                own = rank.parameters[place]
                rank.parameters[place] = (1 - share) * self.common[place] + share * own


def model_of(keras, which, **compiled):
    """One of Keras with three weights, whose gradients are those of ``gradient``."""
    total = keras.ops.sum if hasattr(keras, "ops") else __import__("tensorflow").reduce_sum

    class Linear(keras.layers.Layer):
        def build(self, shape):
            for name, value in zip(NAMES, start(), strict=True):
                constant = keras.initializers.Constant(value)
                weight = self.add_weight(shape=value.shape, name=name, initializer=constant)
                setattr(self, name, weight)
            self.built = True

        def call(self, x):
            kept = [getattr(self, name) for name in NAMES]
            return sum(
                (x[:, 0] + 0.0625 * place) / 2 * total(p * p) + x[:, 1] * total(p)
                for place, p in enumerate(kept)
            )

    model = keras.Sequential([keras.layers.Input((2,)), Linear()])
    compiled.setdefault("run_eagerly", which == "tf_keras")
    inner = keras.optimizers.SGD(RATE, momentum=MOMENTUM)
    model.compile(inner, lambda true, out: out, **compiled)
    return model
