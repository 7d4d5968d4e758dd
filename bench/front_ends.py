"""A training step in JAX, TensorFlow, PyTorch: Kolovod, the framework's own way, no communication.

Two processes with the threads that the framework takes by default (PyTorch: one, as in
bench/training.py, which has models of other kinds), the same batches in all ways of running. A step
is forward, backward, average, SGD with momentum, as one compiled function (``jax.jit`` that
donates, ``tf.function``; PyTorch: eager), and waited for; its time is max(end) - min(start) over
the ranks. The ways take turns in every round. After every round all ranks of a way must hold
bitwise equal weights, and those of Kolovod be those of the framework's own way to rounding.

Own ways: ``jax.distributed`` with gloo and ``pmean``; ``MultiWorkerMirroredStrategy``;
``DistributedDataParallel`` over gloo.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import machine
import report
from gangs import Commands, Gang, GangError
from report import number, table, times

NP = 2
ASK_TIMEOUT_S = 300.0
STEPS = {"mlp": 30, "mid": 40, "wide": 20}
WAYS = {"alone": "2, no communication", "own": "its own way", "kolovod": "Kolovod"}
FRAMEWORKS = {"jax": "jax_rank.py", "tensorflow": "tf_rank.py", "torch": "torch_rank.py"}
OWN = {
    "jax": "jax.distributed, gloo",
    "tensorflow": "MultiWorkerMirroredStrategy",
    "torch": "DDP, gloo",
}
ROUNDING = 1e-3  # of what the weights have changed by


def commands(framework: str, way: str) -> Commands:
    """Return what starts the ranks."""
    rank = [sys.executable, str(machine.BENCH / FRAMEWORKS[framework]), way]
    if way == "kolovod":
        launcher = [sys.executable, "-m", "kolovod", "run", "-np", str(NP), "--"]
        return [([*launcher, *rank], {})]
    probes = [socket.socket() for _ in range(NP)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    workers = [f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes]
    for probe in probes:
        probe.close()
    shared = {"BENCH_COORDINATOR": workers[0], "BENCH_WORKERS": ",".join(workers)}
    return [(rank, {"RANK": str(r), "WORLD_SIZE": str(NP), **shared}) for r in range(NP)]


class Record:
    """All that one run found out."""

    def __init__(self) -> None:
        self.samples: dict[tuple[str, str], list[float]] = defaultdict(list)  # ms
        self.medians: dict[tuple[str, str], list[float]] = defaultdict(list)  # of each round
        self.learnt: dict[tuple[str, str], list[float]] = {}
        self.shapes: dict[str, tuple[int, int]] = {}
        self.modes: list[str] = []

    def add(self, model: str, way: str, answers: list[dict[str, Any]]) -> None:
        """Add one round of one way; GangError when the ranks' weights differ."""
        spans = report.spans(answers, 1e6)
        self.samples[model, way] += spans
        self.medians[model, way].append(report.summary(spans)["median"])
        self.shapes[model] = (answers[0]["parameters"], answers[0]["tensors"])
        digests = {answer["digest"] for answer in answers}
        if way != "alone" and len(digests) != 1:
            raise GangError(f"{model}: the ranks' weights differ after training with {way}")
        self.learnt[model, way] = answers[0]["learnt"]

    def distance(self, model: str, way: str) -> float:
        """Return how differently ``way`` and the framework's own trained, of what it has learnt."""
        norm, *own = self.learnt[model, "own"]
        return max(abs(a - b) for a, b in zip(self.learnt[model, way][1:], own, strict=True)) / norm


def run(framework: str, options: argparse.Namespace, scratch: Path) -> Record:
    """Run all rounds of all models."""
    record = Record()
    gangs: dict[str, Gang] = {}
    try:
        for way in WAYS:
            name = f"{framework}-{way}"
            gangs[way] = Gang(name, NP, scratch, commands=commands(framework, way))
        for turn in range(options.rounds):
            looks = [machine.one_way_ns()]
            for model in options.models:
                ways = list(WAYS)
                for way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
                    steps = options.steps or STEPS[model]
                    answers = gangs[way].ask(ASK_TIMEOUT_S, model=model, steps=steps, warmup=3)
                    record.add(model, way, answers)
                if record.distance(model, "kolovod") > ROUNDING:
                    raise GangError(f"{framework}, {model}: weights are not those of {WAYS['own']}")
            looks.append(machine.one_way_ns())
            record.modes.append(machine.mode_of(*looks))
            load = machine.load()["loadavg"]
            print(f"{framework}, round {turn + 1}/{options.rounds}: mode {record.modes[-1]}, "
                  f"load {load:.2f}", flush=True)  # fmt: skip
    finally:
        for gang in gangs.values():
            gang.close()
    return record


def make(records: dict[str, Record], facts: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the JSON and the Markdown of a run."""
    rows, result = [], {"command": machine.command_line(), "machine": facts}
    for framework, record in records.items():
        found = {key: report.summary(values) for key, values in record.samples.items()}
        for model, (parameters, tensors) in record.shapes.items():
            medians = {way: found[model, way]["median"] for way in WAYS}
            rows.append(
                [f"{framework}: {OWN[framework]}", model, f"{parameters / 1e6:.1f} M, {tensors}"]
                + [f"{number(medians[way])} ({number(found[model, way]['p90'])})" for way in WAYS]
                + [times(medians["own"] / medians["kolovod"])]
            )
        result[framework] = {
            "modes": record.modes,
            "ms": {f"{m}/{way}": {**found[m, way], "round_medians": record.medians[m, way]}
                   for m, way in found},
            "distance": {f"{m}/{way}": record.distance(m, way) for m, way in found},
        }  # fmt: skip
    head = [
        "framework: its own way",
        "model",
        "parameters, tensors",
        *WAYS.values(),
        "Kolovod over its own way",
    ]
    modes = ", ".join(dict.fromkeys(mode for r in records.values() for mode in r.modes))
    markdown = "\n".join([
        "# Training step in JAX, TensorFlow and PyTorch\n",
        f"`{machine.command_line()}`: {report.machine_line(facts)}, mode {modes}. 2 processes; "
        "milliseconds per step, median (p90). How it was measured, and what was checked: the head "
        "of bench/front_ends.py. Other models in PyTorch, against DDP: training.md.\n",
        table(head, rows),
    ])  # fmt: skip
    return result, markdown


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line; see --help."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frameworks", type=lambda s: s.split(","), default=list(FRAMEWORKS))
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(STEPS))
    parser.add_argument("--rounds", type=int, help="default 5; with --quick 2")
    parser.add_argument("--steps", type=int, help=f"per round; default {STEPS}; with --quick 5")
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--output", type=Path, default=report.RESULTS, metavar="FOLDER")
    options = parser.parse_args(arguments)
    for given, known in ((options.models, STEPS), (options.frameworks, FRAMEWORKS)):
        unknown = sorted(set(given) - set(known))
        if unknown:
            parser.error(f"unknown {unknown}: choose from {', '.join(known)}")
    options.rounds = options.rounds or (2 if options.quick else 5)
    options.steps = options.steps or (5 if options.quick else None)
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure, and write."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    facts = machine.facts()
    print(report.machine_line(facts), flush=True)
    scratch = Path(tempfile.mkdtemp(prefix="kolovod-bench-"))
    try:
        records = {each: run(each, options, scratch) for each in options.frameworks}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    result, markdown = make(records, facts)
    name = "front_ends-quick" if options.quick else "front_ends"
    report.write(name, result, markdown, options.output)
    print(f"\n{markdown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
