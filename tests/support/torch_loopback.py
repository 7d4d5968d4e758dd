"""Ranks with PyTorch in the threads of one process."""

from __future__ import annotations

from kolovod.testing.loopback import loopback
from kolovod.torch import TorchCollectives, TorchFrontend


def run(size, work, **kwargs):
    """``work(verbs, rank)`` on each of ``size`` ranks."""
    with loopback(size, TorchFrontend()) as world:

        def on_rank(kv):
            return work(TorchCollectives(kv.frontend, kv.world), kv.world().rank)

        return world.run(on_rank, **kwargs)
