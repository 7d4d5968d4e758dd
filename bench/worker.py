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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from peers import PEERS, Call, Peer

BARRIER_TIMEOUT_S = 60.0
SLOT = 16  # 64-bit words between two ranks' counters: they never share a cache line
POOL_SLACK = 1 << 16

Run = Callable[[list[Any], list[Any]], Any]
"""(buffers, outputs) -> the results of verbs that are not in place and were given no output."""


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
                if self._patience:
                    os.sched_yield()
                else:
                    time.sleep(20e-6)  # a yield may not leave the rank's own scheduling group
                if looks % 256 == 0:
                    deadline = deadline or time.monotonic() + BARRIER_TIMEOUT_S
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"a rank did not arrive within {BARRIER_TIMEOUT_S} s")


class Data:
    """Fresh random small integers for every iteration, rank and buffer, and their exact sum.

    Every rank holds the same random pool; a buffer's content is a stretch of it that starts at a
    place drawn anew each time. So each rank can compute what all ranks together must get, and the
    integers are small enough for the sum to be exact in every dtype. bfloat16, which NumPy has not,
    is kept as uint16: the upper half of a float32.
    """

    def __init__(self, size: int, seed: int, dtype: str = "float32") -> None:
        self._size, self._dtype = size, dtype
        self._draw = np.random.default_rng(seed)  # the same on every rank
        self._pool = np.zeros(0, dtype=np.uint8)

    def use(self, dtype: str) -> np.dtype[Any]:
        """Let buffers hold ``dtype`` from now on; return the NumPy dtype that they have."""
        self._dtype = dtype
        return np.dtype("uint16" if dtype == "bfloat16" else dtype)

    def reserve(self, count: int) -> None:
        """Make the pool long enough for buffers of ``count`` elements."""
        if self._pool.size < count + POOL_SLACK:
            highest = min(16, 256 // self._size)  # the sum fits a uint8
            values = np.random.default_rng(count)
            self._pool = values.integers(0, highest, count + POOL_SLACK, dtype=np.uint8)

    def places(self, buffers: int) -> np.ndarray[Any, Any]:
        """Return where each rank's stretch for each buffer starts: shape [buffers, size]."""
        return self._draw.integers(0, POOL_SLACK, (buffers, self._size))

    def fill(self, buffer: np.ndarray[Any, Any], place: int) -> None:
        """Write the stretch that starts at ``place``."""
        values = self._pool[place : place + buffer.size]
        if self._dtype == "bfloat16":
            high_half = values.astype(np.float32).view(np.uint32) >> 16
            np.copyto(buffer, high_half, casting="unsafe")
            return
        np.copyto(buffer, values, casting="unsafe")

    def wrong(self, buffer: np.ndarray[Any, Any], places: Sequence[int]) -> int:
        """Return how many elements differ from the sum of the stretches; all are looked at."""
        count, step = 0, 1 << 16
        for first in range(0, buffer.size, step):
            length = min(step, buffer.size - first)
            total = np.zeros(length, dtype=np.uint8)
            for place in places:
                total += self._pool[place + first : place + first + length]
            found = buffer[first : first + length]
            if self._dtype == "bfloat16":
                found = (found.astype(np.uint32) << 16).view(np.float32)
            count += int(np.count_nonzero(found != total))
        return count


@dataclass(frozen=True)
class Layout:
    """What a verb takes and gives on one rank: ``count`` elements are the larger of the two.

    ``given``, ``taken``: elements of the buffer and of the result. IN_PLACE verbs need no output.
    """

    verb: str
    rank: int
    size: int
    count: int

    IN_PLACE = ("allreduce", "broadcast")

    @property
    def given(self) -> int:
        return self.count // self.size if self.verb == "allgather" else self.count

    @property
    def taken(self) -> int:
        return self.count // self.size if self.verb == "reducescatter" else self.count

    def wrong(self, data: Data, result: np.ndarray[Any, Any], places: Sequence[int]) -> int:
        """Count elements of the result that are not what the verb must give; also those missing."""
        part = self.count // self.size
        if result.size != self.taken:
            return self.taken
        if self.verb == "allreduce":
            return data.wrong(result, places)
        if self.verb == "broadcast":
            return data.wrong(result, places[:1])
        if self.verb == "reducescatter":
            return data.wrong(result, [place + self.rank * part for place in places])
        start = self.rank * part if self.verb == "alltoall" else 0
        parts = result.reshape(self.size, part)
        return sum(data.wrong(parts[s], [place + start]) for s, place in enumerate(places))


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

    def do_verb(
        self, verb: str, front: str, dtype: str, bytes: int, ops: int, iterations: int, warmup: int
    ) -> dict[str, Any]:
        """Measure ``ops`` blocking calls back to back, each on buffers of its own.

        ``bytes``: the larger of what a rank gives and what it gets.
        """
        call: Call = self._peer.call(front, verb)

        def run(tensors: list[Any], outputs: list[Any]) -> list[Any]:
            return [call(tensor, out) for tensor, out in zip(tensors, outputs, strict=True)]

        return self._measure(run, verb, front, dtype, bytes, ops, iterations, warmup)

    def do_many(
        self, front: str, way: str, dtype: str, bytes: int, ops: int, iterations: int, warmup: int
    ) -> dict[str, Any]:
        """Measure ``ops`` tensors of ``bytes`` each, in the peer's ``way``, until all are done."""
        reduce = self._peer.many(front, way)
        return self._measure(lambda tensors, _: reduce(tensors), "allreduce", front, dtype, bytes,
                             ops, iterations, warmup)  # fmt: skip

    def _measure(
        self, run: Run, verb: str, front: str, dtype: str, size: int, ops: int, iterations: int,
        warmup: int,
    ) -> dict[str, Any]:  # fmt: skip
        peer, stored = self._peer, self._data.use(dtype)
        count = max(1, size // stored.itemsize)
        in_place = verb in Layout.IN_PLACE
        if not in_place:
            count = max(1, count // peer.size) * peer.size
        layout = Layout(verb, peer.rank, peer.size, count)
        self._data.reserve(count)
        buffers = [np.empty(layout.given, stored) for _ in range(ops)]
        outputs = [
            None if in_place or not peer.wants_output else np.ones(layout.taken, stored)
            for _ in range(ops)
        ]
        tensors = [peer.wrap(front, buffer, dtype) for buffer in buffers]
        wrapped = [None if out is None else peer.wrap(front, out, dtype) for out in outputs]
        clock, starts, ends, wrong = time.monotonic_ns, [], [], 0
        for _ in range(warmup + iterations):
            places = self._data.places(ops)
            for buffer, place in zip(buffers, places, strict=True):
                self._data.fill(buffer, place[peer.rank])
            self._barrier.wait()
            start = clock()
            results = run(tensors, wrapped)
            end = clock()
            self._barrier.wait()  # nobody's check takes memory bandwidth from a slower rank
            starts.append(start)
            ends.append(end)
            if in_place:
                results = buffers
            elif peer.wants_output:
                results = outputs
            for result, where in zip(results, places, strict=True):
                wrong += layout.wrong(self._data, np.asarray(result), where)
            results = result = None  # Kolovod's own: it may use the memory again
        return {"starts": starts[warmup:], "ends": ends[warmup:], "wrong": wrong,
                "checked": ops * (warmup + iterations)}  # fmt: skip

    def do_train(self, model: str, steps: int, warmup: int, active: int) -> dict[str, Any]:
        """Measure training steps of a model; ranks from ``active`` on stay out of it."""
        if self._peer.rank >= active:
            return {"starts": [], "ends": []}
        from training_rank import Trainer

        key = f"{model}/{active}"
        if key not in self._trainers:
            self._trainers[key] = Trainer(model, self._peer)
        barrier = self._barrier if active > 1 else None
        result: dict[str, Any] = self._trainers[key].steps(steps, warmup, barrier)
        return result

    def do_hooks(self, model: str, steps: int, warmup: int) -> dict[str, Any]:
        """Measure by overhead_rank.hooks."""
        from overhead_rank import hooks

        return hooks(model, self._barrier, steps, warmup)

    def do_overlap(self, **case: int) -> dict[str, Any]:
        """Measure by overlap_rank.overlap."""
        from overlap_rank import overlap

        return overlap(barrier=self._barrier, **case)

    def do_alone(self, model: str, steps: int, warmup: int) -> dict[str, Any]:
        """Measure by overhead_rank.alone."""
        from overhead_rank import alone

        return alone(model, steps, warmup)


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
