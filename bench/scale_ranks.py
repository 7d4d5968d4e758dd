"""Some ranks of a simulated world, as threads of one process: started by ``bench/scale.py``.

Reads one JSON line with its part of the world, says "ready", and waits for a line; says "counted"
once its ranks have counted their messages, and waits for another, for who leaves makes more; and
answers with one JSON line. Every rank is a host of its own, with all that a process would have: its
own segment, engine, and connections over TCP.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from kolovod import _native
from kolovod.config import Settings
from kolovod.core.engine_factory import make_engine
from kolovod.rendezvous.bootstrap import bootstrap

TIMEOUT_S = 120.0
WARMUP = 4  # by name, by name with a bit for an answer, by bit
BROADCAST = 256  # elements of 4 bytes
SMALL = {"chunk_bytes": 4096, "chunk_slots": 1, "cache_capacity": 64, "spin_us": 0}


def config() -> dict[str, int]:
    """Return a config without tensors: a small segment, and no spinning on a crowded core."""
    return {**Settings().engine_config(), **SMALL, "start_timeout_ms": int(TIMEOUT_S * 1000)}


def run(engine: _native.Engine, verb: str, name: str, data: npt.NDArray[np.float32]) -> None:
    """Run one operation on ``data``, in place; without elements ranks only agree on it."""
    place = data.ctypes.data if len(data) else 0
    tensor = (_native.DTYPES["float32"], data.shape, place, place)
    add = _native.OPS["Sum"]
    handle = engine.submit(_native.VERBS[verb], name, [tensor], add, 1.0, 1.0, 0, True)
    engine.wait(handle, -1.0)
    engine.release(handle)


def messages(engine: _native.Engine) -> int:
    """Return how many this rank has sent to other hosts or received from them."""
    stats = engine.stats()
    return stats["control_messages_sent"] + stats["control_messages_received"]


def be(rank: int, world: dict[str, Any], counted: threading.Barrier) -> dict[str, Any]:
    """Live as ``rank`` of the world, and tell what that took."""
    members = tuple(range(world["size"]))
    begun = time.monotonic()
    ready = bootstrap(
        rank, members, f"host-{rank}", world["store"], world["secret"], config(), TIMEOUT_S
    )
    with ready:
        engine = make_engine(ready, None)
    formed = time.monotonic()
    nothing = np.empty(0, np.float32)
    data = np.full(BROADCAST, rank + 1, np.float32)
    try:
        run(engine, "broadcast", "first", data)
        if not np.all(data == 1):
            raise RuntimeError(f"a broadcast of ones gave {data}")
        carried = time.monotonic()
        for _ in range(WARMUP):
            run(engine, "allreduce", "step", nothing)
        before = messages(engine)
        times = [time.monotonic()]
        for _ in range(world["steps"]):
            run(engine, "allreduce", "step", nothing)
            times.append(time.monotonic())
        passed = messages(engine) - before
        connections = engine.stats()["data_connections"]
        counted.wait(TIMEOUT_S)
        counted.wait(TIMEOUT_S)
    finally:
        engine.shutdown()
    return {
        "begun": begun,
        "formed": formed,
        "carried": carried,
        "step_s": float(np.median(np.diff(times))),
        "messages": passed / world["steps"],
        "connections": connections,
    }


def main() -> int:
    """Run this process's ranks."""
    world = json.loads(sys.stdin.readline())
    answers: list[Any] = [None] * len(world["ranks"])

    def live(index: int, rank: int) -> None:
        try:
            answers[index] = be(rank, world, counted)
        except Exception as error:
            counted.abort()
            answers[index] = {"error": f"rank {rank}: {type(error).__name__}: {error}"}

    counted = threading.Barrier(len(answers) + 1)
    threading.stack_size(256 << 10)
    threads = [
        threading.Thread(target=live, args=(index, rank))
        for index, rank in enumerate(world["ranks"])
    ]
    print("ready", flush=True)
    sys.stdin.readline()
    for thread in threads:
        thread.start()
    with contextlib.suppress(threading.BrokenBarrierError):
        counted.wait(TIMEOUT_S)
        print("counted", flush=True)
        sys.stdin.readline()
        counted.wait(TIMEOUT_S)
    for thread in threads:
        thread.join()
    print(json.dumps(answers), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
