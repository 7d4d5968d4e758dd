"""Descriptions of tensors for the engine, and functions that make its operations' results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import index
from typing import Any, NamedTuple

from kolovod import _native
from kolovod.core.frontend import Frontend, Holder, TensorView
from kolovod.core.ops import Adasum
from kolovod.core.submission import EngineTensor, Finish, Group, Request, WorldLike
from kolovod.core.verbs import REDUCESCATTER
from kolovod.errors import InvalidArgumentError

__all__ = ["Buffers", "Prepared", "all_of", "both", "held", "rows_for_ranks"]

Shape = Callable[[list[Any], list[list[int]]], Any]
"""Makes what a verb returns of its results and, by result, of the rows that each rank gave."""


Make = Callable[[_native.Engine, int], tuple[Any, list[int]]]
"""Makes of a completed operation one result, and the rows that each rank gave for it."""

View = Callable[[Any], TensorView]
"""``Frontend.view``, or ``Frontend.host_view``."""


def all_of(results: list[Any], rows: list[list[int]]) -> Any:
    """The results of a grouped verb."""
    return results


def both(results: list[Any], rows: list[list[int]]) -> Any:
    """The results, and by result the rows of each rank; ``[]`` for verbs that keep shapes."""
    return results, rows


class Prepared(NamedTuple):
    """The arguments of ``Submitter.start`` that follow the request, and ``used``."""

    entries: list[EngineTensor]
    buffers: object
    result: Any
    """The verb's result if there is no ``finish``."""
    finish: Finish[Any] | None
    used: Sequence[Any] = ()
    """For each entry, the tensor whose own memory is read or gets the result; None: a copy is
    read."""


class Buffers:
    """Views of the tensors of one framework, and results made like them."""

    def __init__(
        self, frontend: Frontend[Any], membership: Callable[[Group | None], WorldLike]
    ) -> None:
        """``frontend``: of that framework. ``membership``: of this rank in a process set."""
        self._membership = membership
        self._frontend = frontend
        self._view = frontend.view
        self._empty_like = frontend.empty_like
        self._from_bytes = frontend.from_bytes

    def new(self, request: Request, tensors: Sequence[Any], shape: Shape) -> Prepared:
        """Prepare an operation whose results are put in new memory."""
        if request.verb.makes_outputs:
            return self._all_made_by_engine(request, tensors, shape)
        plain = self._plain(tensors, makes=True)
        if plain is not None:
            entries, results = plain
            made = shape(results, [])
            return Prepared(entries, (tuple(tensors), results), made, None, tensors)
        entries, results, owners = [], [], []
        view = self.view_for(request)
        for tensor in tensors:
            entry, result, owner = self._fresh(tensor, view)
            entries.append(entry)
            results.append(result)
            owners.append(owner)
        buffers = (tuple(tensors), results)
        finish: Finish[Any] | None = None
        if any(owner is not None for owner in owners):
            placed = self._frontend.placed

            def finish(engine: _native.Engine, number: int) -> Any:
                made = [
                    result if tensor is None else placed(result, tensor)
                    for result, tensor in zip(results, owners, strict=True)
                ]
                return shape(made, [])

        used = [t if owner is None else None for t, owner in zip(tensors, owners, strict=True)]
        return Prepared(entries, buffers, shape(results, []), finish, used)

    def in_place(self, request: Request, tensors: Sequence[Any], shape: Shape) -> Prepared:
        """Prepare an operation whose results replace the values of ``tensors``."""
        tensors = list(tensors)
        plain = self._plain(tensors, makes=False)
        if plain is not None:
            return Prepared(plain[0], tensors, shape(tensors, []), None, tensors)
        view = self.view_for(request)
        owned = [self.own(tensor, view) for tensor in tensors]
        entries, owners = [pair[0] for pair in owned], [pair[1] for pair in owned]
        result = shape(tensors, [])
        finish = self.copying_back(owners, tensors, result)
        return Prepared(entries, owners, result, finish, tensors)

    def _plain(
        self, tensors: Sequence[Any], *, makes: bool
    ) -> tuple[list[EngineTensor], list[Any]] | None:
        """Return entries of all tensors, and new results if it ``makes`` them; None: view each."""
        framework = self._frontend.framework
        return _native.plain_views(framework, list(tensors), makes) if framework else None

    def view_for(self, request: Request) -> View:
        """Return the function that views tensors: in host memory if the engine itself computes."""
        return self._frontend.host_view if request.op == Adasum else self._view

    def own(self, tensor: Any, view: View) -> tuple[EngineTensor, Any]:
        """Return the entry of ``tensor`` for work in place, and the tensor or a dense stand-in."""
        self._frontend.claim(tensor)
        dtype, shape, address, owner = view(tensor)
        return (dtype, shape, address, address), owner

    def _fresh(self, tensor: Any, view: View) -> tuple[EngineTensor, Any, Any]:
        """Return the engine's entry for ``tensor``, and the new tensor that receives the result.

        The third value is ``tensor`` if the result is received in a private copy in other memory,
        such as the host's, else None.
        """
        dtype, shape, source, owner = view(tensor)
        if owner is tensor:
            output, target = self._empty_like(tensor)
            return (dtype, shape, source, target), output, None
        return (dtype, shape, source, source), owner, tensor

    def copying_back(
        self, owners: Sequence[Any], tensors: Sequence[Any], result: Any
    ) -> Finish[Any] | None:
        """Return a function that copies stand-ins back and returns ``result``; None without any."""
        pairs = [(owner, t) for owner, t in zip(owners, tensors, strict=True) if owner is not t]
        if not pairs:
            return None
        copy_back = self._frontend.copy_back

        def finish(engine: _native.Engine, number: int) -> Any:
            for owner, tensor in pairs:
                copy_back(owner, tensor)
            return result

        return finish

    def made_by_engine(
        self, tensor: Any, request: Request, i: int = 0
    ) -> tuple[EngineTensor, TensorView, Make]:
        """Return entry, view and maker of the ``i``-th result, which the engine makes."""
        view = dtype, shape, address, _ = self._view(tensor)
        scatters = request.verb is REDUCESCATTER
        scatters_in = self._membership(request.process_set) if scatters else None
        return (dtype, shape, address, 0), view, partial(self._make, tensor, view, scatters_in, i)

    def _make(
        self,
        tensor: Any,
        view: TensorView,
        scatters_in: WorldLike | None,
        i: int,
        engine: _native.Engine,
        number: int,
    ) -> tuple[Any, list[int]]:
        dtype, shape, _, owner = view
        if scatters_in is None:
            rows = engine.rows(number, i)
        else:
            rows = [_part(shape[0], scatters_in)]
        data = engine.output(number, i)
        made = self._from_bytes(data, dtype, (sum(rows), *shape[1:]), tensor)
        return (made if owner is tensor else self._frontend.placed(made, tensor)), rows

    def _all_made_by_engine(
        self, request: Request, tensors: Sequence[Any], shape: Shape
    ) -> Prepared:
        parts = [self.made_by_engine(tensor, request, i) for i, tensor in enumerate(tensors)]
        entries, views, makes = [list(column) for column in zip(*parts, strict=True)] or [[]] * 3

        def finish(engine: _native.Engine, number: int) -> Any:
            made = [make(engine, number) for make in makes]
            return shape([result for result, _ in made], [rows for _, rows in made])

        used = [t if view[3] is t else None for t, view in zip(tensors, views, strict=True)]
        return Prepared(entries, views, None, finish, used)


def held(prepared: Prepared, request: Request, holder: Holder[Any] | None) -> Prepared:
    """Return ``prepared`` for an operation that goes on while tensors may get other memory.

    ``holder``: the front end's; None: its tensors keep their memory. The memory that the tensors
    have now lives on, and ``finish`` raises InvalidArgumentError if a tensor that gets a result has
    other memory by then.
    """
    if holder is None:
        return prepared
    entries, buffers, result, finish, used = prepared
    written = [
        (tensor, holder.place_of(tensor))
        for tensor, (_, _, source, target) in zip(used, entries, strict=True)
        if tensor is not None and source == target
    ]

    def finish_here(engine: _native.Engine, number: int) -> Any:
        name = f" {request.name!r}" if request.name else ""
        check_places(written, holder, f"{request.verb.name}{name}")
        return result if finish is None else finish(engine, number)

    holds = [holder.hold(tensor) for tensor in used if tensor is not None]
    return Prepared(entries, (buffers, holds), result, finish_here if written else finish, used)


def check_places(written: Iterable[tuple[Any, int]], holder: Holder[Any], what: str) -> None:
    """Raise InvalidArgumentError where a tensor has other memory than that at the place it had.

    ``written``: with their places, by ``Holder.place_of``. ``what``: the operation.
    """
    for tensor, place in written:
        if holder.has_moved(tensor, place):
            raise InvalidArgumentError(
                f"the tensor of shape {tuple(tensor.shape)} was given other memory while the "
                f"{what} was on its way, so that the result is not in it: leave it alone until "
                "wait() has returned"
            )


def _part(rows: int, world: WorldLike) -> int:
    """Return how many of the rows a reducescatter leaves on this rank."""
    return rows // world.size + (world.rank < rows % world.size)


def rows_for_ranks(splits: Any, shape: tuple[int, ...], size: int) -> list[int]:
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
