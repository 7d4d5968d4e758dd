"""Callbacks for ``model.fit``: starting equal, metrics of all ranks, rates, best models, commits.

LocalSGD and DiLoCo are in ``periodic.py`` and ``diloco.py``.

They belong to the Keras that the process has chosen (kolovod.keras.framework_detection): Keras 3,
or with TF_USE_LEGACY_KERAS=1 Keras 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np

from kolovod.core.process_sets import ProcessSet
from kolovod.core.rank_info import rank
from kolovod.core.transaction import transaction
from kolovod.core.world import current, is_initialized
from kolovod.elastic import State, exactly
from kolovod.errors import FrontEndArgumentError
from kolovod.gradients.spec import sends
from kolovod.keras.diloco import DiLoCo
from kolovod.keras.framework_detection import InOneKeras, backend_of, chosen, is_keras_3
from kolovod.keras.functions import broadcast_model
from kolovod.keras.optimizer import Distributed
from kolovod.keras.periodic import LocalSGD
from kolovod.keras.schedules import LearningRateScheduleCallback, LearningRateWarmupCallback
from kolovod.metrics import average_metrics
from kolovod.notices import report_to_stderr
from kolovod.numpy import collectives as on_arrays

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "CommitCallback",
    "DiLoCo",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "LocalSGD",
    "MetricAverageCallback",
    "TerminateOnNaN",
]

_keras: Any = chosen()


class BroadcastGlobalVariablesCallback(InOneKeras, _keras.callbacks.Callback):  # type: ignore[misc]
    """Gives all ranks the weights and the optimizer's state of one, when training begins.

    Where Keras makes the variables in the first step only (a model of Keras 2 without an input
    shape), after that step. It also turns off XLA on TensorFlow, which Keras turns on by itself
    where there is a GPU and which cannot wait for other ranks. In an elastic job it broadcasts
    nothing: the state gives a rank that joins what the others have.
    """

    def __init__(
        self,
        root_rank: int = 0,
        process_set: ProcessSet | None = None,
        local_variables: Iterable[Any] = (),
    ) -> None:
        """``local_variables``: those that stay as they are."""
        super().__init__()
        self.root_rank = root_rank
        self.process_set = process_set
        self.local_variables = list(local_variables)
        self.broadcast_done = False
        self._engine: Any = None  # of the world in which it was done

    def register_local_var(self, variable: Any) -> None:
        """Leave this variable as it is."""
        self.local_variables.append(variable)

    def set_model(self, model: Any) -> None:
        """Keep the model, as every callback does."""
        super().set_model(model)
        is_on_tensorflow = is_keras_3(_keras) and backend_of(_keras) == "tensorflow"
        is_distributed = isinstance(getattr(model, "optimizer", None), Distributed)
        is_compiled = is_on_tensorflow and is_distributed and model.jit_compile
        if is_compiled and sends(current(), is_traced=True):
            model.jit_compile = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast the model now if it is built, and if that was not done in this world."""
        if self._engine is not None and is_initialized():
            self.broadcast_done = self._engine is current().engine
        if self.model.built:
            self._broadcast()

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast the model after the first batch if it was not built before."""
        self._broadcast()

    def _broadcast(self) -> None:
        if self.broadcast_done or transaction().is_elastic:
            return
        self.broadcast_done, self._engine = True, current().engine
        if self.process_set is None or self.process_set.included():
            broadcast_model(self.model, self.root_rank, self.process_set, self.local_variables)


class MetricAverageCallback(InOneKeras, _keras.callbacks.Callback):  # type: ignore[misc]
    """Replaces the metrics of each epoch by the means over all ranks.

    Put it before callbacks that look at metrics (early stopping, checkpoints, logs), so that they
    decide alike on all ranks.
    """

    def __init__(
        self,
        samples: float | None = None,
        val_samples: float | None = None,
        process_set: ProcessSet | None = None,
    ) -> None:
        """``samples``, ``val_samples``: how many this rank has in an epoch, to weight by them.

        The former for metrics of training, the latter for those of validation, named "val_...".
        None: all ranks weigh the same.
        """
        super().__init__()
        self.samples = samples
        self.val_samples = val_samples
        self.process_set = process_set

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average what there is. Raises MismatchError when ranks have different metrics."""
        if self.process_set is not None and not self.process_set.included():
            for _ in range(2):  # in an elastic job steps are those of all ranks
                exactly(lambda: None)
            return
        logs = {} if logs is None else logs
        for is_val, samples in ((False, self.samples), (True, self.val_samples)):
            mine = {
                key: value
                for key, value in sorted(logs.items())
                if key.startswith("val_") == is_val and _is_number(value)
            }
            weight = 1 if samples is None else samples
            name = f"epoch.{'val' if is_val else 'train'}"
            average = partial(average_metrics, mine, weight, name, self.process_set)
            logs.update(exactly(average))


class TerminateOnNaN(InOneKeras, _keras.callbacks.Callback):  # type: ignore[misc]
    """Ends the training on all ranks after a batch whose loss is not finite on one of them.

    The callback of that name in Keras looks at this rank's batch, and ends this rank alone. All
    ranks need as many batches, since they ask each other after each one.
    """

    def __init__(self, process_set: ProcessSet | None = None) -> None:
        """``process_set``: the ranks that train this model; None: all."""
        super().__init__()
        self.process_set = process_set

    def on_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Ask all ranks about their loss; those where it is not finite are named once."""
        if self.process_set is not None and not self.process_set.included():
            exactly(lambda: None)  # in an elastic job steps are those of all ranks
            return
        loss = (logs or {}).get("loss", 0.0)
        is_bad = np.array([not np.isfinite(np.asarray(loss)).all()])
        ask = partial(on_arrays.allgather, is_bad, "loss is not finite", self.process_set)
        bad = np.flatnonzero(exactly(ask))
        if not bad.size:
            return
        self.model.stop_training = True
        ranks = [int(each) for each in bad]
        if self.process_set is not None:
            ranks = [self.process_set.ranks[each] for each in ranks]
        if rank() == ranks[0]:
            said = ", ".join(map(str, ranks))
            report_to_stderr(
                f"the loss of rank {said} is not finite in batch {batch}: training ends on all "
                "ranks"
            )


class CommitCallback(InOneKeras, _keras.callbacks.Callback):  # type: ignore[misc]
    """Commits the state of an elastic job after each batch, and counts in it how far ``fit`` is.

    If the state has them, ``state.epoch`` is the number of the epoch at hand and ``state.batch``
    how many of its batches are done. A process that joins goes on from there, in a loop such as::

        state = elastic.State(model=model, epoch=0, batch=0)

        @elastic.run
        def train(state):
            while state.epoch < epochs:
                model.fit(
                    batches(), initial_epoch=state.epoch, epochs=state.epoch + 1,
                    steps_per_epoch=steps - state.batch,
                    callbacks=[..., CommitCallback(state)],
                )

    Put it last among the callbacks: an epoch's last batch is committed when the others have done
    what they do at its end, so a rank that joins finds that over.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        """``batches_per_commit``: commit after so many batches, and at the end of an epoch.

        Where an ElasticSampler is in the state, that is the optimizer's
        ``backward_passes_per_step``. Raises InvalidArgumentError for what is no state, or no whole
        number above 0.
        """
        super().__init__()
        if not isinstance(state, State):
            raise FrontEndArgumentError(
                f"state is a {type(state).__name__}: give a kolovod.elastic.State"
            )
        if not isinstance(batches_per_commit, int) or batches_per_commit < 1:
            raise FrontEndArgumentError(
                f"batches_per_commit is {batches_per_commit!r}: give an int >= 1"
            )
        self.state: Any = state
        self.batches_per_commit = batches_per_commit
        self._begun = 0  # the number of a batch in this call of ``fit``
        self._not_committed = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Count batches anew."""
        self._not_committed = 0

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Commit the batches before: none of them was the last one of the epoch."""
        self._begun = batch
        if self._not_committed >= self.batches_per_commit:
            self._not_committed = 0
            self.state.commit()

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the batches that are done: several with ``steps_per_execution``."""
        done = batch - self._begun + 1
        self._not_committed += done
        if hasattr(self.state, "batch"):
            self.state.batch += done

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit the end of an epoch."""
        if hasattr(self.state, "epoch"):
            self.state.epoch = epoch + 1
        if hasattr(self.state, "batch"):
            self.state.batch = 0
        # Of data whose length it does not know Keras begins a batch that is none: the last one was
        # committed then. What counts samples allows one commit for each step.
        if self._not_committed or not (self.state.samplers() or self.state.logs()):
            self.state.commit()


class BestModelCheckpoint(InOneKeras, _keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Keeps the best model so far in a file, which rank 0 writes.

    Put it behind MetricAverageCallback, which makes the ranks agree on what is best.
    """

    filepath: Any

    def __init__(
        self,
        filepath: Any,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        """Take the arguments of ``keras.callbacks.ModelCheckpoint``.

        ``filepath`` None: it will be assigned.
        """
        suffix = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(
            filepath or f"unset{suffix}",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath = filepath and self.filepath

    def _save_model(self, *args: Any, **kwargs: Any) -> None:
        if rank() != 0:
            return
        if not self.filepath:
            raise FrontEndArgumentError(
                "BestModelCheckpoint does not know where to write: assign its filepath"
            )
        super()._save_model(*args, **kwargs)


def _is_number(value: Any) -> bool:
    if isinstance(value, str | bytes | None):
        return False
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
