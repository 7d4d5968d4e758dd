"""A check whether a transformation of optax may step with parts of arrays in place of the arrays.

It may where what becomes of an element depends on that element, and on what is the same for all.
Three things are looked at, with the user's own tree, so that masks by its structure, by dimensions
or by names work as they will:

- The program for whole arrays and the one for parts have the same operations and constants. They
  do not where a mask or a rate follows from shapes.
- In it, no operation makes values of other elements of a value of some: a norm, "is all finite".
- Two steps with small arrays: parts become what the same elements become in whole arrays. That
  shows what keeps the shape, but mixes: products of square matrices, orders, noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from kolovod.errors import FrontEndArgumentError
from kolovod.jax.clipping import among
from kolovod.jax.parts import Shape, part_shape
from kolovod.jax.primitive import primitive
from kolovod.jax.pytrees import is_key

_ADVICE = (
    "use transformations that work element by element, as adamw and sgd do "
    "(kolovod.jax.clip_by_global_norm clips by the norm of all parts), or no shards"
)


class Outline(NamedTuple):
    """The state of a transformation, for whole arrays and for parts."""

    structure: Any
    whole: list[jax.ShapeDtypeStruct]
    own: list[jax.ShapeDtypeStruct]

    def is_by_element(self, number: int) -> bool:
        """Return whether ranks have parts of a leaf.

        It cannot be told for a leaf that is a scalar for each parameter.
        """
        return bool(self.whole[number].shape != self.own[number].shape)


def outline(inner: Any, params: Any, size: int) -> Outline:
    """Return the outline for parameters, of which only shapes and dtypes are asked.

    Raises InvalidArgumentError where the state for parts is not made of the parts of the state.
    """
    parts = parts_like(params, size)
    whole, own = jax.eval_shape(inner.init, params), jax.eval_shape(inner.init, parts)
    made = Outline(jax.tree.structure(whole), jax.tree.leaves(whole), jax.tree.leaves(own))
    if jax.tree.structure(own) != made.structure:
        raise _refused("its state for parts is another tree than for whole parameters")
    for each, part in zip(made.whole, made.own, strict=True):
        if part.shape not in (each.shape, part_shape(each.shape, size)):
            raise _refused(
                f"its state has an array of shape {each.shape} for whole parameters, and of shape "
                f"{part.shape} for parts"
            )
    return made


def parts_like(tree: Any, size: int) -> Any:
    """Shapes and dtypes of a rank's parts of ``tree``."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(part_shape(leaf.shape, size), leaf.dtype), tree
    )


def check_by_element(
    inner: Any, updates: Any, params: Any, size: int, extra: dict[str, Any]
) -> None:
    """Raise InvalidArgumentError for an ``inner`` that ranks cannot step with.

    ``updates``, ``params`` (or None): shapes and dtypes. ``extra``: what its update gets besides.
    What it raises for whole arrays is raised.
    """
    size = max(size, 2)  # a script of one process hears it, too
    like = updates if params is None else params
    kept = outline(inner, like, size)
    with among(_Nobody()), _traced_apart():
        whole = _traced(inner, updates, params, extra)
        try:
            parts = _traced(
                inner,
                parts_like(updates, size),
                None if params is None else parts_like(params, size),
                extra,
            )
        except Exception as error:  # whatever it says to such shapes
            raise _refused(f"its step fails for parts: {error}") from error
        if _communicates(whole.jaxpr):
            raise _refused("its step communicates itself")
        if _operations(whole.jaxpr) != _operations(parts.jaxpr):
            raise _refused("its step depends on the shapes of the parameters")
        given = len(jax.tree.leaves(updates))
        states = [kept.is_by_element(number) for number in range(len(kept.own))]
        rest = len(whole.jaxpr.invars) - given - len(states)
        _find_mixing(whole.jaxpr, [True] * given + states + [True] * rest)
        with jax.ensure_compile_time_eval():
            _try(inner, updates, params, extra)


@contextmanager
def _traced_apart() -> Iterator[None]:
    """Within this context nothing that is traced is taken for the step itself.

    JAX keeps what a ``jax.jit`` within the step was traced to, by shapes and by this setting, which
    no operation here depends on; and with the constant of ``_Nobody`` the step would clip wrongly.
    """
    now = jax.config.jax_default_matmul_precision
    with jax.default_matmul_precision("float32" if now == "highest" else "highest"):
        yield


def _refused(reason: str) -> FrontEndArgumentError:
    return FrontEndArgumentError(
        f"shard_state gives the optimizer parts of the parameters, with which it cannot step: "
        f"{reason}; {_ADVICE}"
    )


class _Nobody:
    """A stand-in for the other ranks while a step is tried: the norm is a constant."""

    def squares(self, tree: Any) -> jax.Array:
        """Return the same constant for every tree."""
        return jnp.full((), 0.25, jnp.float32)


# The program --------------------------------------------------------------------------------------


def _traced(inner: Any, updates: Any, params: Any, extra: dict[str, Any]) -> ClosedJaxpr:
    state = jax.eval_shape(inner.init, updates if params is None else params)
    return jax.make_jaxpr(lambda u, s, p: inner.update(u, s, p, **extra))(updates, state, params)


def _operations(jaxpr: Jaxpr) -> list[Any]:
    """Return what a program does, whatever the shapes: its operations and scalar constants."""
    return [
        (
            equation.primitive.name,
            [
                repr(v.val)
                for v in equation.invars
                if isinstance(v, Literal) and np.ndim(v.val) == 0
            ],
            [_operations(inner) for inner in _programs(equation)],
        )
        for equation in jaxpr.eqns
    ]


def _communicates(jaxpr: Jaxpr) -> bool:
    return any(
        equation.primitive is primitive or any(map(_communicates, _programs(equation)))
        for equation in jaxpr.eqns
    )


def _programs(equation: Any) -> list[Jaxpr]:
    """The programs that an operation runs."""
    found = []
    for value in equation.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, ClosedJaxpr):
                found.append(each.jaxpr)
            elif isinstance(each, Jaxpr):
                found.append(each)
    return found


def _find_mixing(jaxpr: Jaxpr, given: Sequence[bool]) -> list[bool]:
    """Follow values of elements; raise InvalidArgumentError where they come to others.

    ``given``: which inputs are made of elements. Returns which outputs are.
    """
    made = {var for var, is_made in zip(jaxpr.invars, given, strict=True) if is_made}
    for equation in jaxpr.eqns:
        of = [not isinstance(var, Literal) and var in made for var in equation.invars]
        if any(of):
            results = _results(equation, of)
            made.update(
                var for var, is_made in zip(equation.outvars, results, strict=True) if is_made
            )
    return [not isinstance(var, Literal) and var in made for var in jaxpr.outvars]


def _results(equation: Any, of: list[bool]) -> list[bool]:
    """Return which outputs of an operation are made of elements, where the inputs ``of`` are."""
    name, params = equation.primitive.name, equation.params
    programs = _programs(equation)
    if name == "cond":
        if of[0]:
            raise _refused("a condition of its step depends on elements")
        each = [_find_mixing(branch, of[1:]) for branch in programs]
        return [any(outputs) for outputs in zip(*each, strict=True)]
    if name == "while":
        consts, own = params["cond_nconsts"], params["body_nconsts"]
        condition, body = params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr
        start = consts + own
        carried = _carried(body, of[consts:start], of[start:])
        if any(_find_mixing(condition, [*of[:consts], *carried])):
            raise _refused("a condition of its step depends on elements")
        return carried
    if name == "scan":
        consts, count = params["num_consts"], params["num_carry"]
        if not any(of[consts + count :]):
            rows = of[consts + count :]
            return _carried(programs[0], of[:consts], of[consts : consts + count], rows)
    if len(programs) >= 1 and len(programs[0].invars) == len(of):
        return _find_mixing(programs[0], of)
    shapes = {var.aval.shape for var, is_made in zip(equation.invars, of, strict=True) if is_made}
    shapes |= {var.aval.shape for var in equation.outvars}
    if len(shapes) > 1:
        raise _refused(f"its step mixes elements ({name})")
    return [True] * len(equation.outvars)


def _carried(
    body: Jaxpr, constant: list[bool], carried: list[bool], rows: Sequence[bool] = ()
) -> list[bool]:
    """Return which values of a loop are made of elements after any number of rounds."""
    while True:
        results = _find_mixing(body, [*constant, *carried, *rows])
        after = [a or b for a, b in zip(carried, results, strict=False)]
        if after == carried:
            if any(results[len(carried) :]):
                raise _refused("its step gathers elements in a loop")
            return carried
        carried = after


# Two steps ----------------------------------------------------------------------------------------

_ELEMENTS, _OWN = 12, slice(5, 9)


def _try(inner: Any, updates: Any, params: Any, extra: dict[str, Any]) -> None:
    """Compare two steps of small arrays with those of a part of each."""
    arrays = {name: value for name, value in extra.items() if not callable(value)}
    rest = {name: value for name, value in extra.items() if callable(value)}
    arrays = jax.tree.map(_with_values, arrays)
    update = jax.jit(lambda u, s, p, more: inner.update(u, s, p, **more, **rest))
    found = []
    for is_part in (False, True):
        given = None if params is None else _small(params, 0, is_part)
        gradients = [_small(updates, step, is_part) for step in (1, 2)]
        results = []
        try:
            state = jax.jit(inner.init)(gradients[0] if given is None else given)
            for each in gradients:
                stepped, state = update(each, state, given, arrays)
                results += jax.tree.leaves(stepped)
            results += jax.tree.leaves(state)
        except Exception as error:  # whatever it says to such shapes
            raise _refused(f"its step fails for small parts: {error}") from error
        found.append([leaf for leaf in results if not is_key(leaf)])
    for whole, part in zip(*found, strict=True):
        if not _is_part(np.asarray(whole), np.asarray(part)):
            raise _refused("elements of parts become other values than in whole parameters")


def _with_values(value: Any) -> Any:
    return jnp.ones(value.shape, value.dtype) if isinstance(value, jax.core.Tracer) else value


def _small(tree: Any, step: int, is_part: bool) -> Any:
    """Arrays with as many dimensions and of the same dtypes, or a part of each."""
    leaves, structure = jax.tree.flatten(tree)
    made = []
    for number, leaf in enumerate(leaves):
        values = np.cos(np.arange(_ELEMENTS) * (1.3 + step) + number) * (1 + 0.5 * step)
        if not leaf.shape:
            values = values[0]
        else:
            values = values[_OWN] if is_part else values
            values = values.reshape(_small_shape(len(leaf.shape), is_part))
        made.append(jnp.asarray(values, leaf.dtype))
    return jax.tree.unflatten(structure, made)


def _small_shape(dimensions: int, is_part: bool) -> Shape:
    if dimensions == 1 or is_part:
        return (*(1,) * (dimensions - 1), -1)
    return (*(1,) * (dimensions - 2), 3, 4)


def _is_part(whole: np.ndarray[Any, Any], part: np.ndarray[Any, Any]) -> bool:
    if whole.shape != part.shape:
        whole, part = whole.reshape(-1), part.reshape(-1)
        if whole.size != _ELEMENTS or part.size != whole[_OWN].size:
            return False
        whole = whole[_OWN]
    if not jnp.issubdtype(whole.dtype, jnp.inexact):
        return bool(np.array_equal(whole, part))
    # An operation may round otherwise at the end of an array.
    tolerance = float(jnp.finfo(whole.dtype).eps) ** 0.5
    whole, part = whole.astype(np.float64), part.astype(np.float64)
    largest = float(np.max(np.abs(whole), initial=0.0))
    return bool(np.allclose(whole, part, tolerance, tolerance * largest, equal_nan=True))
