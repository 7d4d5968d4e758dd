"""Clipping by the norm of all gradients, of which this rank may have a part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp

from kolovod.errors import FrontEndArgumentError
from kolovod.jax.with_optax import optax_for

if TYPE_CHECKING:
    import optax


class Among(Protocol):
    """The ranks that have the other parts of a tree."""

    def squares(self, tree: Any) -> jax.Array:
        """``sum_of_squares`` of the whole tree that ``tree`` is this rank's part of."""
        ...


_among: ContextVar[Among | None] = ContextVar("kolovod.among", default=None)


@contextmanager
def among(ranks: Among) -> Iterator[None]:
    """Within this context trees are parts, of which ``ranks`` have the others."""
    token = _among.set(ranks)
    try:
        yield
    finally:
        _among.reset(token)


def clip_by_global_norm(max_norm: Any) -> optax.GradientTransformation:
    """``optax.clip_by_global_norm`` that is right within ``shard_state``, too.

        clipped = optax.chain(kv.clip_by_global_norm(1.0), optax.adamw(1e-3))
        optimizer = kv.DistributedOptimizer(clipped, shard_state=True)

    There it takes the norm over all ranks' parts, by one allreduce of a number; all ranks scale by
    the same factor. Elsewhere it takes the norm of the tree that it is given. Where the norm is not
    less than ``max_norm`` updates become ``update / norm * max_norm``, else they stay.

    ``max_norm``: a number above 0, or a scalar array (``optax.inject_hyperparams`` makes one).

    Squares are added up in float32 at least, whatever the dtype of the gradients; the last bits
    depend on the number of ranks. Raises InvalidArgumentError for another ``max_norm``.
    """
    optax = optax_for("clip_by_global_norm is")
    is_number = isinstance(max_norm, int | float) and not isinstance(max_norm, bool)
    if not (is_number and max_norm > 0) and not (
        isinstance(max_norm, jax.Array) and max_norm.shape == ()
    ):
        raise FrontEndArgumentError(
            f"max_norm is {max_norm!r}: give a number above 0, or a scalar array"
        )

    def init(params: Any) -> Any:
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        ranks = _among.get()
        norm = jnp.sqrt(sum_of_squares(updates) if ranks is None else ranks.squares(updates))
        is_short = norm < max_norm

        def clip(leaf: Any) -> Any:
            clipped = leaf / norm.astype(leaf.dtype) * max_norm
            return jnp.where(is_short, leaf, clipped.astype(leaf.dtype))

        return jax.tree.map(clip, updates), state

    return optax.GradientTransformation(init, update)


def sum_of_squares(tree: Any, is_real: Callable[[Any, Any], Any] | None = None) -> jax.Array:
    """The sum of the squares of all elements, in float32 at least; a scalar.

    ``is_real``: of a leaf, given with its path, which elements count; None: all.
    """
    total = jnp.zeros((), jnp.float32)
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
        real = None if is_real is None else is_real(path, leaf)
        total = total + jnp.sum(jnp.square(wide if real is None else jnp.where(real, wide, 0)))
    return total
