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
from kolovod.process_sets import number_of
from kolovod.submission import Group, several
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
        process_set: Group | None = None,
    ) -> jax.Array:
        """See Collectives.allreduce. Differentiable for Average and Sum.

        Under ``jax.jit`` it needs a ``name``, and those whose inputs are ready are on their way at
        the same time (XLA runs programs of a few operations or of tiny arrays one by one, though;
        ``grouped_allreduce`` is one operation). As everything there it is left out when nothing
        depends on it: use the result on all ranks or on none. Errors are JAX's own, with the
        engine's text, and raised when the result is waited for.
        """
        scales = (prescale_factor, postscale_factor)
        (result,) = _Call(self, name, op, scales, process_set).differentiable([tensor])
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
        """See Collectives.grouped_allreduce and, under ``jax.jit``, allreduce."""
        scales = (prescale_factor, postscale_factor)
        return _Call(self, name, op, scales, process_set).differentiable(several(tensors))


class _Call(NamedTuple):
    """The arguments of an allreduce besides its arrays."""

    verbs: JaxCollectives
    name: str | None
    op: int
    scales: tuple[float, float]
    process_set: Group | None

    def differentiable(self, tensors: Sequence[jax.Array]) -> list[jax.Array]:
        if _is_traced(tensors):
            return _reduced(self, *tensors)  # type: ignore[no-any-return]
        return self.run(tensors) if tensors else []

    def run(self, tensors: Sequence[jax.Array]) -> list[jax.Array]:
        _, name, op, scales, process_set = self
        if _is_traced(tensors):
            return graph.allreduce(tensors, name, op, scales, number_of(process_set))
        # As the base class has it: here it would not end.
        return Collectives.grouped_allreduce(self.verbs, tensors, name, op, *scales, process_set)

    def backward(self) -> _Call:
        if self.op not in (Average, Sum):
            raise InvalidArgumentError(
                f"allreduce with op {Op(self.op).name} has no gradient here; use Average or Sum"
            )
        return self._replace(name=self.name and f"{self.name}.backward")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _reduced(call: _Call, *tensors: jax.Array) -> list[jax.Array]:
    return call.run(tensors)


def _forward(call: _Call, *tensors: jax.Array) -> tuple[list[jax.Array], None]:
    return _reduced(call, *tensors), None


def _backward(call: _Call, _: None, upstream: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    results = list(upstream)
    # An integer's cotangent is JAX's float0, which has no values.
    real = [i for i, u in enumerate(results) if jnp.issubdtype(u.dtype, jnp.inexact)]
    reduced = call.backward().differentiable([results[i] for i in real])
    for i, result in zip(real, reduced, strict=True):
        results[i] = result
    return tuple(results)


_reduced.defvjp(_forward, _backward)


def _is_traced(tensors: Sequence[jax.Array]) -> bool:
    return any(isinstance(tensor, jax.core.Tracer) for tensor in tensors)


collectives = JaxCollectives(JaxFrontend(), current)
