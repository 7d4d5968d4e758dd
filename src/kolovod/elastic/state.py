"""The state that all ranks of an elastic job have alike, and that a rank that joins is given."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

from kolovod.core.objects import Objects
from kolovod.core.world import current
from kolovod.elastic.dealt_data import DealtData
from kolovod.elastic.handing_over import Portions
from kolovod.elastic.independent_training import IndependentTraining
from kolovod.elastic.membership_log import MembershipLog
from kolovod.elastic.outlines import Outline
from kolovod.elastic.process_sets import ProcessSet
from kolovod.errors import ElasticArgumentError

__all__ = ["State", "has_state_dict", "load_state", "share_by"]

V = TypeVar("V")
Keep = Callable[[Any], Callable[[], None]]
"""``keep(value)``: returns what makes ``value`` again what it is now, but for what only the step's
update changes."""
Share = Callable[[str, Any], Any]
"""``share(name, value)``: returns, on all ranks, rank 0's value, or ``value`` changed to it."""
HandOver = Callable[[str, Any, "State"], Portions | None]
"""``hand_over(name, value, state)``: makes ``value`` rank 0's on all ranks, but for what is in the
portions that it returns, which changes in the update of a step only. None: that is nothing."""
Within = Callable[[str, Any], contextlib.AbstractContextManager[object]]
"""``within(name, value)``: returns a context in which the function of ``elastic.run`` runs."""

_Kind = tuple[str, bool]
SizeCallback = Callable[[int, int], None]
LeaveCallback = Callable[[int], None]


def _share_log(name: str, log: MembershipLog) -> MembershipLog:
    log.load_state_dict(Objects(current).broadcast_object(log.state_dict(), 0, f"elastic.{name}"))
    return log


def has_state_dict(value: Any) -> bool:
    """Return whether ``value`` can save and load what it is, as schedules can."""
    kind = type(value)  # an object may claim to have any attribute
    return callable(getattr(kind, "state_dict", None)) and callable(
        getattr(kind, "load_state_dict", None)
    )


def _share_state_dict(name: str, value: Any) -> Any:
    """Have ``value`` load what rank 0's has: it may refer to other values, as a schedule does."""
    is_root = current().rank == 0
    own = value.state_dict() if is_root else None
    state = Objects(current).broadcast_object(own, 0, f"elastic.{name}")
    if not is_root:
        load_state(value, state)
    return value


def load_state(value: Any, state: Any) -> None:
    """Have ``value`` load what its ``state_dict`` was."""
    if not (isinstance(state, Mapping) and not state):  # which a scaler not in use refuses
        value.load_state_dict(state)


def _keep_state_dict(value: Any) -> Callable[[], None]:
    kept = copy.deepcopy(value.state_dict())

    return lambda: load_state(value, copy.deepcopy(kept))


class _Way(NamedTuple):
    """The way in which values of a kind get to other ranks."""

    fits: Callable[[Any], bool]
    share: Share
    keep: Keep | None = None
    hand_over: HandOver | None = None
    within: bool = False
    tensors: Callable[[Any], Iterable[Any]] = lambda value: ()

    @property
    def kind(self) -> str:
        """The name by which all ranks call it."""
        return f"{self.share.__module__}.{self.share.__qualname__}"


_ways = [
    _Way(lambda value: isinstance(value, MembershipLog), _share_log),
    _Way(has_state_dict, _share_state_dict, _keep_state_dict, within=True),
]
_contexts: list[tuple[Callable[[Any], bool], Within]] = []


def share_by(
    fits: Callable[[Any], bool],
    share: Share,
    keep: Keep | None = None,
    hand_over: HandOver | None = None,
    *,
    within: bool = False,
    tensors: Callable[[Any], Iterable[Any]] = lambda value: (),
) -> None:
    """Have values that ``fits(value)`` says yes to given to other ranks by ``share``.

    For a front end's models and optimizers; what nobody has said this of is pickled. What was said
    last counts. ``share`` runs the same operations on all ranks; where a rank is lost meanwhile it
    is called once more, so on ranks that have rank 0's value already it must leave that as it is.
    ``keep``: for ``run(redo="recompute")``, where a step changes more than its update does: batch
    normalisation, in forward. ``hand_over``: for ``run(join="during_step")``, instead of ``share``.
    ``within``: also those that are within lists, dicts and other objects of the state; ``fits`` is
    asked about all that is there. ``tensors(value)``: tensors or arrays that it changes in place.
    """
    _ways.insert(0, _Way(fits, share, keep, hand_over, within, tensors))


def run_within(fits: Callable[[Any], bool], within: Within) -> None:
    """Run the function of ``run`` in a context of each value that fits, in an elastic job.

    This is for values that communicate by themselves: one may be made elastic for that time, and an
    error of the function may be replaced by a clearer one.
    """
    _contexts.append((fits, within))


def _way_of(value: Any, is_whole: bool) -> _Way | None:
    """Return the way for ``value``; None: it is pickled. ``is_whole``: as for an Outline."""
    return next((way for way in _ways if (is_whole or way.within) and way.fits(value)), None)


def _refuse_loader(value: Any) -> None:
    """Raise InvalidArgumentError for a loader that would be given rank 0's place in the data."""
    kind = type(value)
    if has_state_dict(value) and any(
        str(base.__module__).split(".")[0] == "torchdata" for base in kind.__mro__
    ):
        raise ElasticArgumentError(
            f"a value of the state is a {kind.__name__} of torchdata, and all ranks would be given "
            "the place of rank 0 in its data: put an elastic.ElasticStream into the state, whose "
            "make() returns such a loader for a part of the data"
        )


def _kind_of(value: Any, is_whole: bool) -> str | None:
    _refuse_loader(value)
    if isinstance(value, DealtData | ProcessSet) or (
        not is_whole and isinstance(value, MembershipLog | IndependentTraining)
    ):
        raise ElasticArgumentError(
            f"a value of the state has a {type(value).__name__} within it, which would not follow "
            "the steps and the ranks there: give it a name of its own in the state, too"
        )
    way = _way_of(value, is_whole)
    return None if way is None else way.kind


def _tensors_of(value: Any) -> Iterable[Any]:
    way = _way_of(value, is_whole=True)
    return () if way is None else way.tensors(value)


def _check_pickled(failures: Mapping[str, str]) -> None:
    """Raise InvalidArgumentError, on all ranks, for a value that rank 0 cannot pickle."""
    for name, why in failures.items():
        raise ElasticArgumentError(
            f"state.{name} of rank 0 cannot be given to the other ranks, since it cannot be "
            f"pickled: {why}"
        )


def _way_of_whole(kind: str, is_whole: bool) -> _Way | None:
    """Return a way of rank 0's that is for whole values only.

    It shares a value with ranks that have anything in its place.
    """
    ways = (way for way in _ways if is_whole and not way.within and way.kind == kind)
    return next(ways, None)


def _check_known(kinds: Iterable[_Kind]) -> None:
    """Raise InvalidArgumentError for a way of rank 0's that this process does not have."""
    for kind, _ in kinds:
        if not any(way.kind == kind for way in _ways):
            raise ElasticArgumentError(
                f"rank 0 has a value in its state that is shared by {kind}, of which this process "
                "has not heard: import the same front ends, and call elastic.share_by, on all ranks"
            )


class State:
    """Values that all ranks have alike, as attributes.

    Rank 0 says what they are: as the job begins, and to ranks that join. They may be of any kind
    that can be pickled, and what the front ends know, once they are imported: modules and
    optimizers of PyTorch, models and optimizers of Keras, modules and variables of TensorFlow, and
    pytrees with JAX's arrays. What has ``state_dict`` and ``load_state_dict``, as schedules have,
    gets rank 0's by them. These, tensors and arrays stay the objects that they are, wherever in a
    value they are; so do the values themselves, but for what cannot be changed, as numbers and
    tuples cannot (``outlines``). An ElasticSampler, an ElasticStream, a MembershipLog and an
    ``elastic.ProcessSet`` among them follow the steps and the ranks.
    """

    def __init__(self, **values: Any) -> None:
        """``values``: by name. Their names are the same on all ranks.

        Raises InvalidArgumentError for a name that a State uses itself, and for a loader with a
        state of its own (torchdata's StatefulDataLoader): ElasticStream has such loaders.
        """
        for name in values:
            if name.startswith("_") or hasattr(State, name):
                raise ElasticArgumentError(
                    f"a value of the state is called {name!r}, which State uses itself: give it "
                    "another name, without a leading underscore"
                )
        self._names = list(values)
        self._on_commit: Callable[[State], None] | None = None
        self._size = 0  # that the values are made for; 0: not known yet
        self._size_callbacks: list[SizeCallback] = []
        self._leave_callbacks: list[LeaveCallback] = []
        for name, value in values.items():
            _refuse_loader(value)
            setattr(self, name, value)

    def commit(self) -> None:
        """Say that the state is whole: a step is over. All ranks call it after the same steps.

        Ranks join and leave here. As long as nobody wants to, it costs nothing. With a LocalSGD or
        DiLoCo in the state a step is an exchange: between two of them it does nothing.
        """
        if self.is_between_exchanges():
            return
        if self._on_commit is not None:
            self._on_commit(self)
        else:
            self._record_alone()
        for value in self.independent_trainings():
            value.committed()

    def _record_alone(self) -> None:
        """Record a step where the job is not elastic."""
        for sampler in self.samplers():
            sampler.record_step()
            if sampler.is_due:
                gather = partial(Objects(current).allgather_object, name="elastic.samples")
                sampler.changed(current().rank, gather)
        for log in self.logs():
            world = current()
            log.follow(world.members, world.hosts, world.rank)
            log.record(world.members)

    def on_size_change(self, callback: SizeCallback) -> SizeCallback:
        """Have ``callback(before, after)`` called when the job has another number of ranks.

        On all ranks alike, between two steps and with the same values of the state, so that each
        change counts once: a rank that joins has the state of the others, and hears of its own
        coming as they do. Here a learning rate is scaled with the batch. ``callback`` runs no
        operations. Returns it, and so serves as a decorator.
        """
        self._size_callbacks.append(callback)
        return callback

    def on_leave(self, callback: LeaveCallback) -> LeaveCallback:
        """Have ``callback(rank)`` called on a process that leaves, just before it ends.

        A signal has told it to, or another rank of its replica (see ``run``), and it has made
        its last step with the others, where it was ``rank``. The values are as all ranks have
        them after that step, so this is the place to write a checkpoint, on rank 0, before a time
        limit. (If a rank is lost just then, the last step is the one before that which is
        repeated.) The others may go on already: ``callback`` runs no operations. Returns it, and so
        serves as a decorator.
        """
        self._leave_callbacks.append(callback)
        return callback

    def has_left(self, rank: int) -> None:
        """Call what ``on_leave`` was given: this process has left, where it was ``rank``."""
        for callback in self._leave_callbacks:
            callback(rank)

    def has_size(self, size: int) -> None:
        """Call what ``on_size_change`` got if the size changed: on all ranks, between steps."""
        before, self._size = self._size, size
        if before not in (0, size):
            for callback in self._size_callbacks:
                callback(before, size)

    def samplers(self) -> list[DealtData]:
        """Return the samplers and streams among the values."""
        return self._of(DealtData)  # type: ignore[type-abstract]

    def logs(self) -> list[MembershipLog]:
        """Return the membership logs among the values."""
        return self._of(MembershipLog)

    def process_sets(self) -> list[ProcessSet]:
        """Return the process sets among the values."""
        return self._of(ProcessSet)

    def independent_trainings(self) -> list[IndependentTraining]:
        """Return the values by which ranks train independently."""
        return self._of(IndependentTraining)  # type: ignore[type-abstract]

    def is_between_exchanges(self) -> bool:
        """Return whether ranks train independently and have not exchanged since the last commit."""
        independent = self.independent_trainings()
        return bool(independent) and not any(value.has_exchanged for value in independent)

    def _of(self, kind: type[V]) -> list[V]:
        return [value for value in self.values() if isinstance(value, kind)]

    def _outline(self) -> Outline:
        values = {name: getattr(self, name) for name in self._names}
        # Of these ranks tell each other what each has (``running``).
        others = {
            name: value
            for name, value in values.items()
            if isinstance(value, DealtData | ProcessSet)
        }
        sent = {name: value for name, value in values.items() if name not in others}
        return Outline(sent, others, _kind_of, _tensors_of)

    def keep(self) -> Callable[[], None]:
        """Return what makes the values again what they are now, where a step is computed again.

        What is pickled for others is copied; of models and optimizers what ``share_by`` says. A
        sampler or stream goes on from the last step that was recorded, a process set follows the
        worlds.
        """
        outline = self._outline()
        restores = [sampler.keep() for sampler in self.samplers()]
        for value, (_, is_whole) in outline.shared():
            way = _way_of(value, is_whole)
            if way is not None and way.keep is not None:
                restores.append(way.keep(value))
        again = outline.copies()

        def restore() -> None:
            for name, value in again().items():
                setattr(self, name, value)
            for each in restores:
                each()

        return restore

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Enter the contexts of the values, for the function of ``elastic.run``."""
        with contextlib.ExitStack() as stack:
            for name, objects in self._outline().objects.items() if _contexts else ():
                for value in objects:
                    for fits, within in _contexts:
                        if fits(value):
                            stack.enter_context(within(name, value))
            yield

    def sync(self) -> None:
        """Give rank 0's values to all ranks. What kind each is of, rank 0 says, too."""
        self.hand_over(during_step=False)

    def hand_over(self, *, during_step: bool) -> list[Portions]:
        """Do as ``sync``, on all ranks, but for what is returned: that is still to be sent.

        ``during_step``, as rank 0 gives it: False says that nothing is left to be sent.
        """
        outline, objects = self._outline(), Objects(current)
        said = objects.allgather_object(
            (outline.kinds, outline.failures, during_step), "elastic.kinds"
        )
        kinds, failures, during_step = said[0]
        _check_pickled(failures)
        portions: list[Portions | None] = []
        differing = []
        for name, of_root in kinds.items():
            _check_known(of_root)
            if any(each.get(name) != of_root for each, _, _ in said):
                if of_root and (alone := _way_of_whole(*of_root[0])) is not None:
                    outline.results[name] = [alone.share(name, getattr(self, name, None))]
                else:
                    differing.append(name)
                continue
            for n, (value, (_, is_whole)) in enumerate(outline.shared(name)):
                way = _way_of(value, is_whole)
                assert way is not None
                if during_step and is_whole and way.hand_over is not None:
                    portions.append(way.hand_over(name, value, self))
                else:
                    at = name if is_whole else f"{name}.{n}"
                    outline.results[name][n] = way.share(at, value)
        is_root = current().rank == 0
        packed = outline.without(differing).packed() if is_root else None
        packed, self._size = objects.broadcast_object((packed, self._size), 0, "elastic.state")
        _check_pickled(packed.failures)
        for name, value in (outline.whole() if is_root else outline.take(packed)).items():
            setattr(self, name, value)
        return [each for each in portions if each is not None]

    def values(self) -> list[Any]:
        """Return all values."""
        return [getattr(self, name) for name in self._names]
