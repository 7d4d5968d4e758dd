"""Averaging gradients while backward is still computing others.

The trip of one gradient: autograd accumulates it and calls our hook [1], which submits it to the
engine under the parameter's name [2] and returns; ``synchronize`` submits what no hook has
submitted [3], waits for everything [4], and puts the results where the optimizer looks for them
[5].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from kolovod import _native
from kolovod.collectives import Collectives
from kolovod.errors import InvalidArgumentError, MismatchError, from_engine
from kolovod.handles import Keeper
from kolovod.numpy.frontend import NumpyFrontend
from kolovod.objects import Objects
from kolovod.ops import Max
from kolovod.torch.autograd import TorchCollectives
from kolovod.torch.compression import Compression, Compressor
from kolovod.torch.frontend import DTYPES

_ALLREDUCE = _native.VERBS["allreduce"]


class _Removable(Protocol):
    def remove(self) -> None: ...


_InFlight = tuple[_native.Engine, int, torch.Tensor, torch.Tensor, "torch.dtype | None"]
"""One submitted gradient: engine, number, the gradient, the dense tensor that the engine works on
(the gradient itself unless that is compressed or not dense), and the compressor's context. A plain
tuple: one is made in every hook."""


class GradientReducer:
    """Keeps the gradients of named parameters equal on all ranks. One per optimizer."""

    def __init__(
        self,
        named: Iterable[tuple[str, torch.Tensor]],
        compression: type[Compressor],
        passes: int,
        op: int,
        verbs: TorchCollectives,
    ) -> None:
        """``passes``: backward passes that are summed locally before a gradient is sent."""
        self.verbs = verbs
        self._compression = compression
        self._passes = passes
        self._op = int(op)
        self._keeper = Keeper()
        self._hooks: list[_Removable] = []
        self._names: list[str] = []
        self._parameters: list[torch.Tensor] = []
        self._left: list[int] = []  # by parameter: backward passes until it is sent
        self._in_flight: dict[int, _InFlight] = {}
        self._verified = False
        self.synchronized = False  # gradients are equal everywhere, and nothing was submitted since
        self.active = verbs.world().size > 1
        self.add(named)

    def add(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take more parameters; those that want no gradient are left alone."""
        for name, parameter in named:
            if not parameter.requires_grad:
                continue
            self._names.append(name)
            self._parameters.append(parameter)
            self._left.append(self._passes)
            if self.active:
                hook = self._make_hook(len(self._names) - 1, f"gradient.{name}")
                register = parameter.register_post_accumulate_grad_hook
                self._hooks.append(register(hook))  # type: ignore[no-untyped-call]
        self._verified = False

    def set_passes(self, passes: int) -> None:
        """Change ``passes``, between steps."""
        self._passes = passes
        self._reset()

    def remove_hooks(self) -> None:
        """Leave the parameters alone from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @property
    def pending(self) -> bool:
        """Whether gradients are on their way."""
        return bool(self._in_flight)

    def _make_hook(self, index: int, name: str) -> Callable[[torch.Tensor], None]:
        """[1] and [2], with everything at hand as a local: this runs once per gradient."""
        left = self._left
        in_flight = self._in_flight
        world = self.verbs.world
        op = self._op
        plain = self._compression is Compression.none
        submit = self._submit
        dtypes = DTYPES

        def hook(parameter: torch.Tensor) -> None:
            remaining = left[index] = left[index] - 1
            if remaining > 0:
                return
            if remaining < 0:
                raise self._too_many_passes(index)
            grad: torch.Tensor = parameter.grad  # type: ignore[assignment]
            if plain and not grad.is_sparse and grad.is_contiguous():
                engine = world().engine
                address = grad.data_ptr()
                entry = (dtypes[grad.dtype], grad.shape, address, address)
                try:
                    number = engine.submit(_ALLREDUCE, name, (entry,), op, 1.0, 1.0, 0, False)
                except _native.EngineError as error:
                    raise from_engine(error) from None
                in_flight[index] = (engine, number, grad, grad, None)
            else:
                submit(index, grad)

        return hook

    def _submit(self, index: int, grad: torch.Tensor) -> None:
        """[2] for any gradient."""
        name = f"gradient.{self._names[index]}"
        small, context = self._compression.compress(grad.detach())
        try:
            code, shape, address, dense = self.verbs.frontend.view(small)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"gradient of '{self._names[index]}': {error}") from None
        engine = self.verbs.world().engine
        entry = (code, shape, address, address)
        try:
            number = engine.submit(_ALLREDUCE, name, (entry,), self._op, 1.0, 1.0, 0, False)
        except _native.EngineError as error:
            raise from_engine(error) from None
        self._in_flight[index] = (engine, number, grad, dense, context)

    def _too_many_passes(self, index: int) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"the gradient of '{self._names[index]}' was computed {self._passes + 1} times since "
            f"the last step(), but backward_passes_per_step is {self._passes}: call step() after "
            f"{self._passes}, or pass backward_passes_per_step={self._passes + 1}"
        )

    def synchronize(self) -> None:
        """Return when every gradient is equal on all ranks; see ``_Distributed.synchronize``."""
        if not self.active or not self._parameters:
            return
        engine = self.verbs.world().engine
        if any(entry[0] is not engine for entry in self._in_flight.values()):
            self.discard()  # left over from a world that is gone
        self._verify()
        unused = self._submit_missing()
        used = torch.ones(len(self._parameters), dtype=torch.uint8)
        used[unused] = 0
        flags = self.verbs.allreduce_async_(used, f"used.{self._names[0]}", Max)
        done = self._wait_for_all()
        used = flags.wait()
        self._store(done, unused, used)
        self._reset()
        self.synchronized = True

    def _submit_missing(self) -> list[int]:
        """[3] What is unused here may be used elsewhere: send zeros. Returns the unused ones."""
        unused = []
        for index, parameter in enumerate(self._parameters):
            if index in self._in_flight:
                continue
            grad = parameter.grad
            if grad is None:
                unused.append(index)
                grad = torch.zeros_like(parameter, requires_grad=False)
            self._submit(index, grad)
        return unused

    def _wait_for_all(self) -> dict[int, _InFlight]:
        """[4] Last submitted first: one wait drives the engine through all of them."""
        done: dict[int, _InFlight] = {}
        failure: _native.EngineError | None = None
        in_flight = self._in_flight
        while in_flight:
            index, entry = in_flight.popitem()
            engine, number, *_ = entry
            try:
                engine.wait(number, -1.0)
            except _native.EngineError as error:
                failure = failure or error
                self._keeper.keep(engine, number, entry)
                continue
            except BaseException:  # an interrupt: the engine goes on with it
                in_flight[index] = entry
                raise
            engine.release(number)
            done[index] = entry
        if failure is not None:
            self._reset()
            raise from_engine(failure)
        return done

    def _store(self, done: dict[int, _InFlight], unused: list[int], used: torch.Tensor) -> None:
        """[5] A parameter that no rank has used keeps no gradient, as with one process."""
        with torch.no_grad():
            for _, _, grad, dense, context in done.values():
                if dense is not grad:
                    grad.copy_(self._compression.decompress(dense, context))
        for index in unused:
            if used[index]:
                self._parameters[index].grad = done[index][2]

    def _verify(self) -> None:
        """Once: have all ranks the same parameters? A missing one would be waited for forever."""
        if self._verified:
            return
        mine = [(n, tuple(p.shape)) for n, p in zip(self._names, self._parameters, strict=True)]
        objects = Objects(Collectives(NumpyFrontend(), self.verbs.world))
        agree(objects, mine, "optimizer parameter", "optimizer.parameters")
        self._verified = True

    def reset(self) -> None:
        """The optimizer has used the gradients, or zeroed them: count passes anew."""
        self._reset()
        self.synchronized = False

    def _reset(self) -> None:
        self._left[:] = [self._passes] * len(self._left)

    def discard(self) -> None:
        """Do not wait for what is on its way."""
        for engine, number, _, dense, _ in self._in_flight.values():
            self._keeper.keep(engine, number, dense)
        self._in_flight.clear()

    def __del__(self) -> None:
        """Gradients on their way outlive this object."""
        if getattr(self, "_in_flight", None):
            self.discard()


def agree(objects: Objects, mine: list[tuple[str, Any]], what: str, name: str) -> None:
    """Raise MismatchError on every rank unless all have the same ``mine``, in the same order."""
    lists = objects.allgather_object(mine, name)
    for rank, theirs in enumerate(lists):
        if theirs == lists[0]:
            continue
        for position in range(max(len(theirs), len(lists[0]))):
            first, other = (_item(values, position) for values in (lists[0], theirs))
            if first != other:
                raise MismatchError(
                    f"{what} {position} differs: rank 0 has {first}, rank {rank} has {other}; "
                    "every rank must build the same model"
                )


def _item(values: list[tuple[str, Any]], position: int) -> str:
    if position >= len(values):
        return "none"
    name, detail = values[position]
    return f"'{name}' {detail}"
