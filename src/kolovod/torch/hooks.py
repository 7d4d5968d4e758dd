"""What PyTorch calls when backward has accumulated a gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from kolovod.errors import InvalidArgumentError
from kolovod.torch.buckets import Bucket, Buckets
from kolovod.torch.countdown import Countdown
from kolovod.torch.device import Cuda
from kolovod.torch.parameters import Parameters

Complete = Callable[[Bucket], None]


class _Removable(Protocol):
    def remove(self) -> None: ...


class TooManyPassesError(InvalidArgumentError, AssertionError):
    """A backward pass more than ``backward_passes_per_step``; Horovod's is an AssertionError."""


class Hooks:
    """One hook [1] on each parameter: it counts, and says which bucket is complete."""

    def __init__(
        self, parameters: Parameters, countdown: Countdown, buckets: Buckets, device: Cuda
    ) -> None:
        """None are there before ``put_on``."""
        self.are_on = False
        self._parameters = parameters
        self._countdown = countdown
        self._buckets = buckets
        self._device = device
        self._handles: list[_Removable] = []
        self._is_over = False

    def put_on(self, indices: Iterable[int], complete: Complete) -> None:
        """Have ``complete(bucket)`` called when backward has finished the last of a bucket."""
        if self._is_over:
            return
        self.are_on = True
        for index in indices:
            register = self._parameters.tensors[index].register_post_accumulate_grad_hook
            self._handles.append(register(self._hook(index, complete)))  # type: ignore[no-untyped-call]

    def take_off(self, *, for_good: bool = False) -> None:
        """Leave the parameters alone; ``for_good``: whatever ``put_on`` says later."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.are_on = False
        self._is_over = self._is_over or for_good

    def _hook(self, index: int, complete: Complete) -> Callable[[torch.Tensor], None]:
        """Everything is at hand as a local: this runs once per gradient."""
        left, bucket_of = self._countdown.left, self._buckets.of
        is_on_device, stream_of = self._device.is_on_device, self._device.stream_of

        def hook(parameter: torch.Tensor) -> None:
            remaining = left[index] = left[index] - 1
            if remaining > 0:
                return
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
        """One backward more than ``passes``: well if the earlier gradient was thrown away."""
        grad = self._parameters.tensors[index].grad
        if bucket.items:
            is_new = all(own is not grad for i, own, *_ in bucket.items if i == index)
        else:
            is_new = grad is None or grad._version == 0  # accumulating in place would count
        if not is_new:
            passes = self._countdown.passes
            raise TooManyPassesError(
                f"the gradient of '{self._parameters.names[index]}' was computed {passes + 1} "
                f"times since the last step(), but backward_passes_per_step is {passes}: call "
                f"step() after {passes}, or pass backward_passes_per_step={passes + 1}, or let all "
                "but the last run within optimizer.no_sync(); optimizer.zero_grad() throws a "
                "gradient away; for layers shared under torch.utils.checkpoint, use_reentrant=False"
            )
