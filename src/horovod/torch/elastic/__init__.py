"""Horovod's elastic interface for PyTorch: ``hvd.elastic.run`` and ``hvd.elastic.TorchState``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from horovod.common.elastic import run_fn
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import TorchState
from horovod.torch.mpi_ops import init, shutdown

__all__ = ["ElasticSampler", "TorchState", "run"]

R = TypeVar("R")


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Enter ``func(state, ...)`` again in each world; see horovod.common.elastic.run_fn."""

    def reset() -> None:
        shutdown()
        init()

    return run_fn(func, reset)
