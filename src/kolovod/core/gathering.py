"""The verbs whose outputs the engine makes, since their first dimension is not the input's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any, TypeVar

from kolovod import _native
from kolovod.core.frontend import TensorView
from kolovod.core.handles import Handle
from kolovod.core.ops import Average, Sum
from kolovod.core.submission import EngineTensor, Group, Submitter, WorldLike, several
from kolovod.errors import InvalidArgumentError

T = TypeVar("T")

_ALLGATHER = _native.VERBS["allgather"]
_ALLTOALL = _native.VERBS["alltoall"]
_REDUCESCATTER = _native.VERBS["reducescatter"]


class Gathering(Submitter[T]):
    """allgather, alltoall and reducescatter; what all verbs share is said in collectives.py."""

    # allgather ----------------------------------------------------------------------------------

    def allgather(self, tensor: T, name: str | None = None, process_set: Group | None = None) -> T:
        """The ranks' tensors one after the other along dimension 0, in rank order.

        Dimension 0 may differ between ranks (0 included); the others must agree. A scalar has no
        dimension to join along: InvalidArgumentError.
        """
        view = self._view(tensor)

        def finish(engine: _native.Engine, number: int) -> T:
            return self._made(engine, number, 0, view, sum(engine.rows(number, 0)), tensor)

        entries = [(*view[:3], 0)]
        result: T = self._run(
            process_set, _ALLGATHER, name, entries, Sum, 1.0, 1.0, 0, view, finish
        )
        return result

    def allgather_async(
        self, tensor: T, name: str | None = None, process_set: Group | None = None
    ) -> Handle[T]:
        """``allgather`` that returns at once."""
        return self._allgather(process_set, [tensor], name, blocking=False, single=True)

    def grouped_allgather(
        self, tensors: Sequence[T], name: str | None = None, process_set: Group | None = None
    ) -> list[T]:
        """``allgather`` of several tensors as one operation, in the order given."""
        results: list[T] = self._allgather(
            process_set, several(tensors), name, blocking=True
        ).wait()
        return results

    def grouped_allgather_async(
        self, tensors: Sequence[T], name: str | None = None, process_set: Group | None = None
    ) -> Handle[list[T]]:
        """``grouped_allgather`` that returns at once."""
        return self._allgather(process_set, several(tensors), name, blocking=False)

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
        view, entries, finish, checked = self._alltoall(process_set, tensor, splits)
        result: tuple[T, list[int]] = self._run(
            process_set, _ALLTOALL, name, entries, Sum, 1.0, 1.0, 0, view, finish, checked
        )
        return result

    def alltoall_async(
        self,
        tensor: T,
        splits: Sequence[int] | None = None,
        name: str | None = None,
        process_set: Group | None = None,
    ) -> Handle[tuple[T, list[int]]]:
        """``alltoall`` that returns at once; leave ``tensor`` alone until ``wait`` returned."""
        view, entries, finish, checked = self._alltoall(process_set, tensor, splits)
        return self._start(
            process_set,
            _ALLTOALL,
            name,
            entries,
            Sum,
            1.0,
            1.0,
            0,
            view,
            None,
            finish,
            False,
            checked,
        )

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
        view = self._view(tensor)
        world = self.membership(process_set)

        def finish(engine: _native.Engine, number: int) -> T:
            return self._made(engine, number, 0, view, _part(view[1][0], world), tensor)

        pre, post = prescale_factor, postscale_factor
        entries = [(*view[:3], 0)]
        result: T = self._run(
            process_set, _REDUCESCATTER, name, entries, op, pre, post, 0, view, finish
        )
        return result

    def reducescatter_async(
        self,
        tensor: T,
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
    ) -> Handle[T]:
        """``reducescatter`` that returns at once; leave ``tensor`` alone until ``wait``."""
        scales = (prescale_factor, postscale_factor)
        return self._reducescatter(
            process_set, [tensor], name, op, scales, blocking=False, single=True
        )

    def grouped_reducescatter(
        self,
        tensors: Sequence[T],
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
    ) -> list[T]:
        """``reducescatter`` of several tensors as one operation, in the order given."""
        scales = (prescale_factor, postscale_factor)
        results: list[T] = self._reducescatter(
            process_set, several(tensors), name, op, scales, blocking=True
        ).wait()
        return results

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
        scales = (prescale_factor, postscale_factor)
        return self._reducescatter(process_set, several(tensors), name, op, scales, blocking=False)

    # inside -------------------------------------------------------------------------------------

    def _allgather(
        self,
        process_set: Group | None,
        tensors: Sequence[T],
        name: str | None,
        *,
        blocking: bool,
        single: bool = False,
    ) -> Handle[Any]:
        tensors = tuple(tensors)  # the caller may change the list meanwhile
        views = [self._view(tensor) for tensor in tensors]

        def finish(engine: _native.Engine, number: int) -> Any:
            outputs = [
                self._made(engine, number, i, view, sum(engine.rows(number, i)), tensor)
                for i, (view, tensor) in enumerate(zip(views, tensors, strict=True))
            ]
            return outputs[0] if single else outputs

        entries = [(*view[:3], 0) for view in views]
        return self._start(
            process_set, _ALLGATHER, name, entries, Sum, 1.0, 1.0, 0, views, None, finish, blocking
        )

    def _alltoall(
        self, process_set: Group | None, tensor: T, splits: Sequence[int] | None
    ) -> tuple[
        TensorView,
        list[EngineTensor],
        Callable[[_native.Engine, int], tuple[T, list[int]]],
        list[int],
    ]:
        """The view, what the engine is told, what makes the result, and the splits."""
        view = self._view(tensor)
        checked = _splits(splits, view[1], self.membership(process_set).size)

        def finish(engine: _native.Engine, number: int) -> tuple[T, list[int]]:
            received = engine.rows(number, 0)
            return self._made(engine, number, 0, view, sum(received), tensor), received

        return view, [(*view[:3], 0)], finish, checked

    def _reducescatter(
        self,
        process_set: Group | None,
        tensors: Sequence[T],
        name: str | None,
        op: int,
        scales: tuple[float, float],
        *,
        blocking: bool,
        single: bool = False,
    ) -> Handle[Any]:
        tensors = tuple(tensors)
        views = [self._view(tensor) for tensor in tensors]
        world = self.membership(process_set)

        def finish(engine: _native.Engine, number: int) -> Any:
            outputs = [
                self._made(engine, number, i, view, _part(view[1][0], world), tensor)
                for i, (view, tensor) in enumerate(zip(views, tensors, strict=True))
            ]
            return outputs[0] if single else outputs

        entries = [(*view[:3], 0) for view in views]
        return self._start(
            process_set,
            _REDUCESCATTER,
            name,
            entries,
            op,
            *scales,
            0,
            views,
            None,
            finish,
            blocking,
        )

    def _made(
        self, engine: _native.Engine, number: int, i: int, view: TensorView, rows: int, tensor: T
    ) -> T:
        """Output ``i``, which the engine made: like ``tensor``, but with so many rows."""
        shape = (rows, *view[1][1:])
        made = self.frontend.from_bytes(engine.output(number, i), view[0], shape)
        return made if view[3] is tensor else self.frontend.placed(made, tensor)


def _part(rows: int, world: WorldLike) -> int:
    """How many of the rows a reducescatter leaves on this rank."""
    return rows // world.size + (world.rank < rows % world.size)


def _splits(splits: Sequence[int] | None, shape: tuple[int, ...], size: int) -> list[int]:
    """The splits of an alltoall as plain numbers; the engine checks how many and how large."""
    if splits is None:
        rows = shape[0] if shape else 0
        if rows % size != 0:
            raise InvalidArgumentError(
                f"alltoall: {rows} rows cannot be split evenly over {size} ranks; give splits"
            )
        return [rows // size] * size
    try:
        return [index(split) for split in splits]
    except TypeError:
        raise InvalidArgumentError(
            f"splits is {splits!r}: give one whole number of rows for each rank, or None"
        ) from None
