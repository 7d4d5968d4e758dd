"""Ranks of one job that use different frameworks: the engine knows names and bytes only."""

from __future__ import annotations

import numpy as np
import pytest
from forked import ranks_after
from frameworks import is_installed

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.skipif(not is_installed("jax"), reason="JAX is not installed"),
    pytest.mark.skipif(not is_installed("torch"), reason="PyTorch is not installed"),
    pytest.mark.timeout(120),
]
run_ranks = ranks_after("torch", "jax", JAX_PLATFORMS="cpu", JAX_ENABLE_X64="1")
SHAPES = {"w": (300, 7), "b": (7,), "scale": ()}


def torch_part():
    """Rank 0's, in PyTorch; the same by the names of its operations."""
    import torch

    import kolovod.torch as kv

    # All of them before waiting for one: in what order XLA comes to them is not said.
    handles = [
        kv.allreduce_async(torch.full(shape, 1.0), name, kv.Sum) for name, shape in SHAPES.items()
    ]
    handles.append(kv.allreduce_async(torch.ones(3, dtype=torch.bfloat16), "half", kv.Sum))
    x = torch.arange(4.0, dtype=torch.float64, requires_grad=True)
    kv.allreduce(x, "loss").square().sum().backward()
    start = kv.broadcast(torch.full((5,), 7, dtype=torch.int32), 1, "start")
    rows = kv.allgather(torch.zeros(1, 2), "rows")
    *totals, half = [handle.wait() for handle in handles]
    results = [*totals, half.float(), x.grad, start, rows]
    return [result.detach().numpy() for result in results]


def jax_part():
    """Rank 1's, in JAX: in one program, and the verbs whose shapes differ outside of it."""
    import jax
    import jax.numpy as jnp

    import kolovod.jax as kv

    @jax.jit
    def program(x):
        totals = [
            kv.allreduce(jnp.full(shape, 2.0, jnp.float32), name, kv.Sum)
            for name, shape in SHAPES.items()
        ]
        half = kv.allreduce(jnp.full(3, 2, jnp.bfloat16), "half", kv.Sum)
        gradient = jax.grad(lambda x: jnp.square(kv.allreduce(x, "loss")).sum())(x)
        return [*totals, half.astype(jnp.float32), gradient]

    results = program(jnp.arange(4.0) + 2)
    start = kv.broadcast(jnp.full(5, 9, jnp.int32), 1, "start")
    rows = kv.allgather(jnp.ones((2, 2), jnp.float32), "rows")
    return [np.asarray(result) for result in (*results, start, rows)]


def test_a_torch_rank_and_a_jax_rank():
    """The same operations, bit for bit the same results."""

    def work(rank):
        import kolovod

        kolovod.init()
        results = [torch_part, jax_part][rank]()
        kolovod.shutdown()
        return results

    of_torch, of_jax = run_ranks(2, work, timeout_s=60)
    wanted = [
        *(np.full(shape, 3.0) for shape in SHAPES.values()),
        np.full(3, 3.0),
        2 * (np.arange(4.0) + 1),  # both losses' gradients, averaged
        np.full(5, 9),
        np.repeat([[0.0], [1.0], [1.0]], 2, axis=1),
    ]
    for mine, other, right in zip(of_torch, of_jax, wanted, strict=True):
        assert mine.dtype == other.dtype
        np.testing.assert_array_equal(mine, other)
        np.testing.assert_array_equal(mine, right)
