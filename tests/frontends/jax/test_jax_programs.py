"""Programs that operations are part of: what overlaps, what is refused, and errors."""

from __future__ import annotations

import re
import threading
import time

import numpy as np
import pytest
from forked import run_jax_ranks
from frameworks import is_installed
from growing import WORLDS, worlds_of

import kolovod
from kolovod.core.ops import Sum
from kolovod.errors import InvalidArgumentError, NotInitializedError

pytestmark = [
    pytest.mark.skipif(not is_installed("jax"), reason="JAX is not installed"),
    pytest.mark.timeout(170),
]
LIMIT_S = 150


def engine():
    """That of this rank."""
    return kolovod.core.world.current().engine


def while_the_other_is_late(kv, rank, program, arguments, count):
    """Rank 1 runs ``program`` only when rank 0 has ``count`` operations on their way, at most so.

    Both have compiled it, so that rank 0 is ready when the other is.
    """
    import jax

    program = program.lower(*arguments).compile()
    kv.barrier("both are ready")
    if rank == 1:
        kv.barrier("rank 0 has them")
        return jax.block_until_ready(program(*arguments))
    results = []
    thread = threading.Thread(target=lambda: results.append(program(*arguments)))
    thread.start()
    deadline = time.monotonic() + 60
    while engine().pending() < count:
        assert time.monotonic() < deadline, engine().pending()
        time.sleep(0.002)
    time.sleep(0.05)  # for more than there should be
    assert engine().pending() == count
    kv.barrier("rank 0 has them")
    thread.join(60)
    return jax.block_until_ready(results[0])


@pytest.mark.slow
def test_32_gradients_are_in_flight():
    """Though what is computed later could take the memory of what is sent; 32 buckets, too.

    These also where the step donates its weights. The rounds of a loop follow each other.
    """

    def work(rank):
        import jax
        import jax.numpy as jnp

        import kolovod.jax as kv
        from kolovod.gradients import plan

        kv.init()
        plan.BUCKET_BYTES = 1  # one array in each

        def gradients_of(weights, x):
            def loss_of(weights):
                y = x
                for weight in weights:
                    y = jnp.tanh(y @ weight)
                return y.sum()

            return jax.grad(loss_of)(weights)

        def averaged(weights, x):
            return [kv.allreduce(gradient) for gradient in gradients_of(weights, x)]

        def updated(weights, x):
            return [w - 0.5 * g for w, g in zip(weights, averaged(weights, x), strict=True)]

        def updated_tree(weights, x):
            means = kv.allreduce_pytree(gradients_of(weights, x))
            return [w - 0.5 * g for w, g in zip(weights, means, strict=True)]

        def fresh():
            return [jnp.full((30, 30), 0.04) + 0.001 * i for i in range(32)]

        x = jnp.full((4, 30), 0.1 + rank)
        alone = [gradients_of(fresh(), jnp.full((4, 30), 0.1 + r)) for r in (0, 1)]
        means = [(a + b) / 2 for a, b in zip(*alone, strict=True)]
        steps = [w - 0.5 * g for w, g in zip(fresh(), means, strict=True)]
        cases = [(averaged, (), means), (updated_tree, (), steps), (updated_tree, (0,), steps)]
        if jax.__version_info__ >= (0, 10):  # before, XLA orders a program to need little memory
            cases.append((updated, (), steps))
        for function, donated, wanted in cases:
            program = jax.jit(function, donate_argnums=donated)
            got = while_the_other_is_late(kv, rank, program, (fresh(), x), 32)
            for mine, right in zip(got, wanted, strict=True):
                np.testing.assert_allclose(mine, right, 1e-12, 1e-12)

        def body(carry, row):
            return carry, kv.allreduce(row, "row", Sum)

        rows = jnp.ones((6, 3000))
        looped = jax.jit(lambda rows: jax.lax.scan(body, 0, rows)[1])
        assert (while_the_other_is_late(kv, rank, looped, (rows,), 1) == 2).all()
        kv.shutdown()

    run_jax_ranks(2, work, timeout_s=LIMIT_S)


def test_small_operations_are_done_in_the_thread_of_the_program():
    """Where ranks come at the same time; else they are left to the engine's thread, and do end."""

    def work(rank):
        import jax
        import jax.numpy as jnp

        import kolovod.jax as kv

        kv.init()

        @jax.jit
        def program(arrays):
            return [kv.allreduce(array, f"t{i}", Sum) for i, array in enumerate(arrays)]

        arrays = [jnp.full(9, rank + 1.0 + i) for i in range(8)]
        deadline, least = time.monotonic() + 60, 0
        while least == 0:  # in 160 operations
            assert time.monotonic() < deadline
            before = engine().stats()["buckets_by_caller"]
            for _ in range(20):
                jax.block_until_ready(program(arrays))
            mine = jnp.int32(engine().stats()["buckets_by_caller"] - before)
            least = int(kv.allreduce(mine, "least", kv.Min))
        for late in (0, 1):
            time.sleep(0.02 * (rank == late))
            results = program(arrays)
            assert [float(result[0]) for result in results] == [3.0 + 2 * i for i in range(8)]
        kv.shutdown()

    run_jax_ranks(2, work, timeout_s=LIMIT_S)


def test_a_jax_whose_caches_cannot_be_found():
    """What could be written once and run twice is refused; all else works."""

    def work(rank):
        import jax
        import jax.numpy as jnp

        import kolovod.jax as kv
        from kolovod.private_apis import jax as private_apis

        kv.init()
        private_apis._CACHES = ("moved", "moved_too")

        def plain(x):
            return kv.allreduce(x, "n", Sum), kv.allreduce(x, "n", Sum), kv.allreduce(x, op=Sum)

        text = jax.jit(plain).lower(jnp.ones(3)).as_text()
        assert re.findall(r'name = "(.*?)"', text) == ["n", "n#2", "jit_plain.allreduce#1"]
        assert [float(y[0]) for y in jax.jit(plain)(jnp.ones(3))] == [1, 1, 1]
        once = jax.jit(lambda x: kv.allreduce(x, "n"))

        def scanned(x):
            return jax.lax.scan(lambda y, _: (kv.allreduce(y, "n"), None), x, None, 2)[0]

        for nested in (lambda x: once(x) + once(2 * x), scanned):
            with pytest.raises(
                InvalidArgumentError, match=r"'n' is in a function that jax .* once"
            ):
                jax.jit(nested)(jnp.ones(3))
        kv.shutdown()

    run_jax_ranks(1, work, timeout_s=LIMIT_S)


def test_errors_inside_jit():
    """At once where the rank can know, and from the engine, named, where it cannot."""

    def work(rank):
        import jax
        import jax.numpy as jnp

        import kolovod.jax as kv

        wait = jax.block_until_ready
        with pytest.raises(NotInitializedError):
            jax.jit(lambda x: kv.allreduce(x))(jnp.ones(3))
        kv.init()
        for wrong, text in (
            (lambda x: kv.allgather(x[0]), "allgather: a scalar has no dimension 0"),
            (lambda x: kv.alltoall(x)[0], "alltoall: 3 rows cannot be split evenly over 2 ranks"),
            (lambda x: kv.reducescatter(x), "reducescatter: 3 rows cannot be split evenly over 2"),
            (lambda x: kv.alltoall(x, [1, 2])[0], "splits is [1, 2], but inside jax.jit"),
            (lambda x: kv.barrier(), "x = barrier(after=x)"),
            (lambda x: kv.allreduce(x, 5), "name is 5: give a str"),
            (lambda x: kv.allreduce(x, "x", 77), "op is 77: give one of"),
            (lambda x: kv.broadcast(x, "a"), "root_rank is 'a'"),
            (lambda x: kv.allreduce_async(x), "verbs that end in _async do not work"),
        ):
            with pytest.raises(InvalidArgumentError, match=re.escape(text)):
                jax.jit(wrong)(jnp.ones(3))
        for verb, text in (
            (lambda x: kv.allgather(x, "rows"), "all ranks need the same: gather others outside"),
            (lambda x: kv.allreduce(x, "shapes"), "rank 0 has (4, 2), rank 1 has (6, 2)"),
            (lambda x: kv.broadcast(x, 7, "root"), "broadcast 'root'"),
        ):
            with pytest.raises(Exception, match=re.escape(text)) as caught:
                wait(jax.jit(verb)(jnp.ones((4 + 2 * rank, 2))))
            assert not isinstance(caught.value, AssertionError)
        gathered = jax.jit(lambda x: kv.allgather(x, "gathered"))
        assert gathered(jnp.ones(2)).shape == (4,)
        compiled = gathered.lower(jnp.ones(2)).compile()
        assert compiled(jnp.ones(2)).shape == (4,)
        kv.shutdown()
        kv.init(comm=[rank])
        with pytest.raises(Exception, match=rf"for rank {rank} of 2, but this is rank 0 of 1 now"):
            wait(compiled(jnp.ones(2)))
        assert gathered(jnp.ones(2)).shape == (2,)
        kv.shutdown()

    run_jax_ranks(2, work, timeout_s=LIMIT_S)


def test_several_devices_are_refused():
    def work(rank):
        import jax
        import jax.numpy as jnp

        import kolovod.jax as kv

        kv.init()
        assert jax.local_device_count() == 2
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("d",))
        spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
        with pytest.raises(InvalidArgumentError, match="'spread' is part of a program for 2 dev"):
            jax.jit(lambda x: kv.allreduce(x, "spread"))(jax.device_put(jnp.ones(4), spread))
        assert jax.jit(kv.allreduce)(jnp.ones(4)).tolist() == [1] * 4
        kv.shutdown()

    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    run_jax_ranks(2, work, timeout_s=LIMIT_S, env=flags)


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

    run_jax_ranks(3, work, timeout_s=150)
