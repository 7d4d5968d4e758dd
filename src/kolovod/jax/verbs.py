"""The verbs on JAX's arrays, eager or inside ``jax.jit``, with derivatives."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kolovod.core.call_lines import traced_line
from kolovod.core.collectives import Collectives
from kolovod.core.submission import Group, Request, check_further
from kolovod.core.verbs import ALLTOALL, BARRIER
from kolovod.core.world import current
from kolovod.errors import FrontEndArgumentError
from kolovod.jax import repeated
from kolovod.jax.alike import look
from kolovod.jax.frontend import DTYPES, JaxFrontend
from kolovod.jax.primitive import ALIKE, TOGETHER, Call

_SAME_BITS = {
    **{jnp.dtype(f"uint{bits}"): jnp.dtype(f"int{bits}") for bits in (32, 64)},
    **{dtype: jnp.dtype("uint8") for dtype in DTYPES if dtype.name.startswith("float8")},
}
"""The dtypes that programs send instead of those that the engine does not know."""


def as_sent(array: Any, request: Request) -> Any:
    """``array``, or what a program sends in its place."""
    if not isinstance(array, jax.core.Tracer) or array.dtype not in DTYPES:
        return array
    check_further(DTYPES[array.dtype], request)
    if array.dtype in _SAME_BITS:
        return jax.lax.bitcast_convert_type(array, _SAME_BITS[array.dtype])
    if not jnp.iscomplexobj(array) or (request.verb.makes_outputs and not array.shape):
        return array
    return jnp.stack([array.real, array.imag], -1)


def as_kept(result: Any, array: Any) -> Any:
    """The result for ``array``, of which ``as_sent`` was sent."""
    if result.dtype == array.dtype:
        return result
    if jnp.iscomplexobj(array):
        return jax.lax.complex(result[..., 0], result[..., 1])
    return jax.lax.bitcast_convert_type(result, array.dtype)


class JaxCollectives(Collectives):
    """The verbs on arrays. The blocking ones work inside ``jax.jit``, too, and in what it traces.

    There, operations whose inputs are ready are on their way at the same time (XLA runs programs of
    a few operations or of tiny arrays one by one, though; a group is one operation). As everything
    inside ``jax.jit`` they are left out when nothing depends on them: use a result on all ranks or
    on none. Ranks match operations by name; a ``name`` of None is made of the program's and the
    operation's place in it. Errors of the engine are JAX's own, with the engine's text, and raised
    when a result is waited for.

    Inside ``jax.jit`` shapes are fixed: an allgather needs the same shape on all ranks there, a
    reducescatter and an alltoall rows that are divisible by the number of ranks, and an alltoall
    equal splits, which are the default; so do derivatives.

    They can be differentiated, forwards and backwards; the reductions with Average and Sum only.
    The gradient is that of the *sum of all ranks' losses* (see kolovod.core.derivatives). Under
    ``jax.vmap`` a batch is one operation.
    """

    def new(self, request: Request, tensor: Any) -> Any:
        """Carry out ``request`` on one array, into a new one."""
        (result,) = self._called(request, [tensor])
        return result

    def new_with_rows(
        self, request: Request, tensors: Sequence[Any]
    ) -> tuple[list[Any], list[list[int]]]:
        """Carry out ``request`` on several arrays; return results, and the rows of an alltoall."""
        if not tensors:
            return [], []
        if request.verb is not ALLTOALL:
            return self._called(request, tensors), []
        (tensor,) = tensors
        if request.splits is None:
            (result,) = self._called(request, [tensor])
            size = self.membership(request.process_set).size
            return [result], [[result.shape[0] // size] * size]
        if isinstance(tensor, jax.core.Tracer):
            raise FrontEndArgumentError(
                f"alltoall: splits is {request.splits!r}, but inside jax.jit, where shapes are "
                "fixed, they must be equal: leave it out"
            )
        return super().new_with_rows(request, tensors)

    def _called(self, request: Request, arrays: Sequence[Any]) -> list[Any]:
        call = Call(request, self)
        sent = [as_sent(array, request) for array in call.checked(arrays)]
        if request.name is None and any(isinstance(array, jax.core.Tracer) for array in sent):
            call = call._replace(line=traced_line(_is_of_jax))
        results = repeated.bind(call, sent) if repeated.is_for(call, sent) else call.bind(sent)
        return [as_kept(result, array) for result, array in zip(results, arrays, strict=True)]

    def barrier(
        self, name: str | None = None, process_set: Group | None = None, *, after: Any = None
    ) -> Any:
        """Wait until all ranks have called it; return ``after``, a pytree of arrays before it.

        It is passed once these have values; and what uses the result runs after the barrier, also
        inside ``jax.jit``, where nothing else says when that is.
        """
        arrays, tree = jax.tree.flatten(after)
        call = Call(Request(BARRIER, name, process_set), self)
        return jax.tree.unflatten(tree, call.of(arrays))

    def together(
        self, arrays: Sequence[jax.Array], process_set: Group | None = None
    ) -> list[jax.Array]:
        """``arrays``, inside ``jax.jit`` not before all of them are there.

        XLA would use the memory of those that are over for what comes next, and backward would
        wait for each (where the step donates its parameters, say).
        """
        if not any(isinstance(array, jax.core.Tracer) for array in arrays):
            return list(arrays)
        return Call(Request(TOGETHER, None, process_set), self).bind(arrays)

    def compared(
        self, facts: jax.Array, about: str, name: str, process_set: Group | None
    ) -> jax.Array:
        """``facts``, which are to be the same on all ranks; else they are told: see alike.py."""
        (same,) = Call(Request(ALIKE, name, process_set), self, about=about).bind([facts])
        return same

    def run(self, call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Carry out the verb of the base class, for ``call.bind`` when the arrays have values."""
        if call.verb is TOGETHER:
            return list(arrays)
        if call.verb is ALIKE:
            look(call, arrays[0])
            return list(arrays)
        request = call.request._replace(name=call.full_name)
        if call.verb is BARRIER:
            jax.block_until_ready(arrays)
            super().barrier(request.name, request.process_set)
            return list(arrays)
        results, _ = super().new_with_rows(request, arrays)
        return [jnp.zeros_like(each) for each in results] if call.zeroed else results


collectives = JaxCollectives(JaxFrontend(), current)


def _is_of_jax(file: str) -> bool:
    return f"{os.sep}jax{os.sep}_src{os.sep}" in file
