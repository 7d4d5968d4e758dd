"""The conformance table for every verb of TensorFlow, in tf.function and eager, on 1 to 3 ranks."""

from __future__ import annotations

import conformance
import numpy as np
import pytest
from conformance import FLOATS, INTEGERS, Case
from forked import run_tensorflow_ranks
from frameworks import TensorflowTensors, is_installed
from slow import slow_but

from kolovod.core.ops import Max, Sum

pytestmark = [
    pytest.mark.skipif(not is_installed("tensorflow"), reason="TensorFlow is not installed"),
    pytest.mark.timeout(300),
]

DTYPES = (*INTEGERS, *FLOATS, "bool")
ALONE, IN_PLACE = ((False, False),), ((True, False),)
SOME = {1: ("float32",), 2: ("float32", "bfloat16", "bool"), 3: ("float64", "uint8")}


class TensorflowVariables(TensorflowTensors):
    """The same for variables, which verbs in place take."""

    def make(self, values, dtype, dense=True):
        """A variable of ``values``."""
        import tensorflow as tf

        return tf.Variable(super().make(values, dtype))


conformance.TENSORS["tensorflow variables"] = TensorflowVariables()


class InGraphs:
    """The verbs as the table calls them, each in a ``tf.function`` of its own.

    Asynchronous ones are those of the graph, which are waited for with the function.
    """

    def __init__(self, kv):
        self.kv, self.world = kv, kv.world
        self.functions = {}

    def __getattr__(self, verb):
        import tensorflow as tf

        is_asynchronous = "_async" in verb
        method = getattr(self.kv, verb.replace("_async", ""))

        def call(given, *arguments):
            if verb.endswith("_"):  # on variables, which belong to the function
                tf.function(lambda: [method(given, *arguments), tf.constant(0)][1])()
                return Waited(given) if is_asynchronous else given
            key = (method.__name__, repr(arguments))
            if key not in self.functions:
                self.functions[key] = tf.function(lambda x: method(x, *arguments))
            result = self.functions[key](given)
            if isinstance(result, tuple):
                result = (result[0], result[1].numpy().tolist())
            return Waited(result) if is_asynchronous else result

        return call


class Waited:
    """A handle whose operation is done."""

    def __init__(self, result):
        self.result = result

    def wait(self):
        return self.result


def check_verbs(kv, dtypes):
    """Every verb, for some dtypes."""
    for dtype in dtypes:
        for case in conformance.reductions(dtype, ((3, 5),), ALONE):
            if case.dense and case.op in (Sum, Max):
                conformance.check_allreduce(kv, "tensorflow", case)
                conformance.check_reducescatter(kv, "tensorflow", case)
        conformance.check_broadcast(kv, "tensorflow", dtype, ((), (3, 5)), ALONE)
        conformance.check_allgather(kv, "tensorflow", dtype)
        conformance.check_alltoall(kv, "tensorflow", dtype)
    conformance.check_grouped(kv, "tensorflow", dtypes, ((3, 5), (0,), ()), ALONE)
    conformance.check_grouped_allgather(kv, "tensorflow", dtypes)
    conformance.check_grouped_reducescatter(kv, "tensorflow", dtypes)


def check_in_place(kv, dtypes):
    """What is written to variables."""
    variables = "tensorflow variables"
    for dtype in dtypes:
        case = Case(dtype, (3, 5), Sum, (1.0, 1.0), True, False)
        conformance.check_allreduce(kv, variables, case)
        conformance.check_broadcast(kv, variables, dtype, ((), (3, 5)), IN_PLACE)
    conformance.check_grouped(kv, variables, dtypes, ((3, 5), ()), IN_PLACE)


def check_all_dtypes(tf, kv):
    """Each verb once with every dtype that the engine knows, in one function."""
    tensors = conformance.TENSORS["tensorflow"]
    rank, size = kv.world().rank, kv.world().size
    values = [
        [conformance.values_of(dtype, (2 * size, 3), r) for r in range(size)] for dtype in DTYPES
    ]
    mine = [tensors.make(each[rank], d) for each, d in zip(values, DTYPES, strict=True)]

    @tf.function
    def everything(*xs):
        return (
            kv.grouped_allreduce(xs, "r", Max),
            kv.grouped_reducescatter(xs, "s", Max),
            kv.grouped_allgather(xs, "g"),
            [kv.broadcast(x, size - 1, f"b{i}") for i, x in enumerate(xs)],
            [kv.alltoall(x, None, f"a{i}")[0] for i, x in enumerate(xs)],
        )

    reduced, scattered, gathered, sent, exchanged = everything(*mine)
    for i, dtype in enumerate(DTYPES):
        most = np.maximum.reduce(values[i])
        own = slice(2 * rank, 2 * rank + 2)
        wanted = (
            (reduced, most),
            (scattered, most[own]),
            (gathered, np.concatenate(values[i])),
            (sent, values[i][size - 1]),
            (exchanged, np.concatenate([v[own] for v in values[i]])),
        )
        for results, want in wanted:
            assert tensors.name(results[i]) == dtype
            conformance.assert_equal(tensors.read(results[i]), want.astype("f8"), dtype, dtype)


def work(rank, size, dtypes):
    import tensorflow as tf

    import kolovod.tensorflow as kv

    kv.init()
    in_graphs = InGraphs(kv.collectives)
    check_all_dtypes(tf, kv.collectives)
    check_verbs(in_graphs, dtypes)
    check_verbs(kv.collectives, dtypes)
    check_in_place(in_graphs, dtypes)
    check_in_place(kv.collectives, dtypes)
    assert sorted(kv.allgather(tf.constant([kv.join()])).numpy().tolist()) in [
        [last] * size for last in range(size)
    ]


@pytest.mark.parametrize("size", slow_but((1,), SOME))
def test_conformance_in_graphs_and_eager(size):
    run_tensorflow_ranks(size, work, size, SOME[size], timeout_s=240)
