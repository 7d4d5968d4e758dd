"""Communication hooks: a function of the user's combines the gradients of a bucket.

The interface is that of PyTorch's DDP, ``hook(state, bucket) -> future``, so hooks written for it
work here as well. Hooks are called in the order of the buckets on every rank, whatever order
backward makes gradients in, for what they submit to a process group is matched by its order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from kolovod.core.handles import Handle
from kolovod.core.ops import Average
from kolovod.errors import FrontEndArgumentError, InvalidArgumentError
from kolovod.gradients.compression import NOTHING
from kolovod.gradients.in_flight import Flight, InFlight
from kolovod.gradients.spec import ReduceSpec
from kolovod.torch import results
from kolovod.torch.autograd import TorchCollectives
from kolovod.torch.buckets import Bucket, Buckets, InFlightBucket, Item, Sends
from kolovod.torch.device import split
from kolovod.torch.frontend import TorchFrontend
from kolovod.torch.parameters import Parameters
from kolovod.torch.spare import Spare


class Future(Protocol):
    """The result of a hook: a ``torch.futures.Future``, a handle, or another with this method."""

    def wait(self) -> Any:
        """Wait for the combined buffer, and return it: a tensor or a list of one."""
        ...


Hook = Callable[[Any, "GradBucket"], Future]


class GradBucket:
    """The gradients that a hook is to combine; the methods are those of PyTorch's GradBucket."""

    def __init__(
        self,
        bucket: Bucket,
        index: int,
        is_last: bool,
        parameters: Sequence[torch.Tensor],
        buffer: torch.Tensor,
        verbs: TorchCollectives,
    ) -> None:
        """``buffer``: the gradients of ``parameters``, one after the other, a copy of them."""
        self._name = bucket.name
        self._index = index
        self._is_last = is_last
        self._parameters = parameters
        self._buffer = buffer
        self._verbs = verbs
        self._operations = 0

    def index(self) -> int:
        """Return the number of the bucket; the first that backward completes is 0."""
        return self._index

    def is_last(self) -> bool:
        """Return whether no other bucket of this step comes after it."""
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """The gradients of this rank, one-dimensional, of one dtype; a hook may overwrite them."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Take another tensor as the buffer. Raises InvalidArgumentError for another size."""
        _check_result(buffer, self._buffer, "GradBucket.set_buffer was given")
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Views of the buffer, of the shapes of the parameters."""
        return split(self._buffer, self._parameters)

    def parameters(self) -> list[torch.Tensor]:
        """The parameters whose gradients they are, in the order of the buffer."""
        return list(self._parameters)

    def average(self, tensor: torch.Tensor) -> Handle[torch.Tensor]:
        """Average over the optimizer's ranks, in place; all ranks call it in the same order.

        ``tensor``: any shape, the same on all ranks.
        """
        self._operations += 1
        name = f"{self._name}.{self._operations}"
        return self._verbs.allreduce_async_(tensor, name, Average)


@dataclass(frozen=True)
class _Part:
    """The part of a bucket's result that is one gradient's; opened as ``EncodedGradient`` is."""

    result: list[torch.Tensor]
    """The result, as soon as it is there."""
    begin: int
    shape: torch.Size

    def opened(self, scale_of_sum: float) -> torch.Tensor:
        """The combined gradient; hooks have scaled it."""
        end = self.begin + self.shape.numel()
        return self.result[0].view(-1)[self.begin : end].view(self.shape)


class HookSender(Sends):
    """Has a hook combine each bucket: takes the place of ``Sender`` in a reducer."""

    keeps_buckets = True

    def __init__(
        self,
        state: Any,
        hook: Hook,
        parameters: Parameters,
        buckets: Buckets,
        verbs: TorchCollectives,
        in_flight: InFlight,
    ) -> None:
        """``in_flight`` gets what the hook returns."""
        assert isinstance(verbs.frontend, TorchFrontend)
        self.device = verbs.frontend.device
        self._spare = Spare()
        self._state, self._hook = state, hook
        self._parameters, self._buckets = parameters, buckets
        self._verbs, self._in_flight = verbs, in_flight
        self._has_met = False

    def begin_world(self) -> None:
        """Reset what the hook has kept in an earlier world: it is of other ranks."""
        is_first, self._has_met = not self._has_met, True
        if is_first:
            return
        for kept in (self._hook, self._state):
            reset = getattr(kept, "reset", None)
            if callable(reset):
                reset()

    def store(
        self, done: Sequence[Item], is_used: Callable[[int], bool], scale_of_sum: float
    ) -> None:
        """Put results where the optimizer looks for them, as ``Sends`` says."""
        results.store(self._parameters.tensors, done, is_used, scale_of_sum, self._spare)

    def submit(
        self,
        bucket: Bucket,
        problems: list[InvalidArgumentError] | None = None,
        blank: bool = False,
    ) -> None:
        """Call the hook: see ``Sends``. From backward, in its turn: maybe later."""
        if problems is not None:
            self._call(bucket, problems, blank)
            return
        for each in self._buckets.all:
            if each.is_sent:
                continue
            if each.missing or not each.agreed:
                return
            self._call(each, None, False)

    def _call(
        self, bucket: Bucket, problems: list[InvalidArgumentError] | None, blank: bool
    ) -> None:
        if bucket.streams:
            self.device.follow(bucket.streams)
            bucket.streams.clear()
        result: list[torch.Tensor] = []
        items: list[Item] = []
        flat: list[torch.Tensor] = []
        unused: list[int] = []
        begin = 0
        tensors = self._parameters.tensors
        for index in bucket.indices:
            parameter = tensors[index]
            own = None if blank or index in self._parameters.lent else parameter.grad
            if own is not None and own.is_sparse:
                problem = FrontEndArgumentError(
                    f"gradient of '{self._parameters.names[index]}' is sparse, which communication "
                    "hooks cannot combine: use a dense one (sparse=False in nn.Embedding), or no "
                    "hook"
                )
                if problems is None:
                    raise problem
                problems.append(problem)
                own = None
            if own is None:
                unused.append(index)
            grad = torch.zeros_like(parameter, requires_grad=False) if own is None else own
            items.append((index, own, grad._version, grad, _Part(result, begin, parameter.shape)))
            flat.append(grad.detach().reshape(-1))
            begin += grad.numel()
        buffer = torch.cat(flat)
        place = self._buckets.all.index(bucket)
        given = GradBucket(
            bucket,
            place,
            place == len(self._buckets.all) - 1,
            [tensors[index] for index in bucket.indices],
            buffer,
            self._verbs,
        )
        with torch.no_grad():
            future = self._hook(self._state, given)
        if not callable(getattr(future, "wait", None)):
            raise FrontEndArgumentError(
                f"the communication hook {self._hook!r} returned a {type(future).__name__}: return "
                "a torch.futures.Future, or a handle of an _async verb"
            )
        wait = partial(self._wait, future, buffer, result)
        self._in_flight.add(Flight(InFlightBucket(bucket, items, []), wait, int))
        bucket.is_sent = True
        bucket.items, bucket.unused = items, unused

    def _wait(self, future: Future, sent: torch.Tensor, result: list[torch.Tensor]) -> None:
        with torch.no_grad():
            value = future.wait()
        if isinstance(value, list | tuple) and len(value) == 1:
            value = value[0]
        _check_result(value, sent, f"the communication hook {self._hook!r} came to")
        result.append(value)


def check_hook(hook: Any, spec: ReduceSpec, has_begun: bool) -> None:
    """Raise InvalidArgumentError where ``hook`` cannot combine what ``spec`` asks for."""
    if not callable(hook):
        raise FrontEndArgumentError(
            f"hook is a {type(hook).__name__}: give a function of state and bucket"
        )
    is_sent_as_it_is = spec.compressor is NOTHING and not spec.choices
    if not is_sent_as_it_is or spec.op != Average or spec.prescale != 1.0:
        raise FrontEndArgumentError(
            "a communication hook combines gradients by itself, so the optimizer must have the "
            "defaults: compression none (--compression and KOLOVOD_COMPRESSION, too), op Average, "
            "gradient_predivide_factor 1"
        )
    if spec.sparse_as_dense:
        raise FrontEndArgumentError(
            "a communication hook gets dense gradients only: make the DistributedOptimizer without "
            "sparse_as_dense"
        )
    if has_begun:
        raise FrontEndArgumentError(
            "register_comm_hook was called a second time, or after gradients had been averaged: "
            "call it once, before the first backward, on all ranks"
        )


def _check_result(value: Any, like: torch.Tensor, what: str) -> None:
    if not isinstance(value, torch.Tensor):
        raise FrontEndArgumentError(
            f"{what} a {type(value).__name__}: it must be a tensor of {like.numel()} elements, as "
            "the bucket's buffer"
        )
    if value.numel() != like.numel() or not value.is_contiguous():
        kind = "contiguous" if value.is_contiguous() else "non-contiguous"
        raise FrontEndArgumentError(
            f"{what} a {kind} tensor of {value.numel()} elements: the bucket's buffer has "
            f"{like.numel()}, contiguous"
        )
