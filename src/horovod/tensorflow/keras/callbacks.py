"""Horovod's callbacks for tf.keras; but for one argument they are those of horovod.keras."""

from __future__ import annotations

from horovod.keras.callbacks import (
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)
from kolovod.keras import callbacks as _callbacks

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BestModelCheckpoint(_callbacks.BestModelCheckpoint):
    """Keeps the best model. Horovod's users assign ``filepath`` after they have made it."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        """Make the callback; see ``kolovod.keras.callbacks`` for the arguments."""
        super().__init__(None, monitor, verbose, save_weights_only, mode, save_freq)
