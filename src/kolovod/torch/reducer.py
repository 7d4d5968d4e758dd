"""Averaging gradients while backward is still computing others.

The trip of one gradient: autograd accumulates it and calls our hook [1]; the hook that completes a
bucket submits all of it to the engine as one group [2] and returns; ``synchronize`` submits what no
hook has submitted [3], waits for everything [4], and puts the results where the optimizer looks for
them [5].

Nothing is sent for parameters that the ranks have not agreed upon: a name that is missing elsewhere
would be waited for forever. So the first ``synchronize`` in a world sends everything by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kolovod.core import spans
from kolovod.core.ops import Max, Sum
from kolovod.errors import InvalidArgumentError, MismatchError
from kolovod.torch.arrangement import Arrangement
from kolovod.torch.buckets import Bucket, Item

# What a rank says of itself in every trip; each rank sees what all ranks together have said.
_STEPS, _DROPS, _FAILED, _AGAIN = range(4)
_MARKS = 4


class GradientReducer(Arrangement):
    """Keeps the gradients of named parameters equal on all ranks. One per optimizer."""

    synchronized = False
    """Gradients were equal everywhere since the last step."""
    skips = False
    """Gradients are used as they are."""
    _used = False  # there was a step, and no zero_grad since

    @property
    def passes(self) -> int:
        """Backward passes that are summed before a gradient is sent."""
        return self._countdown.passes

    def set_passes(self, passes: int) -> None:
        """Change ``passes``, between steps."""
        self._countdown.passes = passes
        self._reset()

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
        again: list[tuple[str, Any]] = [("gradients", "thrown away and computed again")] * redo
        new = {index: None for bucket in fresh for index in bucket.indices}
        advice = "every rank must add, thaw and zero the same parameters"
        _, dims = self._compared(new, again, advice)
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
