"""Horovod's elastic interface for PyTorch: ``hvd.elastic.run`` and ``hvd.elastic.TorchState``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from horovod.common.elastic import next_world, run_fn
from horovod.torch import handles
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "TorchState", "run"]

R = TypeVar("R")


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Enter ``func(state, ...)`` again in each world; see horovod.common.elastic.run_fn."""

    def reset() -> None:
        next_world()
        handles.forget()

    return run_fn(func, reset)
