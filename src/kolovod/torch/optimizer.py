"""DistributedOptimizer: any PyTorch optimizer, stepping with all ranks' gradients."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from kolovod.core import spans
from kolovod.core.ops import Adasum, Average, Sum
from kolovod.core.process_sets import ProcessSet
from kolovod.elastic import steps
from kolovod.elastic.replicas import is_of_replicas, own_part
from kolovod.errors import InvalidArgumentError
from kolovod.gradients.compression import AnyCompressor, Compression
from kolovod.gradients.plan import Groups
from kolovod.gradients.spec import ReduceSpec, checked_passes
from kolovod.torch import verbs
from kolovod.torch.adasum import ByAdasum, by_adasum
from kolovod.torch.autograd import TorchCollectives
from kolovod.torch.comm_hooks import Hook
from kolovod.torch.parameters import checked_names, names_of_group
from kolovod.torch.parts import is_sharded
from kolovod.torch.reducer import GradientReducer
from kolovod.torch.wrapping import unwrapped, wrap

O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741
Closure = Callable[[], Any]
NamedParameters = Iterable[tuple[str, torch.Tensor]]


class Distributed(torch.optim.Optimizer):
    """What ``DistributedOptimizer`` adds to the class of the optimizer that it is given."""

    _kolovod_base: type[torch.optim.Optimizer]
    _kolovod_reducer: GradientReducer
    _kolovod_names: dict[int, str]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """As usual, but a GradScaler that asks for them finds gradients that are averaged.

        It divides gradients behind autograd's back (no version is counted), in ``unscale_`` and in
        its ``step``, both before our ``step``; and all ranks must see the same infinities. This is
        the only thing of ours that it touches before.
        """
        groups: list[dict[str, Any]] = self.__dict__["param_groups"]
        if sys._getframe(1).f_code.co_name == "_unscale_grads_":
            self._kolovod_prepare()
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    def _kolovod_prepare(self) -> None:
        """Average the gradients unless that is done, or not wanted."""
        reducer = self._kolovod_reducer
        if not reducer.follow_world():
            if not (reducer.skips or reducer.settled):
                reducer.synchronize()
            return
        if reducer.skips:
            if reducer.sending:
                raise InvalidArgumentError(
                    "gradients are on their way to the other ranks: call optimizer.synchronize() "
                    "before you step within optimizer.skip_synchronize()"
                )
        elif not reducer.settled:
            reducer.synchronize()

    def synchronize(self) -> None:
        """Wait until every gradient is the same on all ranks; ``step`` does so by itself.

        Call it to look at the averaged gradients, or to change them (PyTorch's clipping functions
        do so by themselves); the next ``step`` then does not repeat it. A parameter without a
        gradient here counts as zeros, if it has one on another rank. Raises MismatchError on every
        rank when the ranks' parameters differ, RankLostError and its siblings when a rank is gone.
        """
        if not self._kolovod_reducer.settled:
            self._kolovod_reducer.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within this context ``step`` uses the gradients as they are."""
        reducer = self._kolovod_reducer
        before, reducer.skips = reducer.skips, True
        try:
            yield
        finally:
            reducer.skips = before

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this context backward adds up gradients here only, and counts as no pass.

        The next backward outside of it sends the sum: for accumulating over a number of passes that
        varies, where ``backward_passes_per_step`` is fixed. ``step`` averages as always.
        """
        with self._kolovod_reducer.hold():
            yield

    @property
    def backward_passes_per_step(self) -> int:
        """How many backward passes make one step."""
        return self._kolovod_reducer.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes make one step; between steps, the same on all ranks."""
        self._kolovod_reducer.set_passes(checked_passes(passes))

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Let ``hook(state, bucket)`` combine gradients, as in PyTorch's DistributedDataParallel.

        It is called for each bucket as soon as backward has completed it, in the same order on all
        ranks, with a ``GradBucket``, and returns a future (or a handle of an ``_async`` verb) whose
        result takes the place of the bucket's buffer: the mean, of the same size. Hooks of PyTorch
        work as they are, on a process group of ``torch.distributed``; ``bucket.average`` needs
        none. A hook or state with a method ``reset()`` has it called when ranks meet in a new
        world. In a world of one no hook is called.

        Call it once, before the first backward, with equal hooks on all ranks. Raises
        InvalidArgumentError where that is too late, or the optimizer itself has a compression, an
        op other than Average, or a predivide factor.
        """
        self._kolovod_reducer.use_hook(state, hook)

    def step(self, closure: Closure | None = None) -> Any:
        """Synchronize, then step. A ``closure``'s loss is averaged, so that ranks decide alike."""
        reducer = self._kolovod_reducer
        if closure is not None:
            closure = self._synchronizing(closure)
        else:
            self._kolovod_prepare()
        with spans.span(spans.OPTIMIZER_STEP):
            result = super().step() if closure is None else super().step(closure)
        reducer.reset(used=True)
        return result

    # Tells Optimizer that this method runs its step hooks already (the base class's step does).
    step.hooked = True  # type: ignore[attr-defined]

    def _synchronizing(self, closure: Closure) -> Closure:
        reducer = self._kolovod_reducer

        def averaged() -> Any:
            loss = closure()
            if reducer.skips or not reducer.follow_world():
                self._kolovod_prepare()
                if reducer.spec.steps_apart and not reducer.skips and _is_tensor(loss):
                    steps.exactly(lambda: None)  # as the others do with their losses
                return loss
            if not reducer.settled:
                reducer.synchronize()
            if _is_tensor(loss):
                own = loss.detach()
                loss = steps.exactly(lambda: reducer.verbs.allreduce(own))
            return loss

        return averaged

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; those on their way are first waited for, on all ranks alike."""
        self._kolovod_reducer.drop()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As usual; the new parameters' gradients are averaged too."""
        super().add_param_group(param_group)
        group = len(self.param_groups) - 1
        self._kolovod_reducer.add(names_of_group(self, group, self._kolovod_names))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are plain optimizers of the base class: a copy has no world."""
        return unwrapped(self, self._kolovod_base)


def _is_tensor(loss: Any) -> bool:
    return isinstance(loss, torch.Tensor)


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
    collectives: TorchCollectives | None = None,
) -> O:
    """Make ``optimizer`` step with the gradients averaged over all ranks, and return it.

    Each gradient is sent as soon as backward has computed it; ``step`` waits for the last. The
    object stays what it was, an instance of its own class too, so learning-rate schedulers made
    before or after go on working. In a world of one nothing is added to backward.

    ``named_parameters``: ``model.named_parameters()``; it must name every parameter of the
    optimizer that wants a gradient, now or when it is thawed later, and may name more. Names must
    be the same on all ranks. None: parameters are known by their place in the optimizer.
    ``compression``: ``Compression.none``, ``.fp16``, ``.bf16``, between hosts ``.int8``, ``.int4``
    (see ``Compression``), or a ``Compressor``.
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
    ``process_set``: its members average among themselves, other ranks step with their own
    gradients. None: all ranks; of parameters that ``fully_shard`` has sharded, those that have the
    same parts in other replicas (``kolovod run --replica-size``).
    ``collectives``: over another world than the process's own (tests).

    Raises InvalidArgumentError for arguments that cannot work, NotInitializedError before
    ``init()``.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgumentError(
            f"optimizer is a {type(optimizer).__name__}: give a torch.optim.Optimizer"
        )
    if isinstance(optimizer, Distributed | ByAdasum):
        raise InvalidArgumentError("this optimizer is already distributed; wrap it once")
    if any(is_sharded(p) for group in optimizer.param_groups for p in group["params"]):
        process_set = _sharing_parts(optimizer, op, process_set, groups)
    spec = ReduceSpec.checked(
        compression,
        op,
        gradient_predivide_factor,
        process_set,
        (Average, Sum, Adasum),
        sparse_as_dense=sparse_as_dense,
    )
    passes = checked_passes(backward_passes_per_step)
    names = checked_names(optimizer, named_parameters)
    named = [
        pair
        for group in range(len(optimizer.param_groups))
        for pair in names_of_group(optimizer, group, names)
    ]
    # By name, so that the order of parameter groups may differ between ranks.
    named.sort(key=lambda pair: pair[0] or "")
    if collectives is None:
        collectives = verbs.collectives
    if process_set is not None:
        collectives = TorchCollectives(collectives.frontend, process_set.membership)
    if op == Adasum:
        return by_adasum(optimizer, named, spec, collectives, passes)
    grouped = Groups(groups, "parameters")
    grouped.check_known([parameter for _, parameter in named])
    members = {id(p): p for _, p in named if p.requires_grad or not grouped.is_number}
    reducer = GradientReducer(named, spec, passes, collectives, grouped.among(members))
    return _adopt(optimizer, reducer, names)


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
        raise InvalidArgumentError(
            f"the optimizer has sharded parameters, and {len(plain)} that are not, of shapes "
            f"{plain[:3]}: what ranks have the same of them is not known; shard all, or give each "
            "kind an optimizer of its own"
        )
    if op == Adasum or not isinstance(groups, int | None):
        raise InvalidArgumentError(
            "the optimizer's parameters are sharded: op is Average or Sum then, and groups a number"
        )
    if process_set is not None:
        return process_set
    if not is_of_replicas():
        raise InvalidArgumentError(
            "the optimizer's parameters are sharded, so each rank has other parts of them: give "
            "the process_set of the ranks that have the same ones, or start a job of replicas "
            "(kolovod run --elastic --replica-size N)"
        )
    return own_part()


def _adopt(optimizer: O, reducer: GradientReducer, names: dict[int, str]) -> O:
    wrap(optimizer, Distributed)
    assert isinstance(optimizer, Distributed)
    optimizer._kolovod_reducer = reducer
    optimizer._kolovod_names = names
    # The hooks know the reducer only, so dropping the optimizer frees the parameters of them.
    weakref.finalize(optimizer, reducer.close)
    return optimizer
