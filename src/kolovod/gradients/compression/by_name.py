"""Compressions by the names that users give."""

from __future__ import annotations

from collections.abc import Sequence

from kolovod.gradients.compression.auto import LADDERS, Auto
from kolovod.gradients.compression.blocks import Blocks
from kolovod.gradients.compression.casts import Compression
from kolovod.gradients.compression.compressor import Compressor
from kolovod.gradients.compression.stateless import AnyCompressor, adapted


def by_setting(text: str) -> AnyCompressor:
    """Return the compression that ``--compression`` names: "int8", or "auto:int8"."""
    way, _, most = text.partition(":")
    return Auto(most) if way == "auto" else _named(way, ())


def choices_of(auto: Auto) -> tuple[tuple[str, Compressor], ...]:
    """The compressors to choose from, by name, the least lossy first."""
    return tuple((name, adapted(_named(name, auto.exclude))) for name in LADDERS[auto.most])


def _named(name: str, exclude: Sequence[str]) -> AnyCompressor:
    given: AnyCompressor = getattr(Compression, name)
    return given(exclude) if isinstance(given, Blocks) else given
