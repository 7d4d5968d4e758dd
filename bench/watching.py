"""What it costs a job to be watched: ``bench/watching.py``.

Two ranks on this machine train a model of bench/models.py, one compute thread each. By turns, some
hundred steps each, in another order in each round:

- ``off``: nobody watches; twice, so the difference between the two tells how much is noise
- ``top``: ``kolovod top --json`` looks once a second
- ``timeline``: a timeline is recorded
- ``metrics``: a metrics server counts, and is read once a second

A step is forward, backward and ``step()``, from when the first rank begins it until the last ends
it. A round's figure is the median of its steps; told are the medians over the rounds of the ratios
to the ``off`` steps of the same round.
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
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import machine
import numpy as np
import report
from overhead_rank import Training
from report import number, table

import kolovod

WAYS = ("off", "off again", "top", "timeline", "metrics")
GOAL = 0.005
SETTLE_S = 2.5
OVER_S = 6.0  # a little more than a look lasts (observe/live/showing.py)


@contextlib.contextmanager
def watched(way: str, folder: str) -> Iterator[None]:
    """On all ranks: within it the job is watched this way."""
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
            yield
            top.terminate()
            reading.join()
    elif way == "timeline":
        path = Path(folder) / f"{time.monotonic_ns()}.json"
        kolovod.start_timeline(path)
        kolovod.barrier()
        yield
        kolovod.stop_timeline()
        path.unlink(missing_ok=True)
    elif way == "metrics":
        port = kolovod.start_metrics_server(0, "127.0.0.1")
        ended = Event()

        def scrape() -> None:
            while not ended.wait(1.0):
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                    answer.read()

        scraping = Thread(target=scrape)
        scraping.start()
        time.sleep(SETTLE_S)
        kolovod.barrier()
        yield
        ended.set()
        scraping.join()
        kolovod.stop_metrics_server()
    else:
        kolovod.barrier()
        yield
    kolovod.barrier()
    time.sleep(OVER_S if way == "top" else 0.2)
    kolovod.barrier()


def work(model: str, ways: list[str], rounds: int, steps: int, folder: str) -> Any:
    """One rank: by round and way, when each step began and ended (ns)."""
    kolovod.init()
    training = Training(model, distributed=True)
    for _ in range(20):
        training.step()
    found: list[dict[str, Any]] = []
    for turn in range(rounds):
        found.append({})
        for position in range(len(ways)):
            way = ways[(position + turn) % len(ways)]
            times = np.zeros((steps, 2), np.int64)
            with watched(way, folder):
                for step in range(steps):
                    times[step, 0] = time.monotonic_ns()
                    training.step()
                    times[step, 1] = time.monotonic_ns()
            found[-1][way] = times
    digest = kolovod.allgather_object(
        [float(p.detach().double().sum()) for p in training.model.parameters()]
    )
    kolovod.shutdown()
    return found, all(each == digest[0] for each in digest)


def ratios(model: str, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Medians of a run. Raises RuntimeError if the ranks' weights differ at the end."""
    answers = kolovod.run(
        work, (model, options.ways, options.rounds, options.steps, folder), np=2
    )  # fmt: skip
    if not all(equal for _, equal in answers):
        raise RuntimeError("the ranks' weights differ")
    medians: dict[str, list[float]] = {way: [] for way in options.ways}
    for turn in range(options.rounds):
        for way in options.ways:
            both = np.stack([found[turn][way] for found, _ in answers])
            took = both[:, :, 1].max(axis=0) - both[:, :, 0].min(axis=0)
            medians[way].append(float(np.median(took)) / 1e6)
    base = medians["off"]
    return {
        way: {
            "step_ms": statistics.median(values),
            "rounds_ms": values,
            "more": statistics.median(v / b for v, b in zip(values, base, strict=True)) - 1,
        }
        for way, values in medians.items()
    }


def make(found: dict[str, Any], facts: dict[str, Any]) -> str:
    """The Markdown of a run."""
    rows = [
        [model, way, number(one["step_ms"]), f"{one['more']:+.2%}",
         "-" if way.startswith("off") else ("yes" if one["more"] <= GOAL else "no")]
        for model, ways in found.items()
        for way, one in ways.items()
    ]  # fmt: skip
    return "\n".join(
        [
            "# What it costs a job to be watched\n",
            f"`{machine.command_line()}`: {report.machine_line(facts)}. Two ranks and whoever "
            "watches share two cores. How it was measured: the head of bench/watching.py.\n",
            table(["model", "watched by", "step, ms", "more than off", "0.5 % at most"], rows),
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["mlp", "transformer"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=150, help="per round")
    parser.add_argument("--output", type=Path, default=report.RESULTS, metavar="FOLDER")
    options = parser.parse_args(arguments)
    facts = machine.facts()
    print(report.machine_line(facts), flush=True)
    with tempfile.TemporaryDirectory(prefix="kolovod-bench-") as folder:
        found = {model: ratios(model, options, folder) for model in options.models}
    markdown = make(found, facts)
    report.write(
        "watching",
        {"command": machine.command_line(), "machine": facts, "ways": found},
        markdown,
        options.output,
    )
    print(f"\n{markdown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
