"""Parameters that are gathered while the next forward runs, each until its first use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kolovod.errors import FrontEndArgumentError
from kolovod.private_apis.torch import no_torch_function

Gathers = Iterable[tuple[list[torch.Tensor], Callable[[], None]]]
"""Parameters, and what returns when they are there."""


class Gathering:
    """The operations that are on their way to the parameters of one model."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Watch ``model``: its forward, and its ``state_dict``, wait for what they use.

        Raises InvalidArgumentError for what is no model.
        """
        if not isinstance(model, torch.nn.Module):
            raise FrontEndArgumentError(
                f"model is a {type(model).__name__}: give the torch.nn.Module whose forward uses "
                "the optimizer's parameters"
            )
        self._pending: dict[int, Callable[[], None]] = {}
        self._modes: list[_FirstUses] = []
        self._is_compiled = any(map(_is_compiled, model.modules()))
        model.register_forward_pre_hook(self._before_forward, prepend=True)
        model.register_forward_hook(self._after_forward, always_call=True)
        model.register_state_dict_pre_hook(lambda *_: self.wait())  # type: ignore[no-untyped-call]

    def begin(self, gathers: Gathers) -> None:
        """Take what was sent; nothing is pending before."""
        for parameters, wait in gathers:
            self._pending.update(dict.fromkeys(map(id, parameters), wait))

    def wait(self) -> None:
        """Return when all parameters are there."""
        while self._pending:
            self.wait_for(next(iter(self._pending)))

    def wait_for(self, key: int) -> None:
        """Return when the parameter with this ``id`` is there, with all that travel with it."""
        wait = self._pending.get(key)
        if wait is None:
            return
        for other in [each for each, its in self._pending.items() if its is wait]:
            del self._pending[other]
        with no_torch_function():
            wait()

    @property
    def is_over(self) -> bool:
        """True if nothing is on its way."""
        return not self._pending

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        if self._is_compiled:
            self.wait()  # compiled code does not say what it uses first
        mode = _FirstUses(self)
        self._modes.append(mode)
        mode.__enter__()  # type: ignore[no-untyped-call]

    def _after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._modes:
            self._modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]


class _FirstUses(TorchFunctionMode):
    """Waits for a parameter before the function of PyTorch that gets it."""

    def __init__(self, gathering: Gathering) -> None:
        super().__init__()
        self._gathering = gathering

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not self._gathering.is_over:
            self._look_at(args)
            self._look_at(kwargs.values())
        return func(*args, **kwargs)

    def _look_at(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                self._gathering.wait_for(id(value))
            elif isinstance(value, list | tuple):
                self._look_at(value)


def _is_compiled(module: torch.nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
