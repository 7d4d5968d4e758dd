"""Every verb, written once for all frameworks.

A verb makes a Request, and one of eight methods carries it out: for one tensor or several, with new
results or in place, waiting or not. A front end whose framework must know of an operation (to
differentiate it, to make it part of a graph) replaces those methods, not the verbs.

What is common to all verbs:

- ``name``: operations of different ranks belong together by name, so named operations may be
  submitted in any order; the same name may be used again once the operation before is complete.
  Unnamed ones (None) are matched by their order and must be submitted in the same order everywhere.
- ``process_set``: its members only take part, and only they may call the verb; None: all ranks.
  ``root_rank`` is a rank of the world also then; splits and parts are by position in the set.
- The result is the same, bit for bit, on every rank. Tensors that are not dense are copied first.
- Verbs ending in ``_`` work in place and return the tensor that they were given. Those ending in
  ``_async`` or ``_async_`` return at once, a Handle: leave the tensor alone until its ``wait`` has
  returned. Those that begin with ``grouped_`` take several tensors as one operation, and return
  their results in the order given.
- Errors: NotInitializedError before ``init()``; InvalidArgumentError for what this rank got wrong;
  DuplicateNameError when the name is still pending here; MismatchError, on every rank, when the
  ranks did not submit the same thing; RankLostError, RankLeftError, ShutDownError and
  InterruptedByRankError when the operation can never complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from kolovod.core.buffers import Buffers, Make, Prepared, all_of, both, held, rows_for_ranks
from kolovod.core.codecs import codecs_of
from kolovod.core.frontend import ON_DEVICE, Frontend, TensorView
from kolovod.core.handles import Handle
from kolovod.core.ops import Adasum, Average, Sum
from kolovod.core.submission import (
    EngineTensor,
    Group,
    Request,
    Submitter,
    WorldLike,
    position_of,
    several,
)
from kolovod.core.verbs import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BARRIER,
    BROADCAST,
    JOIN,
    REDUCESCATTER,
)

T = TypeVar("T")

_request: Callable[[tuple[Any, ...]], Request] = partial(tuple.__new__, Request)
"""``Request`` of all fields in their order: takes half the time of its own ``__new__``."""


class Collectives:
    """The verbs on the tensors of one framework. See the module's text for what they share."""

    handle_type: type[Handle[Any]] = Handle

    def __init__(self, frontend: Frontend[Any], world: Callable[[], WorldLike]) -> None:
        """``world`` is asked on every call, so that a new world needs no new Collectives."""
        self.frontend = frontend
        self.world = world
        submitter = Submitter(world, self.handle_type)
        self.membership = submitter.membership
        self._buffers = Buffers(frontend, submitter.membership)
        self._run, self._start = submitter.run, submitter.start
        self._view, self._empty_like = frontend.view, frontend.empty_like
        self._made_by_engine = self._buffers.made_by_engine
        self._holder = frontend.holder

    # allreduce ----------------------------------------------------------------------------------

    def allreduce(
        self,
        tensor: T,
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
        compression: Any = None,
    ) -> T:
        """Combine ``tensor`` over all ranks; every rank gets ``postscale * op(prescale * tensor)``.

        ``tensor``: any shape, the same on all ranks, of any dtype that the engine knows (bool: no
        Average, no factors). Integers are truncated toward zero after each multiplication. Sums
        and products wrap around; the sum of an Average is kept in 64 bits and does not: values of
        int64 for which that is too little are refused. Complex tensors: Sum and Average.
        ``compression``: ``Compression.int8`` or ``.int4``, of floats between hosts, with Average or
        Sum (see ``Codec``); a list in a grouped verb: one for each tensor.
        """
        codecs = codecs_of(compression) if compression else ()
        request = _request(
            (ALLREDUCE, name, process_set, op, prescale_factor, postscale_factor, 0, None, codecs)
        )
        return self.new(request, tensor)

    def allreduce_async(
        self,
        tensor: T,
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
        compression: Any = None,
    ) -> Handle[T]:
        """``allreduce`` that returns at once."""
        codecs = codecs_of(compression) if compression else ()
        request = _request(
            (ALLREDUCE, name, process_set, op, prescale_factor, postscale_factor, 0, None, codecs)
        )
        return self.start_new(request, tensor)

    def allreduce_(
        self,
        tensor: T,
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
        compression: Any = None,
    ) -> T:
        """``allreduce`` in place."""
        codecs = codecs_of(compression) if compression else ()
        request = _request(
            (ALLREDUCE, name, process_set, op, prescale_factor, postscale_factor, 0, None, codecs)
        )
        return self.in_place(request, tensor)

    def allreduce_async_(
        self,
        tensor: T,
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
        compression: Any = None,
    ) -> Handle[T]:
        """``allreduce_`` that returns at once."""
        codecs = codecs_of(compression) if compression else ()
        request = _request(
            (ALLREDUCE, name, process_set, op, prescale_factor, postscale_factor, 0, None, codecs)
        )
        return self.start_in_place(request, tensor)

    def grouped_allreduce(
        self,
        tensors: Sequence[T],
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
        compression: Any = None,
    ) -> list[T]:
        """``allreduce`` of several tensors as one operation.

        They may differ in shape and dtype; the group is ready when every rank has submitted it.
        """
        codecs = codecs_of(compression) if compression else ()
        request = _request(
            (ALLREDUCE, name, process_set, op, prescale_factor, postscale_factor, 0, None, codecs)
        )
        return self.new_group(request, tensors)

    def grouped_allreduce_async(
        self,
        tensors: Sequence[T],
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
        compression: Any = None,
    ) -> Handle[list[T]]:
        """``grouped_allreduce`` that returns at once."""
        codecs = codecs_of(compression) if compression else ()
        request = _request(
            (ALLREDUCE, name, process_set, op, prescale_factor, postscale_factor, 0, None, codecs)
        )
        return self.start_new_group(request, tensors)

    def grouped_allreduce_(
        self,
        tensors: Sequence[T],
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
        compression: Any = None,
    ) -> list[T]:
        """``grouped_allreduce`` in place; returns a list of the tensors given."""
        codecs = codecs_of(compression) if compression else ()
        request = _request(
            (ALLREDUCE, name, process_set, op, prescale_factor, postscale_factor, 0, None, codecs)
        )
        return self.group_in_place(request, tensors)

    def grouped_allreduce_async_(
        self,
        tensors: Sequence[T],
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
        compression: Any = None,
    ) -> Handle[list[T]]:
        """``grouped_allreduce_`` that returns at once."""
        codecs = codecs_of(compression) if compression else ()
        request = _request(
            (ALLREDUCE, name, process_set, op, prescale_factor, postscale_factor, 0, None, codecs)
        )
        return self.start_group_in_place(request, tensors)

    # broadcast ----------------------------------------------------------------------------------

    def broadcast(
        self,
        tensor: T,
        root_rank: int = 0,
        name: str | None = None,
        process_set: Group | None = None,
    ) -> T:
        """A new tensor with the values that ``tensor`` has on ``root_rank``; shapes must agree."""
        return self.new(_broadcast(root_rank, name, process_set), tensor)

    def broadcast_async(
        self,
        tensor: T,
        root_rank: int = 0,
        name: str | None = None,
        process_set: Group | None = None,
    ) -> Handle[T]:
        """``broadcast`` that returns at once."""
        return self.start_new(_broadcast(root_rank, name, process_set), tensor)

    def broadcast_(
        self,
        tensor: T,
        root_rank: int = 0,
        name: str | None = None,
        process_set: Group | None = None,
    ) -> T:
        """``broadcast`` in place: ``tensor`` is overwritten on all ranks but ``root_rank``."""
        return self.in_place(_broadcast(root_rank, name, process_set), tensor)

    def broadcast_async_(
        self,
        tensor: T,
        root_rank: int = 0,
        name: str | None = None,
        process_set: Group | None = None,
    ) -> Handle[T]:
        """``broadcast_`` that returns at once."""
        return self.start_in_place(_broadcast(root_rank, name, process_set), tensor)

    # allgather ----------------------------------------------------------------------------------

    def allgather(self, tensor: T, name: str | None = None, process_set: Group | None = None) -> T:
        """The ranks' tensors one after the other along dimension 0, in rank order.

        Dimension 0 may differ between ranks (0 included); the others must agree. A scalar has no
        dimension to join along: InvalidArgumentError.
        """
        return self.new(
            _request((ALLGATHER, name, process_set, Sum, 1.0, 1.0, 0, None, ())), tensor
        )

    def allgather_async(
        self, tensor: T, name: str | None = None, process_set: Group | None = None
    ) -> Handle[T]:
        """``allgather`` that returns at once."""
        return self.start_new(
            _request((ALLGATHER, name, process_set, Sum, 1.0, 1.0, 0, None, ())), tensor
        )

    def grouped_allgather(
        self, tensors: Sequence[T], name: str | None = None, process_set: Group | None = None
    ) -> list[T]:
        """``allgather`` of several tensors as one operation."""
        return self.new_group(
            _request((ALLGATHER, name, process_set, Sum, 1.0, 1.0, 0, None, ())), tensors
        )

    def grouped_allgather_async(
        self, tensors: Sequence[T], name: str | None = None, process_set: Group | None = None
    ) -> Handle[list[T]]:
        """``grouped_allgather`` that returns at once."""
        return self.start_new_group(
            _request((ALLGATHER, name, process_set, Sum, 1.0, 1.0, 0, None, ())), tensors
        )

    # alltoall -----------------------------------------------------------------------------------

    def alltoall(
        self,
        tensor: T,
        splits: Sequence[int] | None = None,
        name: str | None = None,
        process_set: Group | None = None,
    ) -> tuple[T, list[int]]:
        """Send ``splits[r]`` rows of ``tensor`` to rank r, the first ones to rank 0, and so on.

        ``splits``: one for each rank, at least 0, together at most dimension 0 (further rows stay);
        None: equal parts. Returns what the ranks sent here, along dimension 0 in rank order, and
        how many rows each of them sent. The other dimensions must agree. Raises
        InvalidArgumentError for a scalar, for splits that do not fit, and for None when dimension
        0 is not divisible by the number of ranks.
        """
        (result,), (received,) = self.new_with_rows(_alltoall(splits, name, process_set), [tensor])
        return result, received

    def alltoall_async(
        self,
        tensor: T,
        splits: Sequence[int] | None = None,
        name: str | None = None,
        process_set: Group | None = None,
    ) -> Handle[tuple[T, list[int]]]:
        """``alltoall`` that returns at once."""
        request = _alltoall(splits, name, process_set)
        entry, view, make, rows = self._split_by_engine(request, tensor)
        used = [tensor if view[3] is tensor else None]
        return self._begin(request, Prepared([entry], view, None, make, used), rows)

    # reducescatter ------------------------------------------------------------------------------

    def reducescatter(
        self,
        tensor: T,
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
    ) -> T:
        """``allreduce`` of which every rank gets a part of the rows, in rank order.

        ``tensor``: the same shape on all ranks, at least one dimension. Of n rows on s ranks, each
        rank gets n // s, and the first n % s ranks one more.
        """
        request = _reducescatter(name, op, prescale_factor, postscale_factor, process_set)
        return self.new(request, tensor)

    def reducescatter_async(
        self,
        tensor: T,
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
    ) -> Handle[T]:
        """``reducescatter`` that returns at once."""
        request = _reducescatter(name, op, prescale_factor, postscale_factor, process_set)
        return self.start_new(request, tensor)

    def grouped_reducescatter(
        self,
        tensors: Sequence[T],
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
    ) -> list[T]:
        """``reducescatter`` of several tensors as one operation."""
        request = _reducescatter(name, op, prescale_factor, postscale_factor, process_set)
        return self.new_group(request, tensors)

    def grouped_reducescatter_async(
        self,
        tensors: Sequence[T],
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
    ) -> Handle[list[T]]:
        """``grouped_reducescatter`` that returns at once."""
        request = _reducescatter(name, op, prescale_factor, postscale_factor, process_set)
        return self.start_new_group(request, tensors)

    # without tensors ----------------------------------------------------------------------------

    def barrier(self, name: str | None = None, process_set: Group | None = None) -> None:
        """Return once every rank has called it. Other pending operations are not waited for."""
        self._run(_request((BARRIER, name, process_set, Sum, 1.0, 1.0, 0, None, ())), [], None)

    def join(self, process_set: Group | None = None) -> int:
        """Say that this rank has no data left, and wait until all have said so.

        For uneven data: until then the others' allreduces go on, and this rank contributes zeros to
        them; an Average still divides by the number of all ranks. Everything else that they submit
        raises MismatchError there. Operations that this rank has submitted before are completed
        first; submitting more meanwhile raises InvalidArgumentError.

        Returns the rank that came last, which is the one whose model has seen the most data; the
        same on every rank.
        """
        last: int = self._run(
            _request((JOIN, None, process_set, Sum, 1.0, 1.0, 0, None, ())),
            [],
            None,
            lambda engine, number: engine.rows(number, 0)[0],
        )
        return last if process_set is None else process_set.ranks[last]

    # handles ------------------------------------------------------------------------------------

    def poll(self, handle: Handle[Any]) -> bool:
        """Return whether the operation is complete, like ``handle.poll()``."""
        return handle.poll()

    def synchronize(self, handle: Handle[T]) -> T:
        """Wait for the operation and return its result, like ``handle.wait()``."""
        return handle.wait()

    # any verb -----------------------------------------------------------------------------------

    def new(self, request: Request, tensor: T) -> T:
        """Carry out ``request`` on one tensor, into a new one."""
        if request.verb.makes_outputs:
            entry, view, make = self._made_by_engine(tensor, request)
            result: T = self._run(request, [entry], view, make)[0]
            return result
        dtype, shape, source, owner = self._view(tensor)
        if dtype >= ON_DEVICE and request.op == Adasum:
            dtype, shape, source, owner = self.frontend.host_view(tensor)
        if owner is tensor:
            owner, target = self._empty_like(tensor)
            self._run(request, [(dtype, shape, source, target)], (tensor, owner))
        else:  # `owner` is a private copy: work on that in place
            self._run(request, [(dtype, shape, source, source)], owner)
            owner = self.frontend.placed(owner, tensor)
        return owner  # type: ignore[no-any-return]

    def new_group(self, request: Request, tensors: Sequence[T]) -> list[T]:
        """Carry out ``request`` on several tensors, into new ones."""
        results: list[T] = self.new_with_rows(request, several(tensors))[0]
        return results

    def new_with_rows(
        self, request: Request, tensors: Sequence[T]
    ) -> tuple[list[T], list[list[int]]]:
        """Carry out ``request`` as ``new_group`` does; return also each rank's rows, by result.

        These are the rows that each rank gave or sent here. They are known of verbs that join
        tensors along their first dimension.
        """
        if request.verb is ALLTOALL:  # of one tensor
            entry, view, make, rows = self._split_by_engine(request, tensors[0])
            result, received = self._run(request, [entry], view, make, rows)
            return [result], [received]
        entries, buffers, result, finish, _ = self._buffers.new(request, tensors, both)
        made = self._run(request, entries, buffers, finish)
        return result if finish is None else made  # type: ignore[no-any-return]

    def start_new(self, request: Request, tensor: T) -> Handle[T]:
        """``new`` that returns at once."""
        if request.verb.makes_outputs:
            entry, view, make = self._made_by_engine(tensor, request)
            used = [tensor if view[3] is tensor else None]
            return self._begin(
                request,
                Prepared([entry], view, None, lambda *done: make(*done)[0], used),
            )
        dtype, shape, source, owner = self._view(tensor)
        if dtype >= ON_DEVICE and request.op == Adasum:
            dtype, shape, source, owner = self.frontend.host_view(tensor)
        if owner is tensor:
            output, target = self._empty_like(tensor)
            entry = (dtype, shape, source, target)
            return self._begin(request, Prepared([entry], (tensor, output), output, None, [tensor]))
        placed = self.frontend.placed
        return self._start(
            request,
            [(dtype, shape, source, source)],
            owner,
            None,
            lambda engine, number: placed(owner, tensor),
        )

    def start_new_group(self, request: Request, tensors: Sequence[T]) -> Handle[list[T]]:
        """``new_group`` that returns at once."""
        return self._begin(request, self._buffers.new(request, several(tensors), all_of))

    def in_place(self, request: Request, tensor: T) -> T:
        """Carry out ``request`` on one tensor, and overwrite that."""
        self.frontend.claim(tensor)
        dtype, shape, address, owner = self._view(tensor)
        if dtype >= ON_DEVICE and request.op == Adasum:
            dtype, shape, address, owner = self.frontend.host_view(tensor)
        self._run(request, [(dtype, shape, address, address)], owner)
        if owner is not tensor:
            self.frontend.copy_back(owner, tensor)
        return tensor

    def group_in_place(self, request: Request, tensors: Sequence[T]) -> list[T]:
        """Carry out ``request`` on several tensors, and overwrite them."""
        prepared = self._buffers.in_place(request, several(tensors), all_of)
        entries, buffers, result, finish, _ = prepared
        self._run(request, entries, buffers, finish)
        return result  # type: ignore[no-any-return]

    def start_in_place(self, request: Request, tensor: T) -> Handle[T]:
        """``in_place`` that returns at once."""
        entry, owner = self._buffers.own(tensor, self._buffers.view_for(request))
        finish = None
        if owner is not tensor:
            finish = self._buffers.copying_back([owner], [tensor], tensor)
        return self._begin(request, Prepared([entry], owner, tensor, finish, [tensor]))

    def start_group_in_place(self, request: Request, tensors: Sequence[T]) -> Handle[list[T]]:
        """``group_in_place`` that returns at once."""
        return self._begin(request, self._buffers.in_place(request, several(tensors), all_of))

    def _begin(
        self, request: Request, prepared: Prepared, splits: Sequence[int] = ()
    ) -> Handle[Any]:
        """Submit what goes on while the script does, and may give a tensor other memory."""
        entries, buffers, result, finish, _ = held(prepared, request, self._holder)
        return self._start(request, entries, buffers, result, finish, splits)

    def _split_by_engine(
        self, request: Request, tensor: T
    ) -> tuple[EngineTensor, TensorView, Make, list[int]]:
        """Return entry, view and maker of an alltoall's result, and the rows for each rank."""
        entry, view, make = self._made_by_engine(tensor, request)
        size = self.membership(request.process_set).size
        return entry, view, make, rows_for_ranks(request.splits, view[1], size)


def _broadcast(root_rank: int, name: str | None, process_set: Group | None) -> Request:
    root = position_of(root_rank, process_set)
    return _request((BROADCAST, name, process_set, Sum, 1.0, 1.0, root, None, ()))


def _alltoall(splits: Sequence[int] | None, name: str | None, process_set: Group | None) -> Request:
    return _request((ALLTOALL, name, process_set, Sum, 1.0, 1.0, 0, splits, ()))


def _reducescatter(
    name: str | None, op: int, prescale: float, postscale: float, process_set: Group | None
) -> Request:
    return _request((REDUCESCATTER, name, process_set, op, prescale, postscale, 0, None, ()))
