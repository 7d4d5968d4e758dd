"""Operations of one group on the same memory, one after the other.

c10d's groups on GPUs enqueue on a stream, so scripts may submit an operation on a tensor that an
earlier one still reads or writes, without waiting in between. The engine fuses what is pending at
the same time, each operation with the values from before. So what touches the memory of a pending
operation waits here before it is submitted; the order of submission is the same on all ranks, so
none waits for another in a circle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from kolovod.c10d import staging
from kolovod.torch import held

__all__ = ["Order", "is_in_memory", "is_plain", "is_sparse"]

Span = tuple[int, int]
"""The addresses from the first up to, not including, the second."""


class Pending(Protocol):
    """An operation that may still use memory; ``work.Work`` is one."""

    _handle: Any
    _stream: Any
    _is_message: bool

    def _land(self) -> Any: ...


def is_plain(tensor: object) -> bool:
    """Return whether it is a tensor whose elements lie in this process's memory."""
    return isinstance(tensor, torch.Tensor) and tensor.is_cpu and tensor.layout is torch.strided


def is_in_memory(tensor: object) -> bool:
    """Return whether it is a tensor whose elements lie in this process's memory or a GPU's."""
    return is_plain(tensor) or staging.is_on_device(tensor)


def is_sparse(tensor: object) -> bool:
    """Return whether it is a tensor of indices and values (COO)."""
    return isinstance(tensor, torch.Tensor) and tensor.layout is torch.sparse_coo


class _Use(NamedTuple):
    """The memory that one work uses."""

    read: list[Span]
    written: list[Span]
    held: list[object]


class Order:
    """Which memory the pending works of a group use."""

    def __init__(self) -> None:
        """Nothing is pending."""
        self._uses: dict[Pending, _Use] = {}

    def add(
        self, work: Pending, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]
    ) -> None:
        """Note that ``work`` is pending; hold it until it is complete, even if its caller does not.

        So is the memory: until then no script can have it resized.
        """
        memory = [held.hold(tensor) for tensor in (*read, *written) if is_plain(tensor)]
        self._uses[work] = _Use(list(map(_span, read)), list(map(_span, written)), memory)

    def land_before(self, work: Pending) -> None:
        """Land the collectives for GPUs that were submitted before ``work``, as on one stream.

        A message is none: it may wait for what another rank sends later.
        """
        for other in list(self._uses):
            if other is work:
                return
            if other._stream is not None and not other._is_message:
                other._land()

    def done(self, work: Pending) -> None:
        """Note that ``work`` is complete."""
        self._uses.pop(work, None)

    def before_reading(self, tensors: Iterable[torch.Tensor]) -> None:
        """Wait for the works that write any of them. Their errors are theirs to raise."""
        if self._uses:
            self._wait_for(tensors, is_writing=False)

    def before_writing(self, tensors: Iterable[torch.Tensor]) -> None:
        """Wait for the works that read or write any of them."""
        if self._uses:
            self._wait_for(tensors, is_writing=True)

    def _wait_for(self, tensors: Iterable[torch.Tensor], *, is_writing: bool) -> None:
        spans = [_span(tensor) for tensor in tensors]
        for work, use in list(self._uses.items()):
            taken = use.written + use.read if is_writing else use.written
            if any(a < d and c < b for a, b in spans for c, d in taken):
                work._land()
                staging.following(work._stream)
            elif work._stream is None and work._handle.poll():
                self.done(work)  # but not finished here: what is to follow it comes in its own time


def _span(tensor: torch.Tensor) -> Span:
    if is_sparse(tensor):  # which gets new memory; the object stands for it
        return id(tensor), id(tensor) + 1
    if not is_in_memory(tensor) or tensor.numel() == 0:
        return 0, 0
    begin = tensor.data_ptr()
    if tensor.is_contiguous():
        return begin, begin + tensor.nbytes
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()
