"""The record of how gradients are combined, made and checked once per optimizer."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kolovod.config import Settings, load
from kolovod.core.ops import Average, Sum
from kolovod.core.process_sets import ProcessSet
from kolovod.core.submission import WorldLike, no_process_set
from kolovod.core.transaction import transaction
from kolovod.core.world import current, current_tracked
from kolovod.errors import FrontEndArgumentError, NotInitializedError
from kolovod.gradients.compression import (
    NOTHING,
    AnyCompressor,
    Auto,
    Compression,
    Compressor,
    InBlocks,
    adapted,
    by_setting,
    choices_of,
)


@dataclass(frozen=True)
class ReduceSpec:
    """``postscale * op(prescale * gradient)`` over the members of ``process_set``."""

    op: int = Average
    prescale: float = 1.0
    postscale: float = 1.0
    compressor: Compressor = NOTHING
    sparse_as_dense: bool = False
    """Sparse gradients are sent with all their zeros."""
    process_set: Any = None  # a ProcessSet, or another Group where only its engine is asked for
    """None: all ranks."""
    choices: tuple[tuple[str, Compressor], ...] = ()
    """The compressors, by name, that ``compressor`` may become, itself first; empty: it stays."""

    @classmethod
    def checked(
        cls,
        compression: AnyCompressor,
        op: int,
        gradient_predivide_factor: float,
        process_set: ProcessSet | None,
        ops: tuple[int, ...],
        *,
        sparse_as_dense: bool = False,
        may_choose: bool = False,
    ) -> ReduceSpec:
        """Check what an optimizer was asked for. Raises InvalidArgumentError for what cannot work.

        ``compression``: where it is ``Compression.none``, ``--compression`` counts. ``ops``: those
        that the optimizer can do. ``may_choose``: it can change its compressor between two steps.
        """
        if op not in ops:
            *most, last = (known.name for known in map(type(Average), ops))
            raise FrontEndArgumentError(
                f"op is {op!r}: gradients are combined by {', '.join(most)} or {last}"
            )
        predivide: Any = gradient_predivide_factor
        try:
            fits = math.isfinite(predivide) and predivide > 0 and (predivide == 1 or op == Average)
        except TypeError:
            fits = False
        if not fits:
            raise FrontEndArgumentError(
                f"gradient_predivide_factor is {predivide!r}: give a number above 0, and other "
                "than 1 only with op Average"
            )
        if process_set is not None and not hasattr(process_set, "membership"):
            raise no_process_set(process_set)
        if compression is Compression.none and op in (Average, Sum):
            compression = by_setting(settings().compression)
        choices: tuple[tuple[str, Compressor], ...] = ()
        if isinstance(compression, Auto) and may_choose:
            choices = choices_of(compression)
            compression = choices[0][1]
        compressor = adapted(compression)
        if isinstance(compressor, InBlocks) and op not in (Average, Sum):
            raise FrontEndArgumentError(
                f"compression is {compressor.blocks!r}, which is for op Average or Sum, but op is "
                f"{type(Average)(op).name}: use .fp16 or .bf16"
            )
        factors = (1.0 / predivide, predivide)
        as_dense = bool(sparse_as_dense)
        return cls(op, *factors, compressor, as_dense, process_set, choices)

    @property
    def scale(self) -> float:
        """The total factor of a sum; exactly 1 where it differs from that by rounding only."""
        scale = self.prescale * self.postscale
        return 1.0 if math.isclose(scale, 1.0, rel_tol=1e-12) else scale

    def scale_of_sum(self, share: Any) -> Any:
        """Return the factor for a sum of gathered gradients; ``share``: one divided by the size."""
        return self.scale * share if self.op == Average else self.scale

    @property
    def is_member(self) -> bool:
        """True if this rank takes part. Raises NotInitializedError, for a process set."""
        return self.process_set is None or bool(self.process_set.included())

    @property
    def comes_later(self) -> bool:
        """True if the process set is not usable yet, but will be before a training begins."""
        return isinstance(self.process_set, ProcessSet) and self.process_set.comes_later

    @property
    def steps_apart(self) -> bool:
        """True if a rank that has no part in a reduction steps with the others all the same.

        In an elastic job a step is one of all ranks, also of those outside the process set.
        """
        return self.process_set is not None and transaction().is_elastic and current().size > 1

    def has_others(self, world: Callable[[], WorldLike], *, without_world: bool) -> bool:
        """Return whether there is another rank to combine gradients with, in the current world.

        ``world``: that of the members. ``without_world``: the answer where there is none.
        """
        try:
            return (self.process_set is None or self.is_member) and world().size > 1
        except NotInitializedError:
            return without_world


def settings() -> Settings:
    """Return the settings of the world, or those that it would have."""
    try:
        return current().settings
    except NotInitializedError:
        return load(os.environ)


def is_elastic() -> bool:
    """Return whether the world may change its size during the job. Raises NotInitializedError."""
    world = current()
    by_launcher = bool(world.environment.coordinator)
    return world.settings.elastic or by_launcher or transaction().is_elastic


def sends(world: WorldLike, *, is_traced: bool) -> bool:
    """Return whether gradients are sent among the ranks of ``world``.

    Those of one rank alone are not, unless they are of a program that is traced once, and run as it
    is when there are others.
    """
    if world.size > 1 or (is_traced and is_elastic()):
        return True
    current_tracked()  # a program without these operations is for this world
    return False


def checked_passes(passes: Any) -> int:
    """``backward_passes_per_step``, or InvalidArgumentError."""
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise FrontEndArgumentError(f"backward_passes_per_step is {passes!r}: give an int >= 1")
    return passes
