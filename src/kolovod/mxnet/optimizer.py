"""DistributedOptimizer: any MXNet optimizer, updating with all ranks' gradients."""

from __future__ import annotations

from typing import Any

import mxnet as mx

from kolovod.core.ops import Average
from kolovod.core.process_sets import ProcessSet
from kolovod.errors import FrontEndArgumentError
from kolovod.gradients.alike import Alike
from kolovod.gradients.compression import AnyCompressor, Compression
from kolovod.mxnet.alike import Updated, compare
from kolovod.mxnet.gradients import Gradient, GradientReducer, spec_of
from kolovod.mxnet.verbs import collectives


class DistributedOptimizer(mx.optimizer.Optimizer):  # type: ignore[misc]  # mxnet is untyped
    """``optimizer``, which averages each gradient over the ranks before it updates a parameter.

    For ``mx.mod.Module`` and loops that call an updater. With Gluon use ``DistributedTrainer``,
    which sends gradients while others are still computed; here each update waits. All attributes
    (``rescale_grad``, ``lr_mult``, ...) are those of ``optimizer``. Averages are of the ranks'
    gradients, so a ``rescale_grad`` of one divided by the batch of one rank is right.

    Ranks must update the same parameters in the same order. It can be pickled with its optimizer,
    as ``save_optimizer_states`` does, unless it works in a process set, which ends with the world.
    """

    def __init__(
        self,
        optimizer: mx.optimizer.Optimizer,
        compression: AnyCompressor = Compression.none,
        op: int = Average,
        process_set: ProcessSet | None = None,
        *,
        gradient_predivide_factor: float = 1.0,
        prefix: str | None = None,
    ) -> None:
        """``process_set``, ``gradient_predivide_factor``, ``prefix``: see DistributedTrainer.

        Raises InvalidArgumentError for arguments that cannot work.
        """
        if not isinstance(optimizer, mx.optimizer.Optimizer):
            raise FrontEndArgumentError(
                f"optimizer is {optimizer!r}: give one of mx.optimizer, such as "
                "mx.optimizer.create('sgd')"
            )
        if isinstance(optimizer, DistributedOptimizer):
            raise FrontEndArgumentError("the optimizer is a DistributedOptimizer already")
        spec = spec_of(compression, op, gradient_predivide_factor, process_set)
        own = {
            "_kolovod_optimizer": optimizer,
            "_kolovod_options": (compression, op, gradient_predivide_factor, prefix),
            "_kolovod_set": process_set,
            "_kolovod_reducer": GradientReducer(
                collectives, spec, prefix=f"{prefix or ''}optimizer."
            ),
            "_kolovod_alike": Alike(optimizer, "num_update"),
            "_kolovod_updated": {},
            "_kolovod_has_compared": False,
        }
        self.__dict__.update(own)  # not through __setattr__, which is the optimizer's

    def __getattribute__(self, name: str) -> Any:
        """Return the optimizer's attribute ``name``, unless this class itself defines it."""
        if name in ("update", "update_multi_precision") or name.startswith(("_kolovod", "__")):
            return super().__getattribute__(name)
        return getattr(self._kolovod_optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the optimizer's attribute ``name``."""
        setattr(self._kolovod_optimizer, name, value)

    def __reduce__(self) -> Any:
        """Wrap again when loaded, so that nobody goes on alone."""
        if self._kolovod_set is not None:
            raise FrontEndArgumentError(
                f"this optimizer works in {self._kolovod_set}, which ends with the world: save "
                "the states without the optimizer (dump_optimizer=False)"
            )
        return _loaded, (self._kolovod_optimizer, *self._kolovod_options)

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Average ``grad`` (an array or several), then let the optimizer update."""
        self._kolovod_average(index, weight, grad)
        self._kolovod_optimizer.update(index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """``update``, with a float32 copy of float16 parameters if the optimizer has one."""
        self._kolovod_average(index, weight, grad)
        self._kolovod_optimizer.update_multi_precision(index, weight, grad, state)

    def _kolovod_average(self, index: Any, weight: Any, grad: Any) -> None:
        if not isinstance(index, list | tuple):
            index, weight, grad = [index], [weight], [grad]
        updated = self._kolovod_updated
        if any(i in updated for i in index):  # a step is over
            self._kolovod_compare(list(updated.values()))
            updated.clear()
        names = self._kolovod_optimizer.idx2name
        updated.update(
            {i: Updated(names.get(i, str(i)), w) for i, w in zip(index, weight, strict=True)}
        )
        pairs = zip(index, grad, strict=True)
        self._kolovod_reducer.reduce([Gradient(str(i), [array]) for i, array in pairs])

    def _kolovod_compare(self, updated: list[Updated]) -> None:
        reducer, is_first = self._kolovod_reducer, not self._kolovod_has_compared
        if reducer.is_member():
            self.__dict__["_kolovod_has_compared"] = True
            of_set, name = reducer.spec.process_set, f"{reducer.prefix}alike"
            compare(self._kolovod_alike, updated, collectives, of_set, name, is_first=is_first)


def _loaded(
    optimizer: mx.optimizer.Optimizer,
    compression: AnyCompressor,
    op: int,
    factor: float,
    prefix: str | None,
) -> DistributedOptimizer:
    return DistributedOptimizer(
        optimizer, compression, op, gradient_predivide_factor=factor, prefix=prefix
    )
