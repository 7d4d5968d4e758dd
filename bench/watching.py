"""What it costs a job to be watched: ``bench/watching.py``.

Two ranks on this machine train a model of bench/models.py, one compute thread each. By turns, some
seconds each, in another order in each round and with seconds of nobody watching between them:

- ``off``: nobody watches, once more, which tells how much is noise
- ``top``: ``kolovod top --json`` looks once a second
- ``timeline``: a timeline is recorded
- ``metrics``: a metrics server counts, and is read once a second

A turn's figure is its time divided by its steps (forward, backward and ``step()``), so what holds
up one step of many counts too. It is compared with the mean of the two turns around it, in which
nobody watches. Told are the median of these ratios over the rounds, and the middle half of them.
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

WAYS = ("off", "top", "timeline", "metrics")
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


def work(model: str, ways: list[str], rounds: int, turn_s: float, folder: str) -> Any:
    """One rank: seconds per step of the turns, by way; the ratios to the turns around each."""
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
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    alone_s = took_s(steps)
    for turn in range(rounds):
        for position in range(len(ways)):
            way = ways[(position + turn) % len(ways)]
            with watched(way, folder):
                step_s = took_s(steps)
            before_s, alone_s = alone_s, took_s(steps)
            found[way].append((step_s, step_s / ((before_s + alone_s) / 2)))
    digest = kolovod.allgather_object(
        [float(p.detach().double().sum()) for p in training.model.parameters()]
    )
    kolovod.shutdown()
    return found, all(each == digest[0] for each in digest)


def ratios(model: str, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Medians of a run. Raises RuntimeError if the ranks' weights differ at the end."""
    answers = kolovod.run(
        work, (model, options.ways, options.rounds, options.turn_s, folder), np=2
    )  # fmt: skip
    if not all(equal for _, equal in answers):
        raise RuntimeError("the ranks' weights differ")
    found: dict[str, Any] = {}
    for way, turns in answers[0][0].items():
        more = [ratio - 1 for _, ratio in turns]
        quarter, median, three_quarters = np.quantile(more, (0.25, 0.5, 0.75))
        found[way] = {
            "step_ms": 1e3 * statistics.median(step_s for step_s, _ in turns),
            "more": float(median),
            "middle_half": [float(quarter), float(three_quarters)],
            "rounds": more,
        }
    return found


def make(found: dict[str, Any], facts: dict[str, Any]) -> str:
    """The Markdown of a run."""
    rows = [
        [model, way, number(one["step_ms"]), f"{one['more']:+.2%}",
         "{:+.2%} to {:+.2%}".format(*one["middle_half"]),
         "-" if way == "off" else ("yes" if one["more"] <= GOAL else "no")]
        for model, ways in found.items()
        for way, one in ways.items()
    ]  # fmt: skip
    return "\n".join(
        [
            "# What it costs a job to be watched\n",
            f"`{machine.command_line()}`: {report.machine_line(facts)}. Two ranks and whoever "
            "watches share two cores. How it was measured: the head of bench/watching.py.\n",
            table(
                [
                    "model",
                    "watched by",
                    "step, ms",
                    "more than off",
                    "middle half of rounds",
                    "0.5 % at most",
                ],
                rows,
            ),
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
