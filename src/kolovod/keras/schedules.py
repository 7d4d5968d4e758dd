"""Learning rates that change while a model is trained with several ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from kolovod.core.rank_info import rank, size
from kolovod.errors import FrontEndArgumentError
from kolovod.keras.framework_detection import InOneKeras, chosen, keras_of
from kolovod.keras.functions import to_numpy

_keras: Any = chosen()


class LearningRateScheduleCallback(InOneKeras, _keras.callbacks.Callback):  # type: ignore[misc]
    """Multiplies the learning rate by a factor that depends on the epoch."""

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        """``initial_lr``: what is multiplied.

        ``multiplier``: a function of the epoch, or a number that is raised to the power of the
        epochs since ``start_epoch``, by which the schedule is a staircase. ``start_epoch``,
        ``end_epoch``: from the first until before the last of these; None: to the end.
        ``staircase``: change the rate between epochs, not with every batch.
        ``momentum_correction``: with a rate that changes, change the momentum that was gathered at
        the old rate, too (Goyal et al., 2017, section 2.2). ``steps_per_epoch``: of a schedule
        that is no staircase, where Keras does not know it.
        """
        super().__init__()
        if not callable(multiplier):
            base, staircase = float(multiplier), True

            def power(epoch: float) -> float:
                return float(base ** (epoch - start_epoch))

            multiplier = power
        self.initial_lr = initial_lr
        self.multiplier = multiplier
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Find out how many steps an epoch has. Raises InvalidArgumentError if nobody knows."""
        if callable(getattr(_innermost(self.model.optimizer), "_learning_rate", None)):
            raise FrontEndArgumentError(
                "the optimizer's learning rate is a schedule of its own: make the optimizer with a "
                "number, or leave this callback out"
            )
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise FrontEndArgumentError(
                    "Keras does not know how many steps an epoch has: give steps_per_epoch to "
                    f"{type(self).__name__}"
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note which epoch it is."""
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the rate of this batch."""
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._set(self.multiplier(epoch + batch / self.steps_per_epoch))
        elif batch == 0:
            self._set(self.multiplier(epoch))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Tell the other callbacks what the rate is."""
        if logs is not None:
            logs["learning_rate"] = rate_of(self.model.optimizer)

    def _set(self, factor: float) -> None:
        optimizer = self.model.optimizer
        before, after = rate_of(optimizer), self.initial_lr * factor
        if before == after:
            return
        optimizer.learning_rate = after
        if self.momentum_correction and before != 0:
            for variable in _velocities(_innermost(optimizer)):
                variable.assign(variable * (after / before))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from that of one rank to that of all, in the first epochs.

    A batch as many times as large as there are ranks bears a rate as many times as high, but not
    from the start (Goyal et al., 2017).
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        """``initial_lr``: the rate at the end, that of one rank times the number of ranks.

        ``verbose``: 1 to have rank 0 say when it has been reached. For the others see
        LearningRateScheduleCallback.
        """

        def multiplier(epoch: float) -> float:
            # So that the last batch of the last epoch is the first that has the whole rate.
            assert self.steps_per_epoch is not None
            progress = min(1.0, (epoch + 1 / self.steps_per_epoch) / warmup_epochs)
            return (1 + progress * (size() - 1)) / size()

        super().__init__(
            initial_lr,
            multiplier,
            0,
            warmup_epochs,  # type: ignore[arg-type]  # a part of an epoch, too
            False,
            momentum_correction,
            steps_per_epoch,
        )
        if not warmup_epochs > 0:
            raise FrontEndArgumentError(f"warmup_epochs is {warmup_epochs!r}: give more than 0")
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Say that the rate has been reached."""
        super().on_epoch_end(epoch, logs)
        assert self.end_epoch is not None
        if self.verbose > 0 and rank() == 0 and epoch < self.end_epoch <= epoch + 1:
            rate = rate_of(self.model.optimizer)
            sys.stdout.write(f"\nEpoch {epoch + 1}: the learning rate has warmed up to {rate:g}.\n")


def rate_of(optimizer: Any) -> float:
    """The learning rate that is set."""
    return float(to_numpy(optimizer.learning_rate))


def _innermost(optimizer: Any) -> Any:
    """Return the optimizer without a LossScaleOptimizer around it."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def _velocities(optimizer: Any) -> list[Any]:
    """Return the variables in which SGD or RMSprop keeps past gradients times their steps' rates.

    To scale them once is to take another momentum for one step, which Keras could not do: the
    momentum is a constant of the program that it has traced.
    """
    is_legacy = hasattr(optimizer, "get_slot_names")
    kinds = keras_of(optimizer).optimizers
    kinds = kinds.legacy if is_legacy else kinds
    if not isinstance(optimizer, (kinds.SGD, kinds.RMSprop)):
        return []  # Muon's momentums have no rate in them
    if is_legacy:
        names = [str(v.name).split(":")[0] for v in optimizer.variables()]
        pairs = zip(names, optimizer.variables(), strict=True)
        return [variable for name, variable in pairs if name.endswith("/momentum")]
    if not optimizer.momentum:
        return []
    kept = getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None) or []
    return [variable for variable in kept if variable is not None]
