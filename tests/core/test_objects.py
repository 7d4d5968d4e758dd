"""Python objects between ranks."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from forked import run_ranks

from kolovod.core.objects import Objects
from kolovod.errors import InvalidArgumentError, MismatchError
from kolovod.testing.loopback import loopback


class Unpicklable:
    def __reduce__(self):
        raise ValueError("a secret of mine")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_broadcast_object(size):
    with loopback(size) as world:

        def work(kv):
            rank = kv.world().rank
            objects = Objects(kv.world)
            for root in range(size):
                mine = {"rank": rank, "function": lambda x: x + rank, "array": np.arange(rank)}
                for name in (None, "named"):
                    got = objects.broadcast_object(mine if rank == root else None, root, name)
                    assert got["rank"] == root
                    assert got["function"](1) == 1 + root
                    assert got["array"].tolist() == list(range(root))
                    assert (got is mine) == (rank == root)

        world.run(work)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_allgather_object_of_different_sizes(size):
    with loopback(size) as world:

        def work(kv):
            mine = None if kv.world().rank == 0 else "x" * 5000 * kv.world().rank
            for name in (None, "named"):
                got = Objects(kv.world).allgather_object(mine, name)
                assert got == [None, *("x" * 5000 * rank for rank in range(1, size))]

        world.run(work)


@pytest.mark.parametrize("verb", ["broadcast_object", "allgather_object"])
def test_what_cannot_be_pickled_fails_on_every_rank(verb):
    with loopback(3) as world:

        def work(kv):
            rank = kv.world().rank
            objects = Objects(kv.world)
            bad = Unpicklable() if rank == 1 else 3
            with pytest.raises(InvalidArgumentError, match=r"rank 1 gave a Unpicklable.*a secret"):
                getattr(objects, verb)(bad, *([1] if verb == "broadcast_object" else []))
            assert objects.allgather_object(rank) == [0, 1, 2]

        world.run(work)


def test_a_lock_cannot_be_pickled_either():
    with loopback(1) as world, pytest.raises(InvalidArgumentError, match="rank 0 gave a lock"):
        Objects(world.collectives[0].world).broadcast_object(threading.Lock())


class Unreadable:
    def __reduce__(self):
        return divmod, (1, 0)


@pytest.mark.parametrize("verb", ["broadcast_object", "allgather_object"])
def test_who_cannot_read_an_object_says_whose_it_is(verb):
    with loopback(2) as world:

        def work(kv):
            rank = kv.world().rank
            objects = Objects(kv.world)
            mine = Unreadable() if rank == 1 else 3
            arguments = [1] if verb == "broadcast_object" else []
            if rank == 1 and verb == "broadcast_object":
                assert objects.broadcast_object(mine, 1) is mine
            else:
                text = r"rank 1 gave an object that cannot be read on this one: ZeroDivisionError"
                with pytest.raises(InvalidArgumentError, match=text):
                    getattr(objects, verb)(mine, *arguments)
            assert objects.allgather_object(rank) == [0, 1]

        world.run(work)


def test_roots_that_differ():
    with loopback(2) as world:

        def work(kv):
            with pytest.raises(MismatchError, match="root"):
                Objects(kv.world).broadcast_object(1, kv.world().rank)
            return Objects(kv.world).broadcast_object(kv.world().rank, 1)

        assert world.run(work) == [1, 1]


def on_a_real_rank(rank):
    import kolovod

    kolovod.init()
    large = np.full(3_000_000, rank)
    first = kolovod.broadcast_object({"large": large}, root_rank=1)
    everybody = kolovod.allgather_object((rank, "é" * rank))
    return int(first["large"].sum()), everybody


def test_real_processes():
    wanted = (3_000_000, [(0, ""), (1, "é"), (2, "éé")])
    assert run_ranks(3, on_a_real_rank) == [wanted] * 3
