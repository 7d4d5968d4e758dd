"""A compression that follows from the link: the least lossy one that hides behind backward."""

from __future__ import annotations

from collections.abc import Sequence

from kolovod.errors import FrontEndArgumentError

LADDERS: dict[str, tuple[str, ...]] = {
    "fp16": ("none", "fp16"),
    "bf16": ("none", "bf16"),
    "int8": ("none", "bf16", "int8"),
    "int4": ("none", "bf16", "int8", "int4"),
}
"""Names of ``Compression``, the least lossy first, by the lossiest one that is allowed."""


class Auto:
    """``Compression.auto("int8")``: none, ``bf16`` or ``int8``, for PyTorch's optimizers.

    The first rank compares how long gradients take between hosts with how long backward goes on
    after the first bucket has left, and all ranks take the least lossy one that fits, between two
    steps (``gradients/choosing.py``). Within one host nothing is compressed.
    """

    def __init__(self, most: str, exclude: Sequence[str] = ()) -> None:
        """``most``: the lossiest, "fp16", "bf16", "int8" or "int4". ``exclude``: see ``Blocks``.

        Raises InvalidArgumentError.
        """
        if most not in LADDERS:
            raise FrontEndArgumentError(f"auto({most!r}): expected one of {', '.join(LADDERS)}")
        self.most = most
        self.exclude = tuple(exclude)

    def __repr__(self) -> str:
        """Return the expression that a user writes."""
        return f"Compression.auto({self.most!r})"
