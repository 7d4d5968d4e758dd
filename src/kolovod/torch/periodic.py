"""The common part of PyTorch's LocalSGD and DiLoCo: parameters and the warm-up.

``local_sgd.py`` and ``diloco.py`` are the two ways. In the state of an elastic job each brings its
model and its optimizers along: a rank that joins becomes a copy of rank 0, and the others keep what
they have.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kolovod.core.transaction import transaction
from kolovod.errors import FrontEndArgumentError
from kolovod.gradients import periodic
from kolovod.torch.adasum import ByAdasum
from kolovod.torch.distributed import Distributed

Named = Sequence[tuple[str, torch.Tensor]]


class Exchange(periodic.Exchange):
    """An exchange of PyTorch's parameters and gradients."""

    def agree(
        self, details: periodic.Details, parameters: Named, *, are_equal: bool = True
    ) -> None:
        """Make sure, once in each world, that all ranks have the same details and parameters.

        ``are_equal``: the parameters' values must be equal, too. Raises what ``agree_once`` raises.
        """

        def mine() -> periodic.Details:
            compared = parameters if are_equal else ()
            values = [(f"the values of {name}", _checksum(p)) for name, p in compared]
            return [*details, *_described(parameters), *values]

        self.agree_once(mine)

    def begin_step(self, agree: Callable[[], None], parameters: Named, *, warms_up: bool) -> None:
        """Agree, as an optimizer's step begins, and in the warm-up average gradients."""
        self.before_step()
        if not self.takes_part:
            self.has_exchanged |= warms_up
            return
        agree()
        if warms_up:
            self._average_gradients(parameters)

    def _average_gradients(self, parameters: Named) -> None:
        """Make each parameter's gradient the ranks' mean; one that has none counts as zeros."""
        device = parameters[0][1].device
        own = [parameter.grad for _, parameter in parameters]
        gradients = [
            (name, torch.zeros_like(p) if grad is None else grad.to_dense())
            for (name, p), grad in zip(parameters, own, strict=True)
        ]
        used = torch.tensor([g is not None for g in own], dtype=torch.float32, device=device)
        *means, used = self.start("gradients", gradients, [used], is_compressed=False)()
        with_means = zip(parameters, own, means, used.tolist(), strict=True)
        for (_, parameter), grad, mean, share in with_means:
            if not share:  # no rank has one, so no optimizer of one process would change it
                continue
            if grad is not None and grad.layout == torch.sparse_coo:
                mean = mean.to_sparse(grad.sparse_dim())
            parameter.grad = mean


class TrainsIndependently(periodic.TrainsByExchange):
    """LocalSGD or DiLoCo, in the state of an elastic job or not."""

    _exchange: Exchange

    def __init__(self, model: torch.nn.Module, optimizers: Mapping[str, Any]) -> None:
        """``optimizers``: of the model's parameters, by what they are called.

        Raises InvalidArgumentError.
        """
        self._parameters = parameters_of(model)
        self._buffers = buffers_of(model)
        for label, optimizer in optimizers.items():
            _check_optimizer(label, optimizer)
        self._model, self._optimizers = model, dict(optimizers)
        self._check_optimized()
        _all.add(self)

    def _check_optimized(self) -> None:
        """Raise InvalidArgumentError for what a rank changes alone and is not the model's."""
        own = {id(parameter) for parameter in self._model.parameters()}
        for label, optimizer in self._optimizers.items():
            if label == "outer":  # which changes what ranks have in common
                continue
            for other in (p for group in optimizer.param_groups for p in group["params"]):
                if id(other) not in own:
                    raise FrontEndArgumentError(
                        f"{label} has a parameter of shape {tuple(other.shape)} that is not the "
                        "model's, so it would not be averaged: give "
                        f"{type(self).__name__} a module with all of them, "
                        "torch.nn.ModuleList([model, ...]) for instance"
                    )

    def _newly_trained(self) -> Named:
        """Return the parameters that are trained by now, and are not among its own.

        Layers may be unfrozen, added or replaced while a model trains.
        """
        self._check_optimized()
        known = {id(parameter) for _, parameter in self._parameters}
        return [
            (name, p)
            for name, p in self._model.named_parameters()
            if p.requires_grad and id(p) not in known
        ]

    @abstractmethod
    def _options(self) -> periodic.Details:
        """Return the options that must be equal on all ranks."""

    def whole_state(self) -> dict[str, Any]:
        """All that a rank which joins has to have."""
        own = self.state_dict()
        optimizers = {  # the outer one's is in it
            label: each.state_dict() for label, each in self._optimizers.items() if label not in own
        }
        return {"model": self._model.state_dict(), "optimizers": optimizers, "own": own}

    def take_whole_state(self, state: Mapping[str, Any]) -> None:
        """Be a copy of the rank whose ``whole_state`` it is, unless this rank has begun to train.

        Then it has steps of its own, which a rank that joins must not cost it.
        """
        if self._exchange.has_begun:
            return
        self._model.load_state_dict(state["model"])
        for label, value in state["optimizers"].items():
            self._optimizers[label].load_state_dict(value)
        self.load_state_dict(state["own"])

    # --- IndependentTraining ---

    def enter_world(self) -> None:
        """Enter a world of an elastic job together with all ranks, as IndependentTraining says.

        Raises InvalidArgumentError if one of the optimizers is a DistributedOptimizer.
        """
        for label, optimizer in self._optimizers.items():
            if isinstance(optimizer, Distributed | ByAdasum):
                raise FrontEndArgumentError(
                    f"{label} is a DistributedOptimizer: in an elastic job each of its steps is "
                    f"one of all ranks, which {type(self).__name__} is to leave out; give the "
                    "optimizer as it is"
                )
        self._exchange.enter_world(
            lambda: [*self._options(), *_described(list(self._model.state_dict().items()))]
        )

    def owns(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether it is in the current job's state and has a parameter among ``tensors``."""
        own = {id(p) for _, p in self._parameters}
        return self._exchange.is_in_state and any(id(tensor) in own for tensor in tensors)


_all: weakref.WeakSet[TrainsIndependently] = weakref.WeakSet()


def check_not_owned(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise InvalidArgumentError for a value of a state that is in it twice.

    ``tensors``: the parameters of ``state.name``; all ranks would be given rank 0's.
    """
    for apart in list(_all):
        if transaction().is_elastic and apart.owns(tensors):
            kind = type(apart).__name__
            raise FrontEndArgumentError(
                f"state.{name} has parameters of the {kind} in the state, which brings its model "
                f"and optimizers along and leaves each rank its own: leave {name} out"
            )


def _described(tensors: Named) -> periodic.Details:
    return [(name, (tuple(p.shape), str(p.dtype))) for name, p in tensors]


def parameters_of(model: torch.nn.Module) -> Named:
    """Return the parameters that are trained, with names.

    Raises InvalidArgumentError for what is no model, or has none.
    """
    if not isinstance(model, torch.nn.Module):
        raise FrontEndArgumentError(f"model is a {type(model).__name__}: give a torch.nn.Module")
    found = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not found:
        raise FrontEndArgumentError("the model has no parameter that is trained")
    return found


def buffers_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the buffers that are averaged: running statistics, which are floats."""
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def _check_optimizer(label: str, optimizer: Any) -> None:
    """Raise InvalidArgumentError, which calls it ``label``, for what is none."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise FrontEndArgumentError(
            f"{label} is a {type(optimizer).__name__}: give a torch.optim.Optimizer"
        )


def _checksum(tensor: torch.Tensor) -> int:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return periodic.checksum(flat.view(torch.uint8).numpy())
