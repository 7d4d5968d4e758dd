"""How soon a host that vanishes is noticed, and that nothing else is: ``bench/host_loss.py``.

The hosts are network namespaces of this machine (scripts/netbed), so this needs root. Two are there
with two and one ranks, three with two, one and one. Between one of them and the others all packets
are dropped from one moment on: nothing is closed or refused, as when a host loses its power or the
network between is cut. Every rank notes when its operation has failed.

- reduce: all ranks reduce in a loop;
- wait: all wait in an allreduce for the host that vanishes, whose ranks compute: nothing is on its
  way;
- send: each rank sends to the next and receives from the one before, in a loop;
- pair: three hosts; the last two no longer reach each other, but both reach the first.

Seconds are from the cut until the last rank of the other hosts has its error. The host that
vanishes takes turns, so that it is that of rank 0, too.

``--calm SECONDS`` cuts nothing: ranks reduce, with pauses of up to 3 s in which nothing is on its
way, beside ``--busy`` other processes that take all the processor time they get. Any error is a
false alarm. ``--delay`` and ``--loss`` are those of every link (one way), ``--limit`` its bits per
second.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import machine
import numpy as np

import kolovod
from kolovod.errors import CollectiveAbortedError

sys.path.insert(0, str(machine.ROOT / "scripts"))

from netbed import Bed, World

HOSTS = {2: ("a", "a", "b"), 3: ("a", "a", "b", "c")}
BUSY = [sys.executable, "-c", "while True: pass"]


def _reduce(rank: int, victims: list[int]) -> None:
    while True:
        kolovod.allreduce(np.ones(10_000), "t")
        time.sleep(0.002)


def _wait(rank: int, victims: list[int]) -> None:
    if rank in victims:
        time.sleep(10)
    kolovod.allreduce(np.ones(10), "t")


def _send(rank: int, victims: list[int]) -> None:
    size = kolovod.size()
    while True:
        sent = kolovod.isend(np.ones(10_000), (rank + 1) % size)
        kolovod.recv(np.empty(10_000), (rank - 1) % size)
        sent.wait()
        time.sleep(0.002)


WORK: dict[str, Callable[[int, list[int]], None]] = {
    "reduce": _reduce,
    "wait": _wait,
    "send": _send,
    "pair": _reduce,
}


def until_it_fails(rank: int, what: str, victims: list[int], folder: str) -> tuple[str, float]:
    """Return the error's name, and when it came (the same clock on all hosts)."""
    kolovod.init()
    # As WORK has it, but found in the process of a rank, which has this module by value.
    kolovod.allreduce(np.ones(10_000), "t")
    Path(folder, f"ready{rank}").touch()
    try:
        WORK[what](rank, victims)
    except CollectiveAbortedError as error:
        return type(error).__name__, time.monotonic()
    raise AssertionError("nothing failed")


def noticed_s(
    bed: Bed,
    hosts: tuple[str, ...],
    what: str,
    victim: str,
    pause_s: float,
    environment: dict[str, str],
) -> float:
    """Return seconds from the cut until the last rank of the other hosts has its error."""
    ranks = [rank for rank, host in enumerate(hosts) if host == victim]
    for mark in bed.folder.glob("ready*"):
        mark.unlink()
    with World(bed, hosts, until_it_fails, what, ranks, str(bed.folder), env=environment) as world:
        deadline = time.monotonic() + 60
        while not all((bed.folder / f"ready{rank}").exists() for rank in range(len(hosts))):
            if time.monotonic() > deadline:
                raise SystemExit("\n".join(world.stderr(rank) for rank in range(len(hosts))))
            time.sleep(0.01)
        time.sleep(0.3 + pause_s)
        begin = time.monotonic()
        others = [host for host in bed.names if host != victim]
        bed.partition([victim], others[-1:] if what == "pair" else others)
        results = world.results(60)
    bed.heal()
    judged = [r for rank, r in enumerate(results) if what == "pair" or rank not in ranks]
    wrong = [result for result in judged if not isinstance(result, tuple)]
    if wrong:
        raise SystemExit(f"{what}, host {victim}: {wrong}")
    return float(max(moment for _, moment in judged) - begin)


def calm(rank: int, seconds: float) -> tuple[int, float]:
    """Return operations, and processor time in seconds."""
    kolovod.init()
    end = time.monotonic() + seconds
    drawn = np.random.default_rng(1)  # the same on all ranks
    count = 0
    while True:
        pause_s = float(drawn.choice([0, 0, 0, 0, 0.05, 0.3, 1, 3]))
        time.sleep(pause_s if rank == count % kolovod.size() else 0)
        size = int(drawn.choice([1, 1000, 100_000, 1_000_000]))
        total = kolovod.allreduce(
            np.full(size, float(time.monotonic() > end)), f"t{size}", op=kolovod.Max
        )
        count += 1
        if total[0]:
            return count, time.process_time()


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep so many processes computing all the time."""
    processes = [subprocess.Popen(BUSY) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure(options: argparse.Namespace, bed: Bed, count: int, environment: dict[str, str]) -> None:
    """Measure, and print one line for each of ``--work``."""
    hosts = HOSTS[count]
    for what in options.work:
        if what == "pair" and count < 3:
            continue
        victims = bed.names[1:-1] if what == "pair" else bed.names
        seconds = [
            noticed_s(bed, hosts, what, victims[turn % len(victims)], 0.07 * turn, environment)
            for turn in range(options.turns)
        ]
        figures = ", ".join(
            f"{name} {of(seconds):.2f}"
            for name, of in (("min", min), ("median", statistics.median), ("max", max))
        )
        print(f"{count} hosts, {what}: {figures} s ({len(seconds)} times)", flush=True)


def main() -> None:
    """Measure, or wait for false alarms."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=10, help="how often each host vanishes in all")
    parser.add_argument(
        "--hosts", type=int, nargs="*", choices=sorted(HOSTS), default=sorted(HOSTS)
    )
    parser.add_argument("--work", nargs="*", choices=sorted(WORK), default=list(WORK))
    parser.add_argument("--calm", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--busy", type=int, default=0, metavar="PROCESSES")
    parser.add_argument("--delay", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--loss", type=float, default=0.0, metavar="SHARE")
    parser.add_argument("--limit", type=float, default=0.0, metavar="BITS_PER_S")
    parser.add_argument("--encrypt", action="store_true")
    options = parser.parse_args()
    environment = {"KOLOVOD_ENCRYPT": "1"} if options.encrypt else {}
    with busy(options.busy):
        for count in options.hosts:
            names = sorted(set(HOSTS[count]))
            with Bed(
                names, with_sshd=False, delay_s=options.delay, bits_per_s=options.limit
            ) as bed:
                if options.loss:
                    bed.lose(options.loss)
                if not options.calm:
                    measure(options, bed, count, environment)
                    continue
                with World(bed, HOSTS[count], calm, options.calm, env=environment) as world:
                    results = world.results(options.calm + 300)
                print(f"{count} hosts, calm for {options.calm:g} s: {results}", flush=True)


if __name__ == "__main__":
    main()
