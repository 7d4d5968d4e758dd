"""Horovod's DistributedOptimizer and DistributedTrainer: Kolovod's, with Horovod's arithmetic.

Gradients are added up, and ``rescale_grad`` is divided by the number of ranks, where Kolovod
averages them: scripts that look at gradients between ``allreduce_grads`` and ``update``, to clip
them say, count on the sum.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import mxnet as mx

import kolovod.mxnet as kv
from horovod.common.process_sets import global_process_set, group_of
from horovod.mxnet.compression import Compression
from kolovod.core.ops import Sum
from kolovod.errors import FrontEndArgumentError
from kolovod.gradients.spec import ReduceSpec
from kolovod.mxnet.gradients import groups_of, spec_of

__all__ = ["DistributedOptimizer", "DistributedTrainer"]


class DistributedOptimizer(kv.DistributedOptimizer):
    """``optimizer``, which sums each gradient over the ranks before it updates a parameter."""

    def __init__(
        self,
        optimizer: mx.optimizer.Optimizer,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        process_set: Any = global_process_set,
    ) -> None:
        """Divide ``optimizer.rescale_grad`` by the number of ranks, also when that changes.

        ``num_groups``: gradients come as the updater gives them, so it is of no use here. Raises
        ValueError for arguments that cannot work.
        """
        group = group_of(process_set)
        groups_of(num_groups)
        spec, share = _spec(gradient_predivide_factor, Compression.none, group)
        super().__init__(optimizer, process_set=group)
        self._kolovod_reducer.spec = spec
        self.__dict__["_kolovod_share"] = share
        optimizer.rescale_grad *= share

    def _kolovod_average(self, index: Any, weight: Any, grad: Any) -> None:
        before, share = self._kolovod_share, _share(self._kolovod_reducer.spec)
        if share != before:  # in a world of another size
            self.__dict__["_kolovod_share"] = share
            self._kolovod_optimizer.rescale_grad *= share / before
        super()._kolovod_average(index, weight, grad)

    def _kolovod_unwrapped(self) -> mx.optimizer.Optimizer:
        """The optimizer that it was made of, as it was."""
        self._kolovod_optimizer.rescale_grad /= self._kolovod_share
        return self._kolovod_optimizer

    def __reduce__(self) -> Any:
        """Wrap again when loaded, perhaps among another number of ranks."""
        super().__reduce__()  # refuses one of a process set
        factor = 1.0 / self._kolovod_reducer.spec.prescale
        return _loaded, (self._kolovod_optimizer, self._kolovod_share, factor)


class DistributedTrainer(kv.DistributedTrainer):
    """``gluon.Trainer`` that sums gradients over the ranks before it updates parameters."""

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: dict[str, Any] | None = None,
        compression: Any = Compression.none,
        gradient_predivide_factor: float = 1.0,
        prefix: str | None = None,
        num_groups: int = 0,
        process_set: Any = global_process_set,
    ) -> None:
        """``step(batch_size)`` takes this rank's part; see kolovod.mxnet.DistributedTrainer.

        Raises ValueError for arguments that cannot work.
        """
        group = group_of(process_set)
        if isinstance(optimizer, DistributedOptimizer):
            warnings.warn(
                "DistributedTrainer needs no DistributedOptimizer; takes the one within",
                stacklevel=2,
            )
            optimizer = optimizer._kolovod_unwrapped()
        spec, share = _spec(gradient_predivide_factor, compression, group)
        super().__init__(
            params,
            optimizer,
            optimizer_params,
            compression,
            process_set=group,
            groups=num_groups,
            prefix=prefix,
        )
        self._kolovod_store.reducer.spec = spec
        self._scale *= share
        self._kolovod_share = share

    def _check_and_rescale_grad(self, scale: float) -> None:
        """Follow the number of ranks: Gluon calls this with what it made of ``_scale``."""
        before, share = self._kolovod_share, _share(self._kolovod_store.reducer.spec)
        if share != before:  # in a world of another size
            self._kolovod_share = share
            self._scale *= share / before
            scale *= share / before
        super()._check_and_rescale_grad(scale)


def _spec(factor: float, compression: Any, group: Any) -> tuple[ReduceSpec, float]:
    """Return how gradients travel, and the factor that makes an average of their sum."""
    if not factor > 0:
        raise FrontEndArgumentError(f"gradient_predivide_factor is {factor}: give a number > 0")
    spec = replace(spec_of(compression, Sum, 1.0, group), prescale=1.0 / factor)
    return spec, _share(spec)


def _share(spec: ReduceSpec) -> float:
    """The factor that makes an average of a sum, in the present world."""
    if not spec.is_member:
        return 1.0  # steps with its own gradients
    return 1.0 / spec.prescale / kv.collectives.membership(spec.process_set).size


def _loaded(optimizer: mx.optimizer.Optimizer, share: float, factor: float) -> DistributedOptimizer:
    optimizer.rescale_grad /= share
    return DistributedOptimizer(optimizer, factor)
