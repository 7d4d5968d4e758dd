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

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from kolovod import _native
from kolovod.errors import InvalidArgumentError, MismatchError
from kolovod.observe import spans
from kolovod.ops import Max, Sum
from kolovod.torch import sparse
from kolovod.torch.agreement import SAME_MODEL, agree_on_optimizer
from kolovod.torch.autograd import TorchCollectives
from kolovod.torch.buckets import Bucket, Item, Way, cut
from kolovod.torch.countdown import Countdown
from kolovod.torch.sender import Sender


class _Removable(Protocol):
    def remove(self) -> None: ...


# What a rank says of itself in every trip; each rank sees what all ranks together have said.
_STEPS, _DROPS, _FAILED, _AGAIN = range(4)
_MARKS = 4


class TooManyPassesError(InvalidArgumentError, AssertionError):
    """A backward pass more than ``backward_passes_per_step``; Horovod's is an AssertionError."""


class GradientReducer(Sender):
    """Keeps the gradients of named parameters equal on all ranks. One per optimizer."""

    def __init__(
        self,
        named: Iterable[tuple[str | None, torch.Tensor]],
        way: Way,
        passes: int,
        verbs: TorchCollectives,
        groups: Mapping[int, int],
        is_member: bool = True,
    ) -> None:
        """``passes``: backward passes that are summed locally before a gradient is sent.

        ``groups``: the number of a parameter's group, by its ``id``; groups travel whole.
        ``is_member``: False where this rank is not one of those that ``verbs`` work among; then
        gradients stay as they are.
        """
        super().__init__(way, verbs)
        self._countdown = Countdown(passes)
        self._groups = groups
        self._hooks: dict[int, _Removable] = {}  # by parameter
        self._frozen: list[tuple[str | None, torch.Tensor]] = []
        self._buckets: list[Bucket] = []
        self._engine: _native.Engine | None = None  # of the world whose ranks have agreed
        self._number = 0  # of this optimizer in that world
        self._agreed = 0  # so many parameters
        self.synchronized = False  # gradients were equal everywhere since the last step
        self.skips = False  # gradients are used as they are
        self._used = False  # there was a step, and no zero_grad since
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
        self._countdown.add(len(wanted))
        for indices in cut(range(first, len(self._names)), self._parameters, self._groups):
            bucket = Bucket(indices)
            self._buckets.append(bucket)
            for index in indices if self.active else ():
                self._hook(index, bucket)
        return [
            InvalidArgumentError(
                f"a parameter of shape {tuple(parameter.shape)} wants a gradient now, but "
                "named_parameters did not name it: pass the frozen parameters' names too"
            )
            for _, parameter in self._frozen
            if parameter.requires_grad
        ]

    def _hook(self, index: int, bucket: Bucket) -> None:
        before = self._hooks.get(index)
        if before is not None:
            before.remove()
        register = self._parameters[index].register_post_accumulate_grad_hook
        self._hooks[index] = register(self._make_hook(index, bucket))  # type: ignore[no-untyped-call]

    def set_passes(self, passes: int) -> None:
        """Change ``passes``, between steps."""
        self._countdown.passes = passes
        self._reset()

    def remove_hooks(self) -> None:
        """Leave the parameters alone from now on."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    @property
    def pending(self) -> bool:
        """Whether backward has finished gradients that ``synchronize`` has not seen."""
        return any(bucket.missing < len(bucket.indices) for bucket in self._buckets)

    @property
    def settled(self) -> bool:
        """Whether all gradients are averaged: since then there was no backward, and no step."""
        return self.synchronized and not self._countdown.begun

    @property
    def sending(self) -> bool:
        """Whether gradients may be on their way, so that their values are not to be used."""
        return any(bucket.missing == 0 for bucket in self._buckets)

    def _make_hook(self, index: int, bucket: Bucket) -> Callable[[torch.Tensor], None]:
        """[1], with everything at hand as a local: this runs once per gradient."""
        left = self._countdown.left
        complete = self._complete
        is_on_device, stream_of = self._device.is_on_device, self._device.stream_of
        streams = bucket.streams

        def hook(parameter: torch.Tensor) -> None:
            remaining = left[index] = left[index] - 1
            if remaining > 0:
                return
            if remaining < 0:
                self._one_more(index, bucket)
                return
            if is_on_device(parameter):  # backward uses the streams that forward has used
                streams.add(stream_of(parameter))
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
                bucket.items.append((index, grad, grad._version, grad, grad, None))

    def _one_more(self, index: int, bucket: Bucket) -> None:
        """One backward more than ``passes``: well if the earlier gradient was thrown away."""
        grad = self._parameters[index].grad
        if bucket.items:
            is_new = all(own is not grad for i, own, *_ in bucket.items if i == index)
        else:
            is_new = grad is None or grad._version == 0  # accumulating in place would count
        if not is_new:
            passes = self._countdown.passes
            raise TooManyPassesError(
                f"the gradient of '{self._names[index]}' was computed {passes + 1} times "
                f"since the last step(), but backward_passes_per_step is {passes}: call "
                f"step() after {passes}, or pass backward_passes_per_step={passes + 1}, or let all "
                "but the last run within optimizer.no_sync(); optimizer.zero_grad() throws a "
                "gradient away; for layers shared under torch.utils.checkpoint, use_reentrant=False"
            )

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Within this context backward adds up gradients here, and no pass is counted."""
        try:
            with self._countdown.hold():
                yield
        finally:
            self.synchronized = self._used = False

    def owns(self, ids: set[int]) -> bool:
        """See clipping.Averaging."""
        return any(id(parameter) in ids for parameter in self._parameters)

    def settle(self) -> None:
        """See clipping.Averaging.

        Whatever was accumulated is averaged, also when passes are missing, since it may be all that
        this rank has. More passes may follow, and are averaged with it; but not when the ranks'
        gradients are summed, for that would count the first ones several times.
        """
        if self.skips or self.settled or self._countdown.is_held or self._is_spent():
            return
        if self.pending or self._countdown.passes == 1 or self._way.op != Sum:
            self.synchronize()

    def _is_spent(self) -> bool:
        """Whether the gradients are those that a step has used: looked at, maybe by one rank only.

        Thrown away, they are those of a rank without a batch, which the others wait for.
        """
        if not self._used or self._countdown.begun:
            return False
        return any(parameter.grad is not None for parameter in self._parameters)

    @spans.shown(spans.WAIT_FOR_GRADIENTS)
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
        if not self.active:
            return
        try:
            if self.pending and self._engine is self.verbs.world().engine:
                self._travel([bucket for bucket in self._buckets if bucket.agreed], _DROPS, [])
            elif self.pending:
                self._discard()
        finally:
            self.reset(used=False)
        self._thaw()

    def _meet(self) -> None:
        """Once per world: have all ranks the same parameters? They number the optimizer, too.

        Numbers keep the names of several optimizers apart, of dropped ones too.
        """
        engine = self.verbs.world().engine
        if engine is self._engine:
            return
        self._discard()
        details = self._details(range(len(self._names)))
        world, dims = self.verbs.world, self._sparse_dims()
        self._number, dims = agree_on_optimizer(world, details, SAME_MODEL, dims)
        self._engine = engine
        self._agreed = 0
        self._single_out(dims)
        self._accept(self._buckets)

    def _sparse_dims(self) -> list[int]:
        """What this rank knows; what ranks of an earlier world have agreed upon stays sparse."""
        dims = [sparse.sparse_dim_of(p.grad, self._way) for p in self._parameters]
        for bucket in self._buckets:
            if bucket.sparse_dim:
                dims[bucket.indices[0]] = bucket.sparse_dim
        return dims

    def _single_out(self, sparse_dims: list[int]) -> None:
        """What is sparse on some rank travels alone, and as sparse, on all."""
        left = self._countdown.numbers
        for bucket in list(self._buckets):
            for index in [index for index in bucket.indices if sparse_dims[index]]:
                alone = bucket
                if len(bucket.indices) > 1:
                    alone = Bucket([index])
                    alone.items = [item for item in bucket.items if item[0] == index]
                    bucket.indices.remove(index)
                    bucket.items = [item for item in bucket.items if item[0] != index]
                    self._buckets.append(alone)
                    self._hook(index, alone)
                alone.sparse_dim = sparse_dims[index]
                for changed in (bucket, alone):
                    changed.missing = sum(left[i] > 0 for i in changed.indices)

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
        _, dims = agree_on_optimizer(self.verbs.world, mine, advice, self._sparse_dims())
        new = {index for bucket in fresh for index in bucket.indices}
        self._single_out([dim if index in new else 0 for index, dim in enumerate(dims)])
        fresh = [bucket for bucket in self._buckets if not bucket.agreed]
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
        left = self._countdown.numbers
        redo = min(left, default=0) < 0  # a gradient is a second one: see _one_more
        parameters = self._parameters
        kept = changed = None
        for bucket in self._buckets:
            for index, own, version, _, _, _ in bucket.items:
                now = parameters[index].grad
                if now is own:
                    if own is None or own._version == version:
                        continue
                    changed = changed or f"'{self._names[index]}'"
                elif now is not None and left[index] >= 0:
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

    def _store(self, done: list[Item], marks: bytearray) -> None:
        """[5] A parameter that no rank has used keeps no gradient, as with one process."""
        with torch.no_grad():
            for index, own, _, grad, dense, context in done:
                is_used = own is not None or marks[_MARKS + index]
                if isinstance(dense, torch.Tensor) and dense.is_sparse:
                    self._parameters[index].grad = dense if is_used else None
                    continue
                if dense is not grad:
                    result = self._way.compression.decompress(dense, context)
                    if grad.is_sparse:  # and sent as dense
                        self._parameters[index].grad = result.to_sparse(grad.sparse_dim())
                        continue
                    grad.copy_(result)
                if own is None and is_used:
                    self._parameters[index].grad = grad

    def reset(self, *, used: bool) -> None:
        """The optimizer has used the gradients, or zeroed them: count passes anew."""
        if not self.active:  # nothing was counted: no hook
            return
        self._reset()
        self.synchronized, self._used = False, used

    def _reset(self) -> None:
        self._countdown.reset()
        for bucket in self._buckets:
            bucket.missing = len(bucket.indices)
            if bucket.engine is None:
                bucket.items = []
