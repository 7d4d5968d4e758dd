"""Horovod's state of a PyTorch training: models, optimizers, samplers, and plain values."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from horovod.common.elastic import Kept, ObjectState
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.snapshot import copied, fits
from horovod.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from horovod.torch.mpi_ops import rank
from kolovod.elastic.state import has_state_dict, load_state
from kolovod.errors import FrontEndArgumentError

__all__ = [
    "ModelStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]


class StateHandler(Kept):
    """Saves, restores and gives to other ranks one value of a TorchState; for subclasses."""

    def __init__(self, value: Any) -> None:
        """``value``: what ``state.NAME`` is."""
        self.value = value

    def set_value(self, value: Any) -> None:
        """Take another value, and save it."""
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    """The state of a torch.nn.Module. Parameters and buffers stay where they are."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Save ``model``."""
        super().__init__(model)
        self._saved: Any = None
        self.save()

    def save(self) -> None:
        """Implement ``Kept.save``; the copy is made into the memory of the last one."""
        self._saved = copied(self.value.state_dict(), self._saved)

    def restore(self) -> None:
        """Implement ``Kept.restore``."""
        others = {k: v for k, v in self._saved.items() if not isinstance(v, torch.Tensor)}
        self.value.load_state_dict({**self._saved, **copy.deepcopy(others)})

    def sync(self) -> None:
        """Implement ``Kept.sync``."""
        broadcast_parameters(self.value.state_dict(), 0)
        self.save()


class OptimizerStateHandler(StateHandler):
    """The state of a torch.optim.Optimizer. Its tensors stay where they are, if all are there."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Save ``optimizer``."""
        super().__init__(optimizer)
        self._saved: Any = None
        self.save()

    def save(self) -> None:
        """Implement ``Kept.save``; the copy is made into the memory of the last one."""
        self._saved = copied(self.value.state_dict(), self._saved)

    def restore(self) -> None:
        """Implement ``Kept.restore``. Gradients, of a step that failed, are forgotten."""
        own = self.value.state_dict()["state"]
        if fits(self._saved["state"], own):
            self._restore_in_place(own)
        else:  # which would use the tensors that it is given
            self.value.load_state_dict(copied(self._saved))
        for group in self.value.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _restore_in_place(self, own: dict[Any, dict[str, Any]]) -> None:
        for key, values in self._saved["state"].items():
            for name, value in values.items():
                own[key][name] = copied(value, own[key][name])
        for group, saved in zip(self.value.param_groups, self._saved["param_groups"], strict=True):
            for name, value in saved.items():
                if name != "params":
                    group[name] = copied(value, group.get(name))

    def sync(self) -> None:
        """Implement ``Kept.sync``."""
        broadcast_optimizer_state(self.value, 0)
        self.save()


class StateDictHandler(StateHandler):
    """The state of what saves and loads it by itself, as schedules of the learning rate do.

    A copy of one would change a copy of its optimizer.
    """

    def __init__(self, value: Any) -> None:
        """Save ``value``."""
        super().__init__(value)
        self.save()

    def save(self) -> None:
        """Implement ``Kept.save``."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Implement ``Kept.restore``."""
        load_state(self.value, copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Implement ``Kept.sync``."""
        self._saved = broadcast_object(self.value.state_dict(), 0)
        self.restore()


class ContainerHandler(StateHandler):
    """The states of models, optimizers and the like in a list, a tuple or a dict, which stays."""

    def __init__(self, value: Any) -> None:
        """Save what is in ``value``. Raises InvalidArgumentError for what would not be saved."""
        super().__init__(value)
        self.handlers: list[StateHandler] = []
        for each in _items(value):
            handler = _handler_of(each)
            if handler is None:
                raise FrontEndArgumentError(
                    f"a {type(value).__name__} of the state has a {type(each).__name__} beside "
                    "models or optimizers: give it to TorchState by a name of its own"
                )
            self.handlers.append(handler)

    def set_value(self, value: Any) -> None:
        """Take another container, and save what is in it."""
        self.value, self.handlers = value, ContainerHandler(value).handlers

    def save(self) -> None:
        """Implement ``Kept.save``."""
        for handler in self.handlers:
            handler.save()

    def restore(self) -> None:
        """Implement ``Kept.restore``."""
        for handler in self.handlers:
            handler.restore()

    def sync(self) -> None:
        """Implement ``Kept.sync``."""
        for handler in self.handlers:
            handler.sync()


class SamplerStateHandler(StateHandler):
    """The state of an ElasticSampler."""

    def __init__(self, sampler: ElasticSampler) -> None:
        """Save ``sampler``."""
        super().__init__(sampler)
        self.save()

    def save(self) -> None:
        """Implement ``Kept.save``."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Implement ``Kept.restore``."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Implement ``Kept.sync``."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), 0))
        self.save()


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Return which class handles values of which type; the first that fits counts."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Take another registry, for states that are made from now on."""
    global _registry
    _registry = registry


class TorchState(ObjectState):
    """Models, optimizers and samplers by handlers; all other values are pickled."""

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        """``model``, ``optimizer``: attributes like ``kwargs``, each of which may be one, too.

        Assigning to such an attribute has its handler take the new value, and save it.
        """
        values = {"model": model, "optimizer": optimizer, **kwargs}
        self._handlers: dict[str, StateHandler] = {}
        self._is_restored = False
        plain: dict[str, Any] = {}
        for name, value in values.items():
            handler = _handler_of(value)
            if handler is not None:
                self._handlers[name] = handler
            elif name in kwargs:
                plain[name] = value
            super().__setattr__(name, value)
        super().__init__(broadcast_object, rank, **plain)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; give a value that has a handler to that."""
        handler = self.__dict__.get("_handlers", {}).get(name)
        if handler is not None:
            handler.set_value(value)
        elif name in ("model", "optimizer") and (handler := _handler_of(value)) is not None:
            self._handlers[name] = handler
        super().__setattr__(name, value)

    def _parts(self) -> Iterable[Kept]:
        """The handlers."""
        return self._handlers.values()

    def restore(self) -> None:
        """Implement ``Kept.restore``."""
        super().restore()
        self._is_restored = True

    def reset(self) -> None:
        """Deal samples to the ranks of now, and forget passes that an optimizer has counted."""
        for handler in _flat(self._handlers.values()):
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()
            elif self._is_restored and isinstance(handler.value, torch.optim.Optimizer):
                handler.value.zero_grad()
        self._is_restored = False


def _flat(handlers: Iterable[StateHandler]) -> Iterator[StateHandler]:
    for handler in handlers:
        if isinstance(handler, ContainerHandler):
            yield from _flat(handler.handlers)
        else:
            yield handler


def _handler_of(value: Any) -> StateHandler | None:
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    if has_state_dict(value):
        return StateDictHandler(value)
    return ContainerHandler(value) if any(map(_has_handler, _items(value))) else None


def _has_handler(value: Any) -> bool:
    known = has_state_dict(value) or any(isinstance(value, kind) for kind, _ in _registry)
    return known or any(map(_has_handler, _items(value)))


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else []
