"""One rank's training in bench/training.py: the same loop, wrapped by the peer that is measured."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import torch
from models import MODELS
from peers import Gloo, Kolovod, Peer
from torch import nn


class Trainer:
    """A model, its data and its optimizer (SGD with momentum); one compute thread."""

    def __init__(self, name: str, peer: Peer) -> None:
        torch.set_num_threads(1)
        make_model, make_batch = MODELS[name]
        torch.manual_seed(7)  # the same weights everywhere: the peers' results are compared
        self._model: nn.Module = make_model()
        self._loss = nn.CrossEntropyLoss()
        draw = torch.Generator().manual_seed(1000 + peer.rank)
        self._batches = [make_batch(draw) for _ in range(4)]
        self._step = 0
        self._run = self._model
        optimizer: Any = torch.optim.SGD(self._model.parameters(), lr=1e-3, momentum=0.9)
        if isinstance(peer, Gloo):
            # Batch statistics are left alone, as Kolovod does: both then send the gradients only.
            self._run = nn.parallel.DistributedDataParallel(self._model, broadcast_buffers=False)
        elif isinstance(peer, Kolovod):
            import kolovod.torch

            kolovod.torch.broadcast_parameters(self._model.state_dict(), root_rank=0)
            optimizer = kolovod.torch.DistributedOptimizer(
                optimizer, named_parameters=self._model.named_parameters()
            )
        self._optimizer = optimizer

    def steps(self, count: int, warmup: int, barrier: Any) -> dict[str, Any]:
        """Run ``warmup`` + ``count`` steps; return clock readings (ns) of the latter, a digest."""
        starts, ends = [], []
        for _ in range(warmup + count):
            inputs, target = self._batches[self._step % len(self._batches)]
            self._step += 1
            if barrier is not None:
                barrier.wait()
            starts.append(time.monotonic_ns())
            self._optimizer.zero_grad()
            self._loss(self._run(inputs), target).backward()
            self._optimizer.step()
            ends.append(time.monotonic_ns())
        return {
            "starts": starts[warmup:],
            "ends": ends[warmup:],
            "digest": self._digest(),
            "parameters": sum(p.numel() for p in self._model.parameters()),
            "tensors": sum(1 for _ in self._model.parameters()),
        }

    def _digest(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for parameter in self._model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        return digest.hexdigest()
