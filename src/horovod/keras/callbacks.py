"""Horovod's callbacks for Keras: Kolovod's, with Horovod's arguments."""

from __future__ import annotations

from typing import Any

from kolovod.keras import callbacks as _callbacks

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(_callbacks.BroadcastGlobalVariablesCallback):
    """Start equal. ``device`` is of no use here."""

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        """Make the callback; see ``kolovod.keras.callbacks`` for the arguments."""
        super().__init__(root_rank, None, local_variables or ())


class MetricAverageCallback(_callbacks.MetricAverageCallback):
    """Metrics of all ranks, each counting the same. ``device`` is of no use here."""

    def __init__(self, device: str = "") -> None:
        """Make the callback; see ``kolovod.keras.callbacks``."""
        super().__init__()


class _NamesAsHorovod:
    """A callback that sets the rate: other callbacks find it under Horovod's name, too."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Do what Kolovod's callback does, and log the rate under Horovod's name, too."""
        super().on_epoch_end(epoch, logs)  # type: ignore[misc]  # that of Kolovod's callback
        if logs is not None:
            logs["lr"] = logs["learning_rate"]


class LearningRateScheduleCallback(_NamesAsHorovod, _callbacks.LearningRateScheduleCallback):
    """Kolovod's callback; other callbacks find the rate under Horovod's name too."""


class LearningRateWarmupCallback(_NamesAsHorovod, _callbacks.LearningRateWarmupCallback):
    """Kolovod's callback; other callbacks find the rate under Horovod's name too."""


class BestModelCheckpoint(_callbacks.BestModelCheckpoint):
    """Keeps the best model. Horovod's users assign ``filepath`` after they have made it."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        """Make the callback; see ``kolovod.keras.callbacks`` for the arguments."""
        super().__init__(None, monitor, verbose, False, mode, save_freq)
