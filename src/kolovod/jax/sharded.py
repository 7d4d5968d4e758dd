"""DistributedOptimizer with ``shard_state=True``: each rank steps with its share of the parameters.

That is a part of each parameter. Those that the optimizer needs as wholes are one rank's each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from itertools import count
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kolovod.core.ops import Sum
from kolovod.core.submission import Request
from kolovod.core.transaction import transaction
from kolovod.core.verbs import ALLREDUCE
from kolovod.core.world import current_tracked
from kolovod.errors import FrontEndArgumentError
from kolovod.gradients.agreement import Agreement
from kolovod.gradients.compression import NOTHING
from kolovod.gradients.owners import Owners
from kolovod.gradients.spec import ReduceSpec
from kolovod.jax.by_element import Outline, check_step, outline
from kolovod.jax.clipping import among, sum_of_squares
from kolovod.jax.parts import Carrier, part_of, part_shape
from kolovod.jax.primitive import Call
from kolovod.jax.pytrees import Pytrees, described
from kolovod.jax.verbs import JaxCollectives
from kolovod.jax.wholes import Local, Step, Wholes
from kolovod.jax.with_optax import optax_for

_LOST = (
    "before a world ends call gather_state(state, params) on all its ranks, and cut_state(whole, "
    "params) in the next one; a rank goes on with a state of its own only"
)


class ShardedState(NamedTuple):
    """The state of ``DistributedOptimizer(shard_state=True)``: a part of it, of this rank's own."""

    rank: jax.Array
    """Whose state it is: the place among the ranks that have parts; int32, ()."""
    inner: Any
    """The state of the optimizer, for this rank's parts of the parameters; what belongs to one that
    a rank has as a whole is without elements here."""
    held: tuple[Any, ...] = ()
    """The state for those that this rank has as wholes: for each dtype a row, as long on all ranks
    as on the one that has most."""


_numbers = count()


class _Ranks:
    """The ranks that have the other parts of a tree, as clipping.Among has them."""

    def __init__(self, verbs: JaxCollectives, spec: ReduceSpec, name: str, tree: _Tree) -> None:
        self._verbs, self._spec, self._name, self._tree = verbs, spec, name, tree
        self._number = next(_numbers)

    def squares(self, tree: Any) -> jax.Array:
        """Return the sum of squares of the whole tree that ``tree`` is this rank's part of."""
        own = sum_of_squares(tree, self._tree.is_real)
        request = Request(ALLREDUCE, f"{self._name}.norm", self._spec.process_set, Sum)
        branches = 1 if self._tree.owners is None else self._tree.size
        call = Call(request, self._verbs, branches=branches, number=self._number)
        result: jax.Array
        (result,) = call.of([own])
        return result


class _Tree:
    """A tree like the parameters, and the parts that ``size`` ranks have of it."""

    owners: Owners | None = None
    """The ranks that have some of them as wholes; None: there are only parts."""

    def __init__(self, tree: Any, rank: Any, size: int) -> None:
        """``rank``: of this one, int32, ()."""
        self.like = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), tree
        )
        self.structure = jax.tree.structure(tree)
        self.shapes = [leaf.shape for leaf in jax.tree.leaves(self.like)]
        self.key = (
            self.structure,
            *((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(self.like)),
        )
        self.rank, self.size = rank, size

    def own(self, tree: Any) -> Any:
        """Return this rank's part of each leaf, and what some rank has as a whole as it is."""
        leaves = [
            leaf if self._is_whole(i) else part_of(leaf, self.rank, self.size)
            for i, leaf in enumerate(jax.tree.leaves(tree))
        ]
        return jax.tree.unflatten(self.structure, leaves)

    def own_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Return the shape and dtype of each leaf as this rank has it."""
        return [
            leaf
            if self._is_whole(i)
            else jax.ShapeDtypeStruct(part_shape(leaf.shape, self.size), leaf.dtype)
            for i, leaf in enumerate(jax.tree.leaves(self.like))
        ]

    def parts(self, leaves: Sequence[Any]) -> list[Any]:
        """Return what ``leaves`` has for those that ranks have parts of."""
        return [leaf for i, leaf in enumerate(leaves) if not self._is_whole(i)]

    def is_real(self, path: Any, leaf: Any) -> Any:
        """Return which elements, at ``path``, this rank counts in a norm; None: all.

        Those are not the zeros behind a part, nor wholes of other ranks.
        """
        number, elements = self._places.get(jax.tree_util.keystr(path), (-1, leaf.size * self.size))
        if self.owners is not None and number in self.owners.rank_of:
            return self.rank == self.owners.rank_of[number]
        if elements == leaf.size * self.size:
            return None
        numbers = jnp.arange(leaf.size).reshape(leaf.shape)
        return numbers + self.rank * leaf.size < elements

    def _is_whole(self, number: int) -> bool:
        return self.owners is not None and number in self.owners.rank_of

    @cached_property
    def _places(self) -> dict[str, tuple[int, int]]:
        """The place of each leaf among all, and its elements, by path."""
        pairs, _ = jax.tree_util.tree_flatten_with_path(self.like)
        return {jax.tree_util.keystr(path): (i, leaf.size) for i, (path, leaf) in enumerate(pairs)}


class Sharded:
    """The transformation, and how its state becomes whole."""

    def __init__(self, inner: Any, spec: ReduceSpec, name: str, verbs: JaxCollectives) -> None:
        """Raise InvalidArgumentError for a ``spec`` that shards cannot have."""
        if spec.compressor is not NOTHING:
            raise FrontEndArgumentError(
                "shard_state scatters gradients as they are: leave compression at "
                "Compression.none, and out of the job's settings (--compression, "
                "KOLOVOD_COMPRESSION)"
            )
        self._optax = optax_for("DistributedOptimizer makes")
        self._inner = self._optax.with_extra_args_support(inner)
        self._spec, self._name, self._verbs = spec, name, verbs
        self._pytrees = Pytrees(verbs)
        self._agreement = Agreement(verbs.world, spec.process_set)
        self._outlines: dict[Any, tuple[Outline, Wholes | None]] = {}
        self._checked: set[Any] = set()
        self._steps: dict[Any, tuple[Step, Any]] = {}

    def init(self, params: Any) -> ShardedState:
        """Return the state to begin with: this rank's parts."""
        rank, size = self._place(params)
        tree = _Tree(params, jnp.int32(rank), size)
        _, wholes = self._outline(tree)
        self._agree(params, tree)
        mine = jnp.asarray(rank, jnp.int32)
        if wholes is None:
            return ShardedState(mine, self._inner.init(tree.own(params)))
        begin = jax.jit(partial(wholes.started, self._inner.init))
        inner, held = begin(tree.rank, tree.own(params))
        return ShardedState(mine, jax.tree.unflatten(wholes.made.structure, inner), held)

    def update(
        self, updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, ShardedState]:
        """Combine the ranks' gradients, step with this rank's parts, and gather the updates."""
        rank, size = self._place(updates)
        _check_extra(extra)
        tree = _Tree(updates, getattr(state, "rank", None), size)
        like = tree if params is None else _Tree(params, tree.rank, size)
        if like.structure != tree.structure or like.shapes != tree.shapes:
            raise FrontEndArgumentError(
                f"updates are {len(tree.shapes)} arrays of shapes {tree.shapes}, params "
                f"{len(like.shapes)} of {like.shapes}: give trees of one structure and shapes"
            )
        made, wholes = self._outline(like)
        tree.owners = like.owners
        self._agree(updates, tree, is_step=True)
        self._check_state(state, made, wholes, rank, size)
        key = (tree.key, None if params is None else like.key, tuple(extra))
        if key not in self._checked:
            given = None if params is None else like.like
            check_step(self._inner, tree.like, given, size, extra, made)
            self._checked.add(key)
        if size == 1:
            stepped, inner = self._inner.update(updates, state.inner, params, **extra)
            return stepped, ShardedState(state.rank, inner)
        carrier = Carrier(self._verbs, self._spec, size)
        leaves = jax.tree.leaves(updates)
        own = None if params is None else like.own(params)
        if wholes is not None:
            return self._with_wholes(carrier, wholes, tree, state, (leaves, own, extra))
        parts, _ = carrier.scattered(self._name, leaves)
        with among(_Ranks(self._verbs, self._spec, self._name, like)):
            stepped, inner = self._inner.update(
                jax.tree.unflatten(tree.structure, parts), state.inner, own, **extra
            )
        stepped = tree.structure.flatten_up_to(stepped)
        arrays, _ = carrier.gathered(f"{self._name}.updates", stepped, tree.shapes)
        return jax.tree.unflatten(tree.structure, arrays), ShardedState(state.rank, inner)

    def _with_wholes(
        self,
        carrier: Carrier,
        wholes: Wholes,
        tree: _Tree,
        state: ShardedState,
        given: tuple[list[Any], Any, dict[str, Any]],
    ) -> tuple[Any, ShardedState]:
        """``update`` where ranks have some parameters as wholes.

        ``given``: the leaves of the gradients, this rank's parameters, and what is passed on.
        """
        leaves, own, extra = given
        by_place = dict(enumerate(leaves))
        travelling = [rows.rows(by_place) for rows in wholes.rows(leaves)]
        parts, rows = carrier.scattered(self._name, tree.parts(leaves), travelling)
        arrays = {name: value for name, value in extra.items() if not callable(value)}
        local = Local(parts, rows, jax.tree.leaves(state.inner), state.held)
        step, run = self._step(wholes, tree, (state.rank, local, own, arrays), extra)
        after = run(state.rank, local, own, arrays)
        kept = jax.tree.unflatten(wholes.made.structure, after.state)
        stepped, gathered = carrier.gathered(
            f"{self._name}.updates", after.updates, tree.parts(tree.shapes), after.rows
        )
        found: dict[int, Any] = {}
        for layout, received in zip(step.sent, gathered, strict=True):
            found |= layout.arrays(received)
        cut = iter(stepped)
        updates = [found[i] if i in found else next(cut) for i in range(len(leaves))]
        made = ShardedState(state.rank, kept, tuple(after.held))
        return jax.tree.unflatten(tree.structure, updates), made

    def _step(
        self, wholes: Wholes, tree: _Tree, inputs: Any, extra: dict[str, Any]
    ) -> tuple[Step, Any]:
        """Return the step, and what runs it: a program of its own where it is in none."""

        def ranks(rank: Any) -> _Ranks:
            like = _Tree(tree.like, rank, tree.size)
            like.owners = tree.owners
            return _Ranks(self._verbs, self._spec, self._name, like)

        _, _, own, arrays = inputs
        rest = {name: value for name, value in extra.items() if callable(value)}
        leaves, structure = jax.tree.flatten((own, arrays))
        key = (
            tree.key,
            tree.size,
            structure,
            *((jnp.shape(x), jnp.result_type(x)) for x in leaves),
        )
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(inputs))
        if not is_traced and not rest and key in self._steps:
            return self._steps[key]
        like = jax.tree.unflatten(tree.structure, tree.own_shapes())
        step = Step(wholes, partial(self._inner.update, **rest), ranks, like, own, arrays)
        if is_traced:
            return step, step
        self._steps[key] = step, jax.jit(step)
        return self._steps[key]

    def gather_state(self, state: Any, params: Any) -> tuple[Any, Any]:
        """Return the state as it is without shards, the same on all ranks."""
        rank, size = self._place(params)
        tree = _Tree(params, None, size)
        made, wholes = self._outline(tree)
        self._agree(params, tree)
        self._check_state(state, made, wholes, rank, size)
        leaves = jax.tree.leaves(state.inner)
        if size > 1:
            cut = [i for i in range(len(leaves)) if made.is_by_element(i)]
            once = [
                i for i in range(len(leaves)) if not made.is_by_element(i) and i not in made.held
            ]
            name, process_set = f"{self._name}.state", self._spec.process_set
            arrays, gathered = Carrier(self._verbs, self._spec, size).gathered(
                name, [leaves[i] for i in cut], [made.whole[i].shape for i in cut], state.held
            )
            # Those of a scalar for each parameter are the first rank's; others have all ranks.
            root = 0 if process_set is None else process_set.ranks[0]
            kept = self._pytrees.broadcast_pytree(
                [leaves[i] for i in once], root, f"{name}.once", process_set
            )
            found = dict(zip([*cut, *once], [*arrays, *kept], strict=True))
            for rows, received in zip(wholes.state if wholes else [], gathered, strict=True):
                found |= rows.arrays(received)
            leaves = [found[i] for i in range(len(leaves))]
        return self._optax.EmptyState(), jax.tree.unflatten(made.structure, leaves)

    def cut_state(self, whole: Any, params: Any) -> ShardedState:
        """Return this rank's state, cut from a whole one."""
        rank, size = self._place(params)
        tree = _Tree(params, jnp.int32(rank), size)
        made, wholes = self._outline(tree)
        self._agree(params, tree)
        wanted = jax.tree.unflatten(made.structure, made.whole)
        leaves = jax.tree.leaves(whole)
        fits = jax.tree.structure(whole) == jax.tree.structure((self._optax.EmptyState(), wanted))
        if not fits or [jnp.shape(leaf) for leaf in leaves] != [each.shape for each in made.whole]:
            raise FrontEndArgumentError(
                f"whole has {len(leaves)} arrays in {jax.tree.structure(whole)}: give what "
                "gather_state returned, or a state of the same DistributedOptimizer without shards,"
                " for the same parameters"
            )
        own = [
            part_of(leaf, tree.rank, size) if made.is_by_element(i) else leaf
            for i, leaf in enumerate(leaves)
        ]
        held: tuple[Any, ...] = ()
        if wholes is not None:
            held = wholes.rows_of_state(rank, dict(enumerate(leaves)))
            own = wholes.kept(dict(enumerate(own)))
        return ShardedState(tree.rank, jax.tree.unflatten(made.structure, own), held)

    def _place(self, tree: Any) -> tuple[int, int]:
        """Rank and size of those that have parts: this one alone outside of a process set."""
        if transaction().is_elastic:
            raise FrontEndArgumentError(
                "shard_state does not work in elastic jobs: with a rank its part of the state "
                "would be lost; start the job without --elastic, or use no shards"
            )
        for key, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            dtype = jnp.result_type(leaf)
            if not jnp.issubdtype(dtype, jnp.floating):
                raise FrontEndArgumentError(
                    f"the parameter{jax.tree_util.keystr(key)} is of {dtype.name}: shard_state is "
                    "for floats; leave it out, as optax.masked and equinox.partition do"
                )
        current_tracked()  # a program is for this one
        if not self._spec.is_member:
            return 0, 1
        members = self._verbs.membership(self._spec.process_set)
        return members.rank, members.size

    def _agree(self, given: Any, tree: _Tree, *, is_step: bool = False) -> None:
        """Compare the tree ``given`` with the other ranks', once in each world."""
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(given))
        if tree.size > 1 and (is_step or not is_traced) and not self._agreement.is_current():
            kinds = [""] * len(tree.shapes)
            for i in {} if tree.owners is None else tree.owners.rank_of:
                kinds[i] = ", which one rank steps with"
            shapes = [
                (key, f"{shape}{kind}")
                for (key, (shape, _)), kind in zip(described(_arrays(given)), kinds, strict=True)
            ]
            self._agreement.reach([("shard_state", True), *shapes])

    def _outline(self, tree: _Tree) -> tuple[Outline, Wholes | None]:
        """Return the shares of the state for parameters like ``tree``, which gets its owners."""
        key = (tree.key, tree.size)
        if key not in self._outlines:
            made = outline(self._inner, tree.like, tree.size)
            wholes = Wholes(made, tree.like, tree.size) if made.wholes else None
            self._outlines[key] = made, wholes
            if not made.untried:
                self._checked.add((tree.key, tree.key, ()))
        made, wholes = self._outlines[key]
        tree.owners = None if wholes is None else wholes.owners
        return made, wholes

    def _check_state(
        self, state: Any, made: Outline, wholes: Wholes | None, rank: int, size: int
    ) -> None:
        if not isinstance(state, ShardedState):
            raise FrontEndArgumentError(
                f"state is a {type(state).__name__}: give what init or cut_state returned; "
                "cut_state(state, params) makes it of a state without shards"
            )
        of = state.rank
        if not isinstance(of, jax.core.Tracer) and int(of) != rank:
            raise FrontEndArgumentError(
                f"the state is rank {int(of)}'s, this is rank {rank}: {_LOST}"
            )
        shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves((state.inner, state.held))]
        wanted = [each.shape for each in made.own]
        if wholes is not None:
            wanted = [*wholes.shapes(), *((rows.length,) for rows in wholes.state)]
        if shapes != wanted:
            raise FrontEndArgumentError(
                f"the state has arrays of shapes {shapes}, but for these parameters a rank of "
                f"{size} has {wanted}: {_LOST}"
            )


def _arrays(tree: Any) -> Any:
    return jax.tree.map(jnp.asarray, tree)


def _check_extra(extra: dict[str, Any]) -> None:
    for name, value in extra.items():
        for leaf in jax.tree.leaves(value):
            if getattr(leaf, "ndim", 0):
                raise FrontEndArgumentError(
                    f"update was given {name} with an array of shape {leaf.shape}: shard_state "
                    "passes on what is the same for all elements; give scalars"
                )
