"""A check that ranks whose gradients are combined still train one model; see gradients/sentinel.py.

In every step some parameters, and all numbers in the optimizer's state (a learning rate, say, that
``optax.inject_hyperparams`` has put there), are compared, and whether some gradients are finite: as
a part of the program, which comes to Python only where they differ. A callback of JAX would keep
the program out of JAX's persistent cache of compilations, and a table with a row for this rank
would make it the program of one rank; so it is the handler of the custom call that makes the table
(csrc/bind/xla_ffi.cc).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kolovod import _native
from kolovod.core.collectives import Collectives
from kolovod.core.numpy_frontend import NumpyFrontend
from kolovod.core.ops import Sum
from kolovod.gradients import sentinel
from kolovod.gradients.spec import ReduceSpec, is_elastic

if TYPE_CHECKING:
    from kolovod.jax.primitive import Call
    from kolovod.jax.verbs import JaxCollectives

__all__ = ["compared", "look", "register", "tell"]

_LEAVES = 4  # of the parameters: the first, the last, and between them
_ELEMENTS = 1024  # of each, at most
_NUMBERS = 16  # of the state, at most
_GRADIENTS = 8  # whose beginnings are to be finite
_BEGINNING = 256  # elements
_told: set[str] = set()
"""What was told, since each is said once."""


def compared(
    verbs: JaxCollectives,
    spec: ReduceSpec,
    name: str,
    params: Any,
    state: Any,
    grads: Any,
    updates: Any,
) -> Any:
    """Return ``updates``, the smallest of which depends on the comparison of the ranks' facts.

    Not in elastic jobs. ``state``: None, or what the ranks have alike. ``grads``: this rank's own.
    """
    if not spec.is_member or is_elastic() or sentinel.policy() == "off":
        return updates
    leaves, structure = jax.tree.flatten(updates)
    arrays = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    names, facts = _facts_of(params, state, grads)
    if not arrays or not facts:
        return updates
    process_set = spec.process_set
    ranks = None if process_set is None else list(process_set.ranks)
    about = json.dumps({"name": name, "ranks": ranks, **names})
    seen = verbs.compared(jnp.stack(facts), about, f"{name}.alike", process_set)
    if isinstance(seen, jax.core.Tracer):  # what nothing depends on is left out of a program
        last = min(arrays, key=lambda i: leaves[i].size)
        leaves[last] = jnp.where(seen[0] > 0, leaves[last], leaves[last])
    return jax.tree.unflatten(structure, leaves)


def _facts_of(params: Any, state: Any, grads: Any) -> tuple[dict[str, Any], list[jax.Array]]:
    """Return the names of what is compared, and its numbers: int32. Both are empty without floats.

    The last number is 1 + the place of the first gradient that is not finite, or 0.
    """
    weights = sentinel.sample_of(_floats_of(params), _LEAVES)
    gradients = sentinel.sample_of(_floats_of(grads), _GRADIENTS)
    if not gradients:
        return {}, []
    numbers = [pair for pair in _arrays_of(state) if pair[1].shape == () and _has_bits(pair[1])]
    if any("notfinite" in key for key, _ in numbers):  # optax.apply_if_finite sees to them
        gradients = []
    del numbers[_NUMBERS:]
    names = {
        "weights": [key for key, _ in weights],
        "numbers": [(key, str(leaf.dtype)) for key, leaf in numbers],
        "gradients": [key for key, _ in gradients],
    }
    bad = jnp.int32(0)
    for i, (_, grad) in reversed(list(enumerate(gradients))):
        beginning = jax.lax.stop_gradient(grad).reshape(-1)[:_BEGINNING]
        bad = jnp.where(jnp.isfinite(beginning).all(), bad, i + 1)
    return names, [*(_bits(leaf) for _, leaf in (*weights, *numbers)), bad]


def _arrays_of(tree: Any) -> list[tuple[str, Any]]:
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [
        (jax.tree_util.keystr(path), leaf) for path, leaf in pairs if isinstance(leaf, jax.Array)
    ]


def _floats_of(tree: Any) -> list[tuple[str, Any]]:
    return [
        (key, leaf)
        for key, leaf in _arrays_of(tree)
        if leaf.size and jnp.issubdtype(leaf.dtype, jnp.floating) and _has_bits(leaf)
    ]


def _has_bits(leaf: Any) -> bool:
    is_number = any(jnp.issubdtype(leaf.dtype, kind) for kind in (jnp.floating, jnp.integer))
    return is_number and leaf.dtype.itemsize in (2, 4, 8)


def _bits(leaf: jax.Array) -> jax.Array:
    """Return the sum of the first elements' bits, as int32.

    For a single number these are all of its bits, or, of 64 bits, the sum of both halves.
    """
    flat = jax.lax.stop_gradient(leaf).reshape(-1)[:_ELEMENTS]
    words = jax.lax.bitcast_convert_type(flat, jnp.int16 if leaf.dtype.itemsize == 2 else jnp.int32)
    return words.sum(dtype=jnp.int32)


def look(call: Call, facts: jax.Array) -> None:
    """Compare ``facts``, which have values; raises what ``tell`` does."""
    world = call.world
    if world.size == 1:
        return
    table = np.zeros((world.size, len(facts) + 1), np.int32)
    row = [1, *np.asarray(facts).tolist()]
    row[-1] = row[-1] and row[-1] * world.size + world.rank  # see ReadFacts in xla_ffi.cc
    table[world.rank] = row
    verbs = Collectives(NumpyFrontend(), lambda: world)
    table = verbs.allreduce(table, call.full_name, Sum)
    rows = table[table[:, 0] > 0]
    if (rows != rows[0]).any():
        tell(call.about, table.tobytes(), table.shape[1], world.rank)


def tell(about: str, table: bytes, columns: int, rank: int) -> None:
    """Say once what differs by the ranks' ``table``. Raises MismatchError if that is wished."""
    known = json.loads(about)
    rows = np.frombuffer(table, np.int32).reshape(-1, columns)
    there = [i for i, row in enumerate(rows) if row[0] > 0]  # the others have joined
    ranks = range(len(rows)) if known["ranks"] is None else known["ranks"]
    weights, numbers = known["weights"], known["numbers"]
    optimizer = f"JAX's optimizer '{known['name']}'"
    bad = [i for i in there if rows[i, -1] > 0]
    if bad and _is_news(f"gradients {about}") and rank == 0:
        first = min(int(rows[i, -1]) for i in bad) // len(rows) - 1
        name, step = known["gradients"][first], f"a step of {optimizer}"
        text = sentinel.of_gradients([ranks[i] for i in bad], step, name)
        sentinel.warn(text, "this is said once")
    said = []
    for i in there:
        facts = rows[i, 1:-1].tolist()
        values = zip(numbers, facts[len(weights) :], strict=True)
        options = {key: _number(bits, dtype) for (key, dtype), bits in values}
        of_weights = list(zip(weights, facts[: len(weights)], strict=True))
        said.append(sentinel.Facts(None, {weights[0] if weights else "state": options}, of_weights))
    kinds = [
        kind
        for kind, facts in (
            (sentinel.OPTIONS, [each.options for each in said]),
            (sentinel.WEIGHTS, [each.weights for each in said]),
        )
        if any(each != facts[0] for each in facts)
    ]
    if not kinds or not (_is_news(about) or sentinel.policy() == "error"):
        return
    like = sentinel.Like(optimizer, [ranks[i] for i in there], "broadcast_pytree")
    sentinel.tell(sentinel.text_of(kinds, said, like), is_first=rank == 0)


def _is_news(about: str) -> bool:
    """Return whether nothing was said about it yet."""
    is_news = about not in _told
    _told.add(about)
    return is_news


def _number(bits: int, dtype: str) -> Any:
    kind = np.dtype(jnp.dtype(dtype))
    if kind.itemsize == 8:
        return f"{bits:#x} (its bits)"
    words = np.array([bits], np.int16 if kind.itemsize == 2 else np.int32)
    return words.view(kind)[0].item()


def register() -> None:
    """Have programs call ``tell``."""
    _native.on_unlike_in_programs(tell)
