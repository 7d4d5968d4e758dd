"""What training with seldom communication is in all front ends: when what is exchanged, and how.

Each front end has local SGD and DiLoCo in the shape that its framework suggests; the numbers are
the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kolovod.core.ops import Average
from kolovod.core.process_sets import ProcessSet
from kolovod.elastic import steps
from kolovod.errors import InvalidArgumentError
from kolovod.gradients import exchange
from kolovod.gradients.agreement import Agreement
from kolovod.gradients.compression import NOTHING, AnyCompressor, adapted
from kolovod.gradients.spec import ReduceSpec

Details = list[tuple[str, Any]]
"""What all ranks must have in common: names, and what they stand for."""


@dataclass(frozen=True)
class Schedule:
    """After which steps what is exchanged. Pure, so a number of steps may be a traced one, too.

    Fragments are numbered from 0. They take turns: of n fragments number f is sent whenever
    ``(f + 1) * sync_every // n`` steps of a period are over.
    """

    sync_every: int
    """Steps between two exchanges of a parameter."""
    warm_up_steps: int = 0
    """Steps that are synchronous, first."""
    delay: int = 0
    """Steps between the sending of a fragment and its application."""

    @classmethod
    def checked(
        cls, sync_every: Any, warm_up_steps: Any = 0, fragment_sync_delay: Any = 0
    ) -> Schedule:
        """What the user gives. Raises InvalidArgumentError for what cannot work."""
        every = checked_steps("sync_every", sync_every, 1)
        warm_up = checked_steps("warm_up_steps", warm_up_steps, 0)
        delay = checked_steps("fragment_sync_delay", fragment_sync_delay, 0)
        if delay >= every:
            raise InvalidArgumentError(
                f"fragment_sync_delay is {delay}: it must be less than sync_every, which is {every}"
            )
        return cls(every, warm_up, delay)

    def cut(self, number: Any, count: int) -> list[list[int]]:
        """``number`` fragments of ``count`` parameters, as the places of each one's.

        Every n-th parameter, so that each fragment has some of all depths. Raises
        InvalidArgumentError.
        """
        checked = checked_steps("fragments", number, 1)
        if checked > min(count, self.sync_every):
            raise InvalidArgumentError(
                f"fragments is {checked}: there are {count} parameters and {self.sync_every} "
                "steps; give no more than either"
            )
        return [list(range(count))[first::checked] for first in range(checked)]

    def check_turns(self, fragments: int) -> None:
        """Raise InvalidArgumentError for more fragments than there are steps."""
        if fragments > self.sync_every:
            raise InvalidArgumentError(
                f"{fragments} fragments cannot take turns in {self.sync_every} steps"
            )

    def warms_up(self, steps: Any) -> Any:
        """Whether the step after so many is a synchronous one."""
        return steps < self.warm_up_steps

    def begins(self, steps: Any) -> Any:
        """Whether the warm-up is over with so many steps: parameters are in common then."""
        return steps == self.warm_up_steps

    def sends(self, steps: Any, fragment: int = 0, of: int = 1) -> Any:
        """Whether fragment number ``fragment`` of ``of`` is sent after so many steps."""
        turn = (fragment + 1) * self.sync_every // of
        since = steps - self.warm_up_steps
        return (since >= turn) & ((since - turn) % self.sync_every == 0)

    def applies(self, steps: Any, fragment: int = 0, of: int = 1) -> Any:
        """Whether its mean is applied after so many steps."""
        return self.sends(steps - self.delay, fragment, of)

    def details(self) -> Details:
        """What ranks must agree on."""
        return [
            ("sync_every", self.sync_every),
            ("warm_up_steps", self.warm_up_steps),
            ("fragment_sync_delay", self.delay),
        ]

    def share(self, local_share: Any) -> float:
        """What remains of a rank's own parameters; None: 0 without a delay, else a half."""
        share = (0.5 if self.delay else 0.0) if local_share is None else local_share
        return checked_number("local_share", share, 0, 1)


class Exchange:
    """The mean over the ranks of tensors of a model, by a name of its own on all ranks."""

    def __init__(
        self, kind: str, compression: AnyCompressor, process_set: ProcessSet | None, verbs: Any
    ) -> None:
        """``kind``: what names begin with. ``verbs``: a framework's Collectives.

        Raises InvalidArgumentError.
        """
        given = adapted(compression)  # for which --compression does not count
        self.spec = ReduceSpec.checked(given, Average, 1.0, process_set, (Average,))
        self._plain = ReduceSpec.checked(NOTHING, Average, 1.0, process_set, (Average,))
        self._kind = kind
        self._verbs = verbs
        self._agreement = Agreement(verbs.world, process_set)

    @property
    def has_others(self) -> bool:
        """Whether this rank has others to exchange with, in the world of now."""
        return self.spec.has_others(
            lambda: self._verbs.membership(self.spec.process_set), without_world=False
        )

    def agree_once(self, mine: Callable[[], Details]) -> None:
        """Once in each world: all ranks have the same ``mine()``.

        Raises MismatchError on every rank where they do not, InvalidArgumentError in an elastic
        job.
        """
        if self._agreement.is_current():
            return
        self.refuse_elastic()
        self._agreement.reach(mine())

    def refuse_elastic(self) -> None:
        """Raise InvalidArgumentError in an elastic job."""
        if steps.ongoing() is not None:
            raise InvalidArgumentError(
                f"{self._kind} does not work in elastic jobs: their ranks agree after each step, "
                "which is what it leaves out; start the job without --elastic"
            )

    def start(
        self,
        what: str,
        tensors: Sequence[tuple[str, Any]],
        further: Sequence[Any] = (),
        *,
        is_compressed: bool = True,
    ) -> Callable[[], list[Any]]:
        """Send ``tensors``, which may be overwritten; what is returned waits for their means.

        ``further``: the same, as they are; their means come last.
        """
        spec = self.spec if is_compressed else self._plain
        return exchange.start(
            spec,
            f"{self._kind}.{self._agreement.number}.{what}",
            list(tensors),
            exchange.by(self._verbs, spec, in_place=True),
            exchange.scaling(self._verbs, spec),
            further,
        )


def checksum(array: npt.NDArray[Any]) -> int:
    """Of the bits of ``array``, to tell whether ranks have the same."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def checked_steps(label: str, value: Any, least: int) -> int:
    """A number of steps. Raises InvalidArgumentError, which calls it ``label``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidArgumentError(f"{label} is {value!r}: give an int of at least {least}")
    return value


def checked_number(label: str, value: Any, least: float, most: float) -> float:
    """A number within bounds. Raises InvalidArgumentError, which calls it ``label``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise InvalidArgumentError(f"{label} is {value!r}: give a number from {least} to {most}")
    return float(value)
