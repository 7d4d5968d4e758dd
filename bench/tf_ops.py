"""What Kolovod's ops cost inside a ``tf.function``, over an op of TensorFlow's own.

A function holds one op, or 200 that do not depend on each other, each on 16 bytes; the ranks enter
it together, and its time is max(end) - min(start) over them. Beside every verb the same function
with TensorFlow's ``sin`` is timed, by turns, on data drawn anew for each call, and every result is
checked. What an op costs is the difference of the medians over the number of ops.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine
import report
from report import number, table

SIZES = (1, 2)
MANY = 200
TARGET_US = 10.0
BASE = "sin"


def ranks(size: int, counts: list[int], options: argparse.Namespace) -> dict[str, Any]:
    """Return what the ranks of one world have read. RuntimeError if one of them failed."""
    with tempfile.TemporaryDirectory(prefix="kolovod-bench-") as scratch:
        file = Path(scratch) / "readings.json"
        rank = [str(machine.BENCH / "tf_ops_rank.py"), str(file), str(options.iterations)]
        command = [sys.executable, "-m", "kolovod", "run", "-np", str(size), "--", sys.executable]
        done = subprocess.run(
            [*command, *rank, *map(str, counts)],
            capture_output=True,
            text=True,
            timeout=options.timeout_s,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{size} ranks ended with {done.returncode}: {done.stderr[-2000:]}")
        answer: dict[str, Any] = json.loads(file.read_text())
        return answer


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for every number of ranks and of ops, and every verb."""
    rows = []
    counts = [1, options.ops]
    for size in options.sizes:
        everybody = ranks(size, counts, options)["ranks"]
        for count in counts:
            answers = [each[str(count)] for each in everybody]
            base = report.summary(report.spans([answer[BASE] for answer in answers], 1e3))
            for name in answers[0]:
                spans = report.summary(report.spans([answer[name] for answer in answers], 1e3))
                over = (spans["median"] - base["median"]) / count
                cpu = [ns / 1e3 / count for each in answers for ns in each[name]["cpu_ns"]]
                rows.append(
                    {"ranks": size, "ops": count, "verb": name, "us": spans, "over_us": over,
                     "cpu_us": report.quantile(cpu, 0.5)}
                )  # fmt: skip
    return rows


def make(rows: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    """Return the Markdown of a run."""
    lines = [
        [row["verb"], str(row["ranks"]), str(row["ops"]),
         f"{number(row['us']['median'])} ({number(row['us']['p90'])})",
         number(row["cpu_us"]), "" if row["verb"] == BASE else f"{row['over_us']:.1f}"]
        for row in rows
    ]  # fmt: skip
    late = [
        f"{row['verb']} with {row['ranks']} ({row['over_us']:.1f})"
        for row in rows
        if row["ops"] > 1 and row["over_us"] > TARGET_US
    ]
    head = ["op", "ranks", "ops in the function", "function, us", "CPU of a rank, us an op"]
    return "\n".join(
        [
            "# What an op in a tf.function costs\n",
            f"`{machine.command_line()}`: {report.machine_line(facts)}, TensorFlow "
            f"{facts['tensorflow']}, mode {facts['mode']}. Median (p90). How it was measured, and "
            "what was checked: the head of bench/tf_ops.py.\n",
            table([*head, f"over {BASE}, us an op"], lines),
            f"Target: at most {TARGET_US:g} us over TensorFlow's own where a function has many. "
            f"{'Missed: ' + ', '.join(late) if late else 'Met by all verbs'}.\n",
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=lambda text: [*map(int, text.split(","))], default=SIZES)
    parser.add_argument("--ops", type=int, help=f"in a function; default {MANY}, with --quick 20")
    parser.add_argument("--iterations", type=int, help="default 200; with --quick 20")
    parser.add_argument("--quick", action="store_true", help="some seconds")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="for one world")
    parser.add_argument("--output", type=Path, default=report.RESULTS, metavar="FOLDER")
    options = parser.parse_args(arguments)
    options.ops = options.ops or (20 if options.quick else MANY)
    options.iterations = options.iterations or (20 if options.quick else 200)
    facts = machine.facts()
    print(report.machine_line(facts), flush=True)
    looks = [machine.one_way_ns()]
    rows = measure(options)
    looks.append(machine.one_way_ns())
    facts |= {"mode": machine.mode_of(*looks), "tensorflow": _version()}
    markdown = make(rows, facts)
    result = {"command": machine.command_line(), "machine": facts, "rows": rows}
    report.write("tf_ops-quick" if options.quick else "tf_ops", result, markdown, options.output)
    print(f"\n{markdown}")
    return 0


def _version() -> str:
    import importlib.metadata

    return importlib.metadata.version("tensorflow")


if __name__ == "__main__":
    sys.exit(main())
