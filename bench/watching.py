"""What it costs a job to be watched: ``bench/watching.py``.

Two ranks on this machine train a model of bench/models.py, one compute thread each. By turns, some
seconds each, in another order in each round and with seconds of nobody watching between them:

- ``off``: nobody watches, once more, which tells how exact the figures are
- ``top``: ``kolovod top --json`` looks every two seconds, as it does by default
- ``timeline``: a timeline is recorded
- ``metrics``: a metrics server counts, and is read every five seconds

Told are medians over the rounds of the processor time that watching takes, of all ranks together,
as a share of the two cores that the job has:

- *ranks' threads*: those of the ranks' processes that were not there before, and that which shows
  a rank to others: all of a process less the threads that compute and communicate
- *noted*: what these note of each operation, by the time that an operation takes with and without;
  measured once, in a world of one rank, in which the two alternate quickly
- *watcher*: ``kolovod top``. Who reads metrics is on another machine, and is not counted.
- *together*: all of it, less what is counted of threads where nobody watches

A step takes longer by so much where ranks are never idle and are delayed together, by twice that if
they never are, by nothing where cores are free. Told is also the time of a turn divided by its
steps, by its ratio to the two turns around it, in which nobody watches; where others use the
machine, that varies by more than what is looked for.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from threading import Event, Thread
from threading import enumerate as enumerate_threads
from typing import Any, NamedTuple

import machine
import numpy as np
import report
from overhead_rank import Training
from report import number, table

import kolovod
from kolovod.observe.summary import read, summarize

WAYS = ("off", "top", "timeline", "metrics")
GOAL = 0.005
OPERATIONS, PAIRS = 500, 101
SETTLE_S = 2.5
OVER_S = 6.0  # a little more than a look lasts (observe/live/showing.py)


def cpu_ns(process: str, leaving_out: Collection[int] = ()) -> dict[int, int]:
    """Return the processor time of its threads so far, by number."""
    found = {}
    for task in Path(f"/proc/{process}/task").iterdir():
        if int(task.name) not in leaving_out:
            with contextlib.suppress(OSError):  # it has ended
                found[int(task.name)] = int((task / "schedstat").read_text().split()[0])
    return found


@contextlib.contextmanager
def watched(way: str, folder: str) -> Iterator[Callable[[], tuple[int, int]]]:
    """Have the job watched this way on all ranks, within the context.

    Gives what tells, of processor time in nanoseconds, what the watcher has taken so far and what a
    thread of this rank has that reads metrics.
    """
    rank = kolovod.rank()
    if way == "top" and rank == 0:
        name = os.environ["KOLOVOD_JOB"][:8]
        command = [sys.executable, "-m", "kolovod", "top", name, "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as top:
            assert top.stdout is not None
            reading = Thread(target=top.stdout.read)
            reading.start()
            time.sleep(SETTLE_S)
            kolovod.barrier()
            yield lambda: (sum(cpu_ns(str(top.pid)).values()), 0)
            top.terminate()
            reading.join()
    elif way == "timeline":
        path = Path(folder) / f"{time.monotonic_ns()}.json"
        kolovod.start_timeline(path)
        kolovod.barrier()
        yield lambda: (0, 0)
        kolovod.stop_timeline()
        path.unlink(missing_ok=True)
    elif way == "metrics":
        port = kolovod.start_metrics_server(0, "127.0.0.1")
        ended = Event()

        def scrape() -> None:
            while not ended.wait(5.0):
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                    answer.read()

        scraping = Thread(target=scrape)
        scraping.start()
        time.sleep(SETTLE_S)
        kolovod.barrier()
        yield lambda: (0, cpu_ns("self")[scraping.native_id or 0])
        ended.set()
        scraping.join()
        kolovod.stop_metrics_server()
    else:
        kolovod.barrier()
        yield lambda: (0, 0)
    kolovod.barrier()
    time.sleep(OVER_S if way == "top" else 0.2)
    kolovod.barrier()


class Turn(NamedTuple):
    """Of one rank."""

    step_s: float
    ratio: float
    """To the turns around it."""
    threads: float
    """The share of a core that threads of this rank have taken that watch."""
    watcher: float


def work(model: str, ways: list[str], rounds: int, turn_s: float, folder: str) -> Any:
    """Be one rank: return its turns, by way, and the operations of a step."""
    kolovod.init()
    training = Training(model, distributed=True)

    def took_s(steps: int) -> float:
        kolovod.barrier()
        started = time.monotonic()
        for _ in range(steps):
            training.step()
        kolovod.barrier()
        return (time.monotonic() - started) / steps

    took_s(20)
    steps = max(1, round(turn_s / kolovod.broadcast_object(took_s(20), 0)))
    showing = {each.native_id for each in enumerate_threads() if each.name == "kolovod-live"}
    own = cpu_ns("self").keys() - showing

    def watching_ns(reader_ns: int) -> int:
        others = sum(ns for number, ns in cpu_ns("self").items() if number in own)
        return time.process_time_ns() - others - reader_ns

    found: dict[str, list[Turn]] = {way: [] for way in ways}
    alone_s = took_s(steps)
    for turn in range(rounds):
        for position in range(len(ways)):
            way = ways[(position + turn) % len(ways)]
            with watched(way, folder) as taken:
                watcher, reader = taken()
                threads, began_s = watching_ns(reader), time.monotonic()
                step_s = took_s(steps)
                passed_ns = (time.monotonic() - began_s) * 1e9
                watcher_now, reader = taken()
                threads = watching_ns(reader) - threads
            before_s, alone_s = alone_s, took_s(steps)
            ratio = step_s / ((before_s + alone_s) / 2)
            watcher = watcher_now - watcher
            found[way].append(Turn(step_s, ratio, threads / passed_ns, watcher / passed_ns))
    operations = 0.0
    kolovod.start_timeline(path := Path(folder) / "operations.json")
    took_s(20)
    kolovod.stop_timeline()
    if kolovod.rank() == 0:
        operations = summarize(read(path)).operations / 20
    digest = kolovod.allgather_object(
        [float(p.detach().double().sum()) for p in training.model.parameters()]
    )
    kolovod.shutdown()
    return found, operations, all(each == digest[0] for each in digest)


def noted_ns(folder: str) -> tuple[float, float, float]:
    """Return what it takes to note one operation: the quarter, the median and the third quarter."""
    kolovod.init()
    data = np.ones(1)

    def took_ns() -> float:
        began = time.perf_counter_ns()
        for _ in range(OPERATIONS):
            kolovod.allreduce(data, name="noted")
        return (time.perf_counter_ns() - began) / OPERATIONS

    more = []
    for _ in range(PAIRS):
        without = took_ns()
        path = Path(folder) / f"{time.monotonic_ns()}.json"
        kolovod.start_timeline(path)
        took_ns()
        more.append(took_ns() - without)
        kolovod.stop_timeline()
        path.unlink()
    kolovod.shutdown()
    low, middle, high = np.quantile(more, (0.25, 0.5, 0.75))
    return float(low), float(middle), float(high)


def measure(
    model: str, options: argparse.Namespace, folder: str, noted: float
) -> dict[str, dict[str, Any]]:
    """Return medians of a run, by way. Raises RuntimeError if ranks' weights differ at the end."""
    answers = kolovod.run(
        work, (model, options.ways, options.rounds, options.turn_s, folder), np=2
    )  # fmt: skip
    if not all(equal for _, _, equal in answers):
        raise RuntimeError("the ranks' weights differ")
    found: dict[str, dict[str, Any]] = {}
    nothing = 0.0  # what the same way of counting says of ranks that nobody watches
    for way in ("off", *(way for way in options.ways if way != "off")):
        turns: list[list[Turn]] = [ways[way] for ways, _, _ in answers]  # by rank
        more = [turn.ratio - 1 for turn in turns[0]]
        step_s = statistics.median(turn.step_s for turn in turns[0])
        threads = [sum(turn.threads for turn in both) / 2 for both in zip(*turns, strict=True)]
        operations_per_s = 0.0 if way == "off" else answers[0][1] / step_s  # of one rank
        counted = statistics.median(threads)
        nothing = counted if way == "off" else nothing
        quarter, median, three_quarters = np.quantile(more, (0.25, 0.5, 0.75))
        found[way] = {
            "step_ms": 1e3 * step_s,
            "threads": counted,
            "threads_more": max(0.0, counted - nothing),
            "threads_rounds": threads,
            "noted": operations_per_s * max(0.0, noted) / 1e9,
            "watcher": statistics.median(turn.watcher for turn in turns[0]) / 2,
            "longer": float(median),
            "longer_middle_half": [float(quarter), float(three_quarters)],
        }
    return found


def make(found: dict[str, Any], noted: tuple[float, ...], facts: dict[str, Any]) -> str:
    """Return the Markdown of a run."""
    rows = []
    for model, ways in found.items():
        for way, one in ways.items():
            taken = one["threads_more"] + one["noted"] + one["watcher"]
            parts = [f"{one[part]:.2%}" for part in ("threads", "noted", "watcher")]
            low, high = one["longer_middle_half"]
            is_met = "-" if way == "off" else ("yes" if taken <= GOAL else "no")
            rows.append(
                [model, way, number(one["step_ms"]), *parts, f"{taken:.2%}", is_met,
                 f"{one['longer']:+.1%} ({low:+.1%} to {high:+.1%})"]
            )  # fmt: skip
    titles = ["model", "watched by", "step, ms", "ranks' threads", "noted", "watcher", "together",
              "0.5 % at most", "steps longer (middle half of rounds)"]  # fmt: skip
    low, middle, high = noted
    return "\n".join(
        [
            "# What it costs a job to be watched\n",
            f"`{machine.command_line()}`: {report.machine_line(facts)}. Two ranks and whoever "
            "watches share two cores; shares are of both. How it was measured: the head of "
            f"bench/watching.py. To note an operation takes {middle:.0f} ns (middle half "
            f"{low:.0f} to {high:.0f}).\n",
            table(titles, rows),
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["mlp", "transformer"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--turn-s", type=float, default=6.0, help="how long one way is watched")
    parser.add_argument("--output", type=Path, default=report.RESULTS, metavar="FOLDER")
    options = parser.parse_args(arguments)
    facts = machine.facts()
    print(report.machine_line(facts), flush=True)
    with tempfile.TemporaryDirectory(prefix="kolovod-bench-") as folder:
        noted = noted_ns(folder)
        found = {model: measure(model, options, folder, noted[1]) for model in options.models}
    markdown = make(found, noted, facts)
    report.write(
        "watching",
        {"command": machine.command_line(), "machine": facts, "noted_ns": noted, "ways": found},
        markdown,
        options.output,
    )
    print(f"\n{markdown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
