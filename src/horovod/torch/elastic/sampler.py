"""Horovod's sampler whose samples are dealt anew when there are other ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

import torch

from horovod.torch.mpi_ops import rank, size

__all__ = ["ElasticSampler"]


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Deals what is left of an epoch, in one order, to the ranks by turns.

    ``record_batch`` counts what all ranks have used; after a reset only the rest is dealt. The last
    ones are dealt twice where the ranks would not have equally many. Give it to a TorchState, which
    keeps the count equal on all ranks. ``kolovod.elastic.ElasticSampler`` counts each sample once.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        """``dataset``: has a length. Raises ValueError before ``init``."""
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        """Samples of this epoch that all ranks together have used."""
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch. Call it where one ends: what was processed is forgotten."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count ``batch_size`` samples that each rank has used. ``batch_idx`` is of no use here."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return the state that ``load_state_dict`` takes."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there, with the ranks of now."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deal what is left to the ranks of now."""
        self.num_replicas = size()
        self.rank = rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        left = self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(left) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        dealt = [left[i % len(left)] for i in range(self.total_size)]
        self.indices = dealt[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        """The indices of this rank."""
        return iter(self.indices)

    def __len__(self) -> int:
        """Return the number of indices of this rank."""
        return self.num_samples
