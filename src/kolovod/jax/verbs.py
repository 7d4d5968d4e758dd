"""The verbs on JAX's arrays, eager or inside ``jax.jit``, with derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kolovod.core.collectives import Collectives
from kolovod.core.submission import Group, Request
from kolovod.core.verbs import ALLTOALL, BARRIER
from kolovod.core.world import current
from kolovod.errors import InvalidArgumentError
from kolovod.jax import repeated
from kolovod.jax.frontend import JaxFrontend
from kolovod.jax.primitive import TOGETHER, Call


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
        """See Collectives.new."""
        (result,) = self._called(request, [tensor])
        return result

    def new_with_rows(
        self, request: Request, tensors: Sequence[Any]
    ) -> tuple[list[Any], list[list[int]]]:
        """See Collectives.new_with_rows. The rows are those of an alltoall."""
        if not tensors:
            return [], []
        if request.verb is not ALLTOALL:
            return self._called(request, tensors), []
        (tensor,) = tensors
        if request.splits is None:
            (result,) = Call(request, self).of([tensor])
            size = self.membership(request.process_set).size
            return [result], [[result.shape[0] // size] * size]
        if isinstance(tensor, jax.core.Tracer):
            raise InvalidArgumentError(
                f"alltoall: splits is {request.splits!r}, but inside jax.jit, where shapes are "
                "fixed, they must be equal: leave it out"
            )
        return super().new_with_rows(request, tensors)

    def _called(self, request: Request, arrays: Sequence[Any]) -> list[Any]:
        call = Call(request, self)
        if repeated.is_for(call, arrays):
            return repeated.bind(call, call.checked(arrays))
        return call.of(arrays)

    def barrier(
        self, name: str | None = None, process_set: Group | None = None, *, after: Any = None
    ) -> Any:
        """See Collectives.barrier. Returns ``after``, a pytree of arrays that come before.

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

    def run(self, call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """For ``call.bind`` when the arrays have values: the verb of the base class."""
        if call.verb is TOGETHER:
            return list(arrays)
        request = call.request._replace(name=call.full_name)
        if call.verb is BARRIER:
            jax.block_until_ready(arrays)
            super().barrier(request.name, request.process_set)
            return list(arrays)
        results, _ = super().new_with_rows(request, arrays)
        return [jnp.zeros_like(each) for each in results] if call.zeroed else results


collectives = JaxCollectives(JaxFrontend(), current)
