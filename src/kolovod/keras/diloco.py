"""DiLoCo as a callback of Keras, with its outer optimizer in NumPy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from kolovod.core.process_sets import ProcessSet
from kolovod.errors import FrontEndArgumentError
from kolovod.gradients import periodic
from kolovod.gradients.compression import AnyCompressor, Compression
from kolovod.gradients.diloco import Fragments
from kolovod.gradients.periodic import Schedule
from kolovod.keras.elastic import written_back
from kolovod.keras.functions import Array
from kolovod.keras.periodic import PeriodicCallback, read, write

__all__ = ["DiLoCo"]


class DiLoCo(PeriodicCallback):
    """Each rank trains by itself; every ``sync_every`` batches an outer optimizer steps for all.

    How far the weights of a rank have come from those that all ranks have in common is its outer
    gradient; the ranks' mean of these goes to the outer optimizer, SGD with Nesterov momentum,
    whose step makes the next weights in common. See ``kolovod.torch.DiLoCo``, which has the papers
    and the same numbers.

        diloco = kv.callbacks.DiLoCo(sync_every=100, compression=kv.Compression.int4)
        model.compile(keras.optimizers.AdamW(4e-4), loss="mse")  # the inner one
        model.fit(..., callbacks=[kv.callbacks.BroadcastGlobalVariablesCallback(), diloco])

    At the end of ``fit`` all ranks have the same weights; call ``synchronize()`` where they have to
    be before, from another callback. In an elastic job it is in the state, in the place of the
    model, and ``synchronize()`` is called at the end, too (docs/elastic-reference.md).
    """

    kind = "diloco"

    _fragments: Fragments
    _common: list[Array]
    _velocities: list[Array]

    def __init__(
        self,
        sync_every: int,
        *,
        outer_learning_rate: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        fragments: int | Sequence[Sequence[Any]] = 1,
        fragment_sync_delay: int = 0,
        local_share: float | None = None,
        warm_up_steps: int = 0,
        compression: AnyCompressor = Compression.none,
        process_set: ProcessSet | None = None,
    ) -> None:
        """All ranks must begin with the same weights (``BroadcastGlobalVariablesCallback``).

        ``sync_every``: batches after which a variable is synchronised again.
        ``outer_learning_rate``, ``outer_momentum``, ``nesterov``: of the outer SGD, as PyTorch and
        optax have them.
        ``fragments``: how many parts (every n-th variable, so that each has some of all depths), or
        lists of variables.
        ``fragment_sync_delay``: a fragment's mean is applied so many batches after it was sent,
        and travels meanwhile.
        ``local_share``: what remains then of the rank's own weights, from 0 to 1; None: 0 without a
        delay, else a half.
        ``warm_up_steps``, ``process_set``, ``steps_per_execution``: see ``LocalSGD``. The model may
        have a DistributedOptimizer of a process set: synchronous within each host, say, and DiLoCo
        between them.
        ``compression``: of the outer gradients; see ``DistributedOptimizer``.

        Raises InvalidArgumentError.
        """
        schedule = Schedule.checked(sync_every, warm_up_steps, fragment_sync_delay)
        super().__init__(schedule, compression, process_set)
        self._rate = periodic.checked_number("outer_learning_rate", outer_learning_rate, 0, np.inf)
        self._momentum = periodic.checked_number("outer_momentum", outer_momentum, 0, 1)
        self._nesterov = bool(nesterov)
        self._local_share = schedule.share(local_share)
        self._given = fragments
        if isinstance(fragments, int):
            schedule.check_turns(periodic.checked_steps("fragments", fragments, 1))
        self._begin_anew()

    def synchronize(self) -> None:
        """Apply what is on its way, and synchronise all weights that were changed since.

        All ranks call it: before an evaluation, or a checkpoint that others go on from.
        """
        if not self._is_ready:
            return
        written_back(self._of)
        self._fragments.synchronize(self.steps, self._send, partial(self._apply, local_share=0.0))

    def state_dict(self) -> dict[str, Any]:
        """Return numbers and arrays for this rank's checkpoint, beside the model and its optimizer.

        It waits for what is on its way; in an elastic job that counts as this rank's own outer
        gradients. ``common`` and ``momentum``: of each variable that is trained.
        """
        return {
            "steps": self.steps,
            "common": list(self._common),
            "momentum": list(self._velocities),
            "on_its_way": self._fragments.waiting(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``. Raises InvalidArgumentError for what is none.

        That of another model is an InvalidArgumentError when training begins.
        """
        if set(state) != {"steps", "common", "momentum", "on_its_way"}:
            raise FrontEndArgumentError(f"the state has {sorted(state)}, which is none of DiLoCo's")
        self.steps = int(state["steps"])
        self._common, self._velocities = list(state["common"]), list(state["momentum"])
        self._fragments.go_on(state["on_its_way"], {})
        self._is_ready = False

    def drain_exchanges(self) -> Iterator[None]:
        """Let what is on its way arrive, in the order in which it is due."""
        return self._fragments.drain_exchanges()

    def _equal_at(self) -> dict[int, int]:
        return self._fragments.equal_after

    def _be_equal_at(self, equal: dict[int, int]) -> None:
        self._fragments.equal_after = dict(equal)

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self._fragments, self._common, self._velocities = Fragments(self.schedule), [], []

    def _take_up(self) -> None:
        if not self._common:
            self._common = read(self._trained)
            self._velocities = [np.zeros_like(each) for each in self._common]
        shapes = [tuple(v.shape) for v in self._trained]
        if any([each.shape for each in of] != shapes for of in (self._common, self._velocities)):
            raise FrontEndArgumentError(
                f"the state is of variables of shapes {[each.shape for each in self._common]}, but "
                f"those of the model that are trained have {shapes}: give the state of this model, "
                "or make a new callback"
            )
        self._fragments.cut(self._given, self._trained, "the model's variables that are trained")

    def _options(self) -> periodic.Details:
        outer = self._rate, self._momentum, self._nesterov
        options = [("fragments", self._fragments.places), ("the outer optimizer", outer)]
        return [*super()._options(), *options]

    def _details(self) -> periodic.Details:
        return [*super()._details(), *self._values(self._common)]

    def _warm_up(self) -> None:
        super()._warm_up()
        self._common = read(self._trained)

    def _advance(self, steps: range) -> None:
        for step in steps:
            apply = partial(self._apply, local_share=self._local_share)
            self._fragments.advance(step, partial(self._send, step=step), apply)

    def _send(self, fragment: int, step: int = 0) -> None:
        """Start to average a fragment's outer gradients; with the last go moving statistics."""
        written_back(self._of)
        places = self._fragments.places[fragment]
        own = read(self._trained[place] for place in places)
        pairs = zip(places, own, strict=True)
        sent = [np.asarray(self._common[place] - mine) for place, mine in pairs]
        further = read(self._fragments.with_last(fragment, self._statistics))
        self._agree()
        keyed = [(self._keys[place], each) for place, each in zip(places, sent, strict=True)]
        under_way = self._exchange.start(f"fragment.{fragment}", keyed, further)
        self._fragments.begin(fragment, step, under_way)

    def _apply(self, fragment: int, local_share: float) -> None:
        """Take the outer step on a fragment, from what the ranks had in common."""
        written_back(self._of)
        means = self._fragments.end(fragment, self.steps, local_share)
        places = self._fragments.places[fragment]
        write(self._fragments.with_last(fragment, self._statistics), means[len(places) :])
        variables = [self._trained[place] for place in places]
        for place, mean in zip(places, means[: len(places)], strict=True):
            self._velocities[place] = self._momentum * self._velocities[place] + mean
            ahead = mean + self._momentum * self._velocities[place]
            change = ahead if self._nesterov else self._velocities[place]
            self._common[place] = np.asarray(self._common[place] - self._rate * change)
        together = [self._common[place] for place in places]
        if local_share:
            pairs = zip(together, read(variables), strict=True)
            write(variables, [each + local_share * (own - each) for each, own in pairs])
        else:
            write(variables, together)
