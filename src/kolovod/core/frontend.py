"""The few methods that a framework must offer to Kolovod.

Verbs, handles and objects are written once above them.

A front end turns a tensor of its framework into a *view*: plain numbers that the native core
understands. Nothing here copies unless the tensor's memory is not one dense row-major block.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, TypeVar

from kolovod import _native

T = TypeVar("T")
Moving = TypeVar("Moving", contravariant=True)

DEVICE_SHIFT = _native.DEVICE_SHIFT
ON_DEVICE = _native.ON_DEVICE
"""Added to the dtype in a view whose address is one of a GPU, with the GPU's number shifted by
DEVICE_SHIFT. Only worlds that take GPUs' tensors take such views."""


def plain_dtype(dtype: int) -> int:
    """The number of the dtype in a view, wherever the tensor is."""
    return dtype % ON_DEVICE


TensorView: TypeAlias = "tuple[int, tuple[int, ...], int, Any]"
"""``(dtype, shape, address, owner)``: the number of the dtype (``_native.DTYPES``), the shape in
elements, the address of the first byte, and the tensor whose memory that is. ``owner`` is the
viewed tensor itself, or a dense copy of it when the tensor's own memory is not dense or out of the
engine's reach. A plain tuple, because one is made for every small allreduce and a tuple is the
cheapest thing Python has."""


class Holder(Protocol[Moving]):
    """The tensors of a framework that may give them other memory while an operation goes on."""

    def hold(self, tensor: Moving) -> object:
        """Return an object that keeps the memory of ``tensor`` where it is, as long as it lives."""
        ...

    def place_of(self, tensor: Moving) -> int:
        """Return the address of the memory of ``tensor``."""
        ...

    def has_moved(self, tensor: Moving, place: int) -> bool:
        """Return whether ``tensor`` has other memory now than that at ``place``, where it was."""
        ...


class Frontend(Protocol[T]):
    """The tensors of one framework, as the verbs see them."""

    @property
    def holder(self) -> Holder[T] | None:
        """The holder of tensors' memory; None where a tensor keeps its own."""
        ...

    @property
    def framework(self) -> str:
        """The framework whose plain tensors ``_native.plain_views`` reads; "": it reads none."""
        ...

    def is_tensor(self, value: object) -> bool:
        """Return whether ``view`` accepts ``value``."""
        ...

    def view(self, tensor: T) -> TensorView:
        """Describe ``tensor`` for the engine.

        Raises InvalidArgumentError when it is not a tensor of this framework, lives on a device
        that the engine cannot reach, or has a dtype that the engine does not know.
        """
        ...

    def host_view(self, tensor: T) -> TensorView:
        """``view``, but of a copy in host memory also where the engine takes tensors on a GPU."""
        ...

    def empty_like(self, tensor: T) -> tuple[T, int]:
        """A new dense tensor of the same shape and dtype, uninitialised, and its address."""
        ...

    def claim(self, tensor: T) -> None:
        """Called before the engine writes into ``tensor``.

        Raises InvalidArgumentError when the framework says that it must not be written.
        """
        ...

    def copy_back(self, dense: T, tensor: T) -> None:
        """Write the values of ``dense`` into ``tensor``, of which it is a copy (in-place verbs)."""
        ...

    def placed(self, dense: T, like: T) -> T:
        """``dense``, which holds a result for ``like``, where ``like`` is: on its device."""
        ...

    def from_bytes(
        self,
        data: Any,
        dtype: int,
        shape: tuple[int, ...],
        like: T | None = None,
    ) -> T:
        """A tensor over ``data``, what ``_native.Engine.output`` gives; no copy.

        ``like``: of the same kind, if the framework has several.
        """
        ...
