"""Allreduce under jax.jit, and the verbs on eager arrays, on two real ranks each."""

from __future__ import annotations

import re

import numpy as np
import pytest
from forked import run_jax_ranks
from frameworks import check_eager_verbs, check_in_graph, is_installed, take_part_backwards

import kolovod
from kolovod.core.ops import Average, Max, Sum
from kolovod.errors import InvalidArgumentError
from kolovod.testing import RankFailed

pytestmark = [
    pytest.mark.skipif(not is_installed("jax"), reason="JAX is not installed"),
    pytest.mark.timeout(300),
]


def run_two(work):
    """``work(rank)`` on two ranks, and the results."""
    return run_jax_ranks(2, work, timeout_s=240)


def operations():
    """How many operations this rank has completed."""
    return kolovod.core.world.current().engine.stats()["operations"]


def test_in_jit_as_outside():
    """The conformance table in programs, and how many operations a program is left with."""

    def work(rank):
        import jax
        import jax.numpy as jnp

        import kolovod.jax as kv

        kv.init()
        check_in_graph(kv.collectives, "jax", jax.jit)
        x = jnp.full(5, rank + 1.0)

        @jax.jit
        def two(x):
            return kv.allreduce(x, "a", Sum), kv.allreduce(x, "b", Sum)

        @jax.jit
        def of_constants():
            return kv.grouped_allreduce([jnp.array([1.0, 2.0]), jnp.array(3)], "c", Sum)

        for _ in range(3):
            before = operations()
            a, b = two(x)
            assert a.tolist() == b.tolist() == [3] * 5
            assert operations() - before == 2
        assert x.tolist() == [rank + 1.0] * 5
        assert [value.tolist() for value in of_constants()] == [[2, 4], 6]
        batched = jax.jit(jax.vmap(lambda x: kv.allreduce(x, "batched", Sum)))
        assert batched(jnp.ones((2, 3)) * (rank + 1)).tolist() == [[3] * 3] * 2
        scanned = jax.jit(
            lambda x: jax.lax.scan(lambda c, _: (kv.allreduce(c, "s"), c), x, None, 5)
        )
        assert scanned(x)[0].tolist() == [1.5] * 5
        kv.shutdown()

    run_two(work)


def test_several_are_on_their_way_at_once():
    """Rank 1 asks for them in the opposite order, and for one only when it has the other."""
    sizes = {f"t{i}": 1000 + 30_000 * i for i in range(12)}

    def work(rank):
        kolovod.init()
        if rank == 1:
            take_part_backwards(sizes)
            return None
        import jax
        import jax.numpy as jnp

        import kolovod.jax as kv

        @jax.jit
        def all_of_them(arrays):
            return [
                kv.allreduce(array, name, Sum) for name, array in zip(sizes, arrays, strict=True)
            ]

        results = all_of_them([jnp.ones(size, jnp.float32) for size in sizes.values()])
        assert all((np.asarray(result) == 2).all() for result in results)
        return len(results)

    assert run_two(work) == [12, None]


def twice_jitted(verb, arrays):
    """One function under jax.jit, called twice by another."""
    import jax

    one = jax.jit(verb)
    return [one(array) for array in arrays]


def twice_nested(verb, arrays):
    """The same, one level further down."""
    import jax

    inner = jax.jit(verb)
    one = jax.jit(lambda array: inner(array) + 0)
    return [one(array) for array in arrays]


def twice_scanned(verb, arrays):
    """Two loops with one body."""
    import jax

    def body(carry, _):
        return verb(carry), None

    return [jax.lax.scan(body, array, None, 1)[0] for array in arrays]


def twice_unrolled(verb, arrays):
    """Two loops without a loop."""
    import jax

    def body(carry, _):
        return verb(carry), None

    return [jax.lax.scan(body, array, None, 1, unroll=True)[0] for array in arrays]


def twice_remade(verb, arrays):
    """jax.checkpoint of one function."""
    import jax

    one = jax.checkpoint(verb)
    return [one(array) for array in arrays]


def twice_custom(verb, arrays):
    """A function with a derivative of its own."""
    import jax

    one = jax.custom_jvp(verb)
    one.defjvps(lambda move, result, array: move)
    return [one(array) for array in arrays]


TWICE = (
    twice_jitted,
    twice_nested,
    twice_scanned,
    twice_unrolled,
    twice_remade,
    twice_custom,
)


def test_what_a_program_calls_twice_is_two_operations():
    """Each has a name of its own, whichever XLA comes to first, so ranks cannot mix them up."""

    def take_part():
        unnamed = "jit_program.allreduce"
        tens = {"n#2": 20, f"{unnamed}#2": 40, "n": 10, f"{unnamed}#1": 30}
        handles = [
            kolovod.allreduce_async(np.full(3000, ten, np.float32), name, kolovod.Sum)
            for name, ten in tens.items()
        ]
        for handle in handles:
            handle.wait()

    def compute(twice):
        import jax
        import jax.numpy as jnp

        import kolovod.jax as kv

        @jax.jit
        def program(arrays):
            # More than XLA would do one by one.
            others = [array * (i + 1.5) for array in arrays for i in range(9)]
            named = twice(lambda x: kv.allreduce(x, "n", Sum), arrays[:2])
            return [*named, *twice(lambda x: kv.allreduce(x, op=Sum), arrays[2:]), *others]

        results = program([jnp.full(3000, float(i), jnp.float32) for i in range(1, 5)])
        jax.block_until_ready(results)
        return [float(result[-1]) for result in results[:4]]

    def work(rank):
        kolovod.init()
        results = [compute(twice) if rank == 0 else take_part() for twice in TWICE]
        kolovod.shutdown()
        return results

    for twice, result in zip(TWICE, run_two(work)[0], strict=True):
        assert result == [11, 22, 33, 44], twice.__name__


def test_calls_that_are_not_waited_for_keep_their_order():
    def work(rank):
        import jax
        import jax.numpy as jnp

        import kolovod.jax as kv

        kv.init()
        mean = jax.jit(lambda x: kv.allreduce(x, "mean"))
        results = [mean(jnp.full(20_000, 1.0 * i + rank)) for i in range(30)]
        assert [result[0].item() for result in results] == [i + 0.5 for i in range(30)]

    run_two(work)


def test_gradients():
    """Of several arrays, in and outside of jax.jit, equal to those of one process."""

    def work(rank):
        import jax
        import jax.numpy as jnp

        import kolovod.jax as kv

        kv.init()
        data = jnp.asarray(np.random.default_rng(7).normal(size=(2, 16, 8)))
        weights = {"w": jnp.full((8, 3), 0.1), "b": jnp.zeros(3)}

        def loss_of(weights, x):
            return jnp.mean((x @ weights["w"] + weights["b"] - 1.0) ** 2)

        @jax.jit
        def step(weights, x):
            gradients = jax.grad(loss_of)(weights, x)
            return {name: kv.allreduce(g, f"gradient.{name}") for name, g in gradients.items()}

        wanted = jax.grad(loss_of)(weights, data.reshape(32, 8))
        for _ in range(3):
            got = step(weights, data[rank])
            for name, want in wanted.items():
                np.testing.assert_allclose(got[name], want, rtol=1e-6)

        # Through the allreduce: rank r's loss is (r + 1) * sum(op(x)), over all ranks 1 + 2.
        for op, factor in ((Sum, 1.0), (Average, 0.5)):

            def loss(x, op=op):
                count = jnp.arange(3)
                y, z, _ = kv.grouped_allreduce([x, 2 * x, count], f"op{op}", op, 0.5, 4.0)
                return (rank + 1) * jnp.sum(y + z)

            for function in (jax.grad(loss), jax.jit(jax.grad(loss))):
                gradient = function(jnp.full((2, 2), float(rank)))
                assert gradient.tolist() == [[18 * factor] * 2] * 2
        with pytest.raises(InvalidArgumentError, match="op Max has no gradient"):
            jax.jit(jax.grad(lambda x: kv.allreduce(x, "max", Max).sum()))(jnp.ones(2))

    run_two(work)


def test_errors_name_the_ranks():
    def work(rank):
        import jax
        import jax.numpy as jnp

        import kolovod.jax as kv

        kv.init()
        total = jax.jit(lambda x: kv.allreduce(x, "total", Sum))
        with pytest.raises(Exception, match=re.escape("rank 0 has (3,), rank 1 has (4,)")):
            total(jnp.zeros(3 + rank)).block_until_ready()
        assert total(jnp.ones(3)).tolist() == [2, 2, 2]
        with pytest.raises(InvalidArgumentError, match="op is 77"):
            jax.jit(lambda x: kv.allreduce(x, "x", 77))(jnp.ones(3))
        with pytest.raises(Exception, match="bool cannot be averaged"):
            jax.jit(lambda x: kv.allreduce(x, "x"))(jnp.ones(3, bool)).block_until_ready()
        with pytest.raises(Exception, match="is none that Kolovod knows"):
            jax.jit(lambda x: kv.allreduce(x, "x"))(jnp.ones(3, "int4")).block_until_ready()
        members = kv.add_process_set([1])
        if rank == 1:
            alone = jax.jit(lambda x: kv.allreduce(x, "alone", Sum, process_set=members))
            assert alone(jnp.ones(2)).tolist() == [1, 1]
        kv.remove_process_set(members)
        if rank == 1:
            with pytest.raises(Exception, match="process set 1 is not part"):
                alone(jnp.ones(2)).block_until_ready()
        kv.barrier()
        kv.shutdown()
        with pytest.raises(Exception, match=re.escape("call kolovod.init() first")):
            total(jnp.ones(3)).block_until_ready()

    run_two(work)


def test_a_lost_rank_ends_what_is_on_its_way():
    def work(rank):
        import jax
        import jax.numpy as jnp
        from dying import die

        import kolovod.jax as kv

        kv.init()
        many = jax.jit(lambda xs: [kv.allreduce(x, f"t{i}", Sum) for i, x in enumerate(xs)])
        jax.block_until_ready(many([jnp.ones(1000)] * 12))
        die(rank, 1)
        with pytest.raises(Exception, match=r"ABORTED: rank 1 .*died"):
            jax.block_until_ready(many([jnp.ones(1000)] * 12))
        return "noticed"

    results = run_jax_ranks(2, work, timeout_s=240, keep_going=True)
    assert results[0] == "noticed"
    assert isinstance(results[1], RankFailed)


def test_eager_verbs():
    def work(rank):
        import jax.numpy as jnp

        import kolovod.jax as kv

        kv.init()
        check_eager_verbs(
            kv.collectives, "jax", ("float32", "bfloat16", "int32", "float64", "bool")
        )
        x = jnp.ones(4)
        results = [kv.allreduce(x * i, op=Sum) for i in range(20)]
        assert [result[3].item() for result in results] == [2.0 * i for i in range(20)]
        assert x.tolist() == [1] * 4
        for wrong, text in ((np.ones(2), "not ndarray"), (jnp.ones(2, "int4"), "is not supp")):
            with pytest.raises(InvalidArgumentError, match=text):
                kv.allreduce(wrong)
        with pytest.raises(InvalidArgumentError, match="cannot be changed in place"):
            kv.collectives.allreduce_(x)
        assert kv.join() in (0, 1)

    run_two(work)
