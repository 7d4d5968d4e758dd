"""The verbs as one primitive of JAX: what tracing, differentiation and vmap make of them.

JAX calls ``JaxCollectives.run`` for values, and the rules here for everything else. All verbs but a
reduction with Min, Max, Product or Adasum are linear in all ranks' inputs. So the derivative of a
verb is the verb itself, of tangents, and gradients go back by its transpose, of which
kolovod/core/derivatives.py has the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from kolovod.core.derivatives import Given, backward_request, finish, need_linear
from kolovod.core.frontend import Frontend
from kolovod.core.ops import Adasum
from kolovod.core.submission import Group, Request, WorldLike, check_request
from kolovod.core.verbs import ALLGATHER, ALLREDUCE, ALLTOALL, BARRIER, Then, Verb
from kolovod.errors import FrontEndArgumentError
from kolovod.jax.retracing import note_rank_info

TOGETHER = Verb("together", -1)
"""No verb, but what gives arrays when all of them have values: see ``Pytrees.allreduce_pytree``."""


ALIKE = Verb("alike", -2)
"""No verb, but what compares a vector of numbers, which stays where it is: see alike.py."""


class Runner(Protocol):
    """An object that carries out a call whose arrays have values: JaxCollectives."""

    frontend: Frontend[Any]
    world: Callable[[], WorldLike]

    def membership(self, process_set: Group | None) -> WorldLike:
        """Return the world or process set's membership, as Submitter.membership does."""
        ...

    def run(self, call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the results of ``call``."""
        ...


class Call(NamedTuple):
    """A request with what JAX makes of it; a constant of the programs that it is in."""

    request: Request
    verbs: Runner
    placed: bool = False
    """True if what the program does with the results depends on the rank or on the size."""
    zeroed: bool = False
    """True if this rank gets zeros: a property of the operation, since programs that differ between
    ranks might come to their operations in different orders."""
    steps: tuple[str, ...] = ()
    """The steps by which it was derived from the verb that the user has called."""
    about: str = ""
    """The meaning of the numbers, for ``ALIKE``."""
    line: str = ""
    """The line of the script, where a program asks for an operation without a name."""
    branches: int = 1
    """The branches of a conditional that have it, under one name; a rank runs one of them."""
    number: int = 0
    """A number that tells it from other operations that are in several branches."""

    @property
    def verb(self) -> Verb:
        """The verb of the request."""
        return self.request.verb

    @property
    def name(self) -> str | None:
        """The name that the user has given."""
        return self.request.name

    @property
    def world(self) -> WorldLike:
        """The place of this rank among those that take part. Raises what ``membership`` raises."""
        return self.verbs.membership(self.request.process_set)

    @property
    def full_name(self) -> str | None:
        """The name with what was derived from it: ``loss.backward``."""
        return self.name and ".".join((self.name, *self.steps))

    @property
    def is_placed(self) -> bool:
        """True if the program is for one rank of one world only."""
        return self.placed or self.verb.makes_outputs or self.request.process_set is not None

    def of(self, arrays: Sequence[Any]) -> list[Any]:
        """``bind`` for what the user gives. Raises InvalidArgumentError for other than arrays."""
        return self.bind(self.checked(arrays))

    def checked(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Return ``arrays``. Raises InvalidArgumentError for what is no array."""
        for array in arrays:
            if not isinstance(array, jax.Array):
                self.verbs.frontend.view(array)
        return arrays

    def bind(self, arrays: Sequence[Any]) -> list[Any]:
        """Run it, or make it part of what is being traced."""
        return _primitive.bind(*arrays, call=self)  # type: ignore[no-any-return]

    def tangent(self) -> Call:
        """Return the call for tangents. Raises InvalidArgumentError if it has no derivative."""
        need_linear(self.request)
        return self._replace(steps=(*self.steps, "tangent"))

    def backward(self) -> Call:
        """Return the call that sends gradients back; ``derivatives.finish`` does the rest."""
        steps = self.steps[:-1] if self.steps[-1:] == ("tangent",) else self.steps
        back = backward_request(self.request)._replace(name=self.name)
        return self._replace(request=back, steps=(*steps, "backward"), placed=True)

    def check(self) -> None:
        """Raise InvalidArgumentError for what eager verbs leave to the engine's binding."""
        check_request(self.request)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the result's shape for an array of this ``shape``, the same on all ranks.

        Programs for other shapes may come to their operations in another order, and ranks that do
        would wait for each other for ever.
        """
        if not self.verb.makes_outputs:
            return shape
        if not shape:
            raise FrontEndArgumentError(
                f"{self.verb}: a scalar has no dimension 0; give an array of shape (1,)"
            )
        size, rows = self.world.size, shape[0]
        if self.verb is ALLGATHER:
            return (rows * size, *shape[1:])
        if rows % size != 0:
            raise FrontEndArgumentError(
                f"{self.verb}: {rows} rows cannot be split evenly over {size} ranks, which must be "
                "inside jax.jit and for derivatives: there, all ranks need the same shapes"
            )
        return shape if self.verb is ALLTOALL else (rows // size, *shape[1:])


_primitive = Primitive("kolovod")
_primitive.multiple_results = True
primitive = _primitive


def _run(*arrays: jax.Array, call: Call) -> list[jax.Array]:
    return call.verbs.run(call, arrays)


def _abstract(*arrays: Any, call: Call) -> list[Any]:
    call.check()
    _ = call.world  # raises now, not when the program runs
    if call.is_placed:
        note_rank_info()
    if not arrays:
        raise FrontEndArgumentError(
            "inside jax.jit a barrier needs to know its place: x = barrier(after=x), with an array "
            "that is made before and used afterwards"
        )
    return [array.update(shape=call.shape(array.shape), weak_type=False) for array in arrays]


_primitive.def_impl(_run)
_primitive.def_abstract_eval(_abstract)


def differentiated(
    arrays: Sequence[Any], tangents: Sequence[Any], *, call: Call
) -> tuple[list[Any], list[Any]]:
    """The results of ``call``, and what its derivative makes of ``tangents``."""
    results = call.bind(arrays)
    if call.verb in (BARRIER, TOGETHER, ALIKE):
        return results, list(tangents)
    moving = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
    outgoing: list[Any] = [_zero(result) for result in results]
    if moving:
        moved = call.tangent().bind([ad.instantiate_zeros(tangents[i]) for i in moving])
        for i, tangent in zip(moving, moved, strict=True):
            outgoing[i] = tangent
    return results, outgoing


def _zero(array: Any) -> Any:
    dtype = array.dtype if jnp.issubdtype(array.dtype, jnp.inexact) else jax.dtypes.float0
    return ad.Zero(jax.core.ShapedArray(array.shape, dtype))


ad.primitive_jvps[_primitive] = differentiated


def _transpose(cotangents: Sequence[Any], *arrays: Any, call: Call) -> list[Any]:
    wanted = [i for i, array in enumerate(arrays) if ad.is_undefined_primal(array)]
    shapes = [arrays[i].aval.shape for i in wanted]
    given = [ad.instantiate_zeros(cotangents[i]) for i in wanted]
    results: list[Any] = [None] * len(arrays)
    for i, result in zip(wanted, _sent_back(call, given, shapes), strict=True):
        results[i] = result
    return results


class _Arithmetic:
    """The arithmetic that derivatives need of JAX (derivatives.Arithmetic)."""

    @staticmethod
    def zero_unless(rank: int, root: int, array: Any) -> Any:
        """Return ``array``: the operation itself gives zeros (``Call.zeroed``)."""
        return array

    @staticmethod
    def rows(array: Any, start: int, count: int) -> Any:
        return jax.lax.slice_in_dim(array, start, start + count)

    @staticmethod
    def padded(array: Any, rows: int) -> Any:
        """Return ``array``: splits are equal."""
        return array

    @staticmethod
    def scaled(array: Any, factor: float, divisor: int | None) -> Any:
        return array * jnp.asarray(factor / (divisor or 1), array.dtype)


def _sent_back(call: Call, given: list[Any], shapes: list[tuple[int, ...]]) -> list[Any]:
    """Return the gradients of the inputs, from those that came to the outputs."""
    world, request, back = call.world, call.request, call.backward()
    adjoint = request.verb.adjoint
    assert adjoint is not None
    if adjoint.then is Then.ZERO_UNLESS_ROOT:
        back = back._replace(zeroed=world.rank != request.root)
    rows = [shape[0] if shape else 0 for shape in shapes]
    starts = [world.rank * count for count in rows]
    facts = Given(world.rank, world.size, rows, starts)
    return finish(request, facts, back.bind(given), _Arithmetic())


ad.primitive_transposes[_primitive] = _transpose


def batched(
    arrays: Sequence[Any], dims: Sequence[int | None], *, call: Call
) -> tuple[list[Any], list[int | None]]:
    """Carry out one operation on all of the batch, for vmap."""
    if call.verb is ALIKE:
        (array,), (dim,) = arrays, dims
        return call.bind([array.sum(dim, dtype=array.dtype)]), [None]
    if call.request.op == Adasum and call.verb is ALLREDUCE:
        raise FrontEndArgumentError(
            "under jax.vmap Adasum would take the whole batch for one vector: use Average or Sum"
        )
    if call.verb.makes_outputs:
        # Not as the first dimension, and not in front of one that is missing.
        arrays = [
            array if dim is None or array.ndim == 1 else jnp.moveaxis(array, dim, 1)
            for array, dim in zip(arrays, dims, strict=True)
        ]
        if any(dim is not None and a.ndim == 1 for a, dim in zip(arrays, dims, strict=True)):
            raise FrontEndArgumentError(
                f"{call.verb}: a scalar has no dimension 0; give an array of shape (1,)"
            )
        dims = [None if dim is None else 1 for dim in dims]
    return call.bind(arrays), list(dims)


batching.primitive_batchers[_primitive] = batched
