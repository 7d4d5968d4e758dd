"""Sending gradients in blocks of 8 or 4 bits, which the engine encodes between hosts."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from kolovod.core.codecs import Codec
from kolovod.errors import FrontEndArgumentError
from kolovod.gradients.compression.compressor import Compressor, Key, Payload


class Blocks:
    """A ``Codec`` for gradients: ``Compression.int8`` and ``Compression.int4``.

    Biases and the scales of normalizations, which have one dimension and are few and sensitive,
    are sent as they are. ``Compression.int8(exclude=["head.*"])`` is the same with exceptions.
    """

    def __init__(
        self, codec: Codec, exclude: Sequence[str] = (), *, one_dimensional: bool = False
    ) -> None:
        """``exclude``: patterns (``fnmatch``) of names of what is sent as it is.

        The names are those of the framework: ``layer.weight`` of PyTorch's modules, paths of
        Keras's variables and of JAX's trees; the same on all ranks. ``one_dimensional``: encode
        tensors of one dimension, too. Raises InvalidArgumentError for a single string.
        """
        if isinstance(exclude, str):
            raise FrontEndArgumentError(f"exclude is {exclude!r}: give a list of patterns")
        self.codec = codec
        self.exclude = tuple(exclude)
        self.one_dimensional = one_dimensional

    def __call__(self, exclude: Sequence[str] = (), *, one_dimensional: bool = False) -> Blocks:
        """Return one with exceptions; see ``__init__``."""
        return Blocks(self.codec, exclude, one_dimensional=one_dimensional)

    def __repr__(self) -> str:
        """Return the expression that a user writes."""
        return f"Compression.{self.codec.name}"

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Return ``tensor`` and None, as in Horovod's shape: it is the engine that encodes."""
        return tensor, None

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Return ``tensor``."""
        return tensor

    def codec_of(self, name: str, dimensions: int) -> Codec:
        """Return the codec by which the gradient ``name`` is sent."""
        if dimensions < 2 and not self.one_dimensional:
            return Codec.none
        is_excluded = any(fnmatchcase(name, pattern) for pattern in self.exclude)
        return Codec.none if is_excluded else self.codec


class InBlocks(Compressor):
    """``Blocks`` as a Compressor."""

    keeps_state = False

    def __init__(self, blocks: Blocks) -> None:
        """``blocks``: which gradients, and how."""
        self.blocks = blocks

    def compress(self, key: str, tensor: Any) -> Payload:
        """Return ``tensor`` as it is, with its codec."""
        name = key.name if isinstance(key, Key) else key
        return Payload((tensor,), codec=self.blocks.codec_of(name, _dimensions(tensor)))

    def decompress(self, key: str, payload: Payload, received: Sequence[Any]) -> Any:
        """Return the tensor that came back."""
        return received[0]


def _dimensions(tensor: Any) -> int:
    known = getattr(tensor.shape, "rank", -1)  # TensorFlow's may be unknown while it traces
    return len(tensor.shape) if known == -1 else known or 2
