"""PyTorch's models and optimizers in the state of an elastic job."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from kolovod.core.transaction import transaction
from kolovod.core.transfers import Transfers
from kolovod.core.world import current
from kolovod.elastic import share_by
from kolovod.elastic.outlines import Leaf, leaves_are
from kolovod.elastic.state import State
from kolovod.torch import handing_over, periodic
from kolovod.torch.functions import Functions
from kolovod.torch.sharded import Sharded

__all__ = ["share_in_elastic_jobs"]


def share_in_elastic_jobs(functions: Functions, transfers: Transfers) -> None:
    """Let ``kolovod.elastic.State`` hold modules and optimizers: ranks that join get rank 0's."""

    def lacking() -> bool:
        return current().rank in transaction().lacking

    def give_module(
        name: str, module: torch.nn.Module, state: State
    ) -> handing_over.Tensors | None:
        if not handing_over.is_possible(state):
            share_module(name, module)
            return None
        periodic.check_not_owned(name, list(module.parameters()))
        return handing_over.hand_over_module(
            functions, transfers, module, state, lacking(), lambda: keep_buffers(module)
        )

    def give_optimizer(name: str, optimizer: Any, state: State) -> handing_over.Tensors | None:
        if not handing_over.is_possible(state):
            share_optimizer(name, optimizer)
            return None
        return handing_over.hand_over_optimizer(functions, transfers, optimizer, lacking())

    def share_module(name: str, module: torch.nn.Module) -> torch.nn.Module:
        periodic.check_not_owned(name, list(module.parameters()))
        functions.broadcast_module(module)
        return module

    def keep_buffers(module: torch.nn.Module) -> Callable[[], None]:
        """Running statistics, which forward changes; parameters only the optimizer does."""
        buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]

        def restore() -> None:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)

        return restore

    def share_optimizer(name: str, optimizer: Any) -> Any:
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        periodic.check_not_owned(name, tensors)
        if isinstance(optimizer, Sharded):  # ranks have parts of its state
            optimizer._kolovod_share()
            return optimizer
        functions.broadcast_optimizer_state(optimizer)
        return optimizer

    def share_independent(
        name: str, own: periodic.TrainsIndependently
    ) -> periodic.TrainsIndependently:
        own.take_whole_state(functions.broadcast_nested(own.whole_state(), f"elastic.{name}"))
        return own

    share_by(
        _is_module,
        share_module,
        keep_buffers,
        give_module,
        within=True,
        tensors=lambda module: (*module.parameters(), *module.buffers()),
    )
    share_by(
        lambda value: isinstance(value, torch.optim.Optimizer),
        share_optimizer,
        hand_over=give_optimizer,
        within=True,
    )
    share_by(lambda value: isinstance(value, periodic.TrainsIndependently), share_independent)
    leaves_are((torch.Tensor, torch.nn.Parameter), Leaf(_put_tensor, _form, _memory_of))
    leaves_are((torch.Generator,), Leaf(_put_generator))


def _put_tensor(own: torch.Tensor, new: torch.Tensor) -> bool:
    if own.is_inference() or (own.requires_grad and not own.is_leaf):
        return False
    with torch.no_grad():
        own.copy_(new)
    return True


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    strided = tensor.layout == torch.strided
    place = (tensor.stride(), tensor.storage_offset()) if strided else ()
    return tuple(tensor.shape), str(tensor.dtype), str(tensor.layout), place


def _memory_of(tensor: torch.Tensor) -> int:
    if tensor.layout != torch.strided:
        return id(tensor)
    return tensor.untyped_storage().data_ptr() or id(tensor)


def _put_generator(own: torch.Generator, new: torch.Generator) -> bool:
    if own.device != new.device:
        return False
    own.set_state(new.get_state())
    return True


def _is_module(value: Any) -> bool:
    """Return whether it is a module of this front end's.

    A model of Keras on PyTorch is a module, but brings an optimizer: it belongs to Keras's front
    end if that is imported. Which of the two front ends was imported last must not matter.
    """
    if not isinstance(value, torch.nn.Module):
        return False
    of_keras = sys.modules.get("keras")
    is_model = of_keras is not None and isinstance(value, of_keras.Model)
    return not (is_model and "kolovod.keras" in sys.modules)
