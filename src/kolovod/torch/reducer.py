"""Averaging gradients while backward is still computing others.

The trip of one gradient: autograd accumulates it and calls our hook [1]; the hook that completes a
bucket submits all of it to the engine as one group [2] and returns; ``synchronize`` submits what no
hook has submitted [3], waits for everything [4], and puts the results where the optimizer looks for
them [5].

Buckets keep the cost of small tensors down: a hook only counts, and 500 tensors of 4 KiB are two
requests. They follow from the parameters' names and sizes alone, so they are the same on every
rank, in whatever order gradients appear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from kolovod import _native
from kolovod.collectives import Collectives
from kolovod.errors import InvalidArgumentError, MismatchError, from_engine
from kolovod.handles import keeper
from kolovod.numpy.frontend import NumpyFrontend
from kolovod.objects import Objects
from kolovod.ops import Max
from kolovod.torch.autograd import TorchCollectives
from kolovod.torch.compression import Compression, Compressor
from kolovod.torch.frontend import DTYPES

_ALLREDUCE = _native.VERBS["allreduce"]


class _Removable(Protocol):
    def remove(self) -> None: ...


_BUCKET_BYTES = 1 << 20

_Entry = tuple[int, tuple[int, ...], int, int]  # dtype, shape, input, output address

_Item = tuple[int, torch.Tensor, torch.Tensor, "torch.dtype | None"]
"""One gradient of a bucket that is on its way: the parameter's index, the gradient, the dense
tensor the engine works on (the gradient itself unless it is compressed or not dense), and the
compressor's context."""


class _Bucket:
    """Parameters whose gradients are sent together."""

    __slots__ = ("engine", "indices", "items", "missing", "name", "number")

    def __init__(self, name: str, indices: list[int]) -> None:
        self.name = name
        self.indices = indices
        self.missing = len(indices)  # gradients that backward has not finished yet
        self.engine: _native.Engine | None = None  # set while on its way
        self.number = 0
        self.items: list[_Item] = []


def _buckets(first: int, names: list[str], sizes: list[int]) -> list[_Bucket]:
    """Cut parameters ``first``, ``first + 1``, ... into buckets; ``sizes`` in bytes."""
    groups: list[list[int]] = []
    filled = _BUCKET_BYTES
    for offset, size in enumerate(sizes):
        if filled + size > _BUCKET_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(first + offset)
        filled += size
    return [_Bucket(f"gradients.{names[group[0] - first]}", group) for group in groups]


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
        self._hooks: list[_Removable] = []
        self._names: list[str] = []
        self._parameters: list[torch.Tensor] = []
        self._left: list[int] = []  # by parameter: backward passes until it is sent
        self._buckets: list[_Bucket] = []
        self._in_flight: list[_Bucket] = []
        self._verified = False
        self.synchronized = False  # gradients are equal everywhere, and nothing was submitted since
        self.active = verbs.world().size > 1
        self.add(named)

    def add(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take more parameters; those that want no gradient are left alone."""
        wanted = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        names = [name for name, _ in wanted]
        sizes = [p.numel() * p.element_size() for _, p in wanted]
        added = _buckets(len(self._names), names, sizes)
        self._names += names
        self._parameters += [parameter for _, parameter in wanted]
        self._left += [self._passes] * len(wanted)
        self._buckets += added
        self._verified = False
        if not self.active:
            return
        for bucket in added:
            for index in bucket.indices:
                register = self._parameters[index].register_post_accumulate_grad_hook
                hook = self._make_hook(index, bucket)
                self._hooks.append(register(hook))  # type: ignore[no-untyped-call]

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
        """Whether backward has finished gradients that ``synchronize`` has not seen."""
        return any(bucket.missing < len(bucket.indices) for bucket in self._buckets)

    def _make_hook(self, index: int, bucket: _Bucket) -> Callable[[torch.Tensor], None]:
        """[1], with everything at hand as a local: this runs once per gradient."""
        left = self._left
        submit = self._submit

        def hook(_: torch.Tensor) -> None:
            remaining = left[index] = left[index] - 1
            if remaining > 0:
                return
            if remaining < 0:
                raise self._too_many_passes(index)
            bucket.missing -= 1
            if bucket.missing == 0:
                submit(bucket)

        return hook

    def _submit(self, bucket: _Bucket) -> list[int]:
        """[2] Send a bucket; a parameter without a gradient counts as zeros. Returns those."""
        unused = []
        items: list[_Item] = []
        entries: list[_Entry] = []
        is_plain = self._compression is Compression.none
        for index in bucket.indices:
            grad = self._parameters[index].grad
            if grad is None:
                unused.append(index)
                grad = torch.zeros_like(self._parameters[index], requires_grad=False)
            code = DTYPES.get(grad.dtype) if is_plain and grad.is_cpu else None
            if code is not None and not grad.is_sparse and grad.is_contiguous():
                address = grad.data_ptr()
                entries.append((code, grad.shape, address, address))
                items.append((index, grad, grad, None))
            else:
                entry, dense, context = self._prepare(index, grad)
                entries.append(entry)
                items.append((index, grad, dense, context))
        engine = self.verbs.world().engine
        try:
            number = engine.submit(_ALLREDUCE, bucket.name, entries, self._op, 1.0, 1.0, 0, False)
        except _native.EngineError as error:
            raise from_engine(error) from None
        bucket.engine, bucket.number, bucket.items = engine, number, items
        self._in_flight.append(bucket)
        return unused

    def _prepare(
        self, index: int, grad: torch.Tensor
    ) -> tuple[_Entry, torch.Tensor, torch.dtype | None]:
        """What the engine gets of a gradient that is compressed or not dense."""
        small, context = self._compression.compress(grad.detach())
        try:
            code, shape, address, dense = self.verbs.frontend.view(small)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"gradient of '{self._names[index]}': {error}") from None
        return (code, shape, address, address), dense, context

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
        if any(bucket.engine is not engine for bucket in self._in_flight):
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
        missing = [bucket for bucket in self._buckets if bucket.engine is None]
        return [index for bucket in missing for index in self._submit(bucket)]

    def _wait_for_all(self) -> list[_Item]:
        """[4] Last submitted first: one wait drives the engine through all of them."""
        done: list[_Item] = []
        failure: _native.EngineError | None = None
        while self._in_flight:
            bucket = self._in_flight[-1]
            assert bucket.engine is not None
            try:
                bucket.engine.wait(bucket.number, -1.0)
            except _native.EngineError as error:
                failure = failure or error
            done += bucket.items
            self._in_flight.pop()
            self._let_go(bucket)
        if failure is not None:
            self._reset()
            raise from_engine(failure)
        return done

    def _store(self, done: list[_Item], unused: list[int], used: torch.Tensor) -> None:
        """[5] A parameter that no rank has used keeps no gradient, as with one process."""
        with torch.no_grad():
            for _, grad, dense, context in done:
                if dense is not grad:
                    grad.copy_(self._compression.decompress(dense, context))
        if unused:
            grads = {index: grad for index, grad, _, _ in done}
            for index in unused:
                if used[index]:
                    self._parameters[index].grad = grads[index]

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
        for bucket in self._buckets:
            bucket.missing = len(bucket.indices)

    def discard(self) -> None:
        """Do not wait for what is on its way."""
        while self._in_flight:
            self._let_go(self._in_flight.pop())

    def _let_go(self, bucket: _Bucket) -> None:
        """Its buffers stay alive until the engine is done with them."""
        assert bucket.engine is not None
        keeper.keep(bucket.engine, bucket.number, [item[2] for item in bucket.items])
        bucket.engine, bucket.number, bucket.items = None, 0, []

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
