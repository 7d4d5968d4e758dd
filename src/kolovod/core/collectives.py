"""Every verb, written once for all frameworks.

A verb asks the front end for views, submits one request to the engine and waits for it (or hands
out a Handle). What is common to all verbs:

- ``name``: operations of different ranks belong together by name, so named operations may be
  submitted in any order; the same name may be used again once the operation before is complete.
  Unnamed ones (None) are matched by their order and must be submitted in the same order everywhere.
- ``process_set``: its members only take part, and only they may call the verb; None: all ranks.
  ``root_rank`` is a rank of the world also then; splits and parts are by position in the set.
- The result is the same, bit for bit, on every rank. Tensors that are not dense are copied first.
- Verbs ending in ``_`` work in place and return the tensor that they were given.
- Errors: NotInitializedError before ``init()``; InvalidArgumentError for what this rank got wrong;
  DuplicateNameError when the name is still pending here; MismatchError, on every rank, when the
  ranks did not submit the same thing; RankLostError, RankLeftError, ShutDownError and
  InterruptedByRankError when the operation can never complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from kolovod import _native
from kolovod.core.gathering import Gathering
from kolovod.core.handles import Handle
from kolovod.core.ops import Average, Sum
from kolovod.core.submission import Finish, Group, position_of, several

T = TypeVar("T")

_ALLREDUCE = _native.VERBS["allreduce"]
_BROADCAST = _native.VERBS["broadcast"]
_BARRIER = _native.VERBS["barrier"]
_JOIN = _native.VERBS["join"]


class Collectives(Gathering[T]):
    """The verbs on the tensors of one framework. See the module's text for what they share."""

    # allreduce ----------------------------------------------------------------------------------

    def allreduce(
        self,
        tensor: T,
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
    ) -> T:
        """Combine ``tensor`` over all ranks; every rank gets ``postscale * op(prescale * tensor)``.

        ``tensor``: any shape, the same on all ranks, of any dtype that the engine knows (bool: no
        Average, no factors). Integers are truncated toward zero after each multiplication. Sums
        and products wrap around; the sum of an Average is kept in 64 bits and does not.
        """
        dtype, shape, source, owner = self._view(tensor)
        if owner is tensor:
            owner, target = self._empty_like(tensor)
        else:
            target = source  # `owner` is a private copy: reduce that in place
        self._run(
            process_set,
            _ALLREDUCE,
            name,
            [(dtype, shape, source, target)],
            op,
            prescale_factor,
            postscale_factor,
            0,
            (tensor, owner),
        )
        if target == source:
            owner = self.frontend.placed(owner, tensor)
        return owner  # type: ignore[no-any-return]

    def allreduce_async(
        self,
        tensor: T,
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
    ) -> Handle[T]:
        """``allreduce`` that returns at once; leave ``tensor`` alone until ``wait`` returned."""
        entry, output, finish = self._fresh(tensor)
        scales = (prescale_factor, postscale_factor)
        buffers = (tensor, output)
        return self._start(
            process_set, _ALLREDUCE, name, [entry], op, *scales, 0, buffers, output, finish
        )

    def allreduce_(
        self,
        tensor: T,
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
    ) -> T:
        """``allreduce`` in place."""
        self.frontend.claim(tensor)
        dtype, shape, address, owner = self._view(tensor)
        scales = (prescale_factor, postscale_factor)
        entries = [(dtype, shape, address, address)]
        self._run(process_set, _ALLREDUCE, name, entries, op, *scales, 0, owner)
        if owner is not tensor:
            self.frontend.copy_back(owner, tensor)
        return tensor

    def allreduce_async_(
        self,
        tensor: T,
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
    ) -> Handle[T]:
        """``allreduce_`` that returns at once; leave ``tensor`` alone until ``wait`` returned."""
        entry, owner = self._own(tensor)
        finish = None if owner is tensor else self._copying_back([owner], [tensor], tensor)
        pre, post = prescale_factor, postscale_factor
        return self._start(
            process_set, _ALLREDUCE, name, [entry], op, pre, post, 0, owner, tensor, finish
        )

    # grouped allreduce --------------------------------------------------------------------------

    def grouped_allreduce(
        self,
        tensors: Sequence[T],
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
    ) -> list[T]:
        """``allreduce`` of several tensors as one operation, in the order given.

        They may differ in shape and dtype; the group is ready when every rank has submitted it.
        """
        scales = (prescale_factor, postscale_factor)
        return self._grouped(
            process_set, tensors, name, op, scales, in_place=False, blocking=True
        ).wait()

    def grouped_allreduce_async(
        self,
        tensors: Sequence[T],
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
    ) -> Handle[list[T]]:
        """``grouped_allreduce`` that returns at once."""
        scales = (prescale_factor, postscale_factor)
        return self._grouped(process_set, tensors, name, op, scales, in_place=False, blocking=False)

    def grouped_allreduce_(
        self,
        tensors: Sequence[T],
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
    ) -> list[T]:
        """``grouped_allreduce`` in place; returns a list of the tensors given."""
        scales = (prescale_factor, postscale_factor)
        return self._grouped(
            process_set, tensors, name, op, scales, in_place=True, blocking=True
        ).wait()

    def grouped_allreduce_async_(
        self,
        tensors: Sequence[T],
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
    ) -> Handle[list[T]]:
        """``grouped_allreduce_`` that returns at once."""
        scales = (prescale_factor, postscale_factor)
        return self._grouped(process_set, tensors, name, op, scales, in_place=True, blocking=False)

    # broadcast ----------------------------------------------------------------------------------

    def broadcast(
        self,
        tensor: T,
        root_rank: int = 0,
        name: str | None = None,
        process_set: Group | None = None,
    ) -> T:
        """A new tensor with the values that ``tensor`` has on ``root_rank``; shapes must agree."""
        entry, output, finish = self._fresh(tensor)
        root = position_of(root_rank, process_set)
        buffers = (tensor, output)
        result: T | None = self._run(
            process_set, _BROADCAST, name, [entry], Sum, 1.0, 1.0, root, buffers, finish
        )
        return output if result is None else result

    def broadcast_async(
        self,
        tensor: T,
        root_rank: int = 0,
        name: str | None = None,
        process_set: Group | None = None,
    ) -> Handle[T]:
        """``broadcast`` that returns at once."""
        entry, output, finish = self._fresh(tensor)
        root = position_of(root_rank, process_set)
        buffers = (tensor, output)
        return self._start(
            process_set, _BROADCAST, name, [entry], Sum, 1.0, 1.0, root, buffers, output, finish
        )

    def broadcast_(
        self,
        tensor: T,
        root_rank: int = 0,
        name: str | None = None,
        process_set: Group | None = None,
    ) -> T:
        """``broadcast`` in place: ``tensor`` is overwritten on all ranks but ``root_rank``."""
        entry, owner = self._own(tensor)
        root = position_of(root_rank, process_set)
        self._run(process_set, _BROADCAST, name, [entry], Sum, 1.0, 1.0, root, owner)
        if owner is not tensor:
            self.frontend.copy_back(owner, tensor)
        return tensor

    def broadcast_async_(
        self,
        tensor: T,
        root_rank: int = 0,
        name: str | None = None,
        process_set: Group | None = None,
    ) -> Handle[T]:
        """``broadcast_`` that returns at once."""
        entry, owner = self._own(tensor)
        root = position_of(root_rank, process_set)
        finish = None if owner is tensor else self._copying_back([owner], [tensor], tensor)
        return self._start(
            process_set, _BROADCAST, name, [entry], Sum, 1.0, 1.0, root, owner, tensor, finish
        )

    # barrier ------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None, process_set: Group | None = None) -> None:
        """Return once every rank has called it. Other pending operations are not waited for."""
        self._run(process_set, _BARRIER, name, [], Sum, 1.0, 1.0, 0, None)

    # join -------------------------------------------------------------------------------------

    def join(self, process_set: Group | None = None) -> int:
        """Say that this rank has no data left, and wait until all have said so.

        For uneven data: until then the others' allreduces go on, and this rank contributes zeros to
        them; an Average still divides by the number of all ranks. Everything else that they submit
        raises MismatchError there. Operations that this rank has submitted before are completed
        first; submitting more meanwhile raises InvalidArgumentError.

        Returns the rank that came last, which is the one whose model has seen the most data; the
        same on every rank.
        """
        last: int = self._start(
            process_set,
            _JOIN,
            None,
            [],
            Sum,
            1.0,
            1.0,
            0,
            None,
            None,
            lambda engine, number: engine.rows(number, 0)[0],
            True,
        ).wait()
        return last if process_set is None else process_set.ranks[last]

    # handles ------------------------------------------------------------------------------------

    def poll(self, handle: Handle[Any]) -> bool:
        """The same as ``handle.poll()``."""
        return handle.poll()

    def synchronize(self, handle: Handle[T]) -> T:
        """The same as ``handle.wait()``."""
        return handle.wait()

    # inside -------------------------------------------------------------------------------------

    def _grouped(
        self,
        process_set: Group | None,
        tensors: Sequence[T],
        name: str | None,
        op: int,
        scales: tuple[float, float],
        *,
        in_place: bool,
        blocking: bool,
    ) -> Handle[list[T]]:
        finish: Finish[list[T]] | None
        if in_place:
            result = list(several(tensors))
            pairs = [self._own(tensor) for tensor in result]
            entries, outputs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            finish = self._copying_back(outputs, result, result)
        else:
            fresh = [self._fresh(tensor) for tensor in several(tensors)]
            entries, result = [each[0] for each in fresh], [each[1] for each in fresh]
            outputs, finish = result, self._together(result, [each[2] for each in fresh])
        buffers = (tuple(tensors), outputs)
        return self._start(
            process_set,
            _ALLREDUCE,
            name,
            entries,
            op,
            *scales,
            0,
            buffers,
            result,
            finish,
            blocking,
        )
