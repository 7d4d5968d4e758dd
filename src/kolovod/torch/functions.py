"""Starting equal: parameters, optimizer state and objects from one rank to all."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from kolovod.core.objects import Objects
from kolovod.errors import FrontEndArgumentError
from kolovod.gradients.agreement import agree
from kolovod.torch.autograd import TorchCollectives
from kolovod.torch.frontend import DTYPES, refusal, refuse_nested
from kolovod.torch.parts import is_sharded, local_of, sharded_like

_EXTRA_STATE = "_extra_state"
"""The name that PyTorch gives to a module's extra state."""
_Form = tuple[torch.Size, torch.dtype, bool]
"""Facts of a tensor; the last says whether it is in host memory."""
Parameters = Mapping[str, Any] | Iterable[tuple[str, Any]]


class Functions:
    """Has the functions for one world; ``kolovod.torch`` binds those for the process's own."""

    def __init__(self, verbs: TorchCollectives) -> None:
        """``verbs``: on tensors."""
        self._verbs = verbs
        self._objects = Objects(verbs.world)

    def broadcast_parameters(self, params: Parameters, root_rank: int = 0) -> None:
        """Overwrite ``params`` with those of ``root_rank``, in place.

        ``params``: ``model.state_dict()``, ``model.named_parameters()`` or another mapping or
        iterable of (name, tensor); entries that are None are left out. Warns of the extra state of
        modules, which is a copy. Raises InvalidArgumentError for other entries and for dtypes that
        the engine does not know; MismatchError, on every rank, when names, shapes or dtypes differ
        between ranks.
        """
        pairs = _named_tensors(params)
        if copies := [name for name, _ in pairs if name.rpartition(".")[2] == _EXTRA_STATE]:
            warnings.warn(
                f"params['{copies[0]}'] is a copy that get_extra_state() has made: what is "
                "broadcast into it does not come into the module. Keep the mapping that you give, "
                "and load it afterwards: model.load_state_dict(state)",
                stacklevel=2,
            )
        described = [(name, (tuple(t.shape), str(t.dtype))) for name, t in pairs]
        agree(self._objects, described, "parameter", "broadcast_parameters")
        for name, tensor in pairs:  # the same on all ranks
            if tensor.dtype not in DTYPES:
                raise FrontEndArgumentError(f"params['{name}']: {refusal(tensor.dtype)}")
        handles = [
            self._verbs.broadcast_async_(tensor, root_rank, f"parameter.{name}")
            for name, tensor in pairs
        ]
        for handle in handles:
            handle.wait()

    def broadcast_module(self, module: torch.nn.Module, late: Collection[str] = ()) -> None:
        """Make ``module`` what rank 0's is, but for the parameters named ``late``.

        Beside parameters and buffers this is what else its ``state_dict`` has, an extra state for
        instance, and buffers that are not saved, whose shapes may differ between ranks (a cache of
        positions grows with the sequences). Raises as ``broadcast_parameters``.
        """
        own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        state = module.state_dict(keep_vars=True)
        self.broadcast_parameters(
            {name: t for name, t in state.items() if id(t) in own and name not in late}
        )
        is_root = self._verbs.world().rank == 0
        made = {name: _on_cpu(t) for name, t in state.items() if id(t) not in own}
        unsaved = {name: _on_cpu(t) for name, t in module.named_buffers() if name not in state}
        made, unsaved = self._objects.broadcast_object(
            (made, unsaved) if is_root else None, 0, "parameter.others"
        )
        if is_root:
            return
        if made:
            module.load_state_dict({**module.state_dict(), **made})
        for name, value in unsaved.items():
            _set_buffer(module, name, value)

    def check_alike(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raise MismatchError, on every rank, when names, shapes or dtypes differ."""
        described = [(name, (tuple(t.shape), str(t.dtype))) for name, t in named]
        agree(self._objects, described, "parameter", "elastic.run")

    def broadcast_optimizer_state(
        self, optimizer: torch.optim.Optimizer, root_rank: int = 0
    ) -> None:
        """Give ``optimizer`` the state and the options (learning rate and so on) of ``root_rank``.

        No step is taken and no gradient is touched. Where the root has no state yet (before its
        first step), the others have none afterwards. Raises MismatchError, on every rank, when the
        numbers of parameters differ.
        """
        self._check_groups(optimizer, "broadcast_optimizer_state")
        is_root = self._verbs.world().rank == root_rank
        own: list[torch.Tensor] = []
        outline = _take_out(optimizer.state_dict(), own)  # of sharded ones this rank's parts
        outline, forms, received = self._broadcast_outlined(
            outline, own, root_rank, "optimizer_state", keeps=True
        )
        if is_root:
            return
        device = next((p.device for group in optimizer.param_groups for p in group["params"]), None)
        for i, (_, _, was_on_cpu) in enumerate(forms):
            if not was_on_cpu and device is not None:
                received[i] = received[i].to(device)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        optimizer.load_state_dict(_put_back(outline, received, parameters))

    def give_optimizer_form(
        self,
        optimizer: torch.optim.Optimizer,
        lacking: bool,
        is_large: Callable[[torch.Tensor], bool],
        root_rank: int = 0,
    ) -> list[tuple[torch.Tensor, torch.dtype]]:
        """``broadcast_optimizer_state`` to ranks that are ``lacking``, but for large tensors.

        Returns these on all ranks in one order, each with its dtype on ``root_rank``; where they
        are lacking they are zeros. Raises as ``broadcast_optimizer_state``.
        """
        self._check_groups(optimizer, "elastic.run")
        own: list[torch.Tensor] = []
        outline: Any = _take_out(optimizer.state_dict(), own)
        forms = [(t.shape, t.dtype, None if is_large(t) else t.cpu()) for t in own]
        outline, forms = self._objects.broadcast_object(
            (outline, forms), root_rank, "optimizer_state.outline"
        )
        if lacking:
            tensors = [
                torch.zeros(shape, dtype=dtype) if value is None else value
                for shape, dtype, value in forms
            ]
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            optimizer.load_state_dict(_put_back(outline, tensors, parameters))
            own = []
            _take_out(optimizer.state_dict(), own)
        return [
            (tensor, dtype)
            for tensor, (_, dtype, value) in zip(own, forms, strict=True)
            if value is None
        ]

    def _check_groups(self, optimizer: torch.optim.Optimizer, caller: str) -> None:
        shape = [
            (f"group {g}", tuple(tuple(p.shape) for p in group["params"]))
            for g, group in enumerate(optimizer.param_groups)
        ]
        agree(self._objects, shape, "optimizer group", caller)

    def broadcast_nested(self, value: Any, name: str, root_rank: int = 0) -> Any:
        """Return the root's ``value``: dicts, lists and tuples of tensors and what can be pickled.

        ``value`` matters on ``root_rank`` only, and is returned itself there; elsewhere tensors are
        new ones, in host memory. Raises InvalidArgumentError, on every rank, for tensors of which
        each rank has a part: there is nothing here after which another rank could cut its own.
        """
        is_root = self._verbs.world().rank == root_rank
        own: list[torch.Tensor] = []
        outline = _take_out(value, own) if is_root else None
        outline, _, received = self._broadcast_outlined(outline, own, root_rank, name, keeps=False)
        if _has_parts(outline):
            raise FrontEndArgumentError(
                f"{name} has sharded tensors (DTensor), which a rank that joins cannot be given: "
                "train a model that is whole on each rank, or start without --elastic"
            )
        return value if is_root else _filled(outline, received, None)

    def _broadcast_outlined(
        self, outline: Any, own: list[torch.Tensor], root_rank: int, name: str, *, keeps: bool
    ) -> tuple[Any, list[_Form], list[torch.Tensor]]:
        """Return the root's ``outline``, the forms of its tensors (there ``own``), and the tensors.

        ``keeps``: elsewhere ``own`` is memory for what is received.
        """
        is_root = self._verbs.world().rank == root_rank
        # By way of host memory, since ranks may have other devices, or other tensors on them.
        own_forms = [(t.shape, t.dtype, t.is_cpu) for t in own]
        outline, forms = self._objects.broadcast_object(
            (outline, own_forms) if is_root else None, root_rank, f"{name}.outline"
        )
        for _, dtype, _ in forms:
            if dtype not in DTYPES:
                what = "the optimizer's state" if name == "optimizer_state" else name
                raise FrontEndArgumentError(f"a tensor of {what}: {refusal(dtype)}")
        if is_root:
            tensors = [tensor.cpu() for tensor in own]
        else:
            # Who has such a state already, in an elastic job say, needs no other memory for it.
            kept = own if keeps and forms == own_forms else [None] * len(forms)
            tensors = [
                tensor if tensor is not None and tensor.is_cpu else torch.empty(form, dtype=dtype)
                for tensor, (form, dtype, _) in zip(kept, forms, strict=True)
            ]
        handles = [
            self._verbs.broadcast_async_(tensor, root_rank, f"{name}.{i}")
            for i, tensor in enumerate(tensors)
        ]
        return outline, forms, [handle.wait() for handle in handles]


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


@torch.no_grad()
def _set_buffer(module: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    """Set a buffer of ``module``, if it has one of that name."""
    path, _, last = name.rpartition(".")
    owner = dict(module.named_modules()).get(path)
    if owner is None or last not in owner._buffers:
        return
    own = owner._buffers[last]
    if own is not None and own.shape == value.shape and own.dtype == value.dtype:
        own.copy_(value)
    else:
        device = own.device if own is not None else next(module.parameters(), value).device
        owner._buffers[last] = value.to(device)


def _named_tensors(params: Parameters) -> list[tuple[str, torch.Tensor]]:
    try:
        items = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    except TypeError:
        raise FrontEndArgumentError(
            f"params is a {type(params).__name__}: give model.state_dict() or named_parameters()"
        ) from None
    pairs = []
    for item in items:
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)):
            raise FrontEndArgumentError(
                f"params contains a {type(item).__name__} instead of (name, tensor); give "
                "model.state_dict() or model.named_parameters()"
            )
        name, tensor = item
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise FrontEndArgumentError(
                f"params['{name}'] is a {type(tensor).__name__}, not a tensor; send other values "
                "with broadcast_object"
            )
        if is_lazy(tensor):
            raise FrontEndArgumentError(
                f"params['{name}'] has no values yet, since its module is a lazy one: give the "
                "model a batch first, on all ranks"
            )
        refuse_nested(tensor, f"params['{name}']")
        pairs.append((name, tensor))
    return pairs


class _Slot:
    """Stands for tensor number ``position`` in the outline of a state."""

    def __init__(self, position: int, *, is_part: bool) -> None:
        self.position, self.is_part = position, is_part


def _take_out(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a copy of ``value`` with a _Slot for each tensor; append these to ``tensors``."""
    if isinstance(value, torch.Tensor):
        tensors.append(local_of(value).detach())
        return _Slot(len(tensors) - 1, is_part=is_sharded(value))
    if isinstance(value, dict):
        return {key: _take_out(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_take_out(item, tensors) for item in value)
    return value


def _has_parts(outline: Any) -> bool:
    if isinstance(outline, _Slot):
        return outline.is_part
    if isinstance(outline, dict):
        return any(map(_has_parts, outline.values()))
    return type(outline) in (list, tuple) and any(map(_has_parts, outline))


def _put_back(
    outline: dict[str, Any], tensors: list[torch.Tensor], parameters: Sequence[torch.Tensor]
) -> dict[str, Any]:
    """The state of an optimizer of these parameters, by whose places its "state" has entries."""
    state: dict[str, Any] = _filled({**outline, "state": {}}, tensors, None)
    for key, item in outline.get("state", {}).items():
        parameter = parameters[key] if isinstance(key, int) and key < len(parameters) else None
        state["state"][key] = _filled(item, tensors, parameter)
    return state


def _filled(value: Any, tensors: list[torch.Tensor], parameter: torch.Tensor | None) -> Any:
    """Put ``tensors`` into the slots of ``value``; parts are sharded as ``parameter`` is."""
    if isinstance(value, _Slot):
        tensor = tensors[value.position]
        return sharded_like(parameter, tensor) if value.is_part else tensor
    if isinstance(value, dict):
        return {key: _filled(item, tensors, parameter) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_filled(item, tensors, parameter) for item in value)
    return value
