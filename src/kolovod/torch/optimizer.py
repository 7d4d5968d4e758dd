"""DistributedOptimizer: any PyTorch optimizer, stepping with all ranks' gradients."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch

from kolovod.core.ops import Adasum, Average, Sum
from kolovod.core.process_sets import ProcessSet
from kolovod.elastic.replicas import is_of_replicas, own_part
from kolovod.errors import FrontEndArgumentError
from kolovod.gradients.compression import AnyCompressor, Compression
from kolovod.gradients.plan import Groups
from kolovod.gradients.spec import ReduceSpec, checked_passes
from kolovod.torch import verbs
from kolovod.torch.adasum import ByAdasum, by_adasum
from kolovod.torch.autograd import TorchCollectives
from kolovod.torch.distributed import Distributed
from kolovod.torch.parameters import Roll, checked_names, names_of_group
from kolovod.torch.parts import is_sharded
from kolovod.torch.reducer import GradientReducer
from kolovod.torch.sentinel import Sentinel
from kolovod.torch.shardable import check_shardable, stepped_as_wholes
from kolovod.torch.sharded import Sharded, shard
from kolovod.torch.wrapping import wrap

O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741
NamedParameters = Iterable[tuple[str, torch.Tensor]]


def DistributedOptimizer(
    optimizer: O,
    named_parameters: NamedParameters | None = None,
    compression: AnyCompressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    process_set: ProcessSet | None = None,
    *,
    gradient_predivide_factor: float = 1.0,
    groups: int | Sequence[Iterable[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    shard_state: bool = False,
    collectives: TorchCollectives | None = None,
) -> O:
    """Make ``optimizer`` step with the gradients averaged over all ranks, and return it.

    Each gradient is sent as soon as backward has computed it, and all are averages when
    ``backward()`` returns; what came by no backward is averaged in ``step``. The object stays what
    it was, an instance of its own class too, so learning-rate schedulers made before or after go on
    working. In a world of one nothing is added to backward.

    ``named_parameters``: ``model.named_parameters()``; it must name every parameter of the
    optimizer that wants a gradient, now or when it is thawed later, and may name more. Names must
    be the same on all ranks. None: parameters are known by their place in the optimizer.
    ``compression``: ``Compression.none``, ``.fp16``, ``.bf16``, between hosts ``.int8``, ``.int4``
    (see ``Compression``), ``.auto("int8")`` (see ``Auto``), or a ``Compressor``. Where it is
    ``none``, ``--compression`` counts.
    ``backward_passes_per_step``: gradients of so many passes are summed locally before they are
    sent.
    ``op``: Average or Sum. Adasum: every rank steps by itself, and the steps are combined; see
    kolovod.torch.adasum.
    ``gradient_predivide_factor``: with Average, divide gradients by it before they are added up,
    and the sum by what is left of the number of ranks: to keep float16 within its range.
    ``groups``: parameters whose gradients travel together: how many groups (neighbours by name), or
    lists of parameters; others are grouped by size. None: all by size.
    ``sparse_as_dense``: send sparse gradients with all their zeros, where many rows are touched;
    else their indices and values are gathered.
    ``shard_state``: each rank keeps the optimizer's state for its part of the parameters only, and
    steps with that part; parameters are gathered in ``step``, after which gradients are gone. A
    part is a range of elements, or, for optimizers that need whole tensors (Muon, Adafactor), some
    of these. ``state_dict()`` gathers, so all ranks call it. In an elastic job each part is on two
    ranks. See docs/gradients.md.
    ``process_set``: its members average among themselves, other ranks step with their own
    gradients. None: all ranks; of parameters that ``fully_shard`` has sharded, those that have the
    same parts in other replicas (``kolovod run --replica-size``).
    ``collectives``: over another world than the process's own (tests).

    Raises InvalidArgumentError for arguments that cannot work, NotInitializedError before
    ``init()``.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise FrontEndArgumentError(
            f"optimizer is a {type(optimizer).__name__}: give a torch.optim.Optimizer"
        )
    if isinstance(optimizer, Distributed | ByAdasum):
        raise FrontEndArgumentError("this optimizer is already distributed; wrap it once")
    if any(is_sharded(p) for group in optimizer.param_groups for p in group["params"]):
        if shard_state:
            raise FrontEndArgumentError(
                "the optimizer's parameters are sharded already, and its state with them: leave "
                "shard_state out"
            )
        process_set = _sharing_parts(optimizer, op, process_set, groups)
    spec = ReduceSpec.checked(
        compression,
        op,
        gradient_predivide_factor,
        process_set,
        (Average, Sum, Adasum),
        sparse_as_dense=sparse_as_dense,
        may_choose=True,
    )
    passes = checked_passes(backward_passes_per_step)
    names = checked_names(optimizer, named_parameters)
    named = [
        pair
        for group in range(len(optimizer.param_groups))
        for pair in names_of_group(optimizer.param_groups, group, names)
    ]
    # By name, so that the order of parameter groups may differ between ranks.
    named.sort(key=lambda pair: pair[0] or "")
    if collectives is None:
        collectives = verbs.collectives
    if process_set is not None:
        collectives = TorchCollectives(collectives.frontend, process_set.membership)
    if op == Adasum:
        if shard_state:
            raise FrontEndArgumentError("op Adasum combines steps of whole parameters: no shards")
        return by_adasum(optimizer, named, spec, collectives, passes)
    wholes = None
    if shard_state:
        check_shardable(optimizer, spec)
        wholes = stepped_as_wholes(optimizer)
    grouped = Groups(groups, "parameters")
    grouped.check_known([parameter for _, parameter in named])
    members = {id(p): p for _, p in named if p.requires_grad or not grouped.is_number}
    reducer = GradientReducer(named, spec, passes, collectives, grouped.among(members))
    return _adopt(optimizer, reducer, names, wholes)


def _sharing_parts(
    optimizer: torch.optim.Optimizer,
    op: int,
    process_set: ProcessSet | None,
    groups: int | Sequence[Iterable[torch.Tensor]] | None,
) -> ProcessSet:
    """The ranks that have the same parts of the parameters, of which some are sharded.

    Raises InvalidArgumentError for what cannot be averaged among them.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    plain = [tuple(p.shape) for p in parameters if p.requires_grad and not is_sharded(p)]
    if plain:
        raise FrontEndArgumentError(
            f"the optimizer has sharded parameters, and {len(plain)} that are not, of shapes "
            f"{plain[:3]}: what ranks have the same of them is not known; shard all, or give each "
            "kind an optimizer of its own"
        )
    if op == Adasum or not isinstance(groups, int | None):
        raise FrontEndArgumentError(
            "the optimizer's parameters are sharded: op is Average or Sum then, and groups a number"
        )
    if process_set is not None:
        return process_set
    if not is_of_replicas():
        raise FrontEndArgumentError(
            "the optimizer's parameters are sharded, so each rank has other parts of them: give "
            "the process_set of the ranks that have the same ones, or start a job of replicas "
            "(kolovod run --elastic --replica-size N)"
        )
    return own_part()


class _Owner:
    """Lives as long as the fields of an optimizer."""


def _adopt(
    optimizer: O, reducer: GradientReducer, names: dict[int, str], wholes: set[int] | None
) -> O:
    """``wholes``: see ``shard``; None: no shards."""
    wrap(optimizer, Distributed if wholes is None else Sharded)
    assert isinstance(optimizer, Distributed)
    optimizer._kolovod_reducer = reducer
    reducer.watch(Sentinel(optimizer, reducer.parameters))
    optimizer._kolovod_names = names
    optimizer._kolovod_roll = Roll(optimizer)
    reducer.take_up = weakref.WeakMethod(optimizer._kolovod_take_up)
    if isinstance(optimizer, Sharded):
        optimizer._kolovod_sender = shard(optimizer, reducer, wholes or set())
        optimizer._kolovod_gathering = None
    # The hooks know the reducer only, so dropping the optimizer frees the parameters of them. It is
    # dropped with its fields: a wrapper that has taken those over goes on being distributed.
    optimizer._kolovod_owner = owner = _Owner()
    weakref.finalize(owner, reducer.close)
    return optimizer
