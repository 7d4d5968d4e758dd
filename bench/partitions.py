"""Partitions of an elastic job between hosts; nothing else is one: ``bench/partitions.py``.

The hosts are network namespaces of this machine (scripts/netbed), so this needs root: a rank on
each, the launcher on the first. Between two groups of them all packets are dropped from one moment
on, for a time that is drawn; nothing is closed or refused. Then the job has until it is whole
again: ranks that the others have gone on without end, and the launcher starts new ones. Where two
hosts alone cannot reach each other, ranks that are left out for that count as failures, and a host
that has several is avoided for up to ten minutes (docs/elastic-reference.md). A job that is not
whole after 90 seconds is ended, and another one begins.

Each step adds to a value what the members of the world in which it was made contribute, each its
own power of two, so the value tells who took part in which step. Two worlds at a time would have
given the same step two values; so would a step that was lost, made twice or used in part. Every
rank's notes of all steps are compared; the run ends at the first that differ. The last step of a
rank that ends is left out: it may have been the only one to know that the step was complete.

``--calm SECONDS`` cuts nothing: a world after the first is a false alarm. ``bench/host_loss.py
--busy`` beside it makes a load.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import sys
import time
from pathlib import Path

import launcher_loss
import machine
import report
from report import Json, number, table

sys.path.insert(0, str(machine.ROOT / "scripts"))

from netbed import Bed

WHOLE_S = 90.0
LONGEST_S = 6.0
RANK = """
import os, sys, time
import numpy as np
import kolovod.numpy as kv
from kolovod import elastic
from kolovod.core import world

kv.init()
folder, slot = sys.argv[1], int(os.environ["KOLOVOD_SLOT"])
notes = os.open(f"{folder}/{slot}.{time.monotonic_ns()}", os.O_CREAT | os.O_WRONLY)
state = elastic.State(step=0, ends=False, value=0.0)


@elastic.run
def train(state):
    while not state.ends:
        time.sleep(0.005)
        data = np.zeros(50_000)
        data[0], data[1] = 2.0 ** slot, float(os.path.exists(folder + "/end"))
        total = elastic.exactly(lambda: kv.allreduce(data, "data", op=kv.Sum))
        state.ends = bool(total[1])
        state.step += 1
        state.value = (state.value * 31 + float(total[0])) % 1_000_003
        state.commit()
        line = f"{time.monotonic_ns()} {state.step} {kv.size()} {kv.rank()}"
        line += f" {world.current().epoch} {state.value:.0f} {total[0]:.0f}"
        os.write(notes, (line + chr(10)).encode())


train(state)
"""


class StepsDiffer(SystemExit):
    """Two ranks know a step differently, or one has left steps out."""


class Steps:
    """What the ranks of a job have noted, compared as it comes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._last: dict[Path, tuple[int, str]] = {}  # the step, and its line
        self._values: dict[int, str] = {}
        self.latest: dict[str, list[str]] = {}
        """By slot, the last line."""
        self.epochs: set[int] = set()

    @property
    def count(self) -> int:
        """Steps that were made."""
        return max((step for step, _ in self._last.values()), default=0)

    def look(self) -> None:
        """Raises StepsDiffer at a step that two ranks know differently."""
        for path in sorted(self._folder.glob("*.*"), key=lambda path: int(path.suffix[1:])):
            with path.open() as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            whole = text[: text.rfind("\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.splitlines():
                words = line.split()
                step = int(words[1])
                if path in self._last:
                    before, whole_line = self._last[path]
                    if step != before + 1:
                        raise StepsDiffer(f"{path.name} has made step {step} after {before}")
                    self._compare(path.name, before, whole_line)
                self._last[path] = step, line
                self.latest[path.name.partition(".")[0]] = words
                self.epochs.add(int(words[4]))

    def _compare(self, name: str, step: int, line: str) -> None:
        value = line.split()[5]
        if self._values.setdefault(step, value) != value:
            raise StepsDiffer(
                f"step {step} has two values, so there were two worlds: {self._values[step]} and, "
                f"in {name}, {line}"
            )

    def is_whole(self, size: int, since_step: int) -> bool:
        """Return whether so many ranks have made a step together since that one."""
        self.look()
        there = [w for w in self.latest.values() if int(w[1]) > since_step and int(w[2]) == size]
        return len(there) == size and len({words[4] for words in there}) == 1


class Partitions:
    """Jobs on one bed, one after the other."""

    def __init__(self, bed: Bed, folder: Path, seed: int) -> None:
        self._bed, self._folder = bed, folder
        self._random = random.Random(seed)
        self.jobs = 0
        self.counts: collections.Counter[str] = collections.Counter()
        self.whole_s: list[float] = []
        self.steps = 0
        self.worlds = 0

    def _start(self) -> None:
        self.jobs += 1
        folder = self._folder / str(self.jobs)
        folder.mkdir()
        hosts = ",".join(f"{name}:1" for name in self._bed.names)
        flags = ["-H", hosts, "--elastic-timeout", "20"]
        first = self._bed.names[0]
        self._job = launcher_loss.Running(
            folder, lambda *a, **k: self._bed.popen(first, *a, **k), *flags, script=RANK
        )
        self._seen = Steps(folder / "steps")
        if not self._until_whole():
            raise SystemExit(f"the job does not begin: {(folder / 'said').read_text()}")

    def _until_whole(self) -> bool:
        """Wait until it is whole. False: the job has ended, or does not come to it in time."""
        deadline = time.monotonic() + WHOLE_S
        begun = self._seen.count
        while not self._seen.is_whole(len(self._bed.names), begun + 3):
            if time.monotonic() > deadline or self._job.process.poll() is not None:
                return False
            time.sleep(0.05)
        return True

    def _cut(self) -> str:
        """Draw who no longer sees whom; return its kind."""
        names = list(self._bed.names)
        self._random.shuffle(names)
        kind = self._random.choice(["one host", "halves", "one pair", "launcher's host"])
        if kind == "halves":
            middle = len(names) // 2
            self._bed.partition(names[:middle], names[middle:])
        elif kind == "one pair":
            self._bed.partition(names[:1], names[1:2])
        else:
            alone = self._bed.names[0] if kind == "launcher's host" else names[0]
            self._bed.partition([alone], [name for name in names if name != alone])
        return kind

    def run(self, count: int) -> None:
        """Make so many partitions."""
        self._start()
        for turn in range(count):
            kind = self._cut()
            cut_s = self._random.choice([0.2, 0.8, 1.2, 1.6, 2.5, LONGEST_S])
            end = time.monotonic() + cut_s * self._random.uniform(0.8, 1.2)
            while time.monotonic() < end:
                self._seen.look()
                time.sleep(0.05)
            self._bed.heal()
            healed_s = time.monotonic()
            is_whole = self._until_whole()
            self.counts[kind] += 1
            if is_whole:
                self.whole_s.append(time.monotonic() - healed_s)
            else:
                self.counts["anew"] += 1
                said = (self._job.folder / "said").read_text().splitlines()
                ours = [line for line in said if line.startswith("kolovod: ")]
                print("\n".join(["not whole; the launcher's last words:", *ours[-20:]]))
                self._end()
                self._start()
            self._print(turn, kind, cut_s, is_whole)
        self._end()

    def calm(self, seconds: float) -> None:
        """Raises SystemExit at a false alarm."""
        self._start()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._seen.look()
            if len(self._seen.epochs) > 1 or self._job.process.poll() is not None:
                raise SystemExit(f"a false alarm: {(self._job.folder / 'said').read_text()}")
            time.sleep(1.0)
        print(f"{self._seen.count} steps in {seconds:g} s, one world", flush=True)
        self._end()

    def _print(self, turn: int, kind: str, cut_s: float, is_whole: bool) -> None:
        became = f"whole after {self.whole_s[-1]:.1f} s" if is_whole else "another job begins"
        print(f"{turn + 1}: {kind}, {cut_s:g} s: {became}; {self._seen.count} steps", flush=True)

    def _end(self) -> None:
        """Let the job come to its end; what is noted last counts, too."""
        self._job.end()
        self._seen.look()
        self.steps += self._seen.count
        self.worlds += len(self._seen.epochs)


def main() -> None:
    """Measure, and write partitions.json and .md."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--partitions", type=int, default=200)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--calm", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--output", type=Path, default=report.RESULTS, metavar="FOLDER")
    options = parser.parse_args()
    facts, load = machine.facts(), [os.getloadavg()[0]]
    names = [chr(ord("a") + index) for index in range(options.hosts)]
    with launcher_loss.folder() as folder, Bed(names) as bed:
        made = Partitions(bed, folder, options.seed)
        if options.calm:
            made.calm(options.calm)
            return
        made.run(options.partitions)
    load.append(os.getloadavg()[0])
    anew = made.counts.pop("anew", 0)
    whole = report.summary(made.whole_s)
    result: Json = {
        "command": machine.command_line(),
        "partitions": made.counts,
        "jobs": made.jobs,
        "jobs_begun_anew": anew,
        "steps": made.steps,
        "worlds": made.worlds,
        "whole_s": whole,
        "load": load,
        "machine": facts,
    }
    markdown = (
        "# Partitions\n\n"
        f"`{machine.command_line()}` on {report.machine_line(facts)}, load {load[0]:.1f} to "
        f"{load[1]:.1f}; {options.hosts} hosts with a rank each. {sum(made.counts.values())} "
        f"partitions of {made.jobs} jobs; {made.steps:,} steps in {made.worlds} worlds. **No step "
        "had two values**: there were never two worlds at a time. "
        f"{anew} jobs were not whole again after {WHOLE_S:g} s, and were begun anew.\n\n"
        f"{table(['what is cut', 'times'], [[k, str(n)] for k, n in sorted(made.counts.items())])}"
        "\nFrom the end of a partition until all hosts make steps together again, with new "
        f"processes where the others went on without: median {number(whole['median'])} s, "
        f"90 % {number(whole['p90'])} s, longest {number(whole['max'])} s.\n"
    )
    report.write("partitions", result, markdown, options.output)


if __name__ == "__main__":
    main()
