"""Operations without a name in graphs and programs carry the script's line, too."""

from __future__ import annotations

import pytest
from forked import run_ranks

pytestmark = pytest.mark.frameworks

OFF = {"KOLOVOD_CALL_LINES": "0"}


def told(error):
    return str(error).replace("\n", " ")


def in_programs(rank, is_refused):
    """Rank 0 averages one loss more than the others, who go on with the accuracy."""
    import jax

    import kolovod.jax as kv

    kv.init()
    loss = jax.jit(lambda value: kv.allreduce(value))
    accuracy = jax.jit(lambda value: kv.allreduce(value))
    return uneven(kv, rank, loss, accuracy, jax.numpy.float32, is_refused)


def in_graphs(rank, is_refused):
    import tensorflow as tf

    import kolovod.tensorflow as kv

    kv.init()

    @tf.function
    def loss(value):
        return kv.allreduce(value)  # AutoGraph writes this function anew, into another file

    @tf.function(autograph=False)
    def accuracy(value):
        return kv.allreduce(value)

    return uneven(kv, rank, loss, accuracy, tf.constant, is_refused)


def uneven(kv, rank, loss, accuracy, number, is_refused):
    for _ in range(2):  # all come from both lines, by turns
        assert float(loss(number(1.0))) == 1.0
        assert float(accuracy(number(100.0))) == 100.0
    if is_refused:
        with pytest.raises(Exception, match="the calling line differs") as caught:
            loss(number(1.0)) if rank == 0 else float(accuracy(number(100.0)))
        return told(caught.value)
    return float((loss if rank == 0 else accuracy)(number(2.0 - rank)))


@pytest.mark.parametrize("run", [in_programs, in_graphs])
def test_a_rank_that_runs_another_function_is_refused(run):
    for text in run_ranks(2, run, True):
        first, _, other = text.partition("rank 0 calls allreduce at test_traced_lines.py:")[
            2
        ].partition("; rank 1 calls allreduce at test_traced_lines.py:")
        lines = int(first), int(other.partition(".")[0])
        first_line = run.__code__.co_firstlineno
        assert first_line < lines[0] < lines[1] < first_line + 22


@pytest.mark.parametrize("run", [in_programs, in_graphs])
def test_the_setting_lets_ranks_run_other_functions(run):
    assert run_ranks(2, run, False, env=OFF) == [1.5, 1.5]


def one_function_from_two_lines(rank):
    """Where a rank comes first to a function that is traced says nothing of its operations."""
    import jax
    import tensorflow as tf

    import kolovod.jax as kvj
    import kolovod.tensorflow as kvt

    kvj.init()
    program = jax.jit(lambda value: kvj.allreduce(value))
    graph = tf.function(lambda value: kvt.allreduce(value))
    if rank == 0:
        found = [float(program(1.0)), float(graph(1.0))]
    else:
        found = [float(program(3.0)), float(graph(3.0))]
    # A function of a library has no line of the script in it, wherever that calls it.
    inner = jax.jit(kvj.allreduce)
    if rank == 0:
        found.append(float(inner(1.0)))
    else:
        found.append(float(inner(3.0)))
    traced = tf.function(kvt.allreduce)
    if rank == 0:
        found.append(float(traced(tf.constant(1.0))))
    else:
        found.append(float(traced(tf.constant(3.0))))
    return found


def test_what_is_outside_of_a_traced_function_does_not_count():
    assert run_ranks(2, one_function_from_two_lines) == [[2.0] * 4] * 2
