"""What the optimizers of all front ends are given: one error for what cannot work."""

from __future__ import annotations

import math
from typing import Any

from kolovod.core.ops import Average
from kolovod.core.submission import no_process_set
from kolovod.errors import InvalidArgumentError
from kolovod.gradients.compression import check_compression


def check_averaging(
    compression: Any, op: int, factor: Any, process_set: Any, ops: tuple[int, ...]
) -> None:
    """Raise InvalidArgumentError for how gradients cannot be combined.

    ``factor``: gradient_predivide_factor; ``ops``: those that the optimizer can do.
    """
    if op not in ops:
        *most, last = (known.name for known in map(type(Average), ops))
        raise InvalidArgumentError(
            f"op is {op!r}: gradients are combined by {', '.join(most)} or {last}"
        )
    try:
        fits = math.isfinite(factor) and factor > 0 and (factor == 1.0 or op == Average)
    except TypeError:
        fits = False
    if not fits:
        raise InvalidArgumentError(
            f"gradient_predivide_factor is {factor!r}: give a number above 0, and other than 1 "
            "only with op Average"
        )
    if process_set is not None and not hasattr(process_set, "membership"):
        raise no_process_set(process_set)
    check_compression(compression)


def checked_passes(passes: Any) -> int:
    """``backward_passes_per_step``, or InvalidArgumentError."""
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise InvalidArgumentError(f"backward_passes_per_step is {passes!r}: give an int >= 1")
    return passes
