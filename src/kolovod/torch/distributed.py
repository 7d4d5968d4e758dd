"""The methods of an optimizer that steps with the gradients of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kolovod.core.transaction import transaction
from kolovod.errors import FrontEndArgumentError
from kolovod.gradients.spec import checked_passes
from kolovod.private_apis.torch import is_unscaling, uncompiled
from kolovod.torch.comm_hooks import Hook
from kolovod.torch.parameters import Named, Roll
from kolovod.torch.reducer import GradientReducer
from kolovod.torch.wrapping import unwrapped

Closure = Callable[[], Any]


class Distributed(torch.optim.Optimizer):
    """The methods that ``DistributedOptimizer`` adds to the class of the optimizer it is given."""

    _kolovod_base: type[torch.optim.Optimizer]
    _kolovod_reducer: GradientReducer
    _kolovod_names: dict[int, str]
    _kolovod_roll: Roll
    _kolovod_owner: object

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups; where a GradScaler asks for them, gradients are averaged first.

        It divides gradients behind autograd's back (no version is counted), in ``unscale_`` and in
        its ``step``, both before our ``step``; and all ranks must see the same infinities. This is
        the only thing of ours that it touches before.
        """
        groups: list[dict[str, Any]] = self.__dict__["param_groups"]
        if is_unscaling(1):
            self._kolovod_prepare()
            return self._kolovod_to_unscale(groups)
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    @uncompiled
    def _kolovod_prepare(self) -> None:
        """Average the gradients unless that is done, or not wanted."""
        self._kolovod_take_up()
        reducer = self._kolovod_reducer
        if not reducer.follow_world():
            if not (reducer.skips or reducer.settled):
                reducer.synchronize()
            return
        if reducer.skips:
            if reducer.sending:
                raise FrontEndArgumentError(
                    "gradients of a backward that has failed are on their way to the other ranks: "
                    "call optimizer.zero_grad(), on all ranks, and backward() again"
                )
        elif not reducer.settled:
            reducer.synchronize()

    def _kolovod_to_unscale(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The groups whose gradients a GradScaler divides."""
        return groups

    def synchronize(self) -> None:
        """Wait until every gradient is the same on all ranks; ``step`` does so by itself.

        After ``backward()`` there is nothing left to do: it returns when they are. Gradients that
        came by no backward are averaged here; the next ``step`` does not repeat it. A parameter
        without a gradient here counts as zeros, if it has one on another rank. Raises MismatchError
        on every rank when the ranks' parameters differ, RankLostError and its siblings when a rank
        is gone.
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
        """The number of backward passes that make one step."""
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
            reducer.tell_health()
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
                    transaction().run(lambda: None)  # as the others do with their losses
                return loss
            if not reducer.settled:
                reducer.synchronize()
            if _is_tensor(loss):
                own = loss.detach()
                loss = transaction().run(lambda: reducer.verbs.allreduce(own))
            return loss

        return averaged

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; those on their way are first waited for, on all ranks alike."""
        self._kolovod_reducer.drop()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as every optimizer does; its parameters' gradients are averaged, too."""
        super().add_param_group(param_group)
        self._kolovod_take_up()

    def _kolovod_take_up(self) -> None:
        """Average the gradients of new parameters too, also of those put into ``param_groups``."""
        reducer, groups = self._kolovod_reducer, self.__dict__["param_groups"]
        new = self._kolovod_roll.new(groups, self._kolovod_names, reducer.parameters.names)
        if new:
            self._kolovod_add(new)

    def _kolovod_add(self, new: list[Named]) -> None:
        self._kolovod_reducer.add(new)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are plain optimizers of the base class: a copy has no world."""
        return unwrapped(self, self._kolovod_base)


def _is_tensor(loss: Any) -> bool:
    return isinstance(loss, torch.Tensor)
