"""Programs of JAX in an elastic job: a step that a death interrupts is repeated as a whole."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from exact_steps import SIZES, begin, check, killed, share
from forked import QUICKLY_COMPILED, ranks_after
from frameworks import is_installed
from slow import slow_but, thorough_but
from survivors import NoLoss

pytestmark = [
    pytest.mark.skipif(not is_installed("jax"), reason="JAX is not installed"),
    pytest.mark.skipif(not is_installed("optax"), reason="optax is not installed"),
    pytest.mark.timeout(150),
]
run_ranks = ranks_after(
    "optax", "kolovod.jax", JAX_PLATFORMS="cpu", JAX_ENABLE_X64="1", **QUICKLY_COMPILED
)
KINDS = ["jitted", "eager", "passes", "verbs", "bf16", "places"]


def train(rank: int, kind: str, victim: int, seed: int) -> Any:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import kolovod.jax as kv

    begin(kv, rank, victim)
    passes = 2 if kind == "passes" else 1
    options = {"compression": kv.Compression.bf16} if kind == "bf16" else {}
    optimizer = kv.DistributedOptimizer(
        optax.sgd(1.0), op=kv.Sum, backward_passes_per_step=passes, **options
    )
    keys = jax.random.split(jax.random.key(1), len(SIZES))
    wide = [jax.random.normal(k, s) for k, s in zip(keys, itertools.pairwise(SIZES), strict=False)]
    params = [jnp.zeros(()), *wide]
    traced = []

    def step(params: Any, state: Any, scale: Any, rows: Any) -> Any:
        traced.append(kv.size() if kind == "places" else 0)

        def loss_of(params: Any) -> Any:
            x = rows
            for weight in params[1:]:
                x = jnp.tanh(x @ weight)
            return scale / passes * params[0] + 0.01 * jnp.mean(x * x)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(grads, state, params)
        if kind == "verbs":  # steps of their own, in the order of the program
            loss = kv.allreduce(kv.broadcast(kv.allreduce(loss, op=kv.Sum), 0))
        return optax.apply_updates(params, updates), state, loss

    run = step if kind == "eager" else jax.jit(step, donate_argnums=(0, 1))
    state, losses = optimizer.init(params), []

    def once(number: int) -> None:
        nonlocal params, state
        rows = jax.random.normal(jax.random.key(10 * number + rank), (4, SIZES[0]))
        for _ in range(passes):
            params, state, loss = run(params, state, share(rank, number), rows)
        losses.append(loss if kind == "verbs" else 0)

    log = killed(rank, victim, seed, once, lambda: float(params[0]))
    if kind == "places":  # the program knows how many ranks there are: traced anew in a new world
        assert traced == [3, 2]
    elif kind != "eager":
        assert len(traced) == 1
    return log, [np.asarray(each).tobytes() for each in (*params, *losses)]


@pytest.mark.parametrize("kind", slow_but(["jitted"], KINDS))
def test_survivors_go_on_with_the_same_step(kind: str) -> None:
    victim = KINDS.index(kind) % 3
    check(run_ranks(3, train, kind, victim, len(kind), keep_going=True), victim)


@pytest.mark.slow
@pytest.mark.parametrize("seed", thorough_but(range(4), range(12)))
def test_whenever_the_kill_comes(seed: int) -> None:
    check(run_ranks(3, train, "jitted", seed % 3, seed, keep_going=True), seed % 3)


def under_derivatives_and_vmap(rank: int) -> None:
    """There a verb is what it is in other jobs; within a program of one core, too."""
    import os

    import jax
    import jax.numpy as jnp

    import kolovod.jax as kv
    from kolovod.core.transaction import transaction, use_transaction
    from kolovod.core.world import current
    from kolovod.elastic.steps import Steps

    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[0]})
    kv.init()
    use_transaction(Steps(NoLoss(), current))
    x = jnp.full(3, rank + 1.0)
    assert jax.jit(kv.allreduce)(x).tolist() == [1.5] * 3
    assert jax.jit(jax.grad(lambda x: kv.allreduce(x)[0]))(x).tolist() == [1.0, 0, 0]
    assert jax.grad(jax.jit(lambda x: kv.allreduce(x)[0]))(x).tolist() == [1.0, 0, 0]
    assert jax.jit(jax.vmap(lambda y: kv.allreduce(y, "v")))(x).tolist() == [1.5] * 3
    assert jax.jit(kv.allgather)(x).tolist() == [1.0] * 3 + [2.0] * 3
    large = jax.jit(lambda x: kv.allreduce(x @ x, op=kv.Sum) + 1)(jnp.ones((700, 700)))
    assert large[0, 0] == 1401
    assert transaction().passed == 2
    with jax.disable_jit():
        assert jax.jit(kv.allreduce)(x).tolist() == [1.5] * 3


def test_verbs_under_derivatives_and_vmap() -> None:
    run_ranks(2, under_derivatives_and_vmap)
