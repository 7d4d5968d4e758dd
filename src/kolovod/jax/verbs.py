"""The verbs on JAX's arrays, eager or under ``jax.jit``, with gradients.

As for PyTorch, the gradient is that of the *sum of all ranks' losses* with respect to this rank's
input: the gradient of an Average is an Average, that of a Sum a Sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kolovod.collectives import Collectives
from kolovod.errors import InvalidArgumentError
from kolovod.jax import graph
from kolovod.jax.frontend import JaxFrontend
from kolovod.ops import Average, Op, Sum
from kolovod.submission import several
from kolovod.world import current


class JaxCollectives(Collectives[jax.Array]):
    """The verbs on arrays. ``allreduce`` and ``grouped_allreduce`` work under ``jax.jit`` too.

    These two can be differentiated (``jax.grad``, not ``jax.jvp``); the others see values only.
    """

    def allreduce(
        self,
        tensor: jax.Array,
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> jax.Array:
        """See Collectives.allreduce. Differentiable for Average and Sum.

        Under ``jax.jit`` it needs a ``name``, and all those whose inputs are ready are on their way
        at the same time. As everything there it is left out when nothing depends on the result:
        use that on all ranks or on none. Errors are then JAX's, raised when the result is asked
        for: jax.errors.JaxRuntimeError with the engine's text.
        """
        scales = (prescale_factor, postscale_factor)
        (result,) = self._reduced([tensor], name, op, scales)
        return result

    def grouped_allreduce(
        self,
        tensors: Sequence[jax.Array],
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> list[jax.Array]:
        """See Collectives.grouped_allreduce and, under ``jax.jit``, allreduce."""
        scales = (prescale_factor, postscale_factor)
        return self._reduced(list(several(tensors)), name, op, scales)

    def _reduced(
        self, tensors: Sequence[jax.Array], name: str | None, op: int, scales: tuple[float, float]
    ) -> list[jax.Array]:
        if not tensors:
            return []
        if not _is_traced(tensors):
            return super().grouped_allreduce(tensors, name, op, *scales)
        return _differentiable(_Call(self, name, op, scales), *tensors)


class _Call(NamedTuple):
    verbs: JaxCollectives
    name: str | None
    op: int
    scales: tuple[float, float]

    def run(self, tensors: Sequence[jax.Array]) -> list[jax.Array]:
        if _is_traced(tensors):
            return graph.allreduce(tensors, self.name, self.op, self.scales)
        # Within jax.grad, but not within jax.jit.
        return Collectives.grouped_allreduce(self.verbs, tensors, self.name, self.op, *self.scales)

    def backward(self) -> _Call:
        return self._replace(name=self.name and f"{self.name}.backward")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(call: _Call, *tensors: jax.Array) -> list[jax.Array]:
    return call.run(tensors)


def _forward(call: _Call, *tensors: jax.Array) -> tuple[list[jax.Array], None]:
    return _differentiable(call, *tensors), None


def _backward(call: _Call, _: None, upstream: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    if call.op not in (Average, Sum):
        raise InvalidArgumentError(
            f"allreduce with op {Op(call.op).name} has no gradient here; use Average or Sum"
        )
    results = list(upstream)
    # An integer's cotangent is JAX's float0, which has no values.
    real = [i for i, u in enumerate(results) if jnp.issubdtype(u.dtype, jnp.inexact)]
    reduced = call.verbs.grouped_allreduce(
        [results[i] for i in real], call.backward().name, call.op, *call.scales
    )
    for i, result in zip(real, reduced, strict=True):
        results[i] = result
    return tuple(results)


_differentiable.defvjp(_forward, _backward)


def _is_traced(tensors: Sequence[jax.Array]) -> bool:
    return any(isinstance(tensor, jax.core.Tracer) for tensor in tensors)


collectives = JaxCollectives(JaxFrontend(), current)
