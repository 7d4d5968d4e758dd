"""The hooks that PyTorch calls when backward has accumulated a gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from kolovod.errors import FrontEndArgumentError
from kolovod.private_apis.torch import current_backward
from kolovod.torch.buckets import Bucket, Buckets
from kolovod.torch.countdown import Countdown
from kolovod.torch.device import Cuda
from kolovod.torch.parameters import Parameters
from kolovod.torch.passes import Passes

Complete = Callable[[Bucket], None]


_by_id: dict[int, list[tuple[weakref.ref[Hooks], int]]] = {}
"""The hooks that have a parameter, the newest last, and its index there, by its ``id``."""


def _deal(parameter: int) -> None:
    """Let the newest of those that have it combine its gradient, and the others none."""
    alive = [(hooks, index) for each, index in _by_id[parameter] if (hooks := each()) is not None]
    for hooks, index in alive[:-1]:
        hooks._lend(index, alive[-1][0])
    for hooks, index in alive[-1:]:
        hooks._keep(index)


class _Removable(Protocol):
    def remove(self) -> None: ...


class TooManyPassesError(FrontEndArgumentError, AssertionError):
    """A gradient is computed again while it is on its way; Horovod's is an AssertionError."""


class Hooks:
    """One hook [1] on each parameter: it counts, and says which bucket is complete."""

    def __init__(
        self,
        parameters: Parameters,
        countdown: Countdown,
        buckets: Buckets,
        device: Cuda,
        passes: Passes,
    ) -> None:
        """No hook is there before ``put_on``. ``passes`` hears of completed gradients."""
        self.are_on = False
        self._parameters = parameters
        self._countdown = countdown
        self._buckets = buckets
        self._device = device
        self.passes = passes
        self._handles: dict[int, list[_Removable]] = {}  # by the parameter's index
        self._complete: Complete | None = None
        self.before: Callable[[int], None] | None = None
        """Is called with a parameter's index before backward adds to its gradient."""
        self.is_over = False
        """True: no hook is put on any more."""

    def put_on(self, indices: Iterable[int], complete: Complete) -> None:
        """Have ``complete(bucket)`` called when backward has finished the last of a bucket.

        A gradient is combined once: where several optimizers have a parameter, by the one that was
        made last.
        """
        if self.is_over:
            return
        self.are_on, self._complete = True, complete
        for index in indices:
            parameter = id(self._parameters.tensors[index])
            _by_id.setdefault(parameter, []).append((weakref.ref(self), index))
            _deal(parameter)

    def take_off(self, *, for_good: bool = False) -> None:
        """Leave the parameters alone; ``for_good``: whatever ``put_on`` says later."""
        self.is_over = self.is_over or for_good
        for index in [*self._handles, *self._parameters.lent]:
            parameter = id(self._parameters.tensors[index])
            self._lend(index, self)
            left = [each for each in _by_id.pop(parameter, []) if each[0]() not in (None, self)]
            if left:
                _by_id[parameter] = left
                _deal(parameter)
        self._parameters.lent.clear()
        self.are_on = False

    def _keep(self, index: int) -> None:
        """Count this gradient."""
        self._parameters.lent.pop(index, None)
        if index not in self._handles:
            assert self._complete is not None
            parameter, before = self._parameters.tensors[index], self.before
            after = self._hook(index, self._complete)
            wants = parameter.requires_grad
            parameter.requires_grad_(True)  # else PyTorch takes no hook; it may be frozen for now
            handles = self._handles[index] = [parameter.register_post_accumulate_grad_hook(after)]  # type: ignore[no-untyped-call]
            if before is not None:
                handles.append(parameter.register_hook(lambda grad: before(index)))  # type: ignore[no-untyped-call]
            parameter.requires_grad_(wants)

    def _lend(self, index: int, to: Hooks) -> None:
        """Do not count it: ``to`` does."""
        if index in self._handles:
            for handle in self._handles.pop(index):
                handle.remove()
        self._parameters.lent[index] = to.passes.reducer

    def _hook(self, index: int, complete: Complete) -> Callable[[torch.Tensor], None]:
        """Return a hook, which has everything at hand as a local: it runs once per gradient."""
        left, bucket_of, passes = self._countdown.left, self._buckets.of, self.passes
        is_on_device, stream_of = self._device.is_on_device, self._device.stream_of

        def hook(parameter: torch.Tensor) -> None:
            remaining = left[index] = left[index] - 1
            if remaining > 0:
                return
            if current_backward() != passes.known:
                passes.watch()
            bucket = bucket_of[index]
            if remaining < 0:
                self._one_more(index, bucket)
                return
            if is_on_device(parameter):  # backward uses the streams that forward has used
                bucket.streams.add(stream_of(parameter))
            bucket.missing -= 1
            if bucket.missing == 0:
                complete(bucket)

        return hook

    def _one_more(self, index: int, bucket: Bucket) -> None:
        """Count a gradient that comes once more in a pass, or after one that has failed.

        Raises TooManyPassesError if it has left already.
        """
        if bucket.is_sent:
            raise TooManyPassesError(
                f"the gradient of '{self._parameters.names[index]}' was computed again while it is "
                "on its way to the other ranks. Within one backward: for layers shared under "
                "torch.utils.checkpoint, use_reentrant=False. After a backward that has failed: "
                "optimizer.zero_grad() on all ranks throws its gradients away"
            )
        self._buckets.in_parts.add(index)
        self._countdown.left[index] = 0
