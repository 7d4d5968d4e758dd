"""Training with infrequent communication, as all front ends do it: when ranks exchange, and how.

Each front end has local SGD and DiLoCo in the shape that its framework suggests; the numbers are
the same.

In an elastic job an exchange is a step (elastic/steps.py): what is sent is kept until all ranks
have its mean, and sent again among those who are left if a rank is lost before. Between exchanges
no ticket is passed, so a loss stops nobody there; but a rank looks before each step of its own
whether the others are in another world by now (``Exchange.before_step``), where one of them may
wait that has missed the last ticket.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kolovod.core.ops import Average
from kolovod.core.process_sets import ProcessSet
from kolovod.core.transaction import Transaction, settle, transaction
from kolovod.elastic import ProcessSet as KeptProcessSet
from kolovod.elastic.independent_training import IndependentTraining
from kolovod.errors import CollectiveAbortedError, FrontEndArgumentError
from kolovod.gradients import exchange
from kolovod.gradients.agreement import Agreement
from kolovod.gradients.compression import NOTHING, AnyCompressor, adapted
from kolovod.gradients.spec import ReduceSpec

Details = list[tuple[str, Any]]
"""Facts that all ranks must have in common: names, and what they stand for."""


@dataclass(frozen=True)
class Schedule:
    """Says after which steps what is exchanged. A number of steps may be a traced one, too.

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
        """Check what the user gives. Raises InvalidArgumentError for what cannot work."""
        every = checked_steps("sync_every", sync_every, 1)
        warm_up = checked_steps("warm_up_steps", warm_up_steps, 0)
        delay = checked_steps("fragment_sync_delay", fragment_sync_delay, 0)
        if delay >= every:
            raise FrontEndArgumentError(
                f"fragment_sync_delay is {delay}: it must be less than sync_every, which is {every}"
            )
        return cls(every, warm_up, delay)

    def cut(self, number: Any, count: int) -> list[list[int]]:
        """Cut ``count`` parameters into ``number`` fragments; return the places of each one's.

        Every n-th parameter, so that each fragment has some of all depths. Raises
        InvalidArgumentError.
        """
        checked = checked_steps("fragments", number, 1)
        if checked > min(count, self.sync_every):
            raise FrontEndArgumentError(
                f"fragments is {checked}: there are {count} parameters and {self.sync_every} "
                "steps; give no more than either"
            )
        return [list(range(count))[first::checked] for first in range(checked)]

    def check_turns(self, fragments: int) -> None:
        """Raise InvalidArgumentError for more fragments than there are steps."""
        if fragments > self.sync_every:
            raise FrontEndArgumentError(
                f"{fragments} fragments cannot take turns in {self.sync_every} steps"
            )

    def warms_up(self, steps: Any) -> Any:
        """Return whether the step after ``steps`` steps is a synchronous one."""
        return steps < self.warm_up_steps

    def begins(self, steps: Any) -> Any:
        """Return whether the warm-up ends with ``steps`` steps: parameters are in common then."""
        return steps == self.warm_up_steps

    def sends(self, steps: Any, fragment: int = 0, of: int = 1) -> Any:
        """Return whether fragment number ``fragment`` of ``of`` is sent after ``steps`` steps."""
        turn = (fragment + 1) * self.sync_every // of
        since = steps - self.warm_up_steps
        return (since >= turn) & ((since - turn) % self.sync_every == 0)

    def applies(self, steps: Any, fragment: int = 0, of: int = 1) -> Any:
        """Return whether the fragment's mean is applied after ``steps`` steps."""
        return self.sends(steps - self.delay, fragment, of)

    def details(self) -> Details:
        """Return the options that must be equal on all ranks."""
        return [
            ("sync_every", self.sync_every),
            ("warm_up_steps", self.warm_up_steps),
            ("fragment_sync_delay", self.delay),
        ]

    def share(self, local_share: Any) -> float:
        """Return the weight of a rank's own parameters; None: 0 without a delay, else a half."""
        share = (0.5 if self.delay else 0.0) if local_share is None else local_share
        return checked_number("local_share", share, 0, 1)


class Exchange:
    """The mean over the ranks of tensors of a model, by a name of its own on all ranks."""

    def __init__(
        self,
        kind: str,
        compression: AnyCompressor,
        process_set: ProcessSet | None,
        verbs: Any,
        *,
        in_state: str = "",
    ) -> None:
        """``kind``: what names begin with. ``verbs``: a framework's Collectives.

        ``in_state``: what is in an elastic job's state; by default the LocalSGD or DiLoCo itself.
        Raises InvalidArgumentError.
        """
        self._in_state = in_state or kind
        given = adapted(compression)  # for which --compression does not count
        self.spec = ReduceSpec.checked(given, Average, 1.0, process_set, (Average,))
        self.plain = ReduceSpec.checked(NOTHING, Average, 1.0, process_set, (Average,))
        """``spec`` without compression."""
        self._kind = kind
        self._verbs = verbs
        self._agreement = Agreement(verbs.world, process_set)
        self.has_exchanged = False
        """Whether something was exchanged since the last commit; see IndependentTraining."""
        self._job: Transaction | None = None  # the elastic job in whose state it is
        self._trains_in: Transaction | None = None

    @property
    def has_others(self) -> bool:
        """True if this rank has others to exchange with, in the current world."""
        return self.spec.has_others(
            lambda: self._verbs.membership(self.spec.process_set), without_world=False
        )

    @property
    def takes_part(self) -> bool:
        """True where an exchange does more than keep what this rank has: with others, or as a step.

        In an elastic job it is a step of all ranks, also of one that is alone in its process set.
        """
        return transaction().is_elastic or self.has_others

    def agree_once(self, mine: Callable[[], Details]) -> None:
        """Make sure, once in each world, that all ranks have the same ``mine()``.

        Raises MismatchError on every rank where they do not. In an elastic job ranks have done so
        as they came into the world (``enter_world``); InvalidArgumentError if they have not.
        """
        if transaction().is_elastic:
            self.check_in_state()
        elif self.has_others and not self._agreement.is_current():
            self._agreement.reach(mine())

    def enter_world(self, mine: Callable[[], Details]) -> None:
        """Make sure that all ranks of an elastic job have the same ``mine()``, in a new world.

        Raises what ``IndependentTraining.enter_world`` raises.
        """
        process_set = self.spec.process_set
        if process_set is not None and not isinstance(process_set, KeptProcessSet):
            raise FrontEndArgumentError(
                f"process_set of {self._kind} is {process_set}, which ends with its world: in an "
                "elastic job give a kolovod.elastic.ProcessSet, and put it into the state"
            )
        self._job = transaction()
        if self.has_others:
            self._agreement.reach(mine())

    @property
    def is_in_state(self) -> bool:
        """True if it is in the state of the current elastic job."""
        return self._job is not None and self._job is transaction()

    def check_in_state(self) -> None:
        """Raise InvalidArgumentError in an elastic job that does not know of this one."""
        if transaction().is_elastic and not self.is_in_state:
            raise FrontEndArgumentError(
                f"{self._kind} is not in the state of this elastic job: put it there, instead of "
                "what it trains and of optimizers, as in "
                f"elastic.State({self._kind}={self._in_state}, step=0)"
            )

    def before_step(self) -> None:
        """Make ready for a step of this rank's own, in any job.

        In an elastic one it comes into the next world if the present one has failed. Raises what
        ``check_in_state`` and ``Transaction.follow`` raise.
        """
        job = transaction()
        if job.is_elastic:
            self.check_in_state()
            settle()
            job.follow()
            self._trains_in = job

    @property
    def has_begun(self) -> bool:
        """True if this rank has taken steps of its own in the elastic job.

        If so it keeps what it has where others are given the state.
        """
        return self._trains_in is not None and self._trains_in is transaction()

    def start(
        self,
        what: str,
        tensors: Sequence[tuple[str, Any]],
        further: Sequence[Any] = (),
        *,
        is_compressed: bool = True,
    ) -> Sent:
        """Send ``tensors``, which may be overwritten, by names that all ranks have for them.

        ``further``: the same, as they are; their means come last.
        """
        own = [*(tensor for _, tensor in tensors), *further]
        spec = self.spec if is_compressed else self.plain
        is_elastic = transaction().is_elastic
        if not is_elastic and not self.has_others:
            self.has_exchanged = True
            return Sent.arrived(own)
        payloads: list[exchange.Packed] = []

        def send() -> Callable[[], list[Any]]:
            if not payloads:  # once, since a compressor may keep a state
                payloads.extend(exchange.packed(spec.compressor, tensors))
            return exchange.start_packed(
                spec,
                f"{self._kind}.{self._agreement.number}.{what}",
                payloads,
                exchange.by(self._verbs, spec, in_place=not is_elastic),
                exchange.scaling(self._verbs, spec),
                further,
            )

        return Sent(self, own, send)

    @property
    def world(self) -> object:
        """The current world, in which what is on its way travels."""
        return self._verbs.world()


class Sent:
    """The tensors that this rank has sent in an exchange, until all ranks have the means."""

    def __init__(
        self, by: Exchange | None, own: list[Any], send: Callable[[], Callable[[], list[Any]]]
    ) -> None:
        """Send by ``send()``, in the current world; it returns what waits for the means.

        ``own``: what this rank gives to them, and what they are where it is alone.
        """
        self.own = own
        self.means: list[Any] | None = None
        """None: not all ranks have them yet."""
        self._by = by
        self._send = send
        self._wait: Callable[[], list[Any]] | None = None
        self._world: object = None  # in which it is on its way
        if by is not None:
            with contextlib.suppress(CollectiveAbortedError):  # who waits for it sends it again
                self._depart(by)

    @classmethod
    def arrived(cls, means: list[Any]) -> Sent:
        """Return an exchange of which all ranks have the ``means``."""
        made = cls(None, means, lambda: partial(list, means))
        made.means = means
        return made

    def __call__(self) -> list[Any]:
        """Return the means. Raises what ``arrive`` raises."""
        arrive([self])
        assert self.means is not None
        return self.means

    def so_far(self) -> list[Any]:
        """The means, or what this rank gives to them, for a checkpoint of its own."""
        return list(self.own if self.means is None else self.means)

    def attempt(self) -> list[Any]:
        """Return the means that come in the current world; the other ranks may not have them."""
        by = self._by
        assert by is not None
        if self._world is not by.world:
            self._depart(by)
        return list(self.own) if self._wait is None else self._wait()

    def has_arrived(self, means: list[Any]) -> None:
        """Note that all ranks have the ``means``."""
        self.means, self._wait = means, None
        if self._by is not None:
            self._by.has_exchanged = True

    def _depart(self, by: Exchange) -> None:
        self._wait = self._world = None
        world = by.world
        self._wait = self._send() if by.has_others else None
        self._world = world


class TrainsByExchange(IndependentTraining):
    """LocalSGD or DiLoCo of PyTorch or Keras; by itself it has the state of LocalSGD."""

    steps: int
    _exchange: Exchange

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state for a checkpoint, beside those of model and optimizers."""
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``. Raises InvalidArgumentError for another one's."""
        if set(state) != {"steps"}:
            raise FrontEndArgumentError(
                f"the state has {sorted(state)}, which is none of {type(self).__name__}'s"
            )
        self.steps = int(state["steps"])

    @property
    def has_exchanged(self) -> bool:
        """True if all ranks have exchanged something since the last commit."""
        return self._exchange.has_exchanged

    def committed(self) -> None:
        """Note that a commit has been made, as IndependentTraining says."""
        self._exchange.has_exchanged = False

    def drain_exchanges(self) -> Iterator[None]:
        """Return nothing to wait for: nothing is on its way between two steps."""
        return iter(())


def arrive(sent: Sequence[Sent]) -> None:
    """Wait until all ranks have the means of each of these; in an elastic job that is a step.

    Raises what waiting raises; in an elastic job what ``elastic.exactly`` does.
    """
    missing = [each for each in sent if each.means is None]
    if not missing:
        return
    results = transaction().run(lambda: [each.attempt() for each in missing], counts=True)
    for each, means in zip(missing, results, strict=True):
        each.has_arrived(means)


def checksum(array: npt.NDArray[Any]) -> int:
    """Return a checksum of the bits of ``array``, to tell whether ranks have the same."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def checked_steps(label: str, value: Any, least: int) -> int:
    """A number of steps. Raises InvalidArgumentError, which calls it ``label``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise FrontEndArgumentError(f"{label} is {value!r}: give an int of at least {least}")
    return value


def checked_number(label: str, value: Any, least: float, most: float) -> float:
    """A number within bounds. Raises InvalidArgumentError, which calls it ``label``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise FrontEndArgumentError(f"{label} is {value!r}: give a number from {least} to {most}")
    return float(value)
