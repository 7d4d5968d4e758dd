"""What Keras on JAX does with gradients: custom calls of a program, or arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from kolovod.core.codecs import Codec
from kolovod.core.submission import Group
from kolovod.core.world import place
from kolovod.gradients import exchange
from kolovod.gradients.compression.compressor import Verb
from kolovod.gradients.spec import ReduceSpec
from kolovod.jax import repeated
from kolovod.jax.verbs import collectives

varies = False
"""Whether a variable may have a gradient in one step and none in the next."""


SPARSE = None
"""Sends what ``is_sparse``."""


def start(
    spec: ReduceSpec, verb: Verb, name: str, tensors: list[jax.Array], codecs: Sequence[Codec]
) -> Callable[[], Sequence[jax.Array]]:
    """Reduce or gather ``tensors`` as one group; what waits for the results."""
    return exchange.by(collectives, spec, at_once=is_traced(tensors))(verb, name, tensors, codecs)


def exactly(
    combine: Callable[[Sequence[Any]], Sequence[Any]], grads: Sequence[Any], *, counts: bool
) -> list[Any]:
    """``combine(grads)`` as a step of an elastic job; see ``elastic.exactly``."""
    return list(repeated.exactly(lambda: combine(grads), grads, counts=counts))


def together(tensors: Sequence[jax.Array], process_set: Group | None) -> list[jax.Array]:
    """``tensors`` of several groups, not before all are there."""
    return collectives.together(tensors, process_set)


def is_traced(grads: Sequence[Any]) -> bool:
    """Whether they stand for those of a program that is being made."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(grads))


def is_sparse(grad: Any) -> bool:
    """Whether it is gathered; none is: what has gaps is sent without them."""
    return False


def dense(grad: Any) -> jax.Array:
    """Without gaps."""
    return grad.todense() if hasattr(grad, "todense") else grad


def share(size: int, process_set: Group | None) -> float:
    """One of ``size``: a constant of a program, which is traced anew in a world of another size."""
    place()
    return 1.0 / size


def scaled(grad: Any, factor: float) -> Any:
    """``factor`` times ``grad``."""
    return grad * factor


def in_last_pass(
    optimizer: Any, reduced: Callable[[list[Any]], list[Any]], grads: list[Any]
) -> list[Any]:
    """Keras computes in every pass what it uses in the last only; we communicate in that one."""
    last = (optimizer._iterations.value + 1) % optimizer.gradient_accumulation_steps == 0
    return list(jax.lax.cond(last, reduced, lambda grads: grads, grads))
