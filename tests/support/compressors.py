"""Compressors of the tests: what the package's own do not need yet, the shape must allow."""

from __future__ import annotations

import numpy as np

from kolovod.gradients.compression import Compressor, Payload

LEAST = 4  # elements; less is sent as it is


class SignsWithFeedback(Compressor):
    """Signs and a mean magnitude, gathered; what they leave out is added to the next gradient.

    Works on tensors of any framework that can be made NumPy arrays, and made of them by ``make``.
    Less than ``LEAST`` elements are reduced as they are, so that a bucket travels by two verbs.
    """

    def __init__(self, make):
        self._make = make
        self._left_out = {}

    def compress(self, key, tensor):
        values = np.asarray(tensor)
        if values.size < LEAST:
            return Payload([tensor])
        whole = values.reshape(-1) + self._left_out.get(key, 0)
        magnitude = np.abs(whole).mean(keepdims=True, dtype=np.float32)
        signs = whole >= 0
        self._left_out[key] = whole - np.where(signs, magnitude, -magnitude)
        sent = [self._make(np.packbits(signs)[None]), self._make(magnitude)]
        return Payload(sent, "allgather", (values.shape, values.dtype))

    def decompress(self, key, payload, received):
        if payload.verb == "allreduce":
            return received[0]
        shape, dtype = payload.context
        packed, magnitudes = map(np.asarray, received)
        signs = np.unpackbits(packed, axis=1, count=int(np.prod(shape)))
        total = np.where(signs, magnitudes[:, None], -magnitudes[:, None]).sum(0, dtype=dtype)
        return self._make(total.reshape(shape))

    def state_dict(self):
        return dict(self._left_out)

    def load_state_dict(self, state):
        self._left_out = dict(state)


class ByTurns(Compressor):
    """Sends a gradient once, twice, three times as it is, and so on: by how often it was asked."""

    def __init__(self):
        self._turns = {}

    def compress(self, key, tensor):
        turn = self._turns.get(key, 0)
        self._turns[key] = turn + 1
        return Payload([tensor * (turn % 3 + 1)])

    def decompress(self, key, payload, received):
        return received[0]

    def state_dict(self):
        return dict(self._turns)

    def load_state_dict(self, state):
        self._turns = dict(state)


def expected(steps):
    """The averages that ranks come to; ``steps``: by step, by rank, a gradient as an array."""
    ranks = [SignsWithFeedback(np.asarray) for _ in steps[0]]
    averages = []
    for gradients in steps:
        sent = [one.compress("key", grad) for one, grad in zip(ranks, gradients, strict=True)]
        if sent[0].verb == "allreduce":
            averages.append(np.mean(gradients, axis=0))
            continue
        gathered = [np.concatenate(parts) for parts in zip(*(p.tensors for p in sent), strict=True)]
        averages.append(ranks[0].decompress("key", sent[0], gathered) / len(ranks))
    return averages
