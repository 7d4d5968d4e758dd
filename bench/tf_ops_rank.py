"""One rank in bench/tf_ops.py: ``python bench/tf_ops_rank.py FILE ITERATIONS OPS [OPS ...]``."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import tensorflow as tf

import kolovod.tensorflow as kv

WARMUP = 10
ROWS, COLUMNS = 4, 1
"""Of each op's input: 16 bytes."""

Array = np.ndarray[Any, Any]
Ops = dict[str, tuple[Callable[[Any], Any], Callable[[Array], Array]]]


def ops(rank: int, size: int) -> Ops:
    """Return by name the op, and what it makes of all ranks' inputs [rank, op, ROWS, COLUMNS]."""
    share = ROWS // size
    mine = slice(rank * share, (rank + 1) * share)
    return {
        "sin": (tf.sin, lambda given: np.sin(given[rank])),
        "allreduce": (lambda x: kv.allreduce(x, op=kv.Sum), lambda given: given.sum(0)),
        "broadcast": (lambda x: kv.broadcast(x, size - 1), lambda given: given[size - 1]),
        "allgather": (kv.allgather, lambda given: np.concatenate(given, 1)),
        "alltoall": (
            lambda x: kv.alltoall(x)[0],
            lambda given: np.concatenate(given[:, :, mine], 1),
        ),
        "reducescatter": (
            lambda x: kv.reducescatter(x, op=kv.Sum),
            lambda given: given.sum(0)[:, mine],
        ),
    }


def function_of(op: Callable[[Any], Any], count: int) -> Callable[[Any], Any]:
    """Return a function of ``count`` independent ``op``; it gives their results, stacked."""
    return tf.function(lambda x: tf.stack([op(each) for each in tf.unstack(x, count)]))  # type: ignore[no-any-return]


def measure(count: int, iterations: int) -> dict[str, Any]:
    """Return clock readings (ns) of every op's function, by turns, on data drawn anew each time."""
    rank, size = kv.rank(), kv.size()
    verbs = ops(rank, size)
    functions = {name: function_of(op, count) for name, (op, _) in verbs.items()}
    draw = np.random.default_rng(count)  # the same on every rank
    readings: dict[str, Any] = {name: {"starts": [], "ends": [], "cpu_ns": []} for name in verbs}
    for turn in range(WARMUP + iterations):
        for name, function in functions.items():
            given = draw.integers(-8, 8, (size, count, ROWS, COLUMNS)).astype(np.float32)
            x = tf.constant(given[rank])
            kv.barrier()
            cpu, start = time.process_time_ns(), time.monotonic_ns()
            result = function(x)
            end = time.monotonic_ns()
            cpu = time.process_time_ns() - cpu
            wanted = verbs[name][1](given)
            if not np.allclose(result.numpy(), wanted, rtol=1e-6):
                raise RuntimeError(f"{name}, {count} ops: got {result.numpy()}, not {wanted}")
            if turn >= WARMUP:
                for key, value in (("starts", start), ("ends", end), ("cpu_ns", cpu)):
                    readings[name][key].append(value)
    return readings


def main() -> None:
    """Measure, and write what all ranks have read into the file."""
    file, iterations = Path(sys.argv[1]), int(sys.argv[2])
    kv.init()
    found = {count: measure(int(count), iterations) for count in sys.argv[3:]}
    everybody = kv.allgather_object(found)
    if kv.rank() == 0:
        file.write_text(json.dumps({"tensorflow": tf.__version__, "ranks": everybody}))
    kv.shutdown()


if __name__ == "__main__":
    main()
