"""What all ranks of an elastic job have alike, and what a rank that joins is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from kolovod.core.objects import Objects
from kolovod.core.world import current
from kolovod.elastic.membership_log import MembershipLog
from kolovod.elastic.sampler import ElasticSampler

__all__ = ["State", "share_by"]

V = TypeVar("V")
Share = Callable[[str, Any], Any]
"""``share(name, value)``: returns, on all ranks, rank 0's value, or ``value`` changed to it."""


def _share_log(name: str, log: MembershipLog) -> MembershipLog:
    log.load_state_dict(Objects(current).broadcast_object(log.state_dict(), 0, f"elastic.{name}"))
    return log


_shares: list[tuple[Callable[[Any], bool], Share]] = [
    (lambda value: isinstance(value, MembershipLog), _share_log)
]


def share_by(fits: Callable[[Any], bool], share: Share) -> None:
    """Have values that ``fits(value)`` says yes to given to other ranks by ``share``.

    For a front end's models and optimizers; what nobody has said this of is pickled. What was said
    last counts. ``share`` runs the same operations on all ranks; where a rank is lost meanwhile it
    is called once more, so on ranks that have rank 0's value already it must leave that as it is.
    """
    _shares.insert(0, (fits, share))


class State:
    """Values that all ranks have alike, as attributes.

    What they are, rank 0 says: as the job begins, and to ranks that join. They may be of any kind
    that can be pickled, and what front ends know: PyTorch's modules and optimizers. An
    ElasticSampler and a MembershipLog among them follow the steps and the ranks.
    """

    def __init__(self, **values: Any) -> None:
        """``values``: by name. Their names are the same on all ranks."""
        self._names = list(values)
        self._on_commit: Callable[[State], None] | None = None
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

    def samplers(self) -> list[ElasticSampler]:
        """Those among the values."""
        return self._of(ElasticSampler)

    def logs(self) -> list[MembershipLog]:
        """Those among the values."""
        return self._of(MembershipLog)

    def _of(self, kind: type[V]) -> list[V]:
        values = (getattr(self, name) for name in self._names)
        return [value for value in values if isinstance(value, kind)]

    def sync(self) -> None:
        """Give rank 0's values to all ranks."""
        plain: dict[str, Any] = {}
        for name in self._names:
            value = getattr(self, name)
            if isinstance(value, ElasticSampler):  # ranks tell it what each has (``running``)
                continue
            share = next((share for fits, share in _shares if fits(value)), None)
            if share is None:
                plain[name] = value
            else:
                setattr(self, name, share(name, value))
        found = Objects(current).broadcast_object(plain, 0, "elastic.state")
        for name, value in found.items():
            setattr(self, name, value)
