"""Gradients of Keras on JAX: custom calls of a program, or arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from kolovod.core.codecs import Codec
from kolovod.core.submission import Group
from kolovod.core.world import current_tracked
from kolovod.gradients import exchange
from kolovod.gradients.alike import ELEMENTS, place_of_bad
from kolovod.gradients.compression.compressor import Verb
from kolovod.gradients.spec import ReduceSpec
from kolovod.jax import repeated
from kolovod.jax.verbs import collectives
from kolovod.private_apis.keras import steps_done

T = TypeVar("T")

varies = False
"""Whether a variable may have a gradient in one step and none in the next."""


SPARSE = None
"""Nothing ``is_sparse`` here, so nothing sends it."""


def start(
    spec: ReduceSpec, verb: Verb, name: str, tensors: list[jax.Array], codecs: Sequence[Codec]
) -> Callable[[], Sequence[jax.Array]]:
    """Reduce or gather ``tensors`` as one group; return what waits for the results."""
    return exchange.by(collectives, spec, at_once=is_traced(tensors))(verb, name, tensors, codecs)


def run_in_transaction(
    combine: Callable[[Sequence[Any]], Sequence[Any]], grads: Sequence[Any], *, counts: bool
) -> list[Any]:
    """``combine(grads)`` as a step of an elastic job; see ``elastic.exactly``."""
    return list(repeated.run_in_transaction(lambda: combine(grads), grads, counts=counts))


def run_alone(function: Callable[..., T], *args: Any) -> T:
    """``function(*args)``, which is part of a program."""
    return function(*args)


def together(tensors: Sequence[jax.Array], process_set: Group | None) -> list[jax.Array]:
    """``tensors`` of several groups, not before all are there."""
    return collectives.together(tensors, process_set)


def is_traced(grads: Sequence[Any]) -> bool:
    """Return whether ``grads`` stand for those of a program that is being made."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(grads))


def is_sparse(grad: Any) -> bool:
    """Return False: no gradient is gathered; one with gaps is sent without them."""
    return False


def dense(grad: Any) -> jax.Array:
    """Return ``grad`` without gaps."""
    return grad.todense() if hasattr(grad, "todense") else grad


def share(size: int, process_set: Group | None) -> float:
    """The share of one of ``size`` ranks: a constant of a program, traced anew for other sizes."""
    current_tracked()
    return 1.0 / size


def scaled(grad: Any, factor: float) -> Any:
    """``factor`` times ``grad``."""
    return grad * factor


def facts(
    count: Any,
    rate: Any,
    variables: Sequence[Any],
    every: int,
    grads: Sequence[Any],
    process_set: Group | None,
) -> jax.Array:
    """Return a table with the facts of ``alike``: four numbers, in this rank's row.

    The last one tells which of ``grads`` is not finite.
    """
    values = [jnp.asarray(variable.value) for variable in variables]
    count = jnp.asarray(getattr(count, "value", count)).astype(jnp.int32).reshape(())
    rate = jnp.asarray(getattr(rate, "value", rate)).astype(jnp.float32).reshape(())

    def bits(values: Sequence[jax.Array]) -> jax.Array:
        total = jnp.int32(0)
        for value in values:
            if value.dtype.itemsize >= 2:
                kind = jnp.int16 if value.dtype.itemsize == 2 else jnp.int32
                words = jax.lax.bitcast_convert_type(value, kind)
                total = total * 31 + words.sum(dtype=jnp.int32)
        return total

    total = jax.lax.cond(count % every == 0, bits, lambda values: jnp.int32(0), values)
    current_tracked()  # the program is for one rank of one world
    here = collectives.membership(process_set)
    bad = jnp.int32(0)
    for i, grad in reversed(list(enumerate(grads))):
        is_finite = jnp.isfinite(dense(grad).reshape(-1)[:ELEMENTS]).all()
        bad = jnp.where(is_finite, bad, place_of_bad(i + 1, here.size, here.rank))
    row = jnp.stack([count + 1, jax.lax.bitcast_convert_type(rate, jnp.int32), total, bad])
    return jnp.zeros((here.size, len(row)), jnp.int32).at[here.rank].set(row)


def tell_where(table: jax.Array, tell: Callable[[Any], None]) -> None:
    """Have ``tell(table)`` called where its rows are not equal."""
    is_there, bounds = table[:, :1] > 0, jnp.iinfo(jnp.int32)
    least = jnp.where(is_there, table, bounds.max).min(0)
    differ = (jnp.where(is_there, table, bounds.min).max(0) > least).any()
    if not is_traced([table]):
        if bool(differ):
            tell(table)
        return
    jax.lax.cond(differ, lambda t: jax.debug.callback(tell, t), lambda t: None, table)


def in_last_pass(
    optimizer: Any, reduced: Callable[[list[Any]], list[Any]], grads: list[Any]
) -> list[Any]:
    """Return ``reduced(grads)`` in the last of several passes, else ``grads``, which go unused."""
    last = (steps_done(optimizer) + 1) % optimizer.gradient_accumulation_steps == 0
    return list(jax.lax.cond(last, reduced, lambda grads: grads, grads))
