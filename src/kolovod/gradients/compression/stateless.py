"""Horovod's compressors as ours: the one place that knows their shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

from kolovod.errors import FrontEndArgumentError
from kolovod.gradients.compression.auto import Auto
from kolovod.gradients.compression.blocks import Blocks, InBlocks
from kolovod.gradients.compression.casts import NoneCompressor
from kolovod.gradients.compression.compressor import Compressor, Payload


class StaticCompressor(Protocol):
    """Horovod's shape: a class (or an object) with these two, which keeps nothing."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to be allreduced, and what ``decompress`` needs to know."""
        ...

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The combined values in their original dtype."""
        ...


AnyCompressor: TypeAlias = "Compressor | StaticCompressor | type[StaticCompressor] | Auto"
"""The types that ``compression=`` takes."""


class Stateless(Compressor):
    """A compressor of Horovod's shape as a Compressor."""

    keeps_state = False

    def __init__(self, given: StaticCompressor | type[StaticCompressor]) -> None:
        """``given``: has ``compress(tensor)`` and ``decompress(tensor, context)``."""
        self.given = given

    def compress(self, key: str, tensor: Any) -> Payload:
        """Compress by the static method of the class that was given."""
        small, context = self.given.compress(tensor)
        return Payload((small,), "allreduce", context)

    def decompress(self, key: str, payload: Payload, received: Sequence[Any]) -> Any:
        """Decompress by the static method of the class that was given."""
        return self.given.decompress(received[0], payload.context)


NOTHING = Stateless(NoneCompressor)
"""Sends gradients as they are."""


def adapted(compression: AnyCompressor) -> Compressor:
    """``compression`` as a Compressor. Raises InvalidArgumentError for what is none."""
    if isinstance(compression, Compressor):
        return compression
    if isinstance(compression, Auto):
        raise FrontEndArgumentError(
            f"compression is {compression!r}, which only PyTorch's DistributedOptimizer can do, by "
            f"op Average or Sum: give Compression.{compression.most}"
        )
    for method in ("compress", "decompress"):
        if not callable(getattr(compression, method, None)):
            raise FrontEndArgumentError(
                f"compression is {compression!r}: give Compression.none, .fp16, .bf16, .int8 or "
                ".int4"
            )
    if isinstance(compression, type) and issubclass(compression, Compressor):
        name = compression.__name__
        raise FrontEndArgumentError(
            f"compression is the class {name}: give an object of it, {name}(...)"
        )
    if isinstance(compression, Blocks):
        return InBlocks(compression)
    return NOTHING if compression is NoneCompressor else Stateless(compression)
