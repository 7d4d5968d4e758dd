"""What all ranks of an elastic job have alike, and what a rank that joins is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kolovod.core.objects import Objects
from kolovod.core.world import current
from kolovod.elastic.sampler import ElasticSampler
from kolovod.errors import InvalidArgumentError

__all__ = ["State", "share_by"]

Share = Callable[[str, Any], Any]
"""``share(name, value)``: returns, on all ranks, rank 0's value, or ``value`` changed to it."""

_shares: list[tuple[Callable[[Any], bool], Share]] = []


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
    that can be pickled, and what the front ends know, once they are imported: modules and
    optimizers of PyTorch, models and optimizers of Keras, modules and variables of TensorFlow, and
    pytrees with JAX's arrays. An ElasticSampler among them follows the steps and the ranks.
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

    def samplers(self) -> list[ElasticSampler]:
        """Those among the values."""
        values = (getattr(self, name) for name in self._names)
        return [value for value in values if isinstance(value, ElasticSampler)]

    def sync(self) -> None:
        """Give rank 0's values to all ranks. What kind each is of, rank 0 says, too."""
        values = {name: getattr(self, name) for name in self._names}
        sent = {  # of samplers ranks tell each other what each has (``running``)
            name: value for name, value in values.items() if not isinstance(value, ElasticSampler)
        }
        objects = Objects(current)
        kinds = {name: _kind(_share_of(value)) for name, value in sent.items()}
        kinds = objects.broadcast_object(kinds, 0, "elastic.kinds")
        for name, kind in kinds.items():
            if kind is not None:
                setattr(self, name, _share_by_kind(kind, sent.get(name))(name, sent.get(name)))
        plain = {name: value for name, value in sent.items() if kinds.get(name) is None}
        for name, value in objects.broadcast_object(plain, 0, "elastic.state").items():
            setattr(self, name, value)


def _share_of(value: Any) -> Share | None:
    return next((share for fits, share in _shares if fits(value)), None)


def _kind(share: Share | None) -> str | None:
    """What ``share`` is called on all ranks; None: it is none, and values are pickled."""
    return share and f"{share.__module__}.{share.__qualname__}"


def _share_by_kind(kind: str, value: Any) -> Share:
    """The one called ``kind``: that which fits ``value`` if several are."""
    own = _share_of(value)
    known = (share for share in (own, *(share for _, share in _shares)) if _kind(share) == kind)
    share = next(known, None)
    if share is None:
        raise InvalidArgumentError(
            f"rank 0 has a value in its state that is shared by {kind}, of which this process has "
            "not heard: import the same front ends, and call elastic.share_by, on all ranks"
        )
    return share
