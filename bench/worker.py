"""One rank of one peer: does what the driver (gangs.py) asks, and answers with clock readings.

Started as ``python bench/worker.py PEER`` by the peer's own launcher. Commands and answers are
lines of JSON on a Unix socket; between commands the process sleeps, so that one peer's idle ranks
do not disturb the measurement of another's.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
from peers import PEERS, Call, Peer

BARRIER_TIMEOUT_S = 60.0
SLOT = 16  # 64-bit words between two ranks' counters: they never share a cache line
POOL_SLACK = 1 << 16


class Barrier:
    """A barrier of all ranks in memory that they share, the same for every peer.

    The last to arrive goes on at once, the others see it within a microsecond. When ranks outnumber
    cores, the waiting ranks give up the core.
    """

    def __init__(self, path: Path, rank: int, size: int) -> None:
        with path.open("r+b") as file:
            self._slots = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        self._mine = rank * SLOT
        self._others = [other * SLOT for other in range(size) if other != rank]
        self._patience = 0 if size > len(os.sched_getaffinity(0)) else 2000
        self._count = 0

    def wait(self) -> None:
        """Return once every rank has called; TimeoutError after BARRIER_TIMEOUT_S."""
        self._count += 1
        count, slots = self._count, self._slots
        slots[self._mine] = count
        looks, deadline = 0, 0.0
        for other in self._others:
            while slots[other] < count:
                looks += 1
                if looks < self._patience:
                    continue
                os.sched_yield()
                if looks % 4096 == 0:
                    deadline = deadline or time.monotonic() + BARRIER_TIMEOUT_S
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"a rank did not arrive within {BARRIER_TIMEOUT_S} s")


class Data:
    """Fresh random small integers for every iteration, rank and buffer, and their exact sum.

    Every rank holds the same random pool; a buffer's content is a stretch of it that starts at a
    place drawn anew each time. So each rank can compute what all ranks together must get, and the
    integers are small enough for the sum to be exact in every dtype.
    """

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._draw = np.random.default_rng(seed)  # the same on every rank
        self._pool = np.zeros(0, dtype=np.uint8)

    def reserve(self, count: int) -> None:
        """Make the pool long enough for buffers of ``count`` elements."""
        if self._pool.size < count + POOL_SLACK:
            highest = min(16, 256 // self._size)  # the sum fits a uint8
            values = np.random.default_rng(count)
            self._pool = values.integers(0, highest, count + POOL_SLACK, dtype=np.uint8)

    def places(self, buffers: int) -> np.ndarray[Any, Any]:
        """Where each rank's stretch for each buffer starts: shape [buffers, size]."""
        return self._draw.integers(0, POOL_SLACK, (buffers, self._size))

    def fill(self, buffer: np.ndarray[Any, Any], place: int) -> None:
        """Write the stretch that starts at ``place``."""
        np.copyto(buffer, self._pool[place : place + buffer.size], casting="unsafe")

    def wrong(self, buffer: np.ndarray[Any, Any], places: np.ndarray[Any, Any]) -> int:
        """How many elements differ from the sum of the stretches; every element is looked at."""
        count, step = 0, 1 << 16
        for first in range(0, buffer.size, step):
            length = min(step, buffer.size - first)
            total = np.zeros(length, dtype=np.uint8)
            for place in places:
                total += self._pool[place + first : place + first + length]
            count += int(np.count_nonzero(buffer[first : first + length] != total))
        return count


class Measurer:
    """Runs one measurement after the other on one rank."""

    def __init__(self, peer: Peer, barrier: Barrier, seed: int) -> None:
        self._peer, self._barrier = peer, barrier
        self._data = Data(peer.size, seed)
        self._trainers: dict[str, Any] = {}

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Do one command; the keys are those of the methods' parameters."""
        what = command.pop("do")
        gc.collect()
        gc.disable()  # a collection would fall on a random iteration of a random peer
        try:
            result: dict[str, Any] = getattr(self, f"do_{what}")(**command)
        finally:
            gc.enable()
        return result

    def do_allreduce(
        self, front: str, dtype: str, bytes: int, ops: int, iterations: int, warmup: int
    ) -> dict[str, Any]:
        """``ops`` blocking calls back to back, each on a buffer of its own."""
        call: Call = self._peer.allreduce(front)

        def run(tensors: list[Any]) -> None:
            for tensor in tensors:
                call(tensor)

        return self._measure(run, front, dtype, bytes, ops, iterations, warmup)

    def do_many(
        self, front: str, way: str, dtype: str, bytes: int, ops: int, iterations: int, warmup: int
    ) -> dict[str, Any]:
        """``ops`` tensors of ``bytes`` each, in the peer's ``way``, until all are done."""
        run = self._peer.many(front, way)
        return self._measure(run, front, dtype, bytes, ops, iterations, warmup)

    def _measure(
        self, run: Any, front: str, dtype: str, size: int, ops: int, iterations: int, warmup: int
    ) -> dict[str, Any]:
        count = max(1, size // np.dtype(dtype).itemsize)
        self._data.reserve(count)
        buffers = [np.empty(count, dtype=dtype) for _ in range(ops)]
        tensors = [self._peer.wrap(front, buffer) for buffer in buffers]
        clock, starts, ends, wrong = time.monotonic_ns, [], [], 0
        for _ in range(warmup + iterations):
            places = self._data.places(ops)
            for buffer, place in zip(buffers, places, strict=True):
                self._data.fill(buffer, place[self._peer.rank])
            self._barrier.wait()
            start = clock()
            run(tensors)
            end = clock()
            self._barrier.wait()  # nobody's check takes memory bandwidth from a slower rank
            starts.append(start)
            ends.append(end)
            wrong += sum(map(self._data.wrong, buffers, places))
        return {"starts": starts[warmup:], "ends": ends[warmup:], "wrong": wrong,
                "checked": ops * (warmup + iterations)}  # fmt: skip

    def do_train(self, model: str, steps: int, warmup: int, active: int) -> dict[str, Any]:
        """Training steps of a model; ranks from ``active`` on stay out of it."""
        if self._peer.rank >= active:
            return {"starts": [], "ends": []}
        from training_rank import Trainer

        key = f"{model}/{active}"
        if key not in self._trainers:
            self._trainers[key] = Trainer(model, self._peer)
        barrier = self._barrier if active > 1 else None
        result: dict[str, Any] = self._trainers[key].steps(steps, warmup, barrier)
        return result


def main() -> None:
    """Join the peer's world, say hello to the driver, serve it until it hangs up."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(os.environ["BENCH_SOCKET"])
    stream = connection.makefile("rw", encoding="utf-8", newline="\n")

    def say(message: dict[str, Any]) -> None:
        stream.write(json.dumps(message) + "\n")
        stream.flush()

    try:
        peer = PEERS[sys.argv[1]]()
        barrier = Barrier(Path(os.environ["BENCH_BARRIER"]), peer.rank, peer.size)
        measurer = Measurer(peer, barrier, seed=int(os.environ["BENCH_SEED"]))
        say({"rank": peer.rank, "size": peer.size})
        for line in stream:
            say(measurer.answer(json.loads(line)))
        peer.close()
    except BaseException:
        say({"error": traceback.format_exc()})
        raise


if __name__ == "__main__":
    main()
