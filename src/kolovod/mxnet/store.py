"""Kolovod as one of MXNet's key-value stores, for scripts that are written with those.

    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", kvstore=mx.kv.create("kolovod"))

As MXNet's own distributed stores do, it adds gradients up: ``trainer.step(batch_size)`` takes the
batch of all ranks together. ``DistributedTrainer`` averages, and overlaps with backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias

import mxnet as mx

from kolovod.core.ops import Sum
from kolovod.core.transaction import transaction
from kolovod.errors import FrontEndArgumentError
from kolovod.gradients.plan import Groups
from kolovod.gradients.spec import ReduceSpec
from kolovod.mxnet.gradients import Gradient, GradientReducer
from kolovod.mxnet.verbs import MxnetCollectives, collectives

Arrays: TypeAlias = "mx.nd.NDArray | Sequence[mx.nd.NDArray]"


class Kolovod(mx.kv.KVStoreBase):  # type: ignore[misc]  # mxnet is untyped
    """The store; all ranks of the world (or of a process set) call it alike.

    There is no server: parameters are updated by each rank, so it takes no optimizer.
    """

    def __init__(
        self,
        process_set: Any = None,
        spec: ReduceSpec | None = None,
        prefix: str = "",
        verbs: MxnetCollectives = collectives,
        groups: Groups | None = None,
    ) -> None:
        """``spec``: of the same process set; None for sums as they are."""
        spec = spec or ReduceSpec(Sum, process_set=process_set)
        self.reducer = GradientReducer(verbs, spec, groups, prefix or "kvstore.")
        self._verbs = verbs
        self._set = process_set
        self._prefix = prefix or "kvstore."
        self.root = 0
        """The place, among those that take part, of the rank whose values ``broadcast`` takes."""

    @property
    def type(self) -> str:
        """The name of the store."""
        return "kolovod"

    @property
    def rank(self) -> int:
        """The place of this rank. Raises NotInitializedError."""
        return self._verbs.membership(self._set).rank

    @property
    def num_workers(self) -> int:
        """The number of ranks. Raises NotInitializedError."""
        return self._verbs.membership(self._set).size

    def broadcast(
        self, key: int | str, value: mx.nd.NDArray, out: Arrays, priority: int = 0
    ) -> None:
        """Put the ``value`` of ``root`` into ``out``; ``priority`` is of no use here.

        In an elastic job it is this rank's own ``value``: the state has made them equal, and who
        joins calls this when the others do not.
        """
        if self.reducer.is_member() and not transaction().is_elastic:
            root = self._set.ranks[self.root] if self._set else self.root
            name = f"{self._prefix}parameter.{key}"
            value = self._verbs.broadcast(value, root, name, self._set)
        for array in _several(out):
            value.copyto(array)

    def pushpull(
        self, key: int | str, value: Arrays, out: Arrays | None = None, priority: int = 0
    ) -> None:
        """Put the sum of all ranks' ``value`` into ``out``, None: into ``value``.

        ``value``: an array, or one for each of this rank's devices. ``priority`` is of no use here.
        """
        values = _several(value)
        outputs = values if out is None else _several(out)
        if out is not None:
            values = [values[0].copy(), *values[1:]]
        self.reducer.reduce([Gradient(str(key), values)])
        for array in outputs:
            if array is not values[0]:
                values[0].copyto(array)

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Return False: the store has no optimizer. Raises ValueError for other capabilities."""
        if capability.lower() == mx.kv.KVStoreBase.OPTIMIZER:
            return False
        raise FrontEndArgumentError(f"capability is {capability!r}: only 'optimizer' is known")

    def init(self, key: int | str, value: Any) -> NoReturn:
        """Raise InvalidArgumentError: only ``mx.mod.Module`` asks a store without optimizer so."""
        raise FrontEndArgumentError(
            "the store 'kolovod' works with gluon.Trainer: give a Module kvstore=None, "
            "optimizer=kolovod.mxnet.DistributedOptimizer(...), and the arg_params and aux_params "
            "that broadcast_parameters() has made equal"
        )

    def set_optimizer(self, optimizer: Any) -> NoReturn:
        """Raise InvalidArgumentError: each rank updates its parameters."""
        raise _no_optimizer()

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> NoReturn:
        """Raise InvalidArgumentError: ``Trainer.save_states`` has them."""
        raise _no_optimizer()

    def load_optimizer_states(self, fname: str) -> NoReturn:
        """Raise InvalidArgumentError: ``Trainer.load_states`` takes them."""
        raise _no_optimizer()

    def set_gradient_compression(self, compression_params: Any) -> NoReturn:
        """Raise InvalidArgumentError: MXNet's compressions are its own stores'."""
        raise FrontEndArgumentError(
            f"compression_params is {compression_params!r}, which only MXNet's own stores know: "
            "use DistributedTrainer(compression=Compression.fp16)"
        )


def _several(arrays: Arrays) -> list[mx.nd.NDArray]:
    return list(arrays) if isinstance(arrays, list | tuple) else [arrays]


def _no_optimizer() -> FrontEndArgumentError:
    return FrontEndArgumentError(
        "the store 'kolovod' has no optimizer: leave update_on_kvstore at None or False"
    )


def register() -> None:
    """Make ``mx.kv.create("kolovod")`` and the name itself work.

    Of a name without "dist" MXNet thinks that a rank with one device needs no store, and would
    train alone without a word; its releases have ended, so this stays as it is.
    """
    mx.kv.KVStoreBase.register(Kolovod)
    for module in (mx.model, mx.gluon.trainer, mx.module.module):
        original = module._create_kvstore

        def create(kvstore: Any, *arguments: Any, original: Any = original) -> Any:
            if isinstance(kvstore, str) and kvstore.lower() == "kolovod":
                kvstore = mx.kv.create(kvstore)
            return original(kvstore, *arguments)

        module._create_kvstore = create
