"""The verbs with arithmetic, and with them the whole process group."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from kolovod import _native, lifecycle
from kolovod.c10d.base import Tensors, copying_back, paired, several
from kolovod.c10d.flat import Flat
from kolovod.c10d.groups import engine_for
from kolovod.c10d.moving import Moving, check_part
from kolovod.c10d.order import is_sparse
from kolovod.c10d.sending import Sending
from kolovod.c10d.sparse import Parts, add_up
from kolovod.c10d.work import Work
from kolovod.core.ops import Op
from kolovod.core.verbs import ALLGATHER, ALLREDUCE, REDUCESCATTER
from kolovod.errors import GroupArgumentError

__all__ = ["ProcessGroupKolovod", "create"]

_RED_OP: Any = dist.ReduceOp.RedOpType
_OPS: dict[Any, int] = {
    _RED_OP.SUM: Op.Sum,
    _RED_OP.AVG: Op.Average,
    _RED_OP.MIN: Op.Min,
    _RED_OP.MAX: Op.Max,
    _RED_OP.PRODUCT: Op.Product,
    _RED_OP.PREMUL_SUM: Op.Sum,
}


class ProcessGroupKolovod(Moving, Sending):
    """Collectives of c10d. Made by ``init_process_group`` and ``new_group``.

    ``opts`` are c10d's options: the operation, root and timeout, and whether the caller waits at
    once. Every verb returns a ``Work``. It raises InvalidArgumentError for what can never work;
    what goes wrong later is raised by the Work's ``wait``.
    """

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce each tensor in place, all of them as one operation. Sparse ones are added up."""
        tensors = several("all_reduce", tensors)
        op, factor = _reduction(opts)
        if any(map(is_sparse, tensors)):
            return self._allreduce_sparse(tensors, opts)
        flats = [self._flat(tensor) for tensor in tensors]
        return self._start(
            ALLREDUCE,
            [flat.entry(flat.address) for flat in flats],
            opts,
            outputs=tensors,
            sources=flats,
            op=op,
            factor=factor,
            finish=copying_back(flats),
        )

    def _allreduce_sparse(self, tensors: Tensors, opts: Any) -> Work:
        if not all(map(is_sparse, tensors)):
            raise GroupArgumentError(
                "all_reduce: sparse tensors and others cannot be reduced as one operation"
            )
        if opts is not None and opts.reduceOp.op != _RED_OP.SUM:
            raise GroupArgumentError(
                f"all_reduce: {opts.reduceOp.op} of sparse tensors is not to be had; use SUM"
            )
        self._order.before_reading(tensors)
        parts = [Parts(tensor) for tensor in tensors]
        return self._start(
            ALLGATHER,
            [entry for each in parts for entry in each.tensors_to_gather()],
            opts,
            outputs=tensors,
            sources=[flat for each in parts for flat in each.flats],
            keep=parts,
            finish=lambda engine, number: add_up(engine, number, parts),
        )

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        """Start an ``allreduce``: that takes several tensors, too."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Tensors, opts: Any = None) -> Work:
        """``allreduce`` whose results only the root keeps."""
        op, factor = _reduction(opts)
        is_root = opts.rootRank == self.rank()
        flats = [self._flat(tensor) for tensor in several("reduce", tensors)]
        targets = [flat.dense if is_root else torch.empty_like(flat.dense) for flat in flats]
        return self._start(
            ALLREDUCE,
            [flat.entry(to.data_ptr()) for flat, to in zip(flats, targets, strict=True)],
            opts,
            outputs=tensors,
            sources=flats,
            keep=targets,
            op=op,
            factor=factor,
            finish=copying_back(flats) if is_root else None,
        )

    # reduce_scatter -----------------------------------------------------------------------------

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> Work:
        """Reduce ``input``; ``output`` receives this rank's part, and may lie in its place."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        """``reduce_scatter_single`` of several as one operation."""
        op, factor = _reduction(opts)
        pairs = []
        for source, output in paired("reduce_scatter", inputs, outputs):
            whole, part = self._flat(source), Flat(output, is_read=False)
            check_part("reduce_scatter", part, whole, self.size())
            whole.stay_apart(part, -self.rank() * part.bytes)
            pairs.append((whole, part))
        return self._into(REDUCESCATTER, pairs, opts, op=op, factor=factor)

    def reduce_scatter(
        self, outputs: Tensors, input_lists: Sequence[Tensors], opts: Any = None
    ) -> Work:
        """``outputs[i]`` receives the reduction of ``input_lists[i][rank]``; sizes may differ."""
        pairs = paired("reduce_scatter", input_lists, outputs)
        parts = [self._one_each("reduce_scatter", inputs) for inputs, _ in pairs]
        wholes = [self._joined(inputs) for inputs in parts]
        if all(len({part.numel() for part in inputs}) == 1 for inputs in parts):
            return self.reduce_scatter_single_coalesced(outputs, wholes, opts)
        return self._reduce_scatter_unevenly(outputs, wholes, parts, opts)

    def _reduce_scatter_unevenly(
        self, outputs: Tensors, wholes: Tensors, parts: Sequence[Tensors], opts: Any
    ) -> Work:
        """Reduce all of it everywhere, and keep this rank's part."""
        op, factor = _reduction(opts)
        flats = [Flat(whole) for whole in wholes]
        rank = self.rank()
        for inputs, output in zip(parts, outputs, strict=True):
            if inputs[rank].numel() != output.numel():
                raise GroupArgumentError(
                    f"reduce_scatter: the output of shape {tuple(output.shape)} is for an input of "
                    f"shape {tuple(inputs[rank].shape)}"
                )

        def finish(engine: _native.Engine, number: int) -> None:
            with torch.no_grad():
                for inputs, flat, output in zip(parts, flats, outputs, strict=True):
                    begin = sum(part.numel() for part in inputs[:rank])
                    output.copy_(flat.dense[begin : begin + output.numel()].view(output.shape))

        return self._start(
            ALLREDUCE,
            [flat.entry(flat.address) for flat in flats],
            opts,
            outputs=outputs,
            sources=flats,
            op=op,
            factor=factor,
            finish=finish,
        )

    # The names before PyTorch 2.13.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _reduction(opts: Any) -> tuple[int, float]:
    """The engine's op, and the factor for the inputs."""
    if opts is None:
        return Op.Sum, 1.0
    kind = opts.reduceOp.op
    op = _OPS.get(kind)
    if op is None:
        known = ", ".join(str(each).removeprefix("RedOpType.") for each in _OPS)
        raise GroupArgumentError(f"{kind} is not to be had: kolovod reduces with {known}")
    return op, float(opts.reduceOp.factor) if kind == _RED_OP.PREMUL_SUM else 1.0


_groups: weakref.WeakSet[ProcessGroupKolovod] = weakref.WeakSet()


def create(options: Any) -> ProcessGroupKolovod:
    """The group for c10d's ``_DistributedBackendOptions``.

    Raises what ``engine_for`` does, and InvalidArgumentError with a PyTorch before 2.8: it forgets
    what Python knows of an operation that is over, and may then wait for it for ever.
    """
    if not hasattr(dist.AllreduceOptions(), "asyncOp"):
        raise GroupArgumentError(
            f'init_process_group("kolovod") needs PyTorch 2.8 or later, and this is '
            f"{torch.__version__}: install a newer one, or train by "
            "kolovod.torch.DistributedOptimizer, which works with it"
        )
    if not _groups:
        # Before the world registers its own, so that it runs after that.
        atexit.register(_at_exit)
    world, leave = engine_for(
        options.store, options.group_rank, options.group_size, options.global_ranks_in_group
    )
    group = ProcessGroupKolovod(world, leave, options.timeout.total_seconds(), options.store)
    _groups.add(group)
    return group


def _at_exit() -> None:
    """Leave no thread in the engine while the interpreter goes away."""
    lifecycle.leave_at_exit()
    for group in list(_groups):
        group.shutdown()
