"""The marks that stand in ``grad`` while ranks have averaged gradients in parts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kolovod.errors import FrontEndArgumentError
from kolovod.private_apis.torch import no_torch_function, subclassed

if TYPE_CHECKING:
    from kolovod.torch.parameters import Parameters

_T: Any = torch.Tensor
_HARMLESS = frozenset(
    {
        *(getattr(_T, name).__get__ for name in ("shape", "dtype", "device", "layout", "grad_fn")),
        *(getattr(_T, name).__get__ for name in ("requires_grad", "is_leaf", "is_sparse", "grad")),
        *(_T.size, _T.dim, _T.numel, _T.__hash__),
    }
)


class InParts(torch.Tensor):
    """No gradient, but the mark of one: whoever computes with it gets an error.

    A loop that leaves out parameters without a gradient would otherwise clip, scale or measure
    nothing, in silence. It is a sparse tensor without values, which autograd adds to the gradient
    of a later backward without any further ado.
    """

    kolovod_name: str
    kolovod_zero: Callable[[], None]
    kolovod_like: tuple[torch.Size, torch.dtype, torch.device]

    @staticmethod
    def of(parameter: torch.Tensor, name: str, zero: Callable[[], None]) -> InParts:
        """Return the mark for a parameter; ``zero``: makes its gradient zeros."""
        nothing = torch.empty(
            parameter.shape,
            dtype=parameter.dtype,
            device=parameter.device,
            layout=torch.sparse_coo,
            requires_grad=False,
        )
        mark: InParts = subclassed(InParts, nothing)
        mark.kolovod_name, mark.kolovod_zero = name, zero
        mark.kolovod_like = (parameter.shape, parameter.dtype, parameter.device)
        return mark

    def is_like(self, parameter: torch.Tensor) -> bool:
        """Return whether it may stand in the ``grad`` of ``parameter``."""
        return self.kolovod_like == (parameter.shape, parameter.dtype, parameter.device)

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer what is no computation. Raises InvalidArgumentError for all else."""
        if func in _HARMLESS:
            with no_torch_function():
                return func(*args, **(kwargs or {}))
        own = args[0] if args else None
        if isinstance(own, InParts) and func in (_T.requires_grad_, _T.detach_, _T.zero_):
            if func is _T.zero_:  # by Module.zero_grad(set_to_none=False)
                own.kolovod_zero()
            return own
        marks = _flat([*args, *(kwargs or {}).values()])
        name = next((each.kolovod_name for each in marks if isinstance(each, InParts)), "?")
        raise FrontEndArgumentError(
            f"the gradient of '{name}' is averaged and in parts on the ranks (shard_state=True), "
            f"so {getattr(func, '__name__', func)} cannot have it: clip_grad_norm_, "
            "clip_grad_value_ and GradScaler work on the parts; register_step_pre_hook has this "
            "rank's parts in the optimizer's groups; parameter.register_hook changes a gradient "
            "before it is averaged; and parameter.grad may be given another one, or None"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return what it stands for."""
        return f"<the gradient of '{self.kolovod_name}', in parts on the ranks>"

    def __deepcopy__(self, memo: dict[int, Any]) -> InParts:
        """Return itself: a copy of the parameter has no parts."""
        return self


class Marks:
    """The marks that stand in ``grad`` of some parameters, or stood there."""

    def __init__(self, parameters: Parameters, zero: Callable[[int], None]) -> None:
        """``zero(index)``: make the gradient of that parameter zeros; a bound method."""
        self._parameters = parameters
        self._zero = weakref.WeakMethod(zero)  # who keeps a gradient does not keep all others
        self._marks: dict[int, InParts] = {}
        self._put: set[int] = set()

    def put(self, index: int) -> None:
        """Put one there."""
        parameter, mark = self._parameters.tensors[index], self._marks.get(index)
        if mark is None or not mark.is_like(parameter):
            name = self._parameters.names[index]
            mark = self._marks[index] = InParts.of(parameter, name, partial(self._zeros, index))
        self._put.add(index)
        parameter.grad = mark

    def forget(self, index: int) -> None:
        """Forget the one of this parameter."""
        self._put.discard(index)

    def __contains__(self, index: int) -> bool:
        """Return whether one was put there and not forgotten."""
        return index in self._put

    def is_changed(self, index: int) -> bool:
        """Return whether the script has put something else, or None, in the place of a mark."""
        return index in self._put and self._parameters.tensors[index].grad is not self._marks[index]

    def changed(self) -> list[int]:
        """Return the parameters of which that is so."""
        return [index for index in self._put if self.is_changed(index)]

    def take_off(self) -> None:
        """Leave no mark anywhere."""
        for index in self._put:
            if not self.is_changed(index):
                self._parameters.tensors[index].grad = None
        self._put.clear()

    def check(self, index: int) -> None:
        """Raise InvalidArgumentError if the parameter is another one than when it was marked."""
        mark, parameter = self._marks.get(index), self._parameters.tensors[index]
        if mark is not None and not mark.is_like(parameter):
            raise FrontEndArgumentError(
                f"parameter '{self._parameters.names[index]}' is {parameter.dtype} on "
                f"{parameter.device} now, and was {mark.dtype} on {mark.device} in the steps "
                "before, by which the optimizer's state is in parts (shard_state): change a "
                "model's dtype and device before its optimizer is made"
            )

    def _zeros(self, index: int) -> None:
        zero = self._zero()
        if zero is not None:
            zero(index)


def _flat(values: Sequence[Any]) -> list[Any]:
    """Return the values, those in lists as well."""
    return [
        each for value in values for each in (value if isinstance(value, list | tuple) else [value])
    ]
