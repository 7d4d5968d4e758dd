"""What meets what in graphs: operations without a name are known by their place."""

from __future__ import annotations

import pytest
from forked import run_tensorflow_ranks
from frameworks import is_installed

from kolovod.core.ops import Sum

pytestmark = [
    pytest.mark.skipif(not is_installed("tensorflow"), reason="TensorFlow is not installed"),
    pytest.mark.timeout(150),
]

OUTER, INNER = 20, 3


def check_loops_in_loops(tf, kv, rank):
    """Iterations of both loops overlap, and each is matched with its own, however traced."""
    x = tf.constant([1.0, 2.0]) * (rank + 1)

    def place(i, j):
        return tf.cast(100 * i + j, tf.float32)

    @tf.function
    def by_while(x):
        def inner(i):
            def body(j, total):
                return j + 1, total + kv.allreduce(x + place(i, j), op=Sum)

            return tf.while_loop(lambda j, _: j < INNER, body, (0, tf.zeros_like(x)))[1]

        def body(i, rows):
            return i + 1, rows.write(i, inner(i))

        rows = tf.TensorArray(tf.float32, OUTER)
        return tf.while_loop(lambda i, _: i < OUTER, body, (0, rows))[1].stack()

    @tf.function
    def within(x, i):
        rows = tf.TensorArray(tf.float32, INNER)
        for j in tf.range(INNER):
            rows = rows.write(j, kv.allreduce(x + place(i, j), op=Sum))
        return tf.reduce_sum(rows.stack(), 0)

    @tf.function
    def by_map(x):
        return tf.map_fn(lambda i: within(x, i), tf.range(OUTER), tf.float32)

    wanted = [
        [3 * INNER * (k + 1) + sum(2 * (100 * i + j) for j in range(INNER)) for k in range(2)]
        for i in range(OUTER)
    ]
    for function in (by_while, by_map):
        for _ in range(2 * rank):  # rank 1 has traced more
            tf.function(function.python_function).get_concrete_function(x)
        for _ in range(5):
            assert function(x).numpy().tolist() == wanted


def check_different_verbs(tf, kv, rank):
    """Each rank hears which rank asks for what, and the world stays usable."""
    x = tf.ones([2, 2])
    verbs = (
        kv.allreduce,
        kv.broadcast,
        kv.allgather,
        kv.reducescatter,
        lambda x: kv.alltoall(x)[0],
    )
    names = ("allreduce", "broadcast", "allgather", "reducescatter", "alltoall")
    for i, name in enumerate(names):
        other = (i + 1) % len(verbs)
        asked = (name, names[other])
        with pytest.raises(tf.errors.FailedPreconditionError) as caught:
            tf.function(verbs[i] if rank == 0 else verbs[other])(x)
        for r in range(2):
            assert f"rank {r} has {asked[r]}" in str(caught.value)
    with pytest.raises(tf.errors.FailedPreconditionError, match="rank 1 has barrier"):
        tf.function(kv.allreduce)(x) if rank == 0 else tf.function(lambda: kv.barrier())()
    assert tf.function(lambda x: kv.allreduce(x, op=Sum))(x).numpy().tolist() == [[2, 2]] * 2


def check_what_is_not_counted(tf, kv, rank):
    """Operations with names, and of sets that a rank is not in, may be on some ranks only."""
    alone = kv.add_process_set([1])
    nothing = 1e-30  # of 1; times 0 TensorFlow 2.15 would leave the operations out

    @tf.function
    def unequal(x):
        if rank == 1:
            x += nothing * kv.allreduce(x, process_set=alone)
            x += nothing * kv.allreduce(x, "only here", process_set=alone)
            x += nothing * kv.allreduce(x, "a", op=Sum)
        return kv.allreduce(x, op=Sum)

    if rank == 0:
        handle = kv.allreduce_async(tf.ones([2]), "a", op=Sum)
    assert unequal(tf.ones([2])).numpy().tolist() == [2, 2]
    if rank == 0:
        handle.wait()
    kv.remove_process_set(alone)


def test_places():
    def work(rank):
        import tensorflow as tf

        import kolovod.tensorflow as kv

        kv.init()
        check_different_verbs(tf, kv, rank)
        check_what_is_not_counted(tf, kv, rank)
        check_loops_in_loops(tf, kv, rank)

    run_tensorflow_ranks(2, work, timeout_s=120)
