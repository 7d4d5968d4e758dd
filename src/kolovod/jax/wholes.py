"""Arrays that one rank each has as wholes, and what a rank makes of its own within a program.

All ranks have the same program, of the same shapes, so that XLA comes to their operations in the
same order (see ``parts``). So what a rank has of such arrays lies in a row, which is as long on all
ranks as on the one that has most, with zeros at the end; and a conditional has a branch for each
rank, in which the arrays of that rank are cut from its row, computed with, and put into a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from kolovod.gradients.owners import Owners
from kolovod.gradients.plan import BUCKET_BYTES
from kolovod.jax.by_element import Outline
from kolovod.jax.clipping import Among, among
from kolovod.jax.following import communicates, programs
from kolovod.jax.parts import Shape
from kolovod.jax.primitive import primitive

Arrays = Mapping[int, Any]
"""Arrays, or their shapes and dtypes, by their place among the leaves of a tree."""


class Rows:
    """Arrays of one dtype, each of which one rank has, in a row for each rank."""

    def __init__(self, arrays: Arrays, rank_of: Mapping[int, int], size: int) -> None:
        """``rank_of``: the rank of each array, of ``size`` ones."""
        self._shapes: dict[int, Shape] = {i: array.shape for i, array in arrays.items()}
        self._places: list[dict[int, tuple[int, int]]] = [{} for _ in range(size)]
        ends = [0] * size
        for i, array in arrays.items():
            rank = rank_of[i]
            begin, ends[rank] = ends[rank], ends[rank] + array.size
            self._places[rank][i] = begin, ends[rank]
        self.length = max(ends)
        """The elements of a row."""
        self.dtype = next(iter(arrays.values())).dtype

    def row(self, rank: int, arrays: Arrays) -> jax.Array:
        """Return the row of a rank, of which ``arrays`` has all arrays; in shape (length,)."""
        own = self._places[rank]
        flats = [jnp.reshape(arrays[i], -1) for i in own]
        rest = self.length - sum(end - begin for begin, end in own.values())
        if rest or not flats:
            flats.append(jnp.zeros((rest,), self.dtype))
        return flats[0] if len(flats) == 1 else jnp.concatenate(flats)

    def rows(self, arrays: Arrays) -> jax.Array:
        """Return the rows of all ranks, in shape (ranks, length)."""
        return jnp.stack([self.row(rank, arrays) for rank in range(len(self._places))])

    def of(self, rank: int, row: Any) -> dict[int, jax.Array]:
        """Return the arrays of a rank, whose ``row`` this is; it has ``length`` elements."""
        flat = jnp.reshape(row, -1)
        return {
            i: flat[begin:end].reshape(self._shapes[i])
            for i, (begin, end) in self._places[rank].items()
        }

    def arrays(self, rows: Any) -> dict[int, jax.Array]:
        """Return the arrays of all ranks, whose rows these are, in shape (ranks, length)."""
        found: dict[int, jax.Array] = {}
        for rank in range(len(self._places)):
            found |= self.of(rank, rows[rank])
        return found


class Local(NamedTuple):
    """A rank's inputs or results of a step: of cut arrays its parts, of wholes a row."""

    updates: list[Any]
    """Parts of the gradients, or of the updates, but of wholes."""
    rows: list[Any]
    """Rows of the wholes among them."""
    state: list[Any]
    """The leaves of the state; of wholes nothing: arrays without elements."""
    held: tuple[Any, ...]
    """The state of wholes: a row for each dtype."""


class Wholes:
    """The parameters that one of ``size`` ranks each has as wholes, and their state."""

    def __init__(self, made: Outline, params: Any, size: int) -> None:
        """``params``: shapes and dtypes."""
        self.made, self.size = made, size
        leaves = jax.tree.leaves(params)
        self.owners = Owners(size, {i: leaves[i].size for i in sorted(made.wholes)})
        """They say which rank has which."""
        rank_of = {i: self.owners.rank_of[whole] for i, whole in made.held.items()}
        self._held_by = rank_of
        by_dtype: dict[Any, dict[int, Any]] = {}
        for i in sorted(rank_of):
            by_dtype.setdefault(made.own[i].dtype, {})[i] = made.own[i]
        self.state = [Rows(arrays, rank_of, size) for arrays in by_dtype.values()]
        """The way in which the state lies in rows."""

    def rows(self, leaves: Sequence[Any]) -> list[Rows]:
        """Return the rows in which arrays like the parameters travel; ``leaves``: one for each."""
        by_dtype: dict[Any, list[int]] = {}
        for i in reversed(range(len(leaves))):  # as backward makes them
            if i in self.made.wholes:
                by_dtype.setdefault(leaves[i].dtype, []).append(i)
        return [
            Rows({i: leaves[i] for i in sorted(group)}, self.owners.rank_of, self.size)
            for dtype, order in by_dtype.items()
            for group in self.owners.together(order, BUCKET_BYTES // dtype.itemsize)
        ]

    def started(
        self, init: Callable[[Any], Any], rank: Any, params: Any
    ) -> tuple[list[Any], tuple[Any, ...]]:
        """Return the state of ``rank`` to begin with, as ``Local`` has it.

        ``params``: parts and wholes. ``rank``: int32, (): a value, no constant of the program.
        """
        given = jax.tree.leaves(params)
        program = jax.make_jaxpr(lambda tree: jax.tree.leaves(init(tree)))(params)
        places = range(len(self.made.own))
        shared = _evaluated(program, given, [i for i in places if i not in self._held_by])

        def of(own: int) -> tuple[Any, ...]:
            wanted = [i for i in self._held_by if self.is_kept(i, own)]
            return self.rows_of_state(own, _evaluated(program, given, wanted, is_first=False))

        return self.kept(shared), _chosen(rank, self.size, of)

    def is_stepped(self, place: int, rank: int) -> bool:
        """Return whether a rank steps with a parameter, or a part of it."""
        return self.owners.rank_of.get(place, rank) == rank

    def is_kept(self, place: int, rank: int) -> bool:
        """Return whether a rank has a leaf of the state, or a part of it."""
        return self._held_by.get(place, rank) == rank

    def kept(self, state: Arrays) -> list[Any]:
        """Return the leaves of ``state`` but those that lie in rows."""
        return [
            jnp.zeros((0,), each.dtype) if i in self._held_by else state[i]
            for i, each in enumerate(self.made.own)
        ]

    def shapes(self) -> list[Shape]:
        """Return the shapes of the leaves of a rank's state."""
        return [(0,) if i in self._held_by else each.shape for i, each in enumerate(self.made.own)]

    def rows_of_state(self, rank: int, state: Arrays) -> tuple[Any, ...]:
        return tuple(rows.row(rank, state) for rows in self.state)


class Step:
    """A step of a transformation, of which each rank does what is its own."""

    def __init__(
        self,
        wholes: Wholes,
        update: Callable[..., Any],
        ranks: Callable[[Any], Among],
        like: Any,
        params: Any,
        extra: dict[str, Any],
    ) -> None:
        """``ranks``: of a rank, those for ``clipping.among``, of whom a step asks at most once.

        ``like``, ``params`` (or None): as a rank has gradients and parameters. ``extra``: what
        ``update`` gets besides.
        """
        gradients, structure = jax.tree.flatten(like)

        def run(rank: Any, *given: Any) -> tuple[list[Any], list[Any]]:
            gradients, state, params, extra = given
            with among(ranks(rank)):
                stepped, after = update(gradients, state, params, **extra)
            return structure.flatten_up_to(stepped), jax.tree.leaves(after)

        state = jax.tree.unflatten(wholes.made.structure, wholes.made.own)
        rank = jax.ShapeDtypeStruct((), jnp.int32)
        self._program = jax.make_jaxpr(run)(rank, like, state, params, extra)
        self._wholes, self._gradients = wholes, gradients
        self._received = wholes.rows(gradients)
        self.sent = wholes.rows(self._program.out_avals[: len(gradients)])
        """The way in which updates lie in rows."""

    def __call__(self, rank: Any, given: Local, params: Any, extra: dict[str, Any]) -> Local:
        """Return what becomes of ``given``, on this ``rank``, a value as for ``started``."""
        wholes, held_by = self._wholes, self._wholes.made.held
        count = len(self._gradients)
        cut = [i for i in range(count) if i not in wholes.made.wholes]
        of_all = [*cut, *(count + i for i in range(len(wholes.made.own)) if i not in held_by)]
        rest = jax.tree.leaves((params, extra))
        # What all ranks compute is in each branch only if that needs what ranks have as wholes.
        is_apart = not communicates(self._program.jaxpr)
        shared: dict[int, Any] = {}
        if is_apart:
            shared = _evaluated(self._program, [rank, *self._inputs(given, None), *rest], of_all)

        def of(own: int) -> tuple[list[Any], list[Any], tuple[Any, ...]]:
            wanted = [i for i in wholes.made.wholes if wholes.is_stepped(i, own)]
            wanted += [count + i for i in held_by if wholes.is_kept(i, own)]
            wanted += [] if is_apart else of_all
            inputs = [rank, *self._inputs(given, own), *rest]
            results = _evaluated(self._program, inputs, wanted, is_first=not is_apart)
            state = {i - count: value for i, value in results.items() if i >= count}
            rows = [each.row(own, results) for each in self.sent]
            both = [] if is_apart else [results[i] for i in of_all]
            return both, rows, wholes.rows_of_state(own, state)

        both, rows, held = _chosen(rank, wholes.size, of)
        shared |= dict(zip(of_all, both, strict=not is_apart))
        state = wholes.kept({i - count: value for i, value in shared.items() if i >= count})
        return Local([shared[i] for i in cut], rows, state, held)

    def _inputs(self, given: Local, rank: int | None) -> list[Any]:
        """The gradients and the state that a rank has, with zeros for others'; None: of no one."""
        made = self._wholes.made
        cut = [i for i in range(len(self._gradients)) if i not in made.wholes]
        known = dict(zip(cut, given.updates, strict=True))
        states = {i: leaf for i, leaf in enumerate(given.state) if i not in made.held}
        if rank is not None:
            for rows, row in zip(self._received, given.rows, strict=True):
                known |= rows.of(rank, row)
            for rows, row in zip(self._wholes.state, given.held, strict=True):
                states |= rows.of(rank, row)
        return [
            *(known[i] if i in known else _nothing(like) for i, like in enumerate(self._gradients)),
            *(states[i] if i in states else _nothing(like) for i, like in enumerate(made.own)),
        ]


def _chosen(rank: Any, size: int, of: Callable[[int], Any]) -> Any:
    """``of(rank)``, by a conditional, since the program does not know the rank."""
    return jax.lax.switch(rank, [partial(of, own) for own in range(size)])


def _nothing(like: Any) -> jax.Array:
    return jnp.zeros(like.shape, like.dtype)


def _evaluated(
    program: ClosedJaxpr, given: Sequence[Any], wanted: Sequence[int], *, is_first: bool = True
) -> dict[int, Any]:
    """The outputs ``wanted`` of a program, by place, and nothing that they do not need.

    What communicates is always done: the other ranks wait for it. ``is_first``: so is what has
    other effects.
    """
    jaxpr = program.jaxpr
    outputs = [jaxpr.outvars[i] for i in wanted]
    needed = {var for var in outputs if not isinstance(var, Literal)}
    equations = []
    for equation in reversed(jaxpr.eqns):
        is_due = (is_first and equation.effects) or _sends(equation)
        if is_due or not needed.isdisjoint(equation.outvars):
            equations.append(equation)
            needed |= {var for var in equation.invars if not isinstance(var, Literal)}
    smaller = jaxpr.replace(eqns=equations[::-1], outvars=outputs)
    results = jaxpr_as_fun(ClosedJaxpr(smaller, program.consts))(*given)
    return dict(zip(wanted, results, strict=True))


def _sends(equation: Any) -> bool:
    return equation.primitive is primitive or any(map(communicates, programs(equation)))
