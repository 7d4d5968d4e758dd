"""DiLoCo's fragments, for PyTorch and Keras; JAX keeps all that in a pytree, for its programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from kolovod.core.transaction import transaction
from kolovod.errors import FrontEndArgumentError
from kolovod.gradients.periodic import Schedule, Sent, arrive

Act = Callable[[int], None]
"""Does something with the fragment of that number."""


class Fragments:
    """The fragments of a model: which are sent and applied when, and what is on its way."""

    def __init__(self, schedule: Schedule) -> None:
        """There are none before ``cut``."""
        self._schedule = schedule
        self.places: list[list[int]] = []
        """The places of each fragment's parameters among the model's."""
        self.equal_after: dict[int, int] = {}
        """By fragment, the number of steps after which ranks had the same last."""
        self._on_its_way: dict[int, tuple[int, Sent]] = {}
        """Outer gradients by fragment, after the step after which they are applied."""

    def cut(self, given: int | Sequence[Sequence[Any]], parameters: Sequence[Any], of: str) -> None:
        """Cut ``parameters`` into ``given`` fragments. Raises InvalidArgumentError, with ``of``."""
        count = len(parameters)
        if isinstance(given, int):
            self.places = self._schedule.cut(given, count)
            self._check_numbers(self._on_its_way)
            return
        places = {id(p): place for place, p in enumerate(parameters)}
        cut = [[places.get(id(p), -1) for p in fragment] for fragment in given]
        if sorted(place for fragment in cut for place in fragment) != list(range(count)):
            raise FrontEndArgumentError(f"fragments are to have each of {of}, once")
        self._schedule.check_turns(len(cut))
        self.places = cut
        self._check_numbers(self._on_its_way)

    def _check_numbers(self, waiting: Iterable[int]) -> None:
        """Raise InvalidArgumentError if what is ``waiting`` is of more fragments than there are."""
        last = max(waiting, default=-1)
        if self.places and last >= len(self.places):
            raise FrontEndArgumentError(
                f"the state has fragment {last} on its way, but the model is cut into "
                f"{len(self.places)} here: give as many fragments as when it was saved"
            )

    def with_last(self, fragment: int, tensors: list[Any]) -> list[Any]:
        """Return the ``tensors`` that go with the last fragment; none if it is another one."""
        return tensors if fragment == len(self.places) - 1 else []

    def begin(self, fragment: int, steps: int, sent: Sent) -> None:
        """Note that a fragment's outer gradients were sent after ``steps`` steps."""
        self._on_its_way[fragment] = steps + self._schedule.delay, sent

    def end(self, fragment: int, steps: int, local_share: float) -> list[Any]:
        """Return a fragment's means, to be applied after ``steps``. Raises what ``arrive`` does."""
        means = list(self._on_its_way[fragment][1]())
        del self._on_its_way[fragment]
        if not local_share:
            self.equal_after[fragment] = steps
        return means

    def advance(self, steps: int, send: Act, apply: Act) -> None:
        """Do with each fragment what is due after ``steps`` steps."""
        for fragment in range(len(self.places)):
            if self._schedule.sends(steps, fragment, len(self.places)):
                send(fragment)
        for fragment in sorted(self._on_its_way):
            if self._on_its_way[fragment][0] <= steps:
                apply(fragment)

    def synchronize(self, steps: int, send: Act, apply: Act) -> None:
        """Apply what is on its way, and synchronise what has changed since."""
        before = sorted(self._on_its_way)
        changed = [
            fragment
            for fragment in range(len(self.places))
            if fragment not in before and self.equal_after.get(fragment, 0) != steps
        ]  # the outer optimizer would take a step of its momentum alone on others
        for fragment in changed:
            send(fragment)
        arrive([self._on_its_way[fragment][1] for fragment in (*before, *changed)])
        for fragment in (*before, *changed):
            apply(fragment)

    def drain_exchanges(self) -> Iterator[None]:
        """Let what is on its way arrive, in the order in which it is due."""
        for _, sent in sorted(self._on_its_way.values(), key=lambda each: each[0]):
            if sent.means is None:
                arrive([sent])
                yield

    def waiting(self) -> dict[int, tuple[int, list[Any]]]:
        """Return what is on its way, for ``state_dict``: when it is due, and the means."""
        if not transaction().is_elastic:
            arrive([sent for _, sent in self._on_its_way.values()])
        return {f: (due, sent.so_far()) for f, (due, sent) in self._on_its_way.items()}

    def go_on(self, waiting: Mapping[int, tuple[int, Any]], equal_after: dict[int, int]) -> None:
        """Go on from what ``waiting()`` and ``equal_after`` were.

        Raises InvalidArgumentError, here or in ``cut``, if they are of more fragments.
        """
        self._check_numbers(waiting)
        arrived = {f: (due, Sent.arrived(list(means))) for f, (due, means) in waiting.items()}
        self._on_its_way, self.equal_after = arrived, dict(equal_after)
