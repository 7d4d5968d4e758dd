"""Averaging gradients while backward is still computing others.

The trip of one gradient: autograd accumulates it and calls our hook [1]; the hook that completes a
bucket submits all of it to the engine as one group [2] and returns; ``synchronize`` submits what no
hook has submitted [3], waits for everything [4], and puts the results where the optimizer looks for
them [5].

Buckets keep the cost of small tensors down: a hook only counts, and 500 tensors of 4 KiB are two
requests. They follow from the parameters' names and sizes alone, so they are the same on every
rank, in whatever order gradients appear.

Nothing is sent for parameters that the ranks have not agreed upon: a name that is missing elsewhere
would be waited for forever. So the first ``synchronize`` in a world sends everything by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from kolovod import _native
from kolovod.errors import InvalidArgumentError, MismatchError, from_engine
from kolovod.handles import keeper
from kolovod.ops import Max
from kolovod.torch.agreement import SAME_MODEL, agree_on_optimizer
from kolovod.torch.autograd import TorchCollectives
from kolovod.torch.buckets import Bucket, Entry, Item, cut, zeros_for
from kolovod.torch.compression import Compression, Compressor
from kolovod.torch.frontend import DTYPES

_ALLREDUCE = _native.VERBS["allreduce"]


class _Removable(Protocol):
    def remove(self) -> None: ...


# What a rank says of itself in every trip; each rank sees what all ranks together have said.
_STEPS, _DROPS, _FAILED, _AGAIN = range(4)
_MARKS = 4


class GradientReducer:
    """Keeps the gradients of named parameters equal on all ranks. One per optimizer."""

    def __init__(
        self,
        named: Iterable[tuple[str | None, torch.Tensor]],
        compression: type[Compressor],
        passes: int,
        op: int,
        verbs: TorchCollectives,
        is_member: bool = True,
    ) -> None:
        """``passes``: backward passes that are summed locally before a gradient is sent.

        ``is_member``: False where this rank is not one of those that ``verbs`` work among; then
        gradients stay as they are.
        """
        self.verbs = verbs
        self._compression = compression
        self._passes = passes
        self._op = int(op)
        self._hooks: list[_Removable] = []
        self._names: list[str] = []
        self._parameters: list[torch.Tensor] = []
        self._frozen: list[tuple[str | None, torch.Tensor]] = []
        self._left: list[int] = []  # by parameter: backward passes until it is sent
        self._buckets: list[Bucket] = []
        self._in_flight: list[Bucket] = []
        self._engine: _native.Engine | None = None  # of the world whose ranks have agreed
        self._number = 0  # of this optimizer in that world
        self._agreed = 0  # so many parameters
        self.synchronized = False  # gradients are equal everywhere, and nothing was submitted since
        self.active = is_member and verbs.world().size > 1
        self.add(named)

    def add(self, named: Iterable[tuple[str | None, torch.Tensor]]) -> None:
        """Take more parameters; those that want no gradient are left alone until they do.

        Name None: not known, which is an error as soon as the parameter wants a gradient.
        """
        self._frozen += named
        self._thaw()

    def _thaw(self) -> list[InvalidArgumentError]:
        """Take the parameters that want a gradient by now. Returns what is wrong with some."""
        if not self._frozen:
            return []
        named = self._frozen
        self._frozen = [pair for pair in named if pair[0] is None or not pair[1].requires_grad]
        wanted = [(name, p) for name, p in named if name is not None and p.requires_grad]
        first = len(self._names)
        self._names += [name for name, _ in wanted]
        self._parameters += [parameter for _, parameter in wanted]
        self._left += [self._passes] * len(wanted)
        for indices in cut(range(first, len(self._names)), self._parameters):
            bucket = Bucket(indices)
            self._buckets.append(bucket)
            for index in indices if self.active else ():
                register = self._parameters[index].register_post_accumulate_grad_hook
                hook = self._make_hook(index, bucket)
                self._hooks.append(register(hook))  # type: ignore[no-untyped-call]
        return [
            InvalidArgumentError(
                f"a parameter of shape {tuple(parameter.shape)} wants a gradient now, but "
                "named_parameters did not name it: pass the frozen parameters' names too"
            )
            for _, parameter in self._frozen
            if parameter.requires_grad
        ]

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

    @property
    def sending(self) -> bool:
        """Whether gradients may be on their way, so that their values are not to be used."""
        return any(bucket.missing == 0 for bucket in self._buckets)

    def _make_hook(self, index: int, bucket: Bucket) -> Callable[[torch.Tensor], None]:
        """[1], with everything at hand as a local: this runs once per gradient."""
        left = self._left
        complete = self._complete

        def hook(_: torch.Tensor) -> None:
            remaining = left[index] = left[index] - 1
            if remaining > 0:
                return
            if remaining < 0:
                self._one_more(index, bucket)
                return
            bucket.missing -= 1
            if bucket.missing == 0:
                complete(bucket)

        return hook

    def _complete(self, bucket: Bucket) -> None:
        """Backward has finished a bucket: send it, if all ranks have agreed upon it."""
        is_known = self.verbs.world().engine is self._engine
        if is_known and bucket.agreed:
            self._submit(bucket)
            return
        if not is_known:
            self._discard()
        for index in bucket.indices:
            grad = self._parameters[index].grad
            if grad is not None:
                if grad.is_sparse:
                    self._prepare(index, grad)  # says no, here and now
                bucket.items.append((index, grad, grad._version, grad, grad, None))

    def _one_more(self, index: int, bucket: Bucket) -> None:
        """One backward more than ``passes``: well if the earlier gradient was thrown away."""
        grad = self._parameters[index].grad
        if bucket.items:
            is_new = all(own is not grad for i, own, *_ in bucket.items if i == index)
        else:
            is_new = grad is None or grad._version == 0  # accumulating in place would count
        if not is_new:
            raise InvalidArgumentError(
                f"the gradient of '{self._names[index]}' was computed {self._passes + 1} times "
                f"since the last step(), but backward_passes_per_step is {self._passes}: call "
                f"step() after {self._passes}, or pass backward_passes_per_step="
                f"{self._passes + 1}; optimizer.zero_grad() throws a gradient away"
            )

    def _submit(
        self,
        bucket: Bucket,
        problems: list[InvalidArgumentError] | None = None,
        blank: bool = False,
    ) -> None:
        """[2] Send a bucket; a parameter without a gradient counts as zeros.

        ``problems`` gets the errors of gradients that cannot be sent, for which zeros go; without
        it they are raised. ``blank``: send zeros only, to others who wait, and touch no gradient.
        """
        items: list[Item] = []
        unused: list[int] = []
        entries: list[Entry] = []
        is_plain = self._compression is Compression.none
        for index in bucket.indices:
            own = grad = None if blank else self._parameters[index].grad
            if grad is None:
                unused.append(index)
                grad = torch.zeros_like(self._parameters[index], requires_grad=False)
            version = grad._version
            code = DTYPES.get(grad.dtype) if is_plain and grad.is_cpu else None
            if code is not None and not grad.is_sparse and grad.is_contiguous():
                address = grad.data_ptr()
                entries.append((code, grad.shape, address, address))
                items.append((index, own, version, grad, grad, None))
                continue
            try:
                entry, dense, context = self._prepare(index, grad)
            except InvalidArgumentError as error:
                if problems is None:
                    raise
                problems.append(error)
                entry, dense, context = self._prepare(index, zeros_for(self._parameters[index]))
            entries.append(entry)
            items.append((index, own, version, grad, dense, context))
        engine = self.verbs.world().engine
        try:
            number = engine.submit(_ALLREDUCE, bucket.name, entries, self._op, 1.0, 1.0, 0, False)
        except _native.EngineError as error:
            raise from_engine(error) from None
        bucket.engine, bucket.number, bucket.items, bucket.unused = engine, number, items, unused
        self._in_flight.append(bucket)

    def _prepare(
        self, index: int, grad: torch.Tensor
    ) -> tuple[Entry, torch.Tensor, torch.dtype | None]:
        """What the engine gets of a gradient that is compressed or not dense."""
        small, context = self._compression.compress(grad.detach())
        try:
            code, shape, address, dense = self.verbs.frontend.view(small)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"gradient of '{self._names[index]}': {error}") from None
        return (code, shape, address, address), dense, context

    def synchronize(self) -> None:
        """Return when every gradient is equal on all ranks; see ``Distributed.synchronize``."""
        if not self.active or not (self._parameters or self._frozen):
            return
        problems = self._thaw()
        try:
            self._meet()
            self._trip([bucket for bucket in self._buckets if bucket.agreed], problems)
        except Exception:
            self._reset()
            raise
        self._reset()
        self.synchronized = True

    def drop(self) -> None:
        """Forget the gradients. What was sent comes back first, on all ranks alike."""
        if self.pending and self._engine is self.verbs.world().engine:
            self._travel([bucket for bucket in self._buckets if bucket.agreed], _DROPS, [])
        elif self.pending:
            self._discard()
        self.reset()
        self._thaw()

    def _meet(self) -> None:
        """Once per world: have all ranks the same parameters? They number the optimizer, too.

        Numbers keep the names of several optimizers apart, of dropped ones too.
        """
        engine = self.verbs.world().engine
        if engine is self._engine:
            return
        self._discard()
        self._number = agree_on_optimizer(
            self.verbs.world, self._details(range(len(self._names))), SAME_MODEL
        )
        self._engine = engine
        self._agreed = 0
        self._accept(self._buckets)

    def _details(self, indices: Iterable[int]) -> list[tuple[str, Any]]:
        return [(self._names[index], tuple(self._parameters[index].shape)) for index in indices]

    def _accept(self, buckets: list[Bucket]) -> None:
        for bucket in buckets:
            bucket.agreed = True
            bucket.name = f"gradients.{self._number}.{self._names[bucket.indices[0]]}"
            self._agreed += len(bucket.indices)

    def _trip(self, buckets: list[Bucket], problems: list[InvalidArgumentError]) -> None:
        """Average the gradients of ``buckets``, and then those that need a second trip."""
        marks, done, redo = self._travel(buckets, _STEPS, problems)
        if problems:
            raise problems[0]
        if marks[_FAILED]:
            raise InvalidArgumentError(
                "another rank has a gradient that cannot be averaged; its own error says which"
            )
        if marks[_DROPS]:
            raise MismatchError(
                "another rank called optimizer.zero_grad() where this one averages its gradients: "
                "every rank must step, or skip the step, alike"
            )
        if not redo:
            self._store(done, marks)
        if not marks[_AGAIN]:
            return
        fresh = [bucket for bucket in self._buckets if not bucket.agreed]
        mine: list[tuple[str, Any]] = [("gradients", "thrown away and computed again")] * redo
        mine += self._details(index for bucket in fresh for index in bucket.indices)
        advice = "every rank must add, thaw and zero the same parameters"
        agree_on_optimizer(self.verbs.world, mine, advice)
        self._accept(fresh)
        self._reset()
        self._trip(self._buckets if redo else fresh, [])

    def _travel(
        self, buckets: list[Bucket], purpose: int, problems: list[InvalidArgumentError]
    ) -> tuple[bytearray, list[Item], bool]:
        """[3] Send what no hook has sent, and wait for all.

        Returns all ranks' marks, the items, and whether to do it again, since this rank threw away
        what it had sent. After the marks there is a byte per parameter: is it used?
        """
        redo = purpose == _STEPS and self._look_at_sent(problems)
        for bucket in buckets:
            if bucket.engine is None:
                self._submit(bucket, problems, blank=redo or purpose == _DROPS)
        marks = bytearray(_MARKS) + b"\1" * self._agreed
        for bucket in buckets:
            for index in bucket.unused:  # here, but maybe not elsewhere: zeros were sent
                marks[_MARKS + index] = 0
        marks[purpose] = 1
        if purpose == _STEPS:
            marks[_FAILED] = bool(problems)
            marks[_AGAIN] = redo or not all(bucket.agreed for bucket in self._buckets)
        view = torch.frombuffer(marks, dtype=torch.uint8)
        handle = self.verbs.allreduce_async_(view, f"used.{self._number}", Max)
        done = self._wait_for_all()
        handle.wait()
        return marks, done, redo

    def _look_at_sent(self, problems: list[InvalidArgumentError]) -> bool:
        """Were the gradients thrown away since they were sent? Changed ones are problems.

        What was sent is not this rank's gradient any more, so a change to it cannot be made good.
        """
        redo = min(self._left, default=0) < 0  # a gradient is a second one: see _one_more
        parameters = self._parameters
        kept = changed = None
        for bucket in self._buckets:
            for index, own, version, _, _, _ in bucket.items:
                now = parameters[index].grad
                if now is own:
                    if own is None or own._version == version:
                        continue
                    changed = changed or f"'{self._names[index]}'"
                elif now is not None and self._left[index] >= 0:
                    changed = changed or f"'{self._names[index]}'"
                elif bucket.engine is not None:
                    redo = True
        if redo:
            for index, own, *_ in (item for bucket in self._in_flight for item in bucket.items):
                if own is not None and own is parameters[index].grad:
                    kept = f"'{self._names[index]}'"
        what = ""
        if changed:
            what = (
                f"the gradient of {changed} was changed while it was on its way "
                "to the other ranks: call optimizer.synchronize() after backward(), then change "
                "it, then step within optimizer.skip_synchronize()"
            )
        elif kept:
            what = (
                f"gradients were thrown away, but not that of {kept}, which is "
                "on its way to the other ranks: use optimizer.zero_grad()"
            )
        if what:
            problems.append(InvalidArgumentError(what))
        return redo

    def _wait_for_all(self) -> list[Item]:
        """[4] Last submitted first: one wait drives the engine through all of them."""
        done: list[Item] = []
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

    def _store(self, done: list[Item], marks: bytearray) -> None:
        """[5] A parameter that no rank has used keeps no gradient, as with one process."""
        with torch.no_grad():
            for index, own, _, grad, dense, context in done:
                if dense is not grad:
                    grad.copy_(self._compression.decompress(dense, context))
                if own is None and marks[_MARKS + index]:
                    self._parameters[index].grad = grad

    def reset(self) -> None:
        """The optimizer has used the gradients, or zeroed them: count passes anew."""
        self._reset()
        self.synchronized = False

    def _reset(self) -> None:
        self._left[:] = [self._passes] * len(self._left)
        for bucket in self._buckets:
            bucket.missing = len(bucket.indices)
            if bucket.engine is None:
                bucket.items = []

    def _discard(self) -> None:
        """Do not wait for what is on its way, in a world that is gone."""
        while self._in_flight:
            self._let_go(self._in_flight.pop())

    def _let_go(self, bucket: Bucket) -> None:
        """Its buffers stay alive until the engine is done with them."""
        assert bucket.engine is not None
        keeper.keep(bucket.engine, bucket.number, [item[4] for item in bucket.items])
        bucket.engine, bucket.number, bucket.items, bucket.unused = None, 0, [], []

    def __del__(self) -> None:
        """Gradients on their way outlive this object."""
        for bucket in getattr(self, "_in_flight", ()):
            self._let_go(bucket)
