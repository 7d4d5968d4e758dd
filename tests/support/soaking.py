"""A rank of scripts/soak.py: rounds of operations drawn at random (drawn.py), all verified.

usage: python tests/support/soaking.py FOLDER SEED SECONDS, by `kolovod run`

In a round each rank submits some operations of the world and of process sets in an order of its
own, waits for them in another, and then calls some that block. Sets come and go. How many
operations were done and what memory is resident goes to FOLDER/RANK, a line of JSON each time.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from drawn import Draw, Task

import kolovod
from kolovod.numpy import collectives

HANG_S = 60.0  # the deadline of a round, which has some megabytes, of init() and of shutdown()
MOST_AT_ONCE = 24
MOST_SETS = 6
ROUNDS_BETWEEN_SETS = 25
SAMPLE_S, REPORT_S = 0.5, 10.0


class Soak:
    """The loop of this rank."""

    def __init__(self, seed: int, notes: TextIO) -> None:
        """``notes``: where the lines of JSON go."""
        self.seed, self.notes = seed, notes
        self.rank, self.size = kolovod.rank(), kolovod.size()
        self.sets: list[Any] = []
        self.begin_s = time.monotonic()
        self.sampled_s = self.reported_s = -1e9
        self.started = self.verified = 0

    def run(self, seconds: float) -> None:
        """Rounds until rank 0's time is over."""
        for number in itertools.count():
            watch()
            over = np.array([self.passed_s() > seconds])
            if kolovod.broadcast(over, 0)[0]:
                break
            if number % ROUNDS_BETWEEN_SETS == 0:
                self.change_sets(np.random.default_rng([self.seed, number]))
            self.round(number)
            self.note()

    def passed_s(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self.begin_s

    def round(self, number: int) -> None:
        """Some operations at once, then some that block."""
        random = np.random.default_rng([self.seed, number, 1])
        mine = np.random.default_rng([self.seed, number, 2, self.rank])
        tasks = list(self.at_once(number, random))
        pending = []
        for place in mine.permutation(len(tasks)):
            pending.append((tasks[place], self.submitted(tasks[place])))
        for place in mine.permutation(len(pending)):
            task, handle = pending[place]
            self.verify(task, handle.wait())
        for turn in range(int(random.integers(4))):
            members, group = self.some(random)
            if self.rank in members:
                task = Draw(collectives, [self.seed, number, 1000 + turn], members, None, group)
                drawn = task.task()
                self.verify(drawn, self.submitted(drawn))

    def at_once(self, number: int, random: np.random.Generator) -> Iterator[Task]:
        """Those of this rank: half of them with names that were used before."""
        for turn in range(1 + int(random.integers(MOST_AT_ONCE))):
            name = f"{turn}" if random.integers(2) else f"{number}.{turn}"
            members, group = self.some(random)
            if self.rank in members:
                yield Draw(collectives, [self.seed, number, turn], members, name, group).task()

    def some(self, random: np.random.Generator) -> tuple[list[int], Any]:
        """The world, as often as not, or a set."""
        if not self.sets or random.integers(2):
            return list(range(self.size)), None
        group = self.sets[int(random.integers(len(self.sets)))]
        return group.ranks, group

    def change_sets(self, random: np.random.Generator) -> None:
        """Remove one if there are many, add one if there is another."""
        if len(self.sets) >= min(MOST_SETS, 2**self.size - 3):
            kolovod.remove_process_set(self.sets.pop(int(random.integers(len(self.sets)))))
        taken = [group.ranks for group in self.sets]
        every = (
            list(ranks)
            for count in range(1, self.size)
            for ranks in itertools.combinations(range(self.size), count)
        )
        free = [ranks for ranks in every if ranks not in taken]
        if free:
            self.sets.append(kolovod.add_process_set(free[int(random.integers(len(free)))]))

    def submitted(self, task: Task) -> Any:
        """Its handle or result."""
        self.started += 1
        try:
            return task.start()
        except BaseException as error:
            print(f"rank {self.rank}, seed {self.seed}: {task.what}: {error}", file=sys.stderr)
            raise

    def verify(self, task: Task, result: Any) -> None:
        """AssertionError that says which operation it was."""
        try:
            task.check(result)
        except AssertionError as error:
            raise AssertionError(f"rank {self.rank}, seed {self.seed}: {task.what}") from error
        self.verified += 1

    def note(self) -> None:
        """Now and then, what was done and what memory is resident."""
        now_s = self.passed_s()
        if now_s - self.sampled_s < SAMPLE_S:
            return
        self.sampled_s = now_s
        memory = resident_kib()
        line = {"s": now_s, "started": self.started, "verified": self.verified, **memory}
        print(json.dumps(line), file=self.notes, flush=True)
        if self.rank == 0 and now_s - self.reported_s >= REPORT_S:
            self.reported_s = now_s
            parts = ", ".join(f"{name} {kib >> 10} MiB" for name, kib in memory.items())
            print(f"{now_s:4.0f} s: {self.verified:,} operations verified; {parts}", flush=True)


def resident_kib() -> dict[str, int]:
    """By kind, of this process."""
    status = Path("/proc/self/status").read_text()
    return {name: int(kib) for name, kib in re.findall(r"^(Rss\w+):\s+(\d+) kB", status, re.M)}


def watch() -> None:
    """From now on: what takes longer than HANG_S ends this process, which says where it is."""
    faulthandler.dump_traceback_later(HANG_S, exit=True)


def main() -> None:
    """As the command line says."""
    folder, seed, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    watch()
    kolovod.init()
    with open(folder / str(kolovod.rank()), "w") as notes:
        Soak(seed, notes).run(seconds)
    watch()
    kolovod.shutdown()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
