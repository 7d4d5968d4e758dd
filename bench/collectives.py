"""Every verb of Kolovod and its peers, in turn in one run: ``bench/collectives.py [--quick]``.

How it measures. Every rank fills private memory with fresh random small integers, all ranks meet
at a barrier of their own (not the peer's), and the time of an iteration is max(end) - min(start)
over the ranks on CLOCK_MONOTONIC. Below 1 MiB one iteration is several operations back to back,
each on a buffer of its own, and its time is divided by their number. Every element of every
iteration's result is compared with the exact result, warm-up included. All peers are called from
Python as their documentation shows, on memory that NumPy allocated: allreduce and broadcast in
place; allgather, alltoall and reducescatter into memory that gloo and MPI are given, while Kolovod
makes its own. The size is the larger of what a rank gives and what it gets. Each round measures
every size with every peer in turn (the order rotates); a ping-pong of a cache line before and after
tells the mode.

The bound (``inplace``): every rank reads and writes its buffer once, all at the same time, in C++.
``memcpy``: every rank copies its buffer to another, all at the same time, in C++.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import collectives_report
import machine
import report
from gangs import Gang, GangError

KIB, MIB = 1 << 10, 1 << 20
DEFAULT_SIZES = {
    2: [4, 64, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB,
        MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB],
    4: [4, KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB],
}  # fmt: skip
OTHER_SIZES = [4, KIB, 64 * KIB, MIB, 16 * MIB]  # of other numbers of ranks
QUICK_SIZES = [4, 4 * KIB, 64 * KIB, MIB, 16 * MIB]
VERBS = ("broadcast", "allgather", "alltoall", "reducescatter")
VERB_SIZES = {2: [4 * KIB, MIB, 16 * MIB, 64 * MIB], 4: [MIB, 16 * MIB, 64 * MIB]}
OTHER_VERB_SIZES = [MIB, 16 * MIB]
DTYPES = ("float32", "float16", "bfloat16")
DTYPE_ELEMENTS = [16 * KIB, 256 * KIB, 4 * MIB, 16 * MIB]
TORCH_UP_TO = 4 * KIB  # from there on the front end is no longer to be seen
MAX_ITERATIONS = 200
ASK_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Cell:
    """One thing to measure.

    ``what``: a verb; or the way to reduce ``ops`` tensors; or a dtype, for allreduce of that.
    """

    what: str
    bytes: int
    ops: int

    @property
    def divisor(self) -> float:
        """The divisor from nanoseconds of an iteration to microseconds of what the table shows."""
        return 1e3 if self.what in WAYS else 1e3 * self.ops


@dataclass(frozen=True)
class Column:
    """Who is measured, and through which front end. An empty peer is the C++ tool."""

    name: str
    peer: str
    front: str = "numpy"

    def takes(self, cell: Cell) -> bool:
        """Return whether this column has a value in that cell."""
        if cell.what == "allreduce":
            return self.name != "kolovod-torch" or cell.bytes <= TORCH_UP_TO
        if cell.what in DTYPES:
            return self.name in ("kolovod-torch", "gloo")
        if cell.what in VERBS:
            return bool(self.peer) and self.name != "kolovod-torch"
        return self.name in WAYS[cell.what]


WAYS = {
    "calls": ("kolovod", "gloo", "openmpi", "mpich"),
    "async": ("kolovod", "gloo"),
    "grouped": ("kolovod",),
}
COLUMNS = (
    Column("kolovod", "kolovod"),
    Column("kolovod-torch", "kolovod", "torch"),
    Column("kolovod-tcp", "kolovod-tcp"),
    Column("gloo", "gloo", "torch"),
    Column("openmpi", "openmpi"),
    Column("mpich", "mpich"),
    Column("memcpy", ""),
    Column("inplace", ""),
)


@dataclass
class Record:
    """All that one run found out."""

    samples: dict[tuple[int, str, Cell, str], list[list[float]]] = field(
        default_factory=lambda: defaultdict(list)
    )  # (ranks, mode, cell, column) -> rounds -> microseconds
    rounds: list[dict[str, Any]] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    checked: dict[str, int] = field(default_factory=lambda: defaultdict(int))


def operations(size: int) -> int:
    """Return how many operations run back to back in one iteration."""
    for below, count in ((4 * KIB, 64), (64 * KIB, 16), (MIB - 1, 4)):
        if size <= below:
            return count
    return 1


class Bench:
    """One run for one number of ranks."""

    def __init__(self, np: int, options: argparse.Namespace, record: Record, scratch: Path) -> None:
        self.np, self.options, self.record = np, options, record
        self.columns = [column for column in COLUMNS if column.name in options.peers]
        self.cells = self._cells()
        self._iterations: dict[tuple[Cell, str], int] = {}
        self._gangs: dict[str, Gang] = {}
        for peer in dict.fromkeys(column.peer for column in self.columns if column.peer):
            try:
                self._gangs[peer] = Gang(peer, np, scratch)
            except (GangError, OSError) as error:
                self._drop(peer, error)

    def _cells(self) -> list[Cell]:
        options, np = self.options, self.np
        sizes = options.sizes or (QUICK_SIZES if options.quick else None)
        verb_sizes = options.sizes or ([MIB] if options.quick else None)
        elements = [MIB] if options.quick else DTYPE_ELEMENTS
        if options.sizes:
            elements = [max(1, size // 4) for size in options.sizes]
        cells = [
            Cell("allreduce", size, operations(size))
            for size in sizes or DEFAULT_SIZES.get(np, OTHER_SIZES)
        ]
        if np == 2 and options.many:
            cells += [Cell(way, 4 * KIB, options.many) for way in WAYS]
        cells += [
            Cell(verb, size, operations(size))
            for verb in options.verbs
            for size in verb_sizes or VERB_SIZES.get(np, OTHER_VERB_SIZES)
        ]
        for count in elements if np in (2, 4) else []:
            for dtype in options.dtypes:
                size = count * (4 if dtype == "float32" else 2)
                cells.append(Cell(dtype, size, operations(4 * count)))
        return cells

    def _drop(self, peer: str, error: Exception) -> None:
        self._gangs.pop(peer, None)
        self.record.dropped[f"{peer}, np={self.np}"] = str(error)
        print(f"  {peer} dropped: {error}", file=sys.stderr, flush=True)

    def run(self) -> None:
        """Measure in all rounds; one is shown when it is done."""
        try:
            for number in range(self.options.rounds):
                self._round(number)
        finally:
            for gang in self._gangs.values():
                gang.close()

    def _round(self, number: int) -> None:
        before, looks = machine.load(), [machine.one_way_ns()]
        started = time.monotonic()
        for cell in self.cells:
            found: dict[str, list[float]] = {}
            turn = number % len(self.columns)
            for column in self.columns[turn:] + self.columns[:turn]:
                if column.takes(cell):
                    values = self._measure(cell, column)
                    if values:
                        found[column.name] = values
            looks.append(machine.one_way_ns())
            mode = machine.mode_of(*looks[-2:])
            for name, values in found.items():
                self.record.samples[self.np, mode, cell, name].append(values)
        after = machine.load()
        seen = {
            "np": self.np,
            "round": number + 1,
            "mode": machine.mode_of(*looks),
            "one_way_ns": looks,
            "loadavg": [before["loadavg"], after["loadavg"]],
            "steal_s": round(after["steal_s"] - before["steal_s"], 2),
            "seconds": round(time.monotonic() - started, 1),
        }
        self.record.rounds.append(seen)
        print(
            f"np={self.np} round {number + 1}/{self.options.rounds}: mode {seen['mode']}, "
            f"a cache line takes {looks[0]}..{looks[-1]} ns, load {before['loadavg']:.2f}.."
            f"{after['loadavg']:.2f}, steal {seen['steal_s']} s, {seen['seconds']} s",
            flush=True,
        )

    def _measure(self, cell: Cell, column: Column) -> list[float]:
        """Return microseconds by iteration; none when the peer is, or now becomes, dropped."""
        if column.peer and column.peer not in self._gangs:
            return []
        try:
            if (cell, column.name) not in self._iterations:
                started = time.monotonic()
                self._once(cell, column, iterations=3)
                each_s = (time.monotonic() - started) / 4  # three and the warm-up
                budget_s = self.options.budget_s
                wanted = int((budget_s if cell.what == "allreduce" else budget_s / 2) / each_s)
                self._iterations[cell, column.name] = min(MAX_ITERATIONS, max(3, wanted))
            return self._once(cell, column, self._iterations[cell, column.name])
        except GangError as error:
            self._drop(column.peer, error)
        except machine.ToolError as error:
            self.record.dropped[column.name] = str(error)
        return []

    def _once(self, cell: Cell, column: Column, iterations: int) -> list[float]:
        if not column.peer:
            answer = machine.run_tool(
                column.name, np=self.np, bytes=cell.bytes, ops=cell.ops, iterations=iterations + 1
            )
            values: list[float] = answer["us"][1:]
            return values
        command: dict[str, Any] = {
            "do": "many" if cell.what in WAYS else "verb",
            "front": column.front,
            "dtype": cell.what if cell.what in DTYPES else "float32",
            "bytes": cell.bytes,
            "ops": cell.ops,
            "iterations": iterations,
            "warmup": 1,
        }
        if cell.what in WAYS:
            command["way"] = cell.what
        else:
            command["verb"] = cell.what if cell.what in VERBS else "allreduce"
        answers = self._gangs[column.peer].ask(ASK_TIMEOUT_S, **command)
        self.record.wrong[column.name] += sum(answer["wrong"] for answer in answers)
        self.record.checked[column.name] += sum(answer["checked"] for answer in answers)
        return report.spans(answers, cell.divisor)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line; see --help."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    def words(text: str) -> list[str]:
        return [part for part in text.split(",") if part]

    names = [column.name for column in COLUMNS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--np", type=numbers, default=[2, 3, 4, 8], metavar="N,N", help="ranks (default 2,3,4,8)")
    add("--sizes", type=numbers, metavar="BYTES,BYTES", help="instead of 4 B to 256 MiB")
    add("--verbs", type=words, default=list(VERBS), help="beside allreduce: " + ",".join(VERBS))
    add("--dtypes", type=words, default=list(DTYPES), help=",".join(DTYPES))
    add("--many", type=int, default=500, help="how many 4 KiB tensors; 0: leave that out")
    add("--rounds", type=int, help="default 5; with --quick 2")
    add("--budget-s", type=float, help="per peer, size and round; default 0.5; with --quick 0.1")
    add("--peers", type=words, default=names, help=",".join(names))
    add("--quick", action="store_true", help="fewer sizes and rounds, np=2; under 90 s")
    add("--output", type=Path, default=report.RESULTS, metavar="FOLDER")
    add("--docs", "--readme", action="store_true", help="then bring docs/benchmarks.md up to date")
    options = parser.parse_args(arguments)
    for what, chosen, known in (
        ("peers", options.peers, names),
        ("verbs", options.verbs, VERBS),
        ("dtypes", options.dtypes, DTYPES),
    ):
        unknown = sorted(set(chosen) - set(known))
        if unknown:
            parser.error(f"unknown {what} {unknown}: choose from {', '.join(known)}")
    if options.quick and "--np" not in " ".join(arguments):
        options.np = [2]
    options.rounds = options.rounds or (2 if options.quick else 5)
    options.budget_s = options.budget_s or (0.1 if options.quick else 0.5)
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure, write, and say whether every result was right and every peer could be measured."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    record, facts = Record(), machine.facts()
    print(report.machine_line(facts), flush=True)
    scratch = Path(tempfile.mkdtemp(prefix="kolovod-bench-"))
    try:
        for np in options.np:
            Bench(np, options, record, scratch).run()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    result, markdown = collectives_report.make(record, facts, options)
    name = "collectives-quick" if options.quick else "collectives"
    report.write(name, result, markdown, options.output)
    if options.docs:
        report.update_page(options.output)
    print(f"\n{markdown}")
    failed = dict(record.dropped)
    failed |= {who: f"{count} wrong elements" for who, count in record.wrong.items() if count}
    for who, reason in failed.items():
        print(f"FAILED {who}: {reason.splitlines()[-1]}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
