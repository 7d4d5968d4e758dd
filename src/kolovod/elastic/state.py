"""What all ranks of an elastic job have alike, and what a rank that joins is given."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

from kolovod.core.objects import Objects
from kolovod.core.world import current
from kolovod.elastic.membership_log import MembershipLog
from kolovod.elastic.sampler import ElasticSampler
from kolovod.errors import InvalidArgumentError

__all__ = ["State", "share_by"]

V = TypeVar("V")
Keep = Callable[[Any], Callable[[], None]]
"""``keep(value)``: returns what makes ``value`` again what it is now, but for what only the step's
update changes."""
Share = Callable[[str, Any], Any]
"""``share(name, value)``: returns, on all ranks, rank 0's value, or ``value`` changed to it."""

SizeCallback = Callable[[int, int], None]


def _share_log(name: str, log: MembershipLog) -> MembershipLog:
    log.load_state_dict(Objects(current).broadcast_object(log.state_dict(), 0, f"elastic.{name}"))
    return log


_shares: list[tuple[Callable[[Any], bool], Share, Keep | None]] = [
    (lambda value: isinstance(value, MembershipLog), _share_log, None)
]


def share_by(fits: Callable[[Any], bool], share: Share, keep: Keep | None = None) -> None:
    """Have values that ``fits(value)`` says yes to given to other ranks by ``share``.

    For a front end's models and optimizers; what nobody has said this of is pickled. What was said
    last counts. ``share`` runs the same operations on all ranks; where a rank is lost meanwhile it
    is called once more, so on ranks that have rank 0's value already it must leave that as it is.
    ``keep``: for ``run(redo="recompute")``, where a step changes more than its update does: batch
    normalisation, in forward.
    """
    _shares.insert(0, (fits, share, keep))


def _known(value: Any) -> tuple[Share, Keep | None] | None:
    return next(((share, keep) for fits, share, keep in _shares if fits(value)), None)


class State:
    """Values that all ranks have alike, as attributes.

    What they are, rank 0 says: as the job begins, and to ranks that join. They may be of any kind
    that can be pickled, and what front ends know: PyTorch's modules and optimizers. An
    ElasticSampler and a MembershipLog among them follow the steps and the ranks.
    """

    def __init__(self, **values: Any) -> None:
        """``values``: by name. Their names are the same on all ranks.

        Raises InvalidArgumentError for a name that a State uses itself.
        """
        for name in values:
            if name.startswith("_") or hasattr(State, name):
                raise InvalidArgumentError(
                    f"a value of the state is called {name!r}, which State uses itself: give it "
                    "another name, without a leading underscore"
                )
        self._names = list(values)
        self._on_commit: Callable[[State], None] | None = None
        self._size = 0  # that the values are made for; 0: not known yet
        self._size_callbacks: list[SizeCallback] = []
        for name, value in values.items():
            setattr(self, name, value)

    def commit(self) -> None:
        """Say that the state is whole: a step is over. All ranks call it after the same steps.

        Ranks join and leave here. As long as nobody wants to, it costs nothing.
        """
        if self._on_commit is not None:
            self._on_commit(self)
            return
        for sampler in self.samplers():
            sampler.record_step()
        for log in self.logs():
            world = current()
            log.follow(world.members, world.hosts, world.rank)
            log.record(world.members)

    def on_size_change(self, callback: SizeCallback) -> SizeCallback:
        """Have ``callback(before, after)`` called when the job has another number of ranks.

        On all ranks alike, between two steps and with the same values of the state, so that each
        change counts once: a rank that joins has the state of the others, and hears of its own
        coming as they do. The place to scale a learning rate with the batch. ``callback`` runs no
        operations. Returns it, and so serves as a decorator.
        """
        self._size_callbacks.append(callback)
        return callback

    def has_size(self, size: int) -> None:
        """Say how many ranks there are from now on: on all ranks, between two steps."""
        before, self._size = self._size, size
        if before not in (0, size):
            for callback in self._size_callbacks:
                callback(before, size)

    def samplers(self) -> list[ElasticSampler]:
        """Those among the values."""
        return self._of(ElasticSampler)

    def logs(self) -> list[MembershipLog]:
        """Those among the values."""
        return self._of(MembershipLog)

    def _of(self, kind: type[V]) -> list[V]:
        values = (getattr(self, name) for name in self._names)
        return [value for value in values if isinstance(value, kind)]

    def keep(self) -> Callable[[], None]:
        """Returns what makes the values what they are now, where a step is computed again.

        What is pickled for others is copied; of models and optimizers what ``share_by`` says.
        """
        restores: list[Callable[[], None]] = []
        plain: dict[str, Any] = {}
        for name in self._names:
            value = getattr(self, name)
            if isinstance(value, ElasticSampler):  # goes on from the last step that was recorded
                continue
            known = _known(value)
            if known is None:
                plain[name] = value
            elif known[1] is not None:
                restores.append(known[1](value))
        kept = copy.deepcopy(plain)

        def restore() -> None:
            for name, value in copy.deepcopy(kept).items():  # it may be needed again
                setattr(self, name, value)
            for each in restores:
                each()

        return restore

    def sync(self) -> None:
        """Give rank 0's values to all ranks."""
        plain: dict[str, Any] = {"_size": self._size}
        for name in self._names:
            value = getattr(self, name)
            if isinstance(value, ElasticSampler):  # ranks tell it what each has (``running``)
                continue
            known = _known(value)
            if known is None:
                plain[name] = value
            else:
                setattr(self, name, known[0](name, value))
        found = Objects(current).broadcast_object(plain, 0, "elastic.state")
        for name, value in found.items():
            setattr(self, name, value)
