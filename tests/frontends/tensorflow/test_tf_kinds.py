"""Gradients that some ranks have and others have not, or have of another kind."""

from __future__ import annotations

import pytest
from forked import run_tensorflow_ranks
from frameworks import is_installed

from kolovod.errors import MismatchError

pytestmark = [
    pytest.mark.skipif(not is_installed("tensorflow"), reason="TensorFlow is not installed"),
    pytest.mark.timeout(200),
]


def variables(tf, count=2):
    return [tf.Variable(tf.ones([3]), name=name) for name in "abc"[:count]]


def of_experts(tf, kv, rank, wraps, count=2):
    """Each rank uses the variable of its number, and rank 0 loses ten times as much."""
    sources = variables(tf, count)

    def gradients():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sources[rank]) * (10.0 if rank == 0 else 1.0)
        return kv.DistributedGradientTape(tape).gradient(loss, sources)

    return (tf.function(gradients) if wraps else gradients)()


def missing(rank):
    import tensorflow as tf

    import horovod.tensorflow as hvd
    import kolovod.tensorflow as kv

    kv.init()
    for each in (kv, hvd):
        a, b, nobodys = of_experts(tf, each, rank, False, 3)
        assert a.numpy().tolist() == [5.0] * 3
        assert b.numpy().tolist() == [0.5] * 3
        assert nobodys is None
        with pytest.raises(tf.errors.InvalidArgumentError, match="which a graph cannot make good"):
            of_experts(tf, each, rank, True)
    assert kv.allreduce(tf.ones(1)).numpy() == 1.0  # nothing is left on its way


def test_none_on_some_ranks() -> None:
    run_tensorflow_ranks(2, missing)


def of_table(tf, kv, table, uses, *, dense=False, index=None, **options):
    with tf.GradientTape() as tape:
        rows = table if dense else tf.gather(table, tf.constant([2], index or tf.int32))
        loss = tf.reduce_sum(rows) if uses else tf.constant(0.0)
    return kv.DistributedGradientTape(tape, **options).gradient(loss, [table])[0]


def sparse(rank):
    import tensorflow as tf

    import kolovod.tensorflow as kv

    kv.init()
    table = tf.Variable(tf.ones([4, 2]), name="table")
    for index in (tf.int32, tf.int64):
        found = of_table(tf, kv, table, rank == 1, index=index)
        assert isinstance(found, tf.IndexedSlices)
        wanted = [[0.0, 0.0]] * 2 + [[0.5, 0.5]] + [[0.0, 0.0]]
        assert tf.convert_to_tensor(found).numpy().tolist() == wanted
    found = of_table(tf, kv, table, rank == 1, sparse_as_dense=True)
    assert found.numpy().tolist() == wanted
    found = of_table(tf, kv, table, True, dense=rank == 1, sparse_as_dense=True)
    assert found.numpy().tolist() == [[0.5, 0.5]] * 2 + [[1.0, 1.0]] + [[0.5, 0.5]]
    with pytest.raises(MismatchError, match=r"'table' is dense.*IndexedSlices.*sparse_as_dense"):
        of_table(tf, kv, table, True, dense=rank == 1)
    with pytest.raises(MismatchError, match="'table' is a local source on some ranks only"):
        of_table(tf, kv, table, True, local_sources=[table] if rank else [])


def test_sparse_gradients_that_some_ranks_lack_or_have_dense() -> None:
    run_tensorflow_ranks(2, sparse)


def other_sources(rank):
    import tensorflow as tf

    import kolovod.tensorflow as kv

    kv.init()
    sources = variables(tf)[:: -1 if rank else 1]

    def gradients():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sources[0] * sources[1])
        return kv.DistributedGradientTape(tape).gradient(loss, sources)

    with pytest.raises(MismatchError, match=r"source 0 differs: rank 0 has 'a'.*rank 1 has 'b'"):
        gradients()
    with pytest.raises(tf.errors.InvalidArgumentError, match="other sources to gradient"):
        tf.function(gradients)()


def test_sources_in_another_order() -> None:
    run_tensorflow_ranks(2, other_sources)
