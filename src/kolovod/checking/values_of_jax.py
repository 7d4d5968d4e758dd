"""Values of JAX's arrays for the check, also within programs; and what functions are given.

Within a program an operation of ours passes arrays on, and shows their values to Python when the
program runs. Python is given arrays of NumPy there, and uses nothing of JAX, which may need the
thread that waits. No callback of ``jax.debug`` does that: those put what they show on a device.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

__all__ = ["Arrays", "data_given", "leaves_of", "names_of_leaves", "shown"]

Arrays = Sequence[np.ndarray[Any, Any]]
_DEPTH = 3  # of functions that hold functions
_KEY = (2,)  # the shape of a random key that is an array of uint32


def _is_array(leaf: Any) -> bool:
    if not isinstance(leaf, jax.Array | np.ndarray):
        return False
    kinds = jax.dtypes.prng_key, jax.dtypes.float0
    return not any(jnp.issubdtype(leaf.dtype, kind) or leaf.dtype == kind for kind in kinds)


def leaves_of(tree: Any) -> list[Any]:
    """Return the arrays of a pytree."""
    return [leaf for leaf in jax.tree.leaves(tree) if _is_array(leaf)]


def names_of_leaves(tree: Any) -> list[str]:
    """Return the names of its arrays, for example "Dense_0.kernel"."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [
        ".".join(filter(None, (_part(key) for key in path))) or "parameters"
        for path, leaf in pairs
        if _is_array(leaf)
    ]


def _part(key: Any) -> str:
    for name in ("key", "name", "idx"):
        if hasattr(key, name):
            part = str(getattr(key, name))
            return "" if part in _WRAPPERS else part
    return str(key)


_WRAPPERS = ("params", "value", "states", "_graphdef", "_mapping")
"""Parts of names that say nothing: how Flax wraps parameters."""


def data_given(function: Any, others: Sequence[Any], params: Any) -> list[Any]:
    """Return the arrays that ``function`` computes with besides ``params``.

    ``others``: its other arguments; what it holds in closures and global variables is among them,
    too. Scalars and random keys are none, nor is what the parameters are a part of.
    """
    own = {id(leaf) for leaf in leaves_of(params)}
    found: dict[int, Any] = {}
    for each in (*others, *_held_by(function, _DEPTH)):
        leaves = leaves_of(each)
        if not any(id(leaf) in own for leaf in leaves):
            found.update({id(leaf): leaf for leaf in leaves if leaf.ndim and not _is_key(leaf)})
    return list(found.values())


def _is_key(leaf: Any) -> bool:
    return bool(leaf.dtype == np.uint32 and leaf.shape == _KEY)


def _held_by(function: Any, depth: int) -> Iterator[Any]:
    """Yield the arrays, and plain containers, that a function holds."""
    if isinstance(function, functools.partial):
        yield from (*function.args, function.keywords)
        function = function.func
    # A function that Flax or a decorator has wrapped.
    inner = getattr(function, "__wrapped__", None) or getattr(function, "f", None)
    if callable(inner) and depth:
        yield from _held_by(inner, depth - 1)
    elif inspect.isfunction(function):
        with contextlib.suppress(ValueError):  # of a variable that has no value yet
            held = inspect.getclosurevars(function)
            for value in (*held.nonlocals.values(), *held.globals.values()):
                if isinstance(value, jax.Array | np.ndarray | dict | list | tuple):
                    yield value
                elif inspect.isfunction(value) and depth:
                    yield from _held_by(value, depth - 1)


def shown(tree: Any, tell: Callable[[Arrays], None], others: Sequence[Any] = ()) -> Any:
    """Return ``tree``, whose arrays ``tell`` is shown behind ``others``.

    It gets their values now, or when the program runs that is being traced.
    """
    leaves, structure = jax.tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
    arrays = [*others, *(leaves[i] for i in places)]
    if not any(isinstance(array, jax.core.Tracer) for array in arrays):
        tell([np.asarray(array) for array in arrays])
        return tree
    passed = _shown.bind(*arrays, tell=tell, others=len(others))
    for i, array in zip(places, passed, strict=True):
        leaves[i] = array
    return jax.tree.unflatten(structure, leaves)


_shown = Primitive("kolovod_shown")
_shown.multiple_results = True


def _run(*arrays: Any, tell: Callable[[Arrays], None], others: int) -> list[Any]:
    tell([np.asarray(array) for array in arrays])
    return list(arrays[others:])


def _lowering(
    context: Any, *operands: Any, tell: Callable[[Arrays], None], others: int
) -> Sequence[Any]:
    of_program = context.module_context
    devices = getattr(of_program.axis_context, "num_devices", 1)
    if devices != 1 or len(of_program.platforms) != 1:  # there no Python can be called
        return operands[others:]

    def callback(*arrays: Any) -> tuple[Any, ...]:
        return tuple(_run(*arrays, tell=tell, others=others))

    results, _, _ = mlir.emit_python_callback(
        context, callback, None, list(operands), context.avals_in, context.avals_out,
        has_side_effect=True,
    )  # fmt: skip
    return results  # type: ignore[no-any-return]


_shown.def_impl(_run)
_shown.def_abstract_eval(lambda *avals, tell, others: list(avals[others:]))
mlir.register_lowering(_shown, _lowering)
ad.primitive_jvps[_shown] = lambda arrays, tangents, *, tell, others: (
    _shown.bind(*arrays, tell=tell, others=others),
    list(tangents[others:]),
)
batching.primitive_batchers[_shown] = lambda arrays, dims, *, tell, others: (
    _shown.bind(*arrays, tell=tell, others=others),
    list(dims[others:]),
)
