"""DiLoCo: each rank steps by itself, and now and then an outer optimizer steps for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from kolovod.core.process_sets import ProcessSet
from kolovod.errors import FrontEndArgumentError
from kolovod.gradients.compression import AnyCompressor, Compression
from kolovod.gradients.diloco import Fragments
from kolovod.gradients.periodic import Details, Schedule
from kolovod.torch import periodic
from kolovod.torch.autograd import TorchCollectives
from kolovod.torch.verbs import collectives

__all__ = ["DiLoCo"]


class DiLoCo(periodic.TrainsIndependently):
    """Distributed low-communication training of a model.

    Each rank takes ``sync_every`` steps of the inner optimizer by itself. How far its parameters
    have come from those that all ranks have in common is its outer gradient; the ranks' mean of
    these goes to the outer optimizer, whose step makes the next parameters in common. A. Douillard
    et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105:
    AdamW inside, Nesterov momentum of 0.9 with a rate of 0.7 outside.

    With ``fragments`` the parameters are synchronised in parts, one after the other, so that less
    is sent at a time, and with ``fragment_sync_delay`` that happens while the next steps are taken.
    A. Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv 2501.18512.

        inner = torch.optim.AdamW(model.parameters(), lr=4e-4)
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        diloco = kv.DiLoCo(model, inner, outer, sync_every=100, compression=kv.Compression.int4)
        for batch in loader: ...  # as ever; inner.step() does it
        diloco.synchronize()

    It takes more steps than synchronous training to the same loss where a model is trained from
    scratch: ``warm_up_steps`` are for that.

    In an elastic job it is in the state, in the place of the model and the optimizers
    (docs/elastic-reference.md).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inner: torch.optim.Optimizer,
        outer: torch.optim.Optimizer,
        sync_every: int,
        *,
        fragments: int | Sequence[Sequence[torch.Tensor]] = 1,
        fragment_sync_delay: int = 0,
        local_share: float | None = None,
        warm_up_steps: int = 0,
        compression: AnyCompressor = Compression.none,
        process_set: ProcessSet | None = None,
        verbs: TorchCollectives = collectives,
    ) -> None:
        """All ranks must begin with the same parameters (``broadcast_parameters``).

        ``inner``, ``outer``: of the model's parameters; only ``inner.step()`` is called by the
        script. ``inner`` may be a DistributedOptimizer of a process set: synchronous within each
        host, say, and DiLoCo between them.
        ``sync_every``: steps of ``inner`` after which a parameter is synchronised again.
        ``fragments``: how many parts (every n-th parameter, so that each has some of all depths),
        or lists of parameters.
        ``fragment_sync_delay``: a fragment's mean is applied so many steps after it was sent.
        ``local_share``: what remains then of the rank's own parameters, from 0 to 1; None: 0
        without a delay, else a half, as in the paper.
        ``warm_up_steps``: so many steps are taken with averaged gradients first.
        ``compression``: of the outer gradients; see ``DistributedOptimizer``.
        ``process_set``: its members average among themselves; None: all ranks.
        ``verbs``: over another world than the process's own (tests).

        ``inner.step()`` raises MismatchError, on every rank, where models, values or options
        differ; InvalidArgumentError in an elastic job whose state has it not. Raises
        InvalidArgumentError.
        """
        super().__init__(model, {"inner": inner, "outer": outer})
        self._outer = outer
        self._check_outer()
        self._schedule = Schedule.checked(sync_every, warm_up_steps, fragment_sync_delay)
        self._fragments = Fragments(self._schedule)
        self._fragments.cut(
            fragments, [p for _, p in self._parameters], "the model's parameters that are trained"
        )
        self._local_share = self._schedule.share(local_share)
        self.sync_every, self.warm_up_steps = sync_every, warm_up_steps
        self.steps = 0
        """The number of steps that the inner optimizer has taken."""
        self._common = [p.detach().clone() for _, p in self._parameters]
        self._exchange = periodic.Exchange("diloco", compression, process_set, verbs)
        self._hooks = [
            inner.register_step_pre_hook(self._before_step),
            inner.register_step_post_hook(self._after_step),
        ]

    def synchronize(self) -> None:
        """Apply what is on its way, and synchronise what has changed since; all ranks do.

        Before an evaluation, a checkpoint that others go on from, or at the end: ranks have the
        same parameters then.
        """
        self._agree()
        self._fragments.synchronize(self.steps, self._send, partial(self._apply, local_share=0.0))

    def close(self) -> None:
        """Leave the inner optimizer alone from now on."""
        for hook in self._hooks:
            hook.remove()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state for a checkpoint, beside the model's and inner optimizer's.

        It waits for what is on its way. In an elastic job others need not call it, so there what
        has not arrived counts as this rank's own outer gradients, where a job goes on from it.
        """
        return {
            "steps": self.steps,
            "common": dict(zip(self._names(), self._common, strict=True)),
            "outer": self._outer.state_dict(),
            "on_its_way": self._fragments.waiting(),
            "equal_after": dict(self._fragments.equal_after),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``. Raises InvalidArgumentError for another model's."""
        wanted = {"steps", "common", "outer", "on_its_way", "equal_after"}
        if set(state) != wanted or list(state["common"]) != self._names():
            raise FrontEndArgumentError("the state is not of DiLoCo with this model")
        device = self._common[0].device
        waiting = {
            fragment: (due, [mean.to(device) for mean in means])
            for fragment, (due, means) in state["on_its_way"].items()
        }
        self._fragments.go_on(waiting, state["equal_after"])
        self.steps = int(state["steps"])
        with torch.no_grad():
            for common, value in zip(self._common, state["common"].values(), strict=True):
                common.copy_(value)
        self._outer.load_state_dict(state["outer"])

    def drain_exchanges(self) -> Iterator[None]:
        """Let what is on its way arrive, in the order in which it is due."""
        return self._fragments.drain_exchanges()

    def _names(self) -> list[str]:
        return [name for name, _ in self._parameters]

    def _check_outer(self) -> None:
        own = {id(p) for _, p in self._parameters}
        given = {id(p) for group in self._outer.param_groups for p in group["params"]}
        if own != given:
            raise FrontEndArgumentError(
                f"outer has {len(given)} parameters, and the model {len(own)} that are trained: "
                "give an optimizer of exactly these, model.parameters()"
            )

    def _options(self) -> Details:
        return [*self._schedule.details(), ("fragments", self._fragments.places)]

    def _agree(self) -> None:
        details = [*self._options(), ("steps", self.steps)]
        in_common = list(zip(self._names(), self._common, strict=True))
        self._exchange.agree(details, in_common)

    def _check_model(self) -> None:
        """Raise InvalidArgumentError where ranks would keep something that they have changed."""
        new = [name for name, _ in self._newly_trained()]
        inner = self._optimizers["inner"]
        own = {id(p) for group in inner.param_groups for p in group["params"]}
        for common, (name, parameter) in zip(self._common, self._parameters, strict=True):
            if id(parameter) not in own and not torch.equal(common, parameter):
                new.append(name)
        if new:
            raise FrontEndArgumentError(
                f"{', '.join(new[:3])}{', ...' if new[3:] else ''}: trained by now, and not by "
                "inner as DiLoCo was made, so ranks would keep what each has. Give one inner "
                "optimizer of all parameters, or after such a change call close() and make another "
                "DiLoCo"
            )

    def _before_step(self, *arguments: Any) -> None:
        warms_up = self._schedule.warms_up(self.steps)
        self._exchange.begin_step(self._agree, self._parameters, warms_up=warms_up)

    def _after_step(self, *arguments: Any) -> None:
        self.steps += 1
        if self._schedule.begins(self.steps):
            with torch.no_grad():
                for common, (_, parameter) in zip(self._common, self._parameters, strict=True):
                    common.copy_(parameter)
        apply = partial(self._apply, local_share=self._local_share)
        self._fragments.advance(self.steps, self._send, apply)

    def _send(self, fragment: int) -> None:
        """Start to average the outer gradients of a fragment; with the last one go the buffers."""
        self._check_model()
        with torch.no_grad():
            sent = [
                (self._parameters[place][0], self._common[place] - self._parameters[place][1])
                for place in self._fragments.places[fragment]
            ]
            further = [b.clone() for b in self._fragments.with_last(fragment, self._buffers)]
            under_way = self._exchange.start(f"fragment.{fragment}", sent, further)
        self._fragments.begin(fragment, self.steps, under_way)

    def _apply(self, fragment: int, local_share: float) -> None:
        """Step the outer optimizer on a fragment, from what the ranks had in common."""
        means = self._fragments.end(fragment, self.steps, local_share)
        kept = [p.grad for _, p in self._parameters]
        places = self._fragments.places[fragment]
        with torch.no_grad():
            local = [self._parameters[place][1].detach().clone() for place in places]
            for _, parameter in self._parameters:
                parameter.grad = None  # which the outer optimizer passes over
            for buffer in reversed(self._fragments.with_last(fragment, self._buffers)):
                buffer.copy_(means.pop())
            for place, mean in zip(places, means, strict=True):
                parameter = self._parameters[place][1]
                parameter.copy_(self._common[place])
                parameter.grad = mean
        self._outer.step()
        with torch.no_grad():
            for place, own in zip(places, local, strict=True):
                parameter = self._parameters[place][1]
                self._common[place].copy_(parameter)
                if local_share:
                    parameter.lerp_(own, local_share)
            for (_, parameter), grad in zip(self._parameters, kept, strict=True):
                parameter.grad = grad
