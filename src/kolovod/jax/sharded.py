"""DistributedOptimizer with ``shard_state=True``: each rank steps with a part of each parameter."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kolovod.core.ops import Sum
from kolovod.core.transaction import transaction
from kolovod.core.world import current_tracked
from kolovod.errors import FrontEndArgumentError
from kolovod.gradients.agreement import Agreement
from kolovod.gradients.compression import NOTHING
from kolovod.gradients.spec import ReduceSpec
from kolovod.jax.by_element import Outline, check_by_element, outline
from kolovod.jax.clipping import among, sum_of_squares
from kolovod.jax.parts import Carrier, part_of
from kolovod.jax.pytrees import Pytrees, described
from kolovod.jax.verbs import JaxCollectives
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
    """The state of the optimizer, for this rank's parts of the parameters."""


class _Ranks:
    """The ranks that have the other parts of a tree, as clipping.Among has them."""

    def __init__(self, verbs: JaxCollectives, spec: ReduceSpec, name: str, tree: _Tree) -> None:
        self._verbs, self._spec, self._name, self._tree = verbs, spec, name, tree

    def squares(self, tree: Any) -> jax.Array:
        """Return the sum of squares of the whole tree that ``tree`` is this rank's part of."""
        own = sum_of_squares(tree, self._tree.is_real)
        name = f"{self._name}.norm"
        result: jax.Array = self._verbs.allreduce(
            own, name, Sum, process_set=self._spec.process_set
        )
        return result


class _Tree:
    """A tree like the parameters, and the parts that ``size`` ranks have of it."""

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
        self._rank, self._size = rank, size

    def own(self, tree: Any) -> Any:
        """Return this rank's part of each leaf."""
        return jax.tree.map(lambda leaf: part_of(leaf, self._rank, self._size), tree)

    def is_real(self, path: Any, leaf: Any) -> Any:
        """Return which elements of a part, at ``path``, are none of the zeros behind; None: all."""
        elements = self._elements.get(jax.tree_util.keystr(path))
        if elements is None or elements == leaf.size * self._size:
            return None
        numbers = jnp.arange(leaf.size).reshape(leaf.shape)
        return numbers + self._rank * leaf.size < elements

    @cached_property
    def _elements(self) -> dict[str, int]:
        pairs, _ = jax.tree_util.tree_flatten_with_path(self.like)
        return {jax.tree_util.keystr(path): leaf.size for path, leaf in pairs}


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
        self._outlines: dict[Any, Outline] = {}
        self._checked: set[Any] = set()

    def init(self, params: Any) -> ShardedState:
        """Return the state to begin with: this rank's parts."""
        rank, size = self._begun(params)
        tree = _Tree(params, jnp.int32(rank), size)
        self._outline(tree, size)
        return ShardedState(jnp.asarray(rank, jnp.int32), self._inner.init(tree.own(params)))

    def update(
        self, updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, ShardedState]:
        """Combine the ranks' gradients, step with this rank's parts, and gather the updates."""
        rank, size = self._begun(updates, is_step=True)
        _check_extra(extra)
        tree = _Tree(updates, getattr(state, "rank", None), size)
        like = tree if params is None else _Tree(params, tree._rank, size)
        if like.structure != tree.structure or like.shapes != tree.shapes:
            raise FrontEndArgumentError(
                f"updates are {len(tree.shapes)} arrays of shapes {tree.shapes}, params "
                f"{len(like.shapes)} of {like.shapes}: give trees of one structure and shapes"
            )
        self._check_state(state, self._outline(like, size), rank, size)
        key = (tree.key, None if params is None else like.key, tuple(extra))
        if key not in self._checked:
            given = None if params is None else like.like
            check_by_element(self._inner, tree.like, given, size, extra)
            self._checked.add(key)
        if size == 1:
            stepped, inner = self._inner.update(updates, state.inner, params, **extra)
            return stepped, ShardedState(state.rank, inner)
        carrier = Carrier(self._verbs, self._spec, size)
        parts = carrier.scattered(self._name, jax.tree.leaves(updates))
        with among(_Ranks(self._verbs, self._spec, self._name, like)):
            stepped, inner = self._inner.update(
                jax.tree.unflatten(tree.structure, parts),
                state.inner,
                None if params is None else like.own(params),
                **extra,
            )
        stepped = tree.structure.flatten_up_to(stepped)
        whole = carrier.gathered(f"{self._name}.updates", stepped, tree.shapes)
        return jax.tree.unflatten(tree.structure, whole), ShardedState(state.rank, inner)

    def gather_state(self, state: Any, params: Any) -> tuple[Any, Any]:
        """Return the state as it is without shards, the same on all ranks."""
        rank, size = self._begun(params)
        made = self._outline(_Tree(params, None, size), size)
        self._check_state(state, made, rank, size)
        leaves = jax.tree.leaves(state.inner)
        if size > 1:
            cut = [i for i in range(len(leaves)) if made.is_by_element(i)]
            once = [i for i in range(len(leaves)) if not made.is_by_element(i)]
            name, process_set = f"{self._name}.state", self._spec.process_set
            wholes = Carrier(self._verbs, self._spec, size).gathered(
                name, [leaves[i] for i in cut], [made.whole[i].shape for i in cut]
            )
            # Those of a scalar for each parameter are the first rank's; others have all ranks.
            root = 0 if process_set is None else process_set.ranks[0]
            kept = self._pytrees.broadcast_pytree(
                [leaves[i] for i in once], root, f"{name}.once", process_set
            )
            for i, value in zip([*cut, *once], [*wholes, *kept], strict=True):
                leaves[i] = value
        return self._optax.EmptyState(), jax.tree.unflatten(made.structure, leaves)

    def cut_state(self, whole: Any, params: Any) -> ShardedState:
        """Return this rank's state, cut from a whole one."""
        rank, size = self._begun(params)
        tree = _Tree(params, jnp.int32(rank), size)
        made = self._outline(tree, size)
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
            part_of(leaf, tree._rank, size) if made.is_by_element(i) else leaf
            for i, leaf in enumerate(leaves)
        ]
        return ShardedState(tree._rank, jax.tree.unflatten(made.structure, own))

    def _begun(self, tree: Any, *, is_step: bool = False) -> tuple[int, int]:
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
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))
        if members.size > 1 and (is_step or not is_traced) and not self._agreement.is_current():
            shapes = [(key, shape) for key, (shape, _) in described(_arrays(tree))]
            self._agreement.reach([("shard_state", True), *shapes])
        return members.rank, members.size

    def _outline(self, tree: _Tree, size: int) -> Outline:
        key = (tree.key, size)
        if key not in self._outlines:
            self._outlines[key] = outline(self._inner, tree.like, size)
        return self._outlines[key]

    def _check_state(self, state: Any, made: Outline, rank: int, size: int) -> None:
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
        shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(state.inner)]
        if shapes != [each.shape for each in made.own]:
            raise FrontEndArgumentError(
                f"the state has arrays of shapes {shapes}, but for these parameters a rank of "
                f"{size} has {[each.shape for each in made.own]}: {_LOST}"
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
