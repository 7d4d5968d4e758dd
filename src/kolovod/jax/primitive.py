"""The verbs as one primitive of JAX: what tracing, differentiation and vmap make of them.

JAX calls ``JaxCollectives.run`` for values, and the rules here for everything else. All verbs but a
reduction with Min, Max, Product or Adasum are linear in all ranks' inputs. So the derivative of a
verb is the verb itself, of tangents, and its transpose, by which gradients go back, is

| verb          | transpose                                                              |
|---------------|------------------------------------------------------------------------|
| allreduce     | the same allreduce                                                     |
| broadcast     | allreduce with Sum, then zeros on all ranks but the root               |
| allgather     | allreduce with Sum, then this rank's rows                              |
| alltoall      | alltoall                                                               |
| reducescatter | allgather, times the factors (Average: over the number of ranks, too)  |

That is the gradient of the *sum of all ranks' losses* with respect to this rank's input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from kolovod.core.ops import Adasum, Average, Op, Sum
from kolovod.core.submission import Group, WorldLike, check_arguments, position_of
from kolovod.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kolovod.jax.verbs import JaxCollectives

# Verbs that join arrays along their first dimension, or cut them there.
TOGETHER = "together"
"""No verb, but what gives arrays when all of them have values: see ``Pytrees.allreduce_pytree``."""
_BY_ROWS = ("allgather", "alltoall", "reducescatter")


class Call(NamedTuple):
    """A verb with all that it is given besides arrays; a constant of the programs it is in."""

    verb: str
    verbs: JaxCollectives
    name: str | None
    process_set: Group | None = None
    op: int = Sum
    scales: tuple[float, float] = (1.0, 1.0)
    root_rank: int = 0
    placed: bool = False
    """Whether what the program does with the results depends on which rank of how many this is."""
    zeroed: bool = False
    """Whether this rank gets zeros. A property of the operation, since programs that differ between
    ranks might come to their operations in different orders."""
    steps: tuple[str, ...] = ()
    """How it was derived from the verb that the user has called."""

    @property
    def world(self) -> WorldLike:
        """The place of this rank among those that take part. Raises what ``membership`` raises."""
        return self.verbs.membership(self.process_set)

    @property
    def full_name(self) -> str | None:
        """The name with what was derived from it: ``loss.backward``."""
        return self.name and ".".join((self.name, *self.steps))

    @property
    def is_placed(self) -> bool:
        """Whether the program is for one rank of one world only."""
        return self.placed or self.verb in _BY_ROWS or self.process_set is not None

    @property
    def root(self) -> int:
        """Where the root of a broadcast stands among those that take part."""
        is_root = self.verb == "broadcast"
        return position_of(self.root_rank, self.process_set) if is_root else self.root_rank

    def of(self, arrays: Sequence[Any]) -> list[Any]:
        """``bind`` for what the user gives. Raises InvalidArgumentError for other than arrays."""
        for array in arrays:
            if not isinstance(array, jax.Array):
                self.verbs.frontend.view(array)
        return self.bind(arrays)

    def bind(self, arrays: Sequence[Any]) -> list[Any]:
        """Run it, or make it part of what is being traced."""
        return _primitive.bind(*arrays, call=self)  # type: ignore[no-any-return]

    def tangent(self) -> Call:
        """The same for tangents. Raises InvalidArgumentError if it has no derivative."""
        if self.verb in ("allreduce", "reducescatter") and self.op not in (Average, Sum):
            raise InvalidArgumentError(
                f"{self.verb} with op {Op(self.op).name} has no gradient here; use Average or Sum"
            )
        return self._replace(steps=(*self.steps, "tangent"))

    def backward(self) -> Call:
        """The same for what comes back; the verb may still have to be exchanged."""
        steps = self.steps[:-1] if self.steps[-1:] == ("tangent",) else self.steps
        return self._replace(steps=(*steps, "backward"), placed=True)

    def check(self) -> None:
        """Raise InvalidArgumentError for what eager verbs leave to the engine's binding."""
        check_arguments(self.name, self.op, *self.scales, self.root_rank)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the result for an array of this ``shape``, the same on all ranks.

        Programs for other shapes may come to their operations in another order, and ranks that do
        would wait for each other for ever.
        """
        if self.verb not in _BY_ROWS:
            return shape
        if not shape:
            raise InvalidArgumentError(
                f"{self.verb}: a scalar has no dimension 0; give an array of shape (1,)"
            )
        size, rows = self.world.size, shape[0]
        if self.verb == "allgather":
            return (rows * size, *shape[1:])
        if rows % size != 0:
            raise InvalidArgumentError(
                f"{self.verb}: {rows} rows cannot be split evenly over {size} ranks, which must be "
                "inside jax.jit and for derivatives: there, all ranks need the same shapes"
            )
        return shape if self.verb == "alltoall" else (rows // size, *shape[1:])


_primitive = Primitive("kolovod")
_primitive.multiple_results = True
primitive = _primitive


def _run(*arrays: jax.Array, call: Call) -> list[jax.Array]:
    return call.verbs.run(call, arrays)


def _abstract(*arrays: Any, call: Call) -> list[Any]:
    call.check()
    _ = call.world  # raises now, not when the program runs
    if not arrays:
        raise InvalidArgumentError(
            "inside jax.jit a barrier needs to know its place: x = barrier(after=x), with an array "
            "that is made before and used afterwards"
        )
    return [array.update(shape=call.shape(array.shape), weak_type=False) for array in arrays]


_primitive.def_impl(_run)
_primitive.def_abstract_eval(_abstract)


def _jvp(
    arrays: Sequence[Any], tangents: Sequence[Any], *, call: Call
) -> tuple[list[Any], list[Any]]:
    results = call.bind(arrays)
    if call.verb in ("barrier", TOGETHER):
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


ad.primitive_jvps[_primitive] = _jvp


def _transpose(cotangents: Sequence[Any], *arrays: Any, call: Call) -> list[Any]:
    wanted = [i for i, array in enumerate(arrays) if ad.is_undefined_primal(array)]
    shapes = [arrays[i].aval.shape for i in wanted]
    given = [ad.instantiate_zeros(cotangents[i]) for i in wanted]
    results: list[Any] = [None] * len(arrays)
    for i, result in zip(wanted, _sent_back(call.backward(), given, shapes), strict=True):
        results[i] = result
    return results


def _sent_back(call: Call, given: list[Any], shapes: list[tuple[int, ...]]) -> list[Any]:
    """What the inputs get of what came to the outputs, by the table above."""
    world = call.world
    if call.verb == "broadcast":
        summed = call._replace(verb="allreduce", op=Sum, zeroed=world.rank != call.root)
        return summed.bind(given)
    if call.verb == "allgather":
        totals = call._replace(verb="allreduce", op=Sum).bind(given)
        return [
            jax.lax.slice_in_dim(total, world.rank * shape[0], (world.rank + 1) * shape[0])
            for total, shape in zip(totals, shapes, strict=True)
        ]
    if call.verb == "reducescatter":
        factor = call.scales[0] * call.scales[1] / (world.size if call.op == Average else 1)
        gather = call._replace(verb="allgather", op=Sum, scales=(1.0, 1.0))
        return [whole * jnp.asarray(factor, whole.dtype) for whole in gather.bind(given)]
    return call.bind(given)  # allreduce, alltoall


ad.primitive_transposes[_primitive] = _transpose


def _batch(
    arrays: Sequence[Any], dims: Sequence[int | None], *, call: Call
) -> tuple[list[Any], list[int | None]]:
    """For vmap: one operation on all of the batch."""
    if call.op == Adasum and call.verb == "allreduce":
        raise InvalidArgumentError(
            "under jax.vmap Adasum would take the whole batch for one vector: use Average or Sum"
        )
    if call.verb in _BY_ROWS:
        # Not as the first dimension, and not in front of one that is missing.
        arrays = [
            array if dim is None or array.ndim == 1 else jnp.moveaxis(array, dim, 1)
            for array, dim in zip(arrays, dims, strict=True)
        ]
        if any(dim is not None and a.ndim == 1 for a, dim in zip(arrays, dims, strict=True)):
            raise InvalidArgumentError(
                f"{call.verb}: a scalar has no dimension 0; give an array of shape (1,)"
            )
        dims = [None if dim is None else 1 for dim in dims]
    return call.bind(arrays), list(dims)


batching.primitive_batchers[_primitive] = _batch
