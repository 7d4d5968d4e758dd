"""Local SGD: each rank steps by itself, and now and then all take the mean of their parameters."""

from __future__ import annotations

from typing import Any

import torch

from kolovod.core.process_sets import ProcessSet
from kolovod.gradients.compression import AnyCompressor, Compression
from kolovod.gradients.periodic import Details, Schedule
from kolovod.torch import periodic
from kolovod.torch.autograd import TorchCollectives
from kolovod.torch.verbs import collectives

__all__ = ["LocalSGD"]


class LocalSGD(periodic.TrainsIndependently):
    """Averages the parameters of a model every ``sync_every`` steps of its optimizer.

    Between these steps ranks do not communicate. Statistics of batch normalisation are averaged
    with the parameters; the optimizer's state stays each rank's own. S. Stich, "Local SGD
    Converges Fast and Communicates Little", ICLR 2019; with ``warm_up_steps`` post-local SGD: T.
    Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020.

        local_sgd = kv.LocalSGD(model, optimizer, sync_every=8)
        for batch in loader: ...  # as ever; optimizer.step() does it
        local_sgd.synchronize()

    A checkpoint has ``state_dict()``, for ``load_state_dict``, beside the model's and optimizer's.
    In an elastic job it is in the state, in the place of the model and the optimizer
    (docs/elastic-reference.md).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        sync_every: int,
        *,
        warm_up_steps: int = 0,
        compression: AnyCompressor = Compression.none,
        process_set: ProcessSet | None = None,
        verbs: TorchCollectives = collectives,
    ) -> None:
        """All ranks must begin with the same parameters (``broadcast_parameters``).

        ``optimizer``: of the model's parameters, not a DistributedOptimizer of the same ranks.
        ``warm_up_steps``: so many steps are taken with averaged gradients first.
        ``compression``: of the parameters, as they are sent; see ``DistributedOptimizer``.
        ``process_set``: its members average among themselves; None: all ranks.
        ``verbs``: over another world than the process's own (tests).

        ``optimizer.step()`` raises MismatchError, on every rank, where models, values or options
        differ; InvalidArgumentError in an elastic job whose state has it not. Raises
        InvalidArgumentError.
        """
        super().__init__(model, {"optimizer": optimizer})
        self._schedule = Schedule.checked(sync_every, warm_up_steps)
        self.sync_every, self.warm_up_steps = sync_every, warm_up_steps
        self.steps = 0
        """The number of steps that the optimizer has taken."""
        self._exchange = periodic.Exchange("local_sgd", compression, process_set, verbs)
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def synchronize(self) -> None:
        """Take the mean now, before an evaluation or at the end; all ranks do."""
        self._agree()
        self._average()

    def close(self) -> None:
        """Leave the optimizer alone from now on."""
        for hook in self._hooks:
            hook.remove()

    def _options(self) -> Details:
        return self._schedule.details()

    def _agree(self) -> None:
        details = [*self._options(), ("steps", self.steps)]
        self._exchange.agree(details, self._parameters, are_equal=self.steps == 0)

    def _follow_model(self) -> None:
        """Average what the model trains by now; what is frozen since then is still averaged."""
        new = self._newly_trained()
        there = {id(parameter) for parameter in self._model.parameters()}
        kept = [(name, p) for name, p in self._parameters if id(p) in there]
        self._parameters = [*kept, *new]
        self._buffers = periodic.buffers_of(self._model)

    def _before_step(self, *arguments: Any) -> None:
        warms_up = self._schedule.warms_up(self.steps)
        if warms_up:
            self._follow_model()
        self._exchange.begin_step(self._agree, self._parameters, warms_up=warms_up)

    def _after_step(self, *arguments: Any) -> None:
        self.steps += 1
        is_over = self._schedule.begins(self.steps)
        if is_over or self._schedule.sends(self.steps):
            self._average()

    def _average(self) -> None:
        if not self._exchange.takes_part:
            self._exchange.has_exchanged = True
            return
        self._follow_model()
        with torch.no_grad():
            own = [(name, p.detach().clone()) for name, p in self._parameters]
            means = self._exchange.start("parameters", own, [b.clone() for b in self._buffers])()
            averaged = [*(parameter for _, parameter in self._parameters), *self._buffers]
            for tensor, mean in zip(averaged, means, strict=True):
                tensor.copy_(mean)
