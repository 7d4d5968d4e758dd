"""What the ranks of bench/front_ends.py share: the driver's commands, clocks, weights to compare.

Commands and answers are as in worker.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from worker import Barrier

MODELS = {"mlp": (250, 44, 32), "mid": (8, 256, 64), "wide": (4, 1024, 32)}
"""Layers, width, batch of a rank. A layer: x + 0.1 tanh(x w + b); the loss is cross-entropy."""
LEARNING_RATE, MOMENTUM, BATCHES = 1e-3, 0.9, 4
PROJECTIONS = 4


class Peer(Protocol):
    """Who averages: joined when it is made."""

    rank: int
    size: int

    def close(self) -> None:
        """Leave the world."""


class Training(Protocol):
    """A model, its batches, and the state that goes on from round to round."""

    def step(self) -> None:
        """Take one step on the next batch, and wait for it."""

    def weights(self) -> list[np.ndarray[Any, Any]]:
        """Return all weights, as they are on this rank."""


class Alone:
    """No communication: each process trains by itself."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def close(self) -> None:
        """Do nothing: there is no world to leave."""


def first_weights(model: str) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Return ``w`` and ``b`` of each layer, float32, the same on all ranks, for all peers."""
    layers, width, _ = MODELS[model]
    draw = np.random.default_rng(7)
    scale = np.sqrt(width)
    return [
        ((draw.normal(size=(width, width)) / scale).astype(np.float32), np.zeros(width, np.float32))
        for _ in range(layers)
    ]


def batches(model: str, rank: int) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Return the rank's own batches: inputs, float32, and labels."""
    _, width, batch = MODELS[model]
    draw = np.random.default_rng(1000 + rank)
    return [
        (draw.normal(size=(batch, width)).astype(np.float32), draw.integers(width, size=batch))
        for _ in range(BATCHES)
    ]


def learnt(weights: list[np.ndarray[Any, Any]], model: str) -> list[float]:
    """Return how the weights have changed: the norm, and projections on random vectors."""
    draw = np.random.default_rng(11)
    found = np.zeros(1 + PROJECTIONS)
    first = [part for pair in first_weights(model) for part in pair]
    for now, before in zip(weights, first, strict=True):
        change = now.astype(np.float64) - before
        found[0] += np.square(change).sum()
        for number in range(1, 1 + PROJECTIONS):
            found[number] += (change * draw.normal(size=change.shape)).sum()
    return [float(np.sqrt(found[0])), *found[1:].tolist()]


def timed(
    training: Training, model: str, count: int, warmup: int, barrier: Barrier
) -> dict[str, Any]:
    """Return clock readings (ns) of ``count`` steps, and what the weights are after them."""
    starts, ends = [], []
    for _ in range(warmup + count):
        barrier.wait()
        starts.append(time.monotonic_ns())
        training.step()
        ends.append(time.monotonic_ns())
    digest = hashlib.blake2b(digest_size=16)
    weights = training.weights()
    for weight in weights:
        digest.update(np.ascontiguousarray(weight).tobytes())
    return {
        "starts": starts[warmup:],
        "ends": ends[warmup:],
        "digest": digest.hexdigest(),
        "learnt": learnt(weights, model),
        "parameters": sum(weight.size for weight in weights),
        "tensors": len(weights),
    }


# Not freed before the process ends: PyTorch 2.13 holds the GIL while it joins gloo's threads, which
# may wait for that.
_trainings: dict[str, Training] = {}


def serve(peers: Mapping[str, Callable[[], Any]], training: Callable[[Any, str], Training]) -> None:
    """Join the world of the peer that is named, say hello to the driver, serve it until it ends."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(os.environ["BENCH_SOCKET"])
    stream = connection.makefile("rw", encoding="utf-8", newline="\n")

    def say(message: dict[str, Any]) -> None:
        stream.write(json.dumps(message) + "\n")
        stream.flush()

    try:
        peer: Peer = peers[sys.argv[1]]()
        barrier = Barrier(Path(os.environ["BENCH_BARRIER"]), peer.rank, peer.size)
        say({"rank": peer.rank, "size": peer.size})
        for line in stream:
            command = json.loads(line)
            model = command["model"]
            if model not in _trainings:
                _trainings[model] = training(peer, model)
            count, warmup = command["steps"], command["warmup"]
            say(timed(_trainings[model], model, count, warmup, barrier))
        peer.close()
    except BaseException:
        say({"error": traceback.format_exc()})
        raise
