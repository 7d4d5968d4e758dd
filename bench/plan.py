"""How well ``kolovod plan`` predicts: ``bench/plan.py``.

The hosts are network namespaces of this machine (scripts/netbed), with one rank each and a limited
link, so this needs root. A small model is trained on 2, 3 and 4 of them over each link, with
gradients in float32, bfloat16 and int8, for a few steps, with a timeline. For each link, all others
are predicted from the timeline of one run: two hosts, float32. So hosts that share cores, codecs
and what they cost are the model's matter; the links are as measured.

A round is all runs once. Of the steps of a run the first three are left out, and the median counts;
of rounds the one with the lowest such median, since what others do on the machine only adds. Before
a run, up to 20 s pass until the machine is idle.

Below it are efficiencies of up to 512 GPUs that Horovod's authors have published (published.py).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import machine
import published
import report
from plan_rank import train
from report import number, table

from kolovod.observe.reading import read
from kolovod.planning.changes import compressed
from kolovod.planning.measured import Measured, measured
from kolovod.planning.model import simulate, with_cores

sys.path.insert(0, str(machine.ROOT / "scripts"))

import netbed

LINKS = {"100M": ("100 Mbit/s", 100e6), "1G": ("1 Gbit/s", 1e9)}
CODECS = {"none": "float32", "bf16": "bfloat16", "int8": "int8"}
HOSTS = (2, 3, 4)
BASE = (2, "none")  # what is predicted from
WARM_UP = 3
GOAL = 0.10
IDLE, IDLE_S, PATIENCE_S = 0.2, 1.0, 20.0  # busy cores over all, for how long, waited for how long
TIMEOUT_S = 300.0

Key = tuple[int, str]


def wait_until_idle() -> float:
    """Wait; return what share of the cores was busy in the last second."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        before = machine.busy_ms()
        time.sleep(IDLE_S)
        busy = (machine.busy_ms() - before) / 1e3 / IDLE_S / machine.cores()
        if busy < IDLE or time.monotonic() > deadline:
            return busy


def measure(
    bits_per_s: float, key: Key, options: argparse.Namespace, folder: Path
) -> tuple[float, Measured]:
    """Return the median step (s) of a run, and what its timeline shows."""
    hosts, codec = key
    names = [f"host{index}" for index in range(hosts)]
    path = folder / "timeline.json"
    path.unlink(missing_ok=True)
    with netbed.Bed(names, with_sshd=False) as bed:
        for name in names:
            bed.limit(name, bits_per_s)
        arguments = (options.width, options.layers, options.batch, options.steps, codec)
        environment = {"KOLOVOD_TIMELINE": str(path)}
        with netbed.World(bed, names, train, *arguments, env=environment) as world:
            ranks = world.results(TIMEOUT_S)
    if wrong := [each for each in ranks if not isinstance(each, list)]:
        raise SystemExit(str(wrong[0].text))
    return statistics.median(ranks[0][WARM_UP:]), measured(read(path))


def predict(seen: Measured, key: Key, *, cores: bool = True) -> float:
    """Return a step (s) on other hosts with another codec; not ``cores``: there are enough."""
    hosts, codec = key
    step = compressed(seen.step, codec, seen.costs)
    cluster = replace(seen.cluster, hosts=hosts, hosts_per_machine=hosts)
    if not cores:
        cluster = with_cores(cluster)
    return simulate(step, cluster, seen.costs).step_s


def rounds_of(options: argparse.Namespace) -> dict[str, dict[Key, list[tuple[float, Measured]]]]:
    """Return what each round found, by link and run."""
    found: dict[str, dict[Key, list[tuple[float, Measured]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.rounds):
            for link in options.links:
                for key in [(hosts, codec) for hosts in HOSTS for codec in CODECS]:
                    busy = wait_until_idle()
                    one = measure(LINKS[link][1], key, options, Path(folder))
                    found.setdefault(link, {}).setdefault(key, []).append(one)
                    said = f"{turn} {link} {key[0]} {key[1]} {1e3 * one[0]:.1f} ms"
                    print(f"{said}, busy before {busy:.0%}, {machine.load()}", flush=True)
    return found


def compare(runs: dict[Key, list[tuple[float, Measured]]]) -> list[report.Json]:
    """Return what was predicted of each run of a link, and what was measured."""
    best = {key: min(rounds, key=lambda one: one[0]) for key, rounds in runs.items()}
    seen = best[BASE][1]
    rows = []
    for key, (step_s, _) in best.items():
        medians = [one[0] for one in runs[key]]
        rows.append(
            {
                "hosts": key[0],
                "codec": key[1],
                "measured_ms": 1e3 * step_s,
                "rounds_ms": [1e3 * each for each in medians],
                "predicted_ms": 1e3 * predict(seen, key),
                "without_cores_ms": 1e3 * predict(seen, key, cores=False),
            }
        )
    return rows


def _off(row: report.Json, which: str) -> float:
    return float(row[which] / row["measured_ms"] - 1)


def _table(link: str, rows: list[report.Json]) -> str:
    lines = []
    for row in rows:
        name = f"{row['hosts']} hosts, {CODECS[row['codec']]}"
        if (row["hosts"], row["codec"]) == BASE:
            name += " (planned from)"
        off = _off(row, "predicted_ms")
        lines.append(
            [
                name,
                number(row["measured_ms"]),
                f"{number(min(row['rounds_ms']))} to {number(max(row['rounds_ms']))}",
                number(row["predicted_ms"]),
                f"{off:+.1%}",
                "yes" if abs(off) <= GOAL else "**no**",
                f"{_off(row, 'without_cores_ms'):+.1%}",
            ]
        )
    head = [LINKS[link][0], "step, ms", "rounds", "predicted", "off", f"within {GOAL:.0%}",
            "off without the cores"]  # fmt: skip
    return table(head, lines)


def page(result: report.Json) -> str:
    """Return the result for people."""
    facts, model = result["machine"], result["model"]
    parts = [
        "# What kolovod plan predicts\n",
        f"`{result['command']}` on {report.machine_line(facts)}; load average of the minute before "
        f"{result['load'][0]:.1f}, at the end {result['load'][1]:.1f}. {model['layers']} layers of "
        f"{model['width']} x {model['width']}, batch {model['batch']}, {model['steps']} steps a "
        f"run, {model['rounds']} rounds; how it was measured: the head of bench/plan.py. All hosts "
        f"share this machine's {facts['cores']} cores.\n",
    ]
    parts += [_table(link, rows) for link, rows in result["links"].items()]
    rows = [row for each in result["links"].values() for row in each]
    reached = sum(abs(_off(row, "predicted_ms")) <= GOAL for row in rows)
    worst = max(rows, key=lambda row: abs(_off(row, "predicted_ms")))
    parts.append(
        f"{reached} of {len(rows)} are within {GOAL:.0%}; the worst is off by "
        f"{_off(worst, 'predicted_ms'):+.0%}.\n"
    )
    return "\n".join([*parts, published.page()])


def main() -> None:
    """Measure, and write plan.md and plan.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--links", nargs="*", default=list(LINKS), choices=list(LINKS))
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=report.RESULTS, metavar="FOLDER")
    options = parser.parse_args()
    reason = netbed.unavailable()
    if reason:
        raise SystemExit(f"bench/plan.py: {reason}")
    before = machine.load()["loadavg"]
    found = rounds_of(options)
    result: dict[str, Any] = {
        "command": machine.command_line(),
        "machine": machine.facts(),
        "load": [before, machine.load()["loadavg"]],
        "model": {
            name: getattr(options, name) for name in ("width", "layers", "batch", "steps", "rounds")
        },
        "links": {link: compare(runs) for link, runs in found.items()},
        "published": published.rows(),
    }
    report.write("plan", result, page(result), options.output)
    print(page(result))


if __name__ == "__main__":
    main()
