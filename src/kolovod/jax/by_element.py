"""A check which arrays a transformation of optax needs as wholes, and of which parts will do.

It may step with parts where what becomes of an element depends on that element, and on what is the
same for all. Three things are looked at, with the user's own tree, so that masks by its structure,
by dimensions or by names work as they will:

- The program for whole arrays and the one for parts have the same operations and constants. They
  do not where a mask or a rate follows from shapes.
- In it, no operation makes values of other elements of a value of some: a norm, "is all finite".
- Two steps with small arrays: parts become what the same elements become in whole arrays. That
  shows what keeps the shape, but mixes: products of square matrices, orders, noise.

Arrays for which that is not so are left whole, each on one rank: those whose elements are mixed, or
else all. Then no value that follows from one of them may follow from another array, too: the
program for whole arrays is followed for that, and through as many steps as it takes. So such an
array becomes on its rank what it becomes where all are, whatever the others are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from kolovod.errors import FrontEndArgumentError
from kolovod.jax.clipping import among
from kolovod.jax.following import Followed, communicates, operations
from kolovod.jax.parts import Shape, part_shape
from kolovod.jax.pytrees import is_key

_ADVICE = (
    "use transformations that step with each element by itself, as adamw and sgd do, or with each "
    "parameter, as muon and adafactor do (kolovod.jax.clip_by_global_norm clips by the norm of all "
    "parts), or no shards"
)


class Outline(NamedTuple):
    """The state of a transformation, for whole arrays and as a rank steps with it."""

    structure: Any
    whole: list[jax.ShapeDtypeStruct]
    own: list[jax.ShapeDtypeStruct]
    wholes: frozenset[int] = frozenset()
    """The parameters, by their place among the tree's leaves, that one rank each has as wholes."""
    held: Mapping[int, int] = {}
    """The leaves, by place, that belong to one of these, with it: the same rank has them."""
    untried: str = ""
    """Why no step could be tried when there was a state to be made; "": it was."""

    def is_by_element(self, number: int) -> bool:
        """Return whether ranks have parts of a leaf.

        It cannot be told for a leaf that is a scalar for each parameter.
        """
        return bool(self.whole[number].shape != self.own[number].shape)


class _Refused(Exception):
    """Says why a transformation cannot step with a rank's share."""


def outline(inner: Any, params: Any, size: int) -> Outline:
    """Return the outline for parameters, of which only shapes and dtypes are asked.

    A step is tried with gradients like them. Raises InvalidArgumentError where ranks cannot step
    with shares.
    """
    try:
        whole = _try_traced(inner, params)
    except Exception as error:  # it wants to be given more; the first update will tell
        said = f"{type(error).__name__}: {error}"
        try:
            return _outline(inner, params, size)._replace(untried=said)
        except _Refused as refused:
            raise _refused(f"of parts {refused}", said) from None
    count = len(jax.tree.leaves(params))
    reasons = []
    for wholes in _choices(whole, inner, params, count):
        try:
            held = _check(inner, params, params, max(size, 2), whole.extra, wholes)
            made = _outline(inner, params, size, wholes if size > 1 else frozenset())
            return made._replace(held=held if size > 1 else {})
        except _Refused as error:
            reasons.append(str(error))
    raise _refused(f"of parts {reasons[0]}; of one parameter without the others {reasons[-1]}")


def check_step(
    inner: Any, updates: Any, params: Any, size: int, extra: dict[str, Any], made: Outline
) -> None:
    """Raise InvalidArgumentError for an ``inner`` that ranks cannot step with.

    ``updates``, ``params`` (or None): shapes and dtypes. ``extra``: what its update gets besides.
    What it raises for whole arrays is raised.
    """
    if size == 1:  # a script of one process hears it, too
        size, made = 2, outline(inner, updates if params is None else params, 2)
    try:
        held = _check(inner, updates, params, size, extra, made.wholes)
    except _Refused as error:
        kind = "of one parameter without the others" if made.wholes else "of parts"
        raise _refused(f"{kind} {error}", made.untried) from error.__cause__
    if held != made.held:
        raise _refused("its state belongs to other parameters than when it was made")


def _refused(reason: str, untried: str = "") -> FrontEndArgumentError:
    late = untried and (
        "; whether each rank may have some parameters could not be tried when the state was made, "
        f"since update(gradients, state, params) failed ({untried})"
    )
    return FrontEndArgumentError(
        "shard_state gives the optimizer parts of the parameters, or some of them, with which it "
        f"cannot step: {reason}{late}; {_ADVICE}"
    )


def parts_like(tree: Any, size: int, wholes: frozenset[int] = frozenset()) -> Any:
    """Shapes and dtypes of a rank's parts of ``tree``; ``wholes``: the leaves that stay whole."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(
        leaf if i in wholes else jax.ShapeDtypeStruct(part_shape(leaf.shape, size), leaf.dtype)
        for i, leaf in enumerate(leaves)
    )


def _outline(inner: Any, params: Any, size: int, wholes: frozenset[int] = frozenset()) -> Outline:
    """Raise _Refused where the state for parts is not made of the parts of the state."""
    whole = jax.eval_shape(inner.init, params)
    try:
        own = jax.eval_shape(inner.init, parts_like(params, size, wholes))
    except Exception as error:  # whatever it says to such shapes
        raise _Refused(f"its state cannot be made: {error}") from error
    made = Outline(jax.tree.structure(whole), jax.tree.leaves(whole), jax.tree.leaves(own), wholes)
    if jax.tree.structure(own) != made.structure:
        raise _Refused("its state for parts is another tree than for whole parameters")
    for each, part in zip(made.whole, made.own, strict=True):
        if part.shape not in (each.shape, part_shape(each.shape, size)):
            raise _Refused(
                f"its state has an array of shape {each.shape} for whole parameters, and of shape "
                f"{part.shape} for parts"
            )
    return made


# Trying -------------------------------------------------------------------------------------------


class _Traced(NamedTuple):
    program: ClosedJaxpr
    extra: dict[str, Any]


_LOSS = "value"
"""What optax calls the loss, where a transformation's update wants it besides."""


def _try_traced(inner: Any, params: Any) -> _Traced:
    """A step with gradients like ``params``, and with a loss where there is none without."""
    with among(_Nobody()), _traced_apart():
        try:
            return _Traced(_traced(inner, params, params, {}), {})
        except Exception:
            extra = {_LOSS: jnp.zeros((), jnp.float32)}
            try:
                return _Traced(_traced(inner, params, params, extra), extra)
            except Exception:
                pass
            raise


def _choices(whole: _Traced, inner: Any, params: Any, count: int) -> list[frozenset[int]]:
    """The parameters to be tried as wholes: none; those whose elements are mixed; all."""
    seen, _ = _followed(whole.program, inner, params, params)
    mixed = frozenset(i for i in range(count) if seen.mixed >> i & 1)
    every = frozenset(range(count))
    return [frozenset(), *([mixed] if mixed and mixed != every else []), every]


def _check(
    inner: Any,
    updates: Any,
    params: Any,
    size: int,
    extra: dict[str, Any],
    wholes: frozenset[int],
) -> dict[int, int]:
    """Return the leaves of the state that belong to ``wholes``, each with its parameter.

    Raises _Refused where ranks cannot step with those, and parts of the others; and what ``inner``
    raises for whole arrays.
    """
    like = updates if params is None else params
    nobody = _Nobody()
    with among(nobody), _traced_apart():
        whole = _traced(inner, updates, params, extra)
        if communicates(whole.jaxpr):
            raise _Refused("its step communicates itself")
        held: dict[int, int] = {}
        if wholes:
            seen, states = _followed(whole, inner, updates, params)
            held = _held(seen, states, wholes)
            if nobody.asked > 1:
                raise _Refused(
                    "its step asks for the norm of all gradients more than once "
                    "(kolovod.jax.clip_by_global_norm)"
                )
        if len(wholes) < len(jax.tree.leaves(updates)):
            kept = _outline(inner, like, size, wholes)
            try:
                parts = _traced(
                    inner,
                    parts_like(updates, size, wholes),
                    None if params is None else parts_like(params, size, wholes),
                    extra,
                )
            except Exception as error:  # whatever it says to such shapes
                raise _Refused(f"its step fails for parts: {error}") from error
            if operations(whole.jaxpr) != operations(parts.jaxpr):
                raise _Refused("its step depends on the shapes of the parameters")
            _check_mixing(whole, updates, params, kept)
            with jax.ensure_compile_time_eval():
                _try(inner, updates, params, extra, wholes)
    return held


@contextmanager
def _traced_apart() -> Iterator[None]:
    """Within this context nothing that is traced is taken for the step itself.

    JAX keeps what a ``jax.jit`` within the step was traced to, by shapes and by this setting, which
    no operation here depends on; and with the constant of ``_Nobody`` the step would clip wrongly.
    """
    now = jax.config.jax_default_matmul_precision
    with jax.default_matmul_precision("float32" if now == "highest" else "highest"):
        yield


class _Nobody:
    """A stand-in for the other ranks while a step is tried: the norm is a constant."""

    asked = 0

    def squares(self, tree: Any) -> jax.Array:
        """Return the same constant for every tree."""
        self.asked += 1
        return jnp.full((), 0.25, jnp.float32)


# The program --------------------------------------------------------------------------------------


def _traced(inner: Any, updates: Any, params: Any, extra: dict[str, Any]) -> ClosedJaxpr:
    state = jax.eval_shape(inner.init, updates if params is None else params)
    return jax.make_jaxpr(lambda u, s, p: inner.update(u, s, p, **extra))(updates, state, params)


def _check_mixing(whole: ClosedJaxpr, updates: Any, params: Any, kept: Outline) -> None:
    """Raise _Refused where elements of what is in parts come to others."""
    count, rest = len(jax.tree.leaves(updates)), 0 if params is None else 1
    gradients = [0 if i in kept.wholes else 1 << i for i in range(count)]
    states = [
        1 << count + number if kept.is_by_element(number) else 0 for number in range(len(kept.own))
    ]
    seen = Followed()
    seen.outputs(whole.jaxpr, [*gradients, *states, *gradients * rest])
    if seen.mixed:
        raise _Refused(seen.how)


def _followed(
    whole: ClosedJaxpr, inner: Any, updates: Any, params: Any
) -> tuple[Followed, list[int]]:
    """Return what any number of steps does, and the arrays that each leaf of the state has.

    Those are bits, by the place of a parameter.
    """
    like = updates if params is None else params
    count = len(jax.tree.leaves(like))
    own = [1 << i for i in range(count)]
    states = Followed().outputs(jax.make_jaxpr(inner.init)(like).jaxpr, own)
    while True:
        seen = Followed()
        given = [*own, *states, *([] if params is None else own)]
        results = seen.outputs(whole.jaxpr, given)
        after = [a | b for a, b in zip(states, results[count:], strict=True)]
        for place, (arrays, wanted) in enumerate(zip(results, own, strict=False)):
            if arrays | wanted != wanted:
                seen.joined.append((arrays | wanted, f"update {place}"))
        if after == states:
            return seen, states
        states = after


def _held(seen: Followed, states: list[int], wholes: frozenset[int]) -> dict[int, int]:
    bits = sum(1 << i for i in wholes)
    for arrays, where in [*seen.joined, *((arrays, "its state") for arrays in states)]:
        if arrays & bits and arrays.bit_count() > 1:
            raise _Refused(f"its step mixes elements of several parameters ({where})")
    return {i: arrays.bit_length() - 1 for i, arrays in enumerate(states) if arrays & bits}


# Two steps ----------------------------------------------------------------------------------------

_ELEMENTS, _OWN = 12, slice(5, 9)


def _try(
    inner: Any, updates: Any, params: Any, extra: dict[str, Any], wholes: frozenset[int]
) -> None:
    """Compare two steps of small arrays with those of a part of each but ``wholes``."""
    arrays = {name: value for name, value in extra.items() if not callable(value)}
    rest = {name: value for name, value in extra.items() if callable(value)}
    arrays = jax.tree.map(_with_values, arrays)
    update = jax.jit(lambda u, s, p, more: inner.update(u, s, p, **more, **rest))
    found = []
    for is_part in (False, True):
        given = None if params is None else _small(params, 0, is_part, wholes)
        gradients = [_small(updates, step, is_part, wholes) for step in (1, 2)]
        results = []
        try:
            state = jax.jit(inner.init)(gradients[0] if given is None else given)
            for each in gradients:
                stepped, state = update(each, state, given, arrays)
                results += jax.tree.leaves(stepped)
            results += jax.tree.leaves(state)
        except Exception as error:  # whatever it says to such shapes
            raise _Refused(f"its step fails for small parts: {error}") from error
        found.append([leaf for leaf in results if not is_key(leaf)])
    for whole, part in zip(*found, strict=True):
        if not _is_part(np.asarray(whole), np.asarray(part)):
            raise _Refused("elements of parts become other values than in whole parameters")


def _with_values(value: Any) -> Any:
    return jnp.ones(value.shape, value.dtype) if isinstance(value, jax.core.Tracer) else value


def _small(tree: Any, step: int, is_part: bool, wholes: frozenset[int]) -> Any:
    """Arrays with as many dimensions and of the same dtypes, or a part of each but ``wholes``."""
    leaves, structure = jax.tree.flatten(tree)
    made = []
    for number, leaf in enumerate(leaves):
        values = np.cos(np.arange(_ELEMENTS) * (1.3 + step) + number) * (1 + 0.5 * step)
        if not leaf.shape:
            values = values[0]
        else:
            is_cut = is_part and number not in wholes
            values = values[_OWN] if is_cut else values
            values = values.reshape(_small_shape(len(leaf.shape), is_cut))
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
