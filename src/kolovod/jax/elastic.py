"""Pytrees with JAX's arrays in the state of an elastic job."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax

from kolovod.core.objects import Objects
from kolovod.elastic import share_by
from kolovod.jax.local_training import LocalTraining
from kolovod.jax.pytrees import Pytrees, described, is_wholly_sent
from kolovod.jax.verbs import collectives

__all__ = ["share_in_elastic_jobs"]

_pytrees = Pytrees(collectives)
_objects = Objects(collectives.world)


def share_in_elastic_jobs() -> None:
    """Let ``kolovod.elastic.State`` hold pytrees: ranks that join get rank 0's."""
    share_by(_has_arrays, share_pytree)
    share_by(_is_of_nnx, share_nnx, _keep_nnx, within=True)
    share_by(lambda value: isinstance(value, LocalTraining), share_local_training)


def share_pytree(name: str, tree: Any) -> Any:
    """Rank 0's ``tree``: array by array where all ranks have such a one, else pickled."""
    said = _objects.allgather_object((described(tree), is_wholly_sent(tree)), f"elastic.{name}")
    if said.count(said[0]) < len(said) or not said[0][1]:
        return _objects.broadcast_object(tree, 0, f"elastic.{name}.pickle")
    return _pytrees.broadcast_pytree(tree, 0, f"elastic.{name}")


def share_nnx(name: str, value: Any) -> Any:
    """Change a module or an optimizer of Flax's nnx, which others refer to, to rank 0's."""
    nnx = sys.modules["flax.nnx"]
    nnx.update(value, share_pytree(name, nnx.state(value)))
    return value


def _keep_nnx(value: Any) -> Callable[[], None]:
    nnx = sys.modules["flax.nnx"]
    kept = jax.tree.map(lambda array: array, nnx.state(value))
    return lambda: nnx.update(value, kept)


def _is_of_nnx(value: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, getattr(nnx, "Pytree", None) or nnx.Object)


def share_local_training(name: str, training: LocalTraining) -> LocalTraining:
    """``training`` as a copy of rank 0's, unless it has steps of its own."""
    training.take_whole(share_pytree(name, training.whole()))
    return training


def _has_arrays(value: Any) -> bool:
    return any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value))
