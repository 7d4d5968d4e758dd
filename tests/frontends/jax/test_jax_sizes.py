"""Programs of JAX in worlds that grow and shrink."""

from __future__ import annotations

import pytest
from forked import QUICKLY_COMPILED, ranks_after
from frameworks import is_installed
from growing import MOMENTUM, RATE, STEPS, WORLDS, batch, check, replayed, start, worlds_of

pytestmark = [
    pytest.mark.skipif(not is_installed("jax"), reason="JAX is not installed"),
    pytest.mark.skipif(not is_installed("optax"), reason="optax is not installed"),
    pytest.mark.timeout(170),
]
run_ranks = ranks_after(
    "optax", "kolovod.jax", JAX_PLATFORMS="cpu", JAX_ENABLE_X64="1", **QUICKLY_COMPILED
)
PASSES = {"jitted": 1, "passes": 2, "eager": 1}


def test_steps_in_worlds_that_grow_and_shrink():
    """What is averaged is compiled once."""

    def work(launched_as):
        import jax
        import jax.numpy as jnp
        import optax

        import kolovod.jax as kv

        kv.init(comm=[launched_as])
        trained, traced = {}, []
        for name, passes in PASSES.items():
            sgd = optax.sgd(RATE, momentum=MOMENTUM)
            optimizer = kv.DistributedOptimizer(sgd, backward_passes_per_step=passes)

            def step(params, state, data, optimizer=optimizer, name=name):
                def loss_of(params):
                    return jnp.mean((data[0] @ params[0] + params[1] - data[1]) ** 2)

                traced.append(name)
                updates, state = optimizer.update(jax.grad(loss_of)(params), state, params)
                return optax.apply_updates(params, updates), state

            params = [jnp.asarray(value + launched_as) for value in start()]
            run = step if name == "eager" else jax.jit(step)
            trained[name] = [run, params, optimizer.init(params), []]
        kv.shutdown()
        for phase in worlds_of(kv, launched_as):
            for name, each in trained.items():
                run, params, state, found = each
                params, state = kv.broadcast_pytree((params, state))
                for row in range(STEPS * PASSES[name]):
                    params, state = run(params, state, batch(phase, row, launched_as))
                each[1:3] = jax.block_until_ready((params, state))
                found += [None] * (phase - len(found)) + [[*map(jax.device_get, params)]]
        assert [traced.count(name) for name in ("jitted", "passes")] == [1, 1]
        return {name: found for name, (*_, found) in trained.items()}

    results = run_ranks(3, work, timeout_s=150)
    for name, passes in PASSES.items():
        check([each[name] for each in results], replayed(passes=passes))


def test_programs_that_ask_where_they_are_are_traced_anew():
    def work(launched_as):
        import jax
        import jax.numpy as jnp

        import kolovod
        import kolovod.jax as kv

        @jax.jit
        def by_hand(x):
            return kv.allreduce(x, op=kv.Sum) / kv.size() + kv.rank()

        @jax.jit
        def loop(x):
            return jax.lax.scan(lambda total, row: (total + row / kolovod.size(), None), 0.0, x)[0]

        rows = jax.jit(kv.allgather)
        slope = jax.jit(jax.grad(lambda x: jnp.sum(kv.broadcast(x, 0)[0])))

        for phase in worlds_of(kv, launched_as):
            size, rank, x = kv.size(), kv.rank(), jnp.full(2, launched_as + 1.0)
            assert by_hand(x).tolist() == [(size + 1) / 2 + rank] * 2
            assert loop(jnp.ones(6)) == pytest.approx(6 / size)
            assert rows(x[:1]).tolist() == [rank + 1 for rank in WORLDS[phase]]
            assert slope(x).tolist() == ([0, 0] if rank else [size, 0])

    run_ranks(3, work, timeout_s=150)
