"""Codecs: how floats are encoded between hosts (csrc/collectives/codec.h)."""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence
from typing import Any

from kolovod import _native
from kolovod.errors import InvalidArgumentError

_SHIFT = _native.CODEC_SHIFT
_has_looked = False


class Codec(enum.IntEnum):
    """Encodings in blocks (of 256; of 64) with a scale: an element takes 8 bits, or 4, not 32.

    Only tensors of floats (not float64) with 1024 elements or more are encoded, and only where an
    allreduce by Sum or Average crosses between hosts: within a host data stay as they are. An
    element is off by at most the largest magnitude of its block by 254 (int8) or by 14 (int4),
    twice: when a host sends it, and when their sum is sent back.
    """

    none = _native.CODECS["none"]
    int8 = _native.CODECS["int8"]
    int4 = _native.CODECS["int4"]


def codec_in(compression: Any) -> Codec:
    """The codec of a compressor, of Kolovod's or Horovod's shape; none for a framework's own."""
    codec = getattr(compression, "codec", Codec.none)
    return codec if isinstance(codec, Codec) else Codec.none


def codecs_of(compression: Any) -> tuple[int, ...]:
    """The numbers for ``Request.codecs`` of what a verb was given as ``compression``.

    One for all tensors, or in a list one for each: a Codec, or what has one as its ``codec``
    (``Compression.int8``). Raises InvalidArgumentError for others.
    """
    several = compression if isinstance(compression, list | tuple) else [compression]
    codecs = []
    for each in several:
        codec = getattr(each, "codec", each)
        if not isinstance(codec, Codec):
            raise InvalidArgumentError(
                f"compression is {each!r}: a verb takes Compression.none, .int8 or .int4; what "
                "optimizers take besides is to be applied to the tensor before"
            )
        codecs.append(int(codec))
    return tuple(codecs) if any(codecs) else ()


def coded(entries: Sequence[tuple[Any, ...]], codecs: Sequence[int]) -> list[Any]:
    """``entries`` for the engine, whose dtypes say how they are to be encoded, too."""
    each = _for_each(codecs, len(entries))
    return [
        (entry[0] + with_codec(codec), *entry[1:])
        for entry, codec in zip(entries, each, strict=True)
    ]


def tell_where_useless(world: Any) -> None:
    """Say on rank 0, once, that nothing is encoded in this world, whose ranks share a host."""
    global _has_looked
    if _has_looked or world.size == 1:  # others may come
        return
    _has_looked = True
    hosts: tuple[str, ...] = getattr(world, "hosts", ())
    if world.rank == 0 and len(set(hosts)) == 1:
        print(
            f"kolovod: compression changes nothing here: all {world.size} ranks are on host "
            f"{hosts[0]}, and only what crosses between hosts is encoded",
            file=sys.stderr,
        )


def with_codec(codec: int) -> int:
    """Return the number that is added to a dtype's in an entry, so that it names the codec, too."""
    return codec << _SHIFT


def in_digits(codecs: Sequence[int], count: int) -> str:
    """The codecs of ``count`` tensors as an attribute of an operation in a graph; "" for none."""
    return "".join(map(str, _for_each(codecs, count))) if codecs else ""


def _for_each(codecs: Sequence[int], count: int) -> Sequence[int]:
    if len(codecs) == 1:
        return [*codecs] * count
    if len(codecs) != count:
        raise InvalidArgumentError(
            f"compression has {len(codecs)} items for {count} tensors: give one for each, or one "
            "for all"
        )
    return codecs
