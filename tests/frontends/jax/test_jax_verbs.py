"""Every verb inside jax.jit and what traces, loops and differentiates; and what stays outside."""

from __future__ import annotations

import itertools
import time
from functools import partial

import conformance
import numpy as np
import pytest
from conformance import assert_equal, values_of
from forked import run_jax_ranks
from frameworks import check_eager_verbs, is_installed
from slow import slow_but

from kolovod.core.ops import Adasum, Average, Max, Sum
from kolovod.errors import InvalidArgumentError

pytestmark = [
    pytest.mark.skipif(not is_installed("jax"), reason="JAX is not installed"),
    pytest.mark.timeout(170),
]
LIMIT_S = 150
DTYPES = ("float32", "bfloat16", "int32", "uint8", "bool")


class InJit:
    """The verbs of ``kv``, each call a program of its own."""

    def __init__(self, verbs):
        """``verbs``: the JaxCollectives."""
        self.world = verbs.world
        self.verbs = verbs

    def __getattr__(self, verb):
        import jax

        function = getattr(self.verbs, verb)

        def call(arrays, *arguments):
            return jax.jit(lambda given: function(given, *arguments))(arrays)

        return call


@pytest.mark.parametrize("size", slow_but((1, 2), (1, 2, 3)))
def test_conformance(size):
    """The verbs outside of jax.jit and inside, where shapes are equal."""

    def work(rank):
        import kolovod.jax as kv

        kv.init()
        if size != 2:  # test_jax_seed.py has these
            check_eager_verbs(kv.collectives, "jax", ("float32", "int32"))
        inside = InJit(kv.collectives)
        new = ((False, False),)
        for dtype in DTYPES:
            for case in conformance.reductions(dtype, ((6, 5),), new):
                if case.dense and case.op in (Sum, Average, Max):
                    conformance.check_allreduce(inside, "jax", case)
                    if case.op != Max:
                        conformance.check_reducescatter(inside, "jax", case)
            conformance.check_broadcast(inside, "jax", dtype, ((), (2, 0), (3, 5)), new)
            check_rows(inside, dtype)
        conformance.check_grouped(inside, "jax", DTYPES[:3], ((3, 5), (0,), ()), new)
        kv.shutdown()

    run_jax_ranks(size, work, timeout_s=LIMIT_S)


def check_rows(kv, dtype):
    """Exchange equal parts by allgather and alltoall."""
    tensors = conformance.TENSORS["jax"]
    rank, size = kv.world().rank, kv.world().size
    for tail, rows in itertools.product(((), (2, 3)), (0, 1, 4)):
        shape = (rows * size, *tail)
        parts = [values_of(dtype, shape, r) for r in range(size)]
        mine = tensors.make(parts[rank], dtype)
        (gathered,) = kv.grouped_allgather([mine], f"g.{dtype}.{shape}")
        assert (tensors.read(kv.allgather(mine)) == tensors.read(gathered)).all()
        assert_equal(tensors.read(gathered), np.concatenate(parts).astype("f8"), dtype, shape)
        sent, counts = kv.alltoall(mine, None, f"a.{dtype}.{shape}")
        assert [int(count) for count in counts] == [rows] * size
        wanted = np.concatenate([part[rank * rows : (rank + 1) * rows] for part in parts])
        assert_equal(tensors.read(sent), wanted.astype("f8"), dtype, shape)
        assert tensors.name(gathered) == tensors.name(sent) == dtype


def formulas(size):
    """What the verbs give rank r of all ranks' arrays, in JAX alone."""
    import jax.numpy as jnp

    def split(total, r):
        return jnp.array_split(total, size)[r]

    return {
        "average": lambda xs, r: sum(xs) / size,
        "sum": lambda xs, r: 3.0 * sum(0.5 * x for x in xs),
        "broadcast": lambda xs, r: xs[size - 1],
        "allgather": lambda xs, r: jnp.concatenate(xs),
        "alltoall": lambda xs, r: jnp.concatenate([split(x, r) for x in xs]),
        "reducescatter": lambda xs, r: split(sum(xs) / size, r),
        "barrier": lambda xs, r: xs[r],
    }


@pytest.mark.parametrize("size", slow_but((1, 2), (1, 2, 3)))
def test_derivatives(size):
    """Of the sum of all ranks' losses, backwards and forwards, in and out of jax.jit."""

    def work(rank):
        import jax
        import jax.numpy as jnp

        import kolovod.jax as kv

        kv.init()
        verbs = {
            "average": lambda x: kv.allreduce(x, "average"),
            "sum": lambda x: kv.grouped_allreduce([x, jnp.arange(3)], None, Sum, 0.5, 3.0)[0],
            "broadcast": lambda x: kv.broadcast(x, size - 1),
            "allgather": lambda x: kv.allgather(x, "gather"),
            "alltoall": lambda x: kv.alltoall(x)[0],
            "reducescatter": lambda x: kv.reducescatter(x),
            "barrier": lambda x: kv.barrier(after=x),
        }
        draw = np.random.default_rng(3)
        xs = [jnp.asarray(draw.normal(size=(2 * size, 3))) for _ in range(size)]
        moves = [jnp.asarray(draw.normal(size=(2 * size, 3))) for _ in range(size)]

        def loss_of(y, r):
            weights = jnp.arange(1.0, y.size + 1).reshape(y.shape)
            return (r + 1) * jnp.sum(jnp.sin(y) * weights)

        def own(name, x):
            return loss_of(verbs[name](x), rank)

        def gradients(x):
            return {name: jax.grad(partial(own, name))(x) for name in verbs}

        def moved(x, move):
            return {name: jax.jvp(partial(own, name), (x,), (move,))[1] for name in verbs}

        @jax.jit
        def wanted(xs, moves):
            backwards, forwards = {}, {}
            for name, formula in formulas(size).items():

                def total(x, formula=formula):
                    others = (*xs[:rank], x, *xs[rank + 1 :])
                    return sum(loss_of(formula(others, r), r) for r in range(size))

                backwards[name] = jax.grad(total)(xs[rank])
                loss = lambda *xs: loss_of(formula(xs, rank), rank)  # noqa: B023, E731
                forwards[name] = jax.jvp(loss, tuple(xs), tuple(moves))[1]
            return backwards, forwards

        backwards, forwards = wanted(xs, moves)
        mine = xs[rank], moves[rank]
        for wrap in (lambda function: function, jax.jit):
            for name, gradient in wrap(gradients)(xs[rank]).items():
                np.testing.assert_allclose(gradient, backwards[name], 1e-12, 1e-12, name)
            for name, move in wrap(moved)(*mine).items():
                np.testing.assert_allclose(move, forwards[name], 1e-12, 1e-12, name)
        with pytest.raises(InvalidArgumentError, match="reducescatter with op Max has no gradient"):
            jax.jit(jax.grad(lambda x: kv.reducescatter(x, op=Max).sum()))(xs[rank])

    run_jax_ranks(size, work, timeout_s=LIMIT_S)


def test_loops_and_branches():
    """In scan (unrolled, too), while_loop and cond; the same name many times in one program."""

    def work(rank):
        import jax
        import jax.numpy as jnp

        import kolovod.jax as kv

        kv.init()
        rows = jnp.ones((8, 3000)) * jnp.arange(8.0)[:, None] + rank
        wanted = np.arange(8.0)[:, None] * 2 + 1 + np.zeros((8, 3000))
        for unroll in (1, 2, 8):

            @jax.jit
            def independent(rows, unroll=unroll):
                def body(carry, row):
                    return carry, kv.allreduce(row, "row", Sum)

                return jax.lax.scan(body, 0, rows, unroll=unroll)[1]

            for _ in range(5):
                np.testing.assert_array_equal(independent(rows), wanted)

        def chained(w, rows):
            def body(carry, row):
                return kv.allreduce(jnp.tanh(carry * row)), None

            return jax.lax.scan(body, w, rows)[0].sum()

        def chained_alone(w, rows):
            for row in rows:
                w = jnp.tanh(w * row)
            return w.sum()

        w, same = jnp.full(3000, 0.3), wanted[:4] / 7
        got = jax.jit(jax.grad(chained))(w, same)
        np.testing.assert_allclose(got, jax.grad(chained_alone)(w, same), 1e-12)

        @jax.jit
        def until(x):
            return jax.lax.while_loop(
                lambda x: x[0] < 100, lambda x: 2 * kv.allreduce(x, "until"), x
            )

        assert until(jnp.ones(2000) + 2 * rank)[0] == 128

        @jax.jit
        def either(flag, x):
            return jax.lax.cond(
                flag, lambda: kv.allreduce(x, "either", Sum), lambda: kv.allreduce(-x, "or", Sum)
            )

        for flag in (True, False):
            assert either(flag, jnp.ones(2000))[0] == (2 if flag else -2)

        @jax.jit
        def remade(x):
            step = jax.checkpoint(lambda x: jnp.sin(kv.allreduce(jnp.sin(x), "remade")))
            return jax.grad(lambda x: step(x).sum())(x)

        x = jnp.full(3000, 0.5)
        plain = jax.grad(lambda x: jnp.sin(jnp.sin(x)).sum())(x)
        np.testing.assert_allclose(remade(x), plain, 1e-12)

        @jax.jit
        def twice(x, y):  # one name, two operations
            return kv.allreduce(x, "twice", Sum), kv.allreduce(y, "twice", Sum)

        for _ in range(10):
            a, b = twice(jnp.ones(9000), jnp.full(9000, 5.0))
            assert (a[0], b[0]) == (2, 10)
        kv.shutdown()

    run_jax_ranks(2, work, timeout_s=LIMIT_S)


def test_operations_without_a_name():
    """They match however often a rank has traced the program, and in whatever it has run before."""

    def work(rank):
        import jax
        import jax.numpy as jnp

        import kolovod.jax as kv

        kv.init()

        @jax.jit
        def step(x):
            total = kv.allreduce(x, op=Sum)
            return total, kv.allreduce(2 * x, op=Sum), kv.broadcast(x, 1)

        if rank == 1:
            for size in range(1, 20):
                step.lower(jnp.ones(size))
            jax.jit(lambda x: kv.allreduce(x)).lower(jnp.ones(3))
        for size in (1, 3000):
            x = jnp.full(size, 1.0 + rank)
            assert [float(each[0]) for each in step(x)] == [3, 6, 2]
        # A program of each rank's own around the same operations, matched by their names.
        own = [jax.jit(lambda x: kv.allreduce(x, "n", Sum) + 0), jax.jit(lambda x: named(x))]

        def named(x):
            return kv.allreduce(x * 1.0, "n", Sum)

        assert own[rank](jnp.ones(4)).tolist() == [2] * 4
        kv.shutdown()

    run_jax_ranks(2, work, timeout_s=LIMIT_S)


def test_vmap():
    """A batch is one operation, with rows where they were."""

    def work(rank):
        import jax
        import jax.numpy as jnp

        import kolovod
        import kolovod.jax as kv

        kv.init()
        x = jnp.arange(24.0).reshape(2, 3, 4) + 100 * rank
        both = [np.arange(24.0).reshape(2, 3, 4) + 100 * r for r in (0, 1)]
        before = kolovod.core.world.current().engine.stats()["operations"]
        for wrap in (lambda f: f, jax.jit):
            mean = wrap(jax.vmap(lambda x: kv.allreduce(x, "m")))
            np.testing.assert_array_equal(mean(x), sum(both) / 2)
            gather = wrap(jax.vmap(lambda x: kv.allgather(x, "g"), in_axes=1, out_axes=1))
            np.testing.assert_array_equal(gather(x), np.concatenate(both))
            scatter = wrap(jax.vmap(lambda x: kv.reducescatter(x, "r", Sum), in_axes=2))
            wanted = np.moveaxis(sum(both), 2, 0)[:, rank : rank + 1]
            np.testing.assert_array_equal(scatter(x), wanted)
            some = wrap(jax.vmap(lambda a, b: kv.grouped_allreduce([a, b], "s", Sum), (0, None)))
            a, b = some(x, jnp.ones(2))
            np.testing.assert_array_equal(a, sum(both))
            np.testing.assert_array_equal(b, np.full((2, 2), 2))
            gradient = wrap(jax.vmap(jax.grad(lambda x: kv.allgather(x, "d").sum())))
            np.testing.assert_array_equal(gradient(x), np.full((2, 3, 4), 2))
            for verb in (kv.allgather, kv.reducescatter):
                with pytest.raises(InvalidArgumentError, match="a scalar has no dimension 0"):
                    wrap(jax.vmap(lambda x, verb=verb: verb(x)))(jnp.ones(2))
            with pytest.raises(InvalidArgumentError, match="the whole batch for one vector"):
                wrap(jax.vmap(lambda x: kv.allreduce(x, "a", Adasum)))(x)
        assert kolovod.core.world.current().engine.stats()["operations"] - before == 6 + 5
        kv.shutdown()

    run_jax_ranks(2, work, timeout_s=LIMIT_S)


def test_arrays_stay_as_they_are():
    """Arguments keep their values; donated ones give up their memory and nothing else."""

    def work(rank):
        import jax
        import jax.numpy as jnp

        import kolovod.jax as kv

        kv.init()
        kept = jnp.full(50_000, rank + 1.0)
        view = np.asarray(kept)  # shares the array's memory
        inside = jax.jit(lambda x: kv.allreduce(x, "k", Sum))
        verbs = (
            kv.allreduce,
            kv.broadcast,
            kv.allgather,
            kv.reducescatter,
            lambda x: kv.alltoall(x)[0],
        )
        for verb in (inside, *verbs, *map(jax.jit, verbs), jax.jit(lambda x: kv.barrier(after=x))):
            jax.block_until_ready(verb(kept))
            assert (view == rank + 1.0).all()
        update = jax.jit(
            lambda w, g: (w - kv.allreduce(g, "g", Sum), kv.allreduce(w, "w", Sum)),
            donate_argnums=(0, 1),
        )
        w, g = jnp.zeros(50_000), jnp.full(50_000, rank + 1.0)
        for turn in range(1, 6):
            w, total = update(w, g)
            assert (np.asarray(w) == -3 * turn).all()
            assert (np.asarray(total) == -6 * (turn - 1)).all()
            g = jnp.full(50_000, rank + 1.0)
        x = jnp.ones(50_000)
        summed = jax.jit(lambda x: kv.allreduce(x, "d", Sum), donate_argnums=0)(x)
        assert (np.asarray(summed) == 2).all()

        @jax.jit
        def used_again(x):  # results have the memory of what was computed, but not what is needed
            y = 2 * x
            first, second = kv.grouped_allreduce([y, y], "twice", Sum)
            return y, first, second, kv.broadcast(y, 1), kv.allreduce(y, "again", Sum), y + 1

        for size in (50, 50_000):
            results = used_again(jnp.full(size, rank + 1.0))
            wanted = (2 * (rank + 1), 6, 6, 4, 6, 2 * (rank + 1) + 1)
            for result, right in zip(results, wanted, strict=True):
                assert (np.asarray(result) == right).all()
        kv.shutdown()

    run_jax_ranks(2, work, timeout_s=LIMIT_S)


def test_what_is_on_its_way_keeps_its_memory():
    """Also where the script has the array deleted, or donates it, before others come to it."""

    def work(rank):
        import jax
        import jax.numpy as jnp

        import kolovod.jax as kv

        kv.init()
        ninefold = jax.jit(lambda x: 9 * x, donate_argnums=0)
        verbs = [
            (lambda x: kv.allreduce_async(x, op=Sum), [3.0, 3.0]),
            (lambda x: kv.grouped_allreduce_async([x], op=Sum), [3.0, 3.0]),
            (lambda x: kv.allgather_async(x), [1.0, 2.0]),
        ]
        for dtype in (jnp.float32, jnp.bfloat16):
            for take_away in (ninefold, lambda x: x.delete()):
                for start, right in verbs:
                    x = jnp.full(1 << 20, rank + 1.0, dtype)
                    time.sleep(0.1 * rank)
                    handle = start(x)
                    kept = take_away(x), [np.full(1 << 20, 7.0, np.float32) for _ in range(3)]
                    result = handle.wait()
                    result = np.asarray(result[0] if isinstance(result, list) else result)
                    assert result[[0, -1]].astype(float).tolist() == right
                    del kept
        kv.shutdown()

    run_jax_ranks(2, work, timeout_s=LIMIT_S)
