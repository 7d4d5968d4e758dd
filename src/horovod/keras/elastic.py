"""Horovod's elastic interface for Keras: ``run``, ``KerasState``, and callbacks that follow it."""

from __future__ import annotations

from typing import Any

from horovod.common.graph_errors import run
from horovod.keras.state import KerasState
from kolovod.keras.framework_detection import InOneKeras, chosen

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]

_keras: Any = chosen()


class CommitStateCallback(InOneKeras, _keras.callbacks.Callback):  # type: ignore[misc]
    """Calls ``commit`` after every so many batches, and at the end of every epoch.

    Subclasses may override ``commit``, which both go through. Let it come after callbacks that
    change ``state`` at the end of an epoch, so that it keeps what they have noted.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        """``batches_per_commit``: more make it cheaper, and a failure dearer."""
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        """Count batches anew."""
        self.batches_remaining = self.batches_per_commit

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit, if it is time."""
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit, so that a failure costs an epoch at most."""
        self.commit()

    def commit(self) -> None:
        """``state.commit()``; the next one is due after as many batches as a whole one."""
        self.batches_remaining = self.batches_per_commit
        self.state.commit()


class UpdateBatchStateCallback(InOneKeras, _keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps ``state.batch``: the number of the last batch, 0 after the end of an epoch.

    ``params["steps"]``, the number of batches that other callbacks show, is less by it in the first
    epoch. How many batches there are the script says, by ``steps_per_epoch``.
    """

    def __init__(self, state: Any) -> None:
        """``state`` has ``batch``."""
        super().__init__()
        self.state = state
        self.steps_per_epoch: int | None = None
        self._is_first = True

    def on_train_begin(self, logs: Any = None) -> None:
        """Note that the next epoch may have been begun before."""
        self.steps_per_epoch, self._is_first = None, True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Leave the batches that are done already out of ``params["steps"]``."""
        if not self.params.get("steps"):
            return
        if self.steps_per_epoch is None:
            self.steps_per_epoch = self.params["steps"]
        done = self.state.batch if self._is_first else 0
        self.params["steps"] = self.steps_per_epoch - done

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note the number of the batch."""
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Note that no batch of the next epoch is done."""
        self._is_first = False
        self.state.batch = 0


class UpdateEpochStateCallback(InOneKeras, _keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps ``state.epoch``: how many are over, those before this ``fit`` included.

    Give ``fit`` the number that is left: ``epochs=total - state.epoch``.
    """

    def __init__(self, state: Any) -> None:
        """``state`` has ``epoch``."""
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        """Note how many epochs are over: ``fit`` counts from here on."""
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count one more epoch."""
        self.state.epoch = self.initial_epoch + epoch + 1
