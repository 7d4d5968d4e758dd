"""What the tests of TensorFlow and JAX share: the conformance table, in graphs and outside."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import conformance
import numpy as np
from conformance import FLOATS, INTEGERS, Case
from tensors import TensorflowTensors

import kolovod
from kolovod.core.ops import Max, Sum

__all__ = [
    "TensorflowTensors", "check_eager_verbs", "check_in_graph", "is_installed",
    "take_part_backwards",
]  # fmt: skip

_NEW = ((False, False), (False, True))  # modes that make a new tensor


def is_installed(framework: str) -> bool:
    """Whether there is such a package; a folder of tests of that name is none."""
    spec = importlib.util.find_spec(framework)
    return spec is not None and spec.origin is not None


def keras_variable(tf: Any, value: Any) -> Any:
    """A variable as Keras 3 has them; Keras 2 has TensorFlow's."""
    return getattr(tf.keras, "Variable", tf.Variable)(value)


def check_eager_verbs(kv: Any, frontend: str, dtypes: tuple[str, ...]) -> None:
    """Every verb outside of graphs that does not work in place, on this rank."""
    for dtype in dtypes:
        for case in conformance.reductions(dtype, ((), (0,), (3, 5)), _NEW):
            conformance.check_allreduce(kv, frontend, case)
            if case.shape == (3, 5) and case.op == Sum and not case.asynchronous:
                conformance.check_reducescatter(kv, frontend, case)
        conformance.check_broadcast(kv, frontend, dtype, ((), (3, 5)), _NEW)
        conformance.check_allgather(kv, frontend, dtype)
        conformance.check_alltoall(kv, frontend, dtype)
    conformance.check_grouped(kv, frontend, dtypes[:3], ((3, 5), (0,)), _NEW)
    conformance.check_grouped_allgather(kv, frontend, dtypes[:3])
    conformance.check_grouped_reducescatter(kv, frontend, dtypes[:3])
    kv.barrier()


def check_in_graph(kv: Any, frontend: str, to_graph: Callable[[Any], Any]) -> None:
    """``allreduce`` in graphs, on this rank; ``to_graph`` is ``tf.function`` or ``jax.jit``."""

    class InGraph:
        world = staticmethod(kv.world)

        @staticmethod
        def allreduce(tensor: Any, name: str, *arguments: Any) -> Any:
            return to_graph(lambda x: kv.allreduce(x, name, *arguments))(tensor)

    for dtype in (*INTEGERS, *FLOATS, "bool"):
        for case in conformance.reductions(dtype, ((3, 5),), ((False, False),)):
            if case.dense and (case.op in (Sum, Max) or dtype in ("int32", "float32")):
                conformance.check_allreduce(InGraph, frontend, case)
    for shape in ((), (0,), (2, 0, 3), (1,), (1025,), (1_000_003,)):
        case = Case("float32", shape, Sum, (1.0, 1.0), False, False)
        conformance.check_allreduce(InGraph, frontend, case)


def take_part_backwards(sizes: dict[str, int]) -> None:
    """Sum ones of these sizes with the other rank, the last name first, each waited for.

    Ends only if the other rank has all of them on their way before any is complete.
    """
    for name, size in reversed(sizes.items()):
        handle = kolovod.allreduce_async(np.ones(size, np.float32), name, kolovod.Sum)
        assert (handle.wait(timeout_s=60) == 2).all()
