"""DistributedTrainer: Gluon's Trainer, stepping with all ranks' gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mxnet as mx

from kolovod.core.objects import Objects
from kolovod.core.ops import Average
from kolovod.core.process_sets import ProcessSet
from kolovod.core.transaction import transaction
from kolovod.errors import FrontEndArgumentError
from kolovod.gradients.alike import Alike
from kolovod.gradients.compression import AnyCompressor, Compression
from kolovod.gradients.spec import is_elastic
from kolovod.mxnet.alike import compare
from kolovod.mxnet.gradients import Gradient, groups_of, spec_of
from kolovod.mxnet.optimizer import DistributedOptimizer
from kolovod.mxnet.store import Kolovod
from kolovod.mxnet.verbs import collectives


class DistributedTrainer(mx.gluon.Trainer):  # type: ignore[misc]  # mxnet is untyped
    """``gluon.Trainer`` that averages gradients over the ranks before it updates parameters.

    ``step(batch_size)`` takes this rank's part of the batch: a rank's gradient is a sum over its
    samples, the average over the ranks is divided by ``batch_size`` (by ``rescale_grad``). So
    ranks with equally many samples step as one process would with all of them. Between
    ``allreduce_grads()`` and ``update(batch_size)`` gradients are averages, to be clipped.

    Gradients travel in buckets, the last layer's first, while MXNet computes those before. At the
    first step parameters become those of the first rank; ``broadcast_parameters`` makes them equal
    before the first forward. Where the world may grow (KOLOVOD_ELASTIC), they become, in the first
    step of each world in which somebody steps for the first time, those of the first rank that has
    stepped before. In the function of ``elastic.run`` they are those of the state.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: dict[str, Any] | None = None,
        compression: AnyCompressor = Compression.none,
        op: int = Average,
        process_set: ProcessSet | None = None,
        *,
        gradient_predivide_factor: float = 1.0,
        groups: int | Sequence[Iterable[Any]] = 0,
        prefix: str | None = None,
    ) -> None:
        """``params``, ``optimizer`` and ``optimizer_params`` are Gluon's.

        ``process_set``: ranks outside of it step with their own gradients.
        ``gradient_predivide_factor``: gradients are divided by it before they are added up, and
        multiplied after; with op Average. ``groups``: so many groups of neighbouring gradients
        travel whole, or lists of parameters; 0: buckets of about 1 MiB. ``prefix``: begins the
        operations' names, for trainers that ranks use in different orders.

        Raises InvalidArgumentError for arguments that cannot work; a step raises it for sparse
        gradients, and MismatchError, on every rank, when the ranks' parameters differ.
        """
        if isinstance(optimizer, DistributedOptimizer):
            raise FrontEndArgumentError(
                "the optimizer is a DistributedOptimizer, which averages gradients, too: give the "
                "one that it was made of"
            )
        spec = spec_of(compression, op, gradient_predivide_factor, process_set)
        prefix = f"{prefix or ''}trainer."
        self._kolovod_store = Kolovod(process_set, spec, prefix, groups=groups_of(groups))
        self._kolovod_prefix = prefix
        self._kolovod_engine: Any = None  # of the world in which a new rank has been told
        super().__init__(
            params,
            optimizer,
            optimizer_params,
            kvstore=self._kolovod_store,
            update_on_kvstore=False,
        )
        self._kolovod_alike = Alike(self._optimizer, "num_update")

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Combine the gradients of all ranks and update the parameters, as gluon.Trainer does."""
        self._kolovod_meet()
        super().step(batch_size, ignore_stale_grad)

    def allreduce_grads(self) -> None:
        """Combine the gradients of all ranks, as gluon.Trainer does."""
        self._kolovod_meet()
        super().allreduce_grads()

    def _kolovod_meet(self) -> None:
        """Have Gluon, which broadcasts in the first step, do so for ranks that are new."""
        store = self._kolovod_store
        if not is_elastic() or not store.reducer.is_member() or transaction().is_elastic:
            return
        engine = collectives.membership(store.reducer.spec.process_set).engine
        if engine is self._kolovod_engine:
            return
        has_stepped = self._kolovod_engine is not None
        said = Objects(collectives.world).allgather_object(
            has_stepped, f"{self._kolovod_prefix}has_stepped", store.reducer.spec.process_set
        )
        self._kolovod_engine = engine
        if any(said) and not all(said):
            store.root = said.index(True)
            self._params_to_init = list(self._params)

    def _allreduce_grads(self) -> None:
        """Combine the gradients: Gluon calls this in ``step`` and ``allreduce_grads``."""
        reducer = self._kolovod_store.reducer
        trained = [parameter for parameter in self._params if parameter.grad_req != "null"]
        reducer.reduce_all([Gradient(each.name, each.list_grad()) for each in trained])
        if reducer.is_member():
            if not self._kolovod_alike.is_of(self._optimizer):  # ``load_states`` makes another
                self._kolovod_alike = Alike(self._optimizer, "num_update")
            process_set, name = reducer.spec.process_set, f"{self._kolovod_prefix}alike"
            compare(self._kolovod_alike, trained, collectives, process_set, name)
