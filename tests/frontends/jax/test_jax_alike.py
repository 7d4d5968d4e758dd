"""Ranks that train by an optimizer of JAX hear it when they are not alike, in jax.jit or not."""

from __future__ import annotations

import os
from typing import Any

import pytest
from forked import QUICKLY_COMPILED, ranks_after
from frameworks import is_installed
from slow import slow_but

pytestmark = [
    pytest.mark.skipif(not is_installed("jax"), reason="JAX is not installed"),
    pytest.mark.skipif(not is_installed("optax"), reason="optax is not installed"),
]
run_ranks = ranks_after("optax", "kolovod.jax", JAX_PLATFORMS="cpu", **QUICKLY_COMPILED)
LIMIT_S = 150
STEPS = 6


def trained(kv: Any, way: str, inside: bool, process_set: Any = None) -> list[str]:
    """What is said, once or more, when rank 1 gets something of its own after three steps."""
    import jax
    import jax.numpy as jnp
    import optax

    from kolovod import notices
    from kolovod.jax import alike

    alike._told.clear()
    notices.kept.clear()
    rated = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
    if way == "chain":
        optimizer = optax.chain(kv.average_gradients(process_set=process_set), optax.adam(0.1))
    else:
        options = {"shard_state": way == "sharded", "process_set": process_set}
        plain = optax.adam(0.1) if way == "sharded" else rated
        passes = 2 if way == "passes" else 1
        optimizer = kv.DistributedOptimizer(plain, backward_passes_per_step=passes, **options)
    params = {"layer": {"weight": jnp.ones((3, 2)), "bias": jnp.zeros(2)}, "norm": jnp.ones(5)}
    state = optimizer.init(params)

    if way == "ignored":
        optimizer = kv.DistributedOptimizer(optax.apply_if_finite(rated, 5))
        state = optimizer.init(params)

    def step(params: Any, state: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            return ((x @ p["layer"]["weight"] + p["layer"]["bias"]) ** 2).mean() + p["norm"].sum()

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    if inside:
        step = jax.jit(step)
    for turn in range(STEPS):
        if turn == 3 and kv.rank() == 1:
            if way == "rate":
                state[1].hyperparams["learning_rate"] = jnp.float32(0.25)
            elif way not in ("alike", "nan", "ignored"):
                params["layer"]["bias"] = params["layer"]["bias"] + 1
        is_bad = turn == 3 and kv.rank() == 1 and way in ("nan", "ignored")
        x = jnp.full((4, 3), jnp.nan if is_bad else kv.rank() + 1.0)
        params, state = step(params, state, x)
    jax.block_until_ready(params)
    return list(notices.kept)


WAYS = ["alike", "weights", "rate", "nan", "ignored", "chain", "sharded", "passes"]


def each_way(rank: int, inside: bool) -> dict[str, list[str]]:
    import kolovod.jax as kv

    kv.init()
    ways = WAYS if inside else WAYS[:4]
    found = {way: trained(kv, way, inside) for way in ways}
    pair = kv.add_process_set([0, 1])
    found["set"] = trained(kv, "weights", inside, pair)
    alone = kv.add_process_set([0, 2])
    found["without"] = trained(kv, "weights", inside, alone)
    kv.shutdown()
    return found


@pytest.mark.parametrize("inside", slow_but([False], [True, False]))
def test_what_rank_0_says(inside: bool) -> None:
    first, *others = run_ranks(3, each_way, inside, timeout_s=LIMIT_S)
    for found in others:
        assert not any(found.values()), found
    assert first["alike"] == first["without"] == first.pop("ignored", []) == []
    (bad,) = first.pop("nan")
    assert bad.startswith("gradients of rank 1 are not finite")
    assert "of '['layer']['bias']'" in bad
    (rate,) = first["rate"]
    assert "option '[1].hyperparams['learning_rate']'" in rate
    assert "ranks 0, 2 have 0.10000000149011612, rank 1 has 0.25" in rate
    for way in first.keys() - {"alike", "rate", "without"}:
        (text,) = first[way]
        assert "in JAX's optimizer 'gradients': parameter '['layer']['bias']'" in text
        assert "broadcast_pytree" in text
        other = "each rank has values of its own" if way == "set" else "rank 1 has other values"
        assert other in text


def fails(rank: int, inside: bool) -> str:
    import kolovod.jax as kv

    kv.init()
    with pytest.raises(Exception, match="KOLOVOD_SENTINEL=error") as caught:
        trained(kv, "weights", inside)
    return str(caught.value)


@pytest.mark.parametrize("inside", slow_but([True], [True, False]))
def test_an_error_by_choice(inside: bool) -> None:
    env = {"KOLOVOD_SENTINEL": "error"}
    for text in run_ranks(2, fails, inside, timeout_s=LIMIT_S, env=env):
        assert "parameter '['layer']['bias']'" in text


def keeps_programs(rank: int, folder: str) -> list[str]:
    import jax

    import kolovod.jax as kv

    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    kv.init()
    trained(kv, "weights", True)
    kv.barrier()
    return sorted(name for name in os.listdir(folder) if name.startswith("jit_step"))


def test_programs_stay_in_the_persistent_cache_and_are_those_of_every_rank(tmp_path: Any) -> None:
    by_rank = run_ranks(2, keeps_programs, str(tmp_path), timeout_s=LIMIT_S)
    for names in by_rank:
        assert len({name.removesuffix("-cache").removesuffix("-atime") for name in names}) == 1


def within_transforms(rank: int) -> list[float]:
    """An update whose derivative is asked for, and one of a batch of models."""
    import jax
    import jax.numpy as jnp
    import optax

    import kolovod.jax as kv

    kv.init()
    optimizer = kv.DistributedOptimizer(optax.sgd(0.5))

    def after(params: Any, x: Any) -> Any:
        grad = jax.grad(lambda p: (p * x).sum())(params)
        updates, _ = optimizer.update(grad, optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    params = jnp.ones(2)
    through = jax.jit(jax.grad(lambda p: after(p, jnp.full(2, rank + 1.0)).sum()))(params)
    batch = jax.jit(jax.vmap(after))(jnp.ones((3, 2)), jnp.full((3, 2), rank + 1.0))
    kv.shutdown()
    return [*through.tolist(), *batch[:, 0].tolist()]


def test_derivatives_and_batches() -> None:
    wanted = [1.0, 1.0, 0.25, 0.25, 0.25]
    assert run_ranks(2, within_transforms, timeout_s=LIMIT_S) == [wanted] * 2
