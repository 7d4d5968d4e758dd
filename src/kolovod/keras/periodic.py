"""LocalSGD as a callback of Keras, and what it has in common with DiLoCo."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from kolovod.core.process_sets import ProcessSet
from kolovod.core.transaction import transaction
from kolovod.errors import FrontEndArgumentError
from kolovod.gradients import periodic
from kolovod.gradients.compression import AnyCompressor, Compression, Key, dtype_name
from kolovod.gradients.periodic import Schedule
from kolovod.keras.elastic import IndependentCallback, note_independent, written_back
from kolovod.keras.framework_detection import InOneKeras, chosen
from kolovod.keras.functions import Array, optimizer_variables, to_numpy
from kolovod.keras.optimizer import Distributed
from kolovod.keras.reducer import name_of
from kolovod.numpy import collectives

__all__ = ["LocalSGD", "PeriodicCallback"]

_keras: Any = chosen()


class PeriodicCallback(
    periodic.TrainsByExchange,
    IndependentCallback,
    InOneKeras,
    _keras.callbacks.Callback,  # type: ignore[misc]
):
    """The common part of ``LocalSGD`` and ``DiLoCo``."""

    kind: ClassVar[str]
    """The beginning of the names of operations."""

    def __init__(
        self, schedule: Schedule, compression: AnyCompressor, process_set: ProcessSet | None
    ) -> None:
        super().__init__()
        self.schedule = schedule
        self._exchange = periodic.Exchange(self.kind, compression, process_set, collectives)
        self.steps = 0
        """Batches that were trained on."""
        self._of: Any = None  # not ``model``, which on JAX costs a copy of all that is trained
        self._trained: list[Any] = []
        self._statistics: list[Any] = []
        self._keys: list[Key] = []
        self._is_ready = False
        self._begun = 0  # the number of a batch in this call of ``fit``
        note_independent(self)

    def set_model(self, model: Any) -> None:
        """Keep the model, as every callback does; with another one than before begin anew."""
        super().set_model(model)
        if self._of is not None and self._of is not model:
            self._begin_anew()
        self._of, self._is_ready = model, False

    def on_train_begin(self, logs: Any = None) -> None:
        """Look at the model anew, when others have prepared it."""
        self._is_ready = False

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Agree with the other ranks, at the first batch of a call of ``fit``.

        Raises MismatchError, on every rank, where models, values or options differ;
        InvalidArgumentError in an elastic job whose state has it not, and for a model without
        variables.
        """
        self._begun = batch
        self._exchange.before_step()
        if not self._is_ready:
            self._prepare()
            self._is_ready = True

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the batches that are done (several with ``steps_per_execution``), and exchange."""
        before, done = self.steps, batch - self._begun + 1
        if done > self.schedule.sync_every:
            raise FrontEndArgumentError(
                f"sync_every is {self.schedule.sync_every}, but Keras trains on {done} batches "
                "at a time: give at least as many, or compile with a smaller steps_per_execution"
            )
        self.steps += done
        if self.schedule.warms_up(before):
            self._warm_up()
            return
        self._advance(range(before + 1, self.steps + 1))

    def on_train_end(self, logs: Any = None) -> None:
        """Synchronize, but not in an elastic job, where some ranks may join at this end."""
        if not transaction().is_elastic:
            self.synchronize()

    @abstractmethod
    def synchronize(self) -> None:
        """Exchange all weights that were changed since they were exchanged last; all ranks do."""

    def _begin_anew(self) -> None:
        self.steps = 0

    def _prepare(self) -> None:
        self._look_at_model()
        self._agree()

    def _look_at_model(self) -> None:
        model = self._of
        if not model.built:
            raise FrontEndArgumentError(
                f"{model!r} has no variables yet: call model.build() before fit"
            )
        written_back(model)
        self._trained = list(model.trainable_variables)
        if not self._trained:
            raise FrontEndArgumentError("the model has no variable that is trained")
        self._statistics = _statistics_of(model)
        self._keys = [Key(i, name_of(v)) for i, v in enumerate(self._trained)]
        self._take_up()

    def _take_up(self) -> None:
        """Prepare what depends on the variables, which are known now."""

    def _agree(self) -> None:
        if self._exchange.takes_part:
            self._exchange.agree_once(self._details)

    def _details(self) -> periodic.Details:
        """Return what ranks must have in common: options, variables and how far they are."""
        return [*self._options(), ("steps", self.steps)]

    def _options(self) -> periodic.Details:
        """Return options and variables, which must be equal, on ranks that are yet to join, too."""
        described = [
            # Without the layer's name, which counts how many the process has made.
            (name_of(v).split("/")[-1], (tuple(v.shape), dtype_name(v)))
            for v in self._trained
        ]
        return [*self.schedule.details(), *described]

    def _values(self, arrays: Sequence[Array]) -> periodic.Details:
        """Return checksums of ``arrays``, of the variables: what ranks must have in common."""
        pairs = zip(self._trained, arrays, strict=True)
        return [
            (f"the values of {name_of(v).split('/')[-1]}", periodic.checksum(array))
            for v, array in pairs
        ]

    # --- in the state of an elastic job ---

    def enter_world(self) -> None:
        """Enter a world of an elastic job together with all ranks, as IndependentTraining says.

        Raises InvalidArgumentError without a model, and for one with a DistributedOptimizer.
        """
        if self._of is None:
            raise FrontEndArgumentError(
                f"the {type(self).__name__} in the state has no model: call its set_model(model) "
                "before the function of elastic.run"
            )
        if isinstance(getattr(self._of, "optimizer", None), Distributed):
            raise FrontEndArgumentError(
                "the model has a DistributedOptimizer: in an elastic job each of its steps is one "
                f"of all ranks, which {type(self).__name__} is to leave out; compile the model "
                "with a plain optimizer"
            )
        if not self._is_ready:
            self._look_at_model()
        self._exchange.enter_world(self._options)

    @property
    def owned(self) -> tuple[Any, ...]:
        """The model and its optimizer, if it is in the state of the current elastic job."""
        return (
            (self._of, getattr(self._of, "optimizer", None)) if self._exchange.is_in_state else ()
        )

    @property
    def has_begun(self) -> bool:
        """True if this rank has steps of its own, which it keeps."""
        return self._exchange.has_begun

    def own_state(self) -> Any:
        """Return what a rank that joins needs beside the model with its optimizer."""
        return self.state_dict(), self._equal_at()

    def take_own_state(self, state: Any) -> None:
        """Go on from what ``own_state`` returned."""
        saved, equal = state
        self.load_state_dict(saved)
        self._look_at_model()
        self._be_equal_at(equal)

    @abstractmethod
    def _equal_at(self) -> Any:
        """Return the numbers of steps with which values were the same on all ranks."""

    @abstractmethod
    def _be_equal_at(self, equal: Any) -> None:
        """Go on from ``_equal_at``."""

    def _warm_up(self) -> None:
        """Make the step a synchronous one.

        The mean of weights is what a mean of gradients makes of them where these come into the
        optimizer linearly. Its state has to be the mean only when ranks begin to step alone.
        """
        slots: list[Any] = []
        optimizer = getattr(self._of, "optimizer", None)
        if optimizer is not None and not self.schedule.warms_up(self.steps):
            variables = optimizer_variables(optimizer, self._of)
            slots = [v for v in variables if len(v.shape) and "float" in dtype_name(v)]
        self._average(slots, is_compressed=False)

    @abstractmethod
    def _advance(self, steps: range) -> None:
        """Do what is due after each of these steps, of which the last is over."""

    def _average(self, besides: Sequence[Any] = (), *, is_compressed: bool = True) -> None:
        """Replace weights, moving statistics and variables ``besides`` by the ranks' means."""
        if not self._exchange.takes_part:
            self._exchange.has_exchanged = True
            return
        self._agree()
        written_back(self._of)
        own = list(zip(self._keys, read(self._trained), strict=True))
        further = [*self._statistics, *besides]
        means = self._exchange.start("weights", own, read(further), is_compressed=is_compressed)()
        write([*self._trained, *further], means)


class LocalSGD(PeriodicCallback):
    """Averages the weights of a model every ``sync_every`` batches of ``fit``, and at its end.

    Between them ranks do not communicate. Moving statistics (of BatchNormalization) are averaged
    with the weights; the optimizer's state stays each rank's own. The model is compiled with a
    plain optimizer. See ``kolovod.torch.LocalSGD`` for the papers.

        local_sgd = kv.callbacks.LocalSGD(sync_every=8)
        model.fit(..., callbacks=[kv.callbacks.BroadcastGlobalVariablesCallback(), local_sgd])

    A rank's checkpoint has ``state_dict()``, for ``load_state_dict``, beside the compiled model. In
    an elastic job it is in the state, in the place of the model, and ``synchronize()`` is called at
    the end (docs/elastic-reference.md).
    """

    kind = "local_sgd"

    def __init__(
        self,
        sync_every: int,
        *,
        warm_up_steps: int = 0,
        compression: AnyCompressor = Compression.none,
        process_set: ProcessSet | None = None,
    ) -> None:
        """All ranks must begin with the same weights (``BroadcastGlobalVariablesCallback``).

        ``warm_up_steps``: after each of so many batches weights are averaged first, and after the
        last one the optimizer's momenta. A callback does not see gradients; with SGD, also with
        momentum, it is the same as if these were averaged.
        ``compression``: of the weights, as they are sent; see ``DistributedOptimizer``. Not in the
        warm-up.
        ``process_set``: its members average among themselves; None: all ranks.

        Every rank trains on as many batches. With ``steps_per_execution`` the weights are averaged
        at the end of the execution in which that is due. Raises InvalidArgumentError.
        """
        super().__init__(Schedule.checked(sync_every, warm_up_steps), compression, process_set)
        self._averaged_after = 0

    def synchronize(self) -> None:
        """Average the weights, if they were changed since; before an evaluation. All ranks do."""
        if self.steps != self._averaged_after:
            self._average()
            self._averaged_after = self.steps

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self._averaged_after = 0

    def _equal_at(self) -> int:
        return self._averaged_after

    def _be_equal_at(self, equal: int) -> None:
        self._averaged_after = equal

    def _details(self) -> periodic.Details:
        values = self._values(read(self._trained)) if self.steps == 0 else []
        return [*super()._details(), *values]

    def _warm_up(self) -> None:
        super()._warm_up()
        self._averaged_after = self.steps

    def _advance(self, steps: range) -> None:
        if any(map(self.schedule.sends, steps)):
            self.synchronize()


def read(variables: Iterable[Any]) -> list[Array]:
    """Return the values of ``variables``: new arrays, in float32 at least."""
    arrays = (to_numpy(variable) for variable in variables)
    return [np.array(each, np.promote_types(_known(each.dtype), np.float32)) for each in arrays]


def write(variables: Iterable[Any], values: Iterable[Array]) -> None:
    """Assign ``values`` to ``variables``: the reverse of ``read``."""
    for variable, value in zip(variables, values, strict=True):
        is_narrow = dtype_name(variable) != value.dtype.name
        variable.assign(value.astype(to_numpy(variable).dtype) if is_narrow else value)


def _known(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """``dtype``, or for one that NumPy does not have (bfloat16) float32."""
    return dtype if dtype.kind == "f" else np.dtype(np.float32)


def _statistics_of(model: Any) -> list[Any]:
    """The floats that a model keeps but does not train; not weights of layers that are frozen."""
    made_so: set[int] = set()
    for layer in model._flatten_layers():
        kept = getattr(layer, "_non_trainable_variables", None)  # in Keras 3
        kept = layer._non_trainable_weights if kept is None else kept
        made_so.update(map(id, kept))
    return [v for v in model.non_trainable_weights if id(v) in made_so and "float" in dtype_name(v)]
