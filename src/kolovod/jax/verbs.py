"""The verbs on JAX's arrays, eager or inside ``jax.jit``, with derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kolovod import _native
from kolovod.core.collectives import Collectives
from kolovod.core.handles import Handle
from kolovod.core.ops import Average, Sum
from kolovod.core.submission import Group, position_of, several
from kolovod.core.world import current
from kolovod.errors import InvalidArgumentError
from kolovod.jax.frontend import JaxFrontend
from kolovod.jax.primitive import TOGETHER, Call

_BROADCAST = _native.VERBS["broadcast"]


class JaxCollectives(Collectives[jax.Array]):
    """The verbs on arrays. The blocking ones work inside ``jax.jit``, too, and in what it traces.

    There, operations whose inputs are ready are on their way at the same time (XLA runs programs of
    a few operations or of tiny arrays one by one, though; a group is one operation). As everything
    inside ``jax.jit`` they are left out when nothing depends on them: use a result on all ranks or
    on none. Ranks match operations by name; a ``name`` of None is made of the program's and the
    operation's place in it. Errors of the engine are JAX's own, with the engine's text, and raised
    when a result is waited for.

    They can be differentiated, forwards and backwards; the reductions with Average and Sum only.
    The gradient is that of the *sum of all ranks' losses* (see kolovod.jax.primitive). Under
    ``jax.vmap`` a batch is one operation.
    """

    def allreduce(
        self,
        tensor: jax.Array,
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
    ) -> jax.Array:
        """See Collectives.allreduce."""
        scales = (prescale_factor, postscale_factor)
        (result,) = Call("allreduce", self, name, process_set, op, scales).of([tensor])
        return result

    def grouped_allreduce(
        self,
        tensors: Sequence[jax.Array],
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
    ) -> list[jax.Array]:
        """See Collectives.grouped_allreduce."""
        scales = (prescale_factor, postscale_factor)
        return _group(Call("allreduce", self, name, process_set, op, scales), tensors)

    def broadcast(
        self,
        tensor: jax.Array,
        root_rank: int = 0,
        name: str | None = None,
        process_set: Group | None = None,
    ) -> jax.Array:
        """See Collectives.broadcast."""
        call = Call("broadcast", self, name, process_set, root_rank=root_rank)
        (result,) = call.of([tensor])
        return result

    def allgather(
        self, tensor: jax.Array, name: str | None = None, process_set: Group | None = None
    ) -> jax.Array:
        """See Collectives.allgather. Inside ``jax.jit`` all ranks need the same shape."""
        (result,) = Call("allgather", self, name, process_set).of([tensor])
        return result

    def grouped_allgather(
        self,
        tensors: Sequence[jax.Array],
        name: str | None = None,
        process_set: Group | None = None,
    ) -> list[jax.Array]:
        """See Collectives.grouped_allgather, and allgather."""
        return _group(Call("allgather", self, name, process_set), tensors)

    def alltoall(
        self,
        tensor: jax.Array,
        splits: Sequence[int] | None = None,
        name: str | None = None,
        process_set: Group | None = None,
    ) -> tuple[jax.Array, list[int]]:
        """See Collectives.alltoall. Derivatives, and what is inside ``jax.jit``, need equal splits.

        These are the default; other ``splits`` are for arrays with values.
        """
        if splits is not None and not isinstance(tensor, jax.core.Tracer):
            return super().alltoall(tensor, splits, name, process_set)
        if splits is not None:
            raise InvalidArgumentError(
                f"alltoall: splits is {splits!r}, but inside jax.jit, where shapes are fixed, they "
                "must be equal: leave it out"
            )
        (result,) = Call("alltoall", self, name, process_set).of([tensor])
        size = self.membership(process_set).size
        return result, [result.shape[0] // size] * size

    def reducescatter(
        self,
        tensor: jax.Array,
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
    ) -> jax.Array:
        """See Collectives.reducescatter. Inside ``jax.jit`` rows must be divisible by the ranks."""
        scales = (prescale_factor, postscale_factor)
        (result,) = Call("reducescatter", self, name, process_set, op, scales).of([tensor])
        return result

    def grouped_reducescatter(
        self,
        tensors: Sequence[jax.Array],
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
    ) -> list[jax.Array]:
        """See Collectives.grouped_reducescatter."""
        scales = (prescale_factor, postscale_factor)
        return _group(Call("reducescatter", self, name, process_set, op, scales), tensors)

    def barrier(
        self, name: str | None = None, process_set: Group | None = None, *, after: Any = None
    ) -> Any:
        """See Collectives.barrier. Returns ``after``, a pytree of arrays that come before.

        It is passed once these have values; and what uses the result runs after the barrier, also
        inside ``jax.jit``, where nothing else says when that is.
        """
        arrays, tree = jax.tree.flatten(after)
        return jax.tree.unflatten(tree, Call("barrier", self, name, process_set).of(arrays))

    def together(
        self, arrays: Sequence[jax.Array], process_set: Group | None = None
    ) -> list[jax.Array]:
        """``arrays``, inside ``jax.jit`` not before all of them are there.

        XLA would use the memory of those that are over for what comes next, and backward would
        wait for each (where the step donates its parameters, say).
        """
        if not any(isinstance(array, jax.core.Tracer) for array in arrays):
            return list(arrays)
        return Call(TOGETHER, self, None, process_set).bind(arrays)

    def run(self, call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """For ``call.bind`` when the arrays have values: the verb of the base class."""
        results = self._run_verb(call, arrays)
        return [jnp.zeros_like(each) for each in results] if call.zeroed else results

    def _run_verb(self, call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        if call.verb == TOGETHER:
            return list(arrays)
        name, group = call.name and call.full_name, call.process_set
        one = len(arrays) == 1
        if call.verb in ("allreduce", "reducescatter"):
            reduction = (name, call.op, *call.scales, group)
            if one:
                verb = getattr(super(), call.verb)
                return [verb(arrays[0], *reduction)]
            return getattr(super(), f"grouped_{call.verb}")(arrays, *reduction)  # type: ignore[no-any-return]
        if call.verb == "allgather":
            if one:
                return [super().allgather(arrays[0], name, group)]
            return super().grouped_allgather(arrays, name, group)
        if call.verb == "alltoall":
            return [super().alltoall(arrays[0], None, name, group)[0]]
        if call.verb == "broadcast":
            if one:
                return [super().broadcast(arrays[0], call.root_rank, name, group)]
            return self._grouped_broadcast(arrays, call.root_rank, name, group)
        jax.block_until_ready(arrays)
        super().barrier(name, group)
        return list(arrays)

    def _grouped_broadcast(
        self, arrays: Sequence[jax.Array], root_rank: int, name: str | None, group: Group | None
    ) -> list[jax.Array]:
        fresh = [self._fresh(array) for array in arrays]
        outputs = [each[1] for each in fresh]
        root = position_of(root_rank, group)
        entries = [each[0] for each in fresh]
        buffers = (arrays, outputs)
        handle: Handle[list[jax.Array]] = self._start(
            group, _BROADCAST, name, entries, Sum, 1.0, 1.0, root, buffers, outputs, None, True
        )
        return handle.wait()


def _group(call: Call, tensors: Sequence[jax.Array]) -> list[jax.Array]:
    return call.of(several(tensors)) if tensors else []


collectives = JaxCollectives(JaxFrontend(), current)
