"""A training step: Kolovod, DDP over gloo or Kolovod, no communication: ``bench/training.py``.

Two processes, one compute thread each, the same batches in all ways of running. A step is forward,
backward, optimizer; its time is max(end) - min(start) over the ranks. The ways take turns in every
round. The communication overhead is the time over the same step of two processes that do not
communicate. After every round all ranks must hold bitwise equal weights, and Kolovod's are
compared with DDP's.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import goals
import machine
import report
from gangs import Gang, GangError
from report import number, table

NP = 2
ASK_TIMEOUT_S = 300.0
MODELS = {"resnet50": 6, "transformer": 8, "mlp": 40}  # steps a round


@dataclass(frozen=True)
class Way:
    """A way to run the step: which gang, and how many of its ranks take part."""

    name: str
    text: str
    peer: str
    active: int


WAYS = (
    Way("single", "1 process", "local", 1),
    Way("alone", "2, no communication", "local", NP),
    Way("ddp", "DDP (gloo)", "gloo", NP),
    Way("ddp-kolovod", "DDP (Kolovod)", "kolovod-under-torch", NP),
    Way("kolovod", "Kolovod", "kolovod", NP),
    Way("kolovod-unwatched", "Kolovod without sentinel", "kolovod-unwatched", NP),
)


COMMUNICATING = ("ddp", "ddp-kolovod", "kolovod", "kolovod-unwatched")


@dataclass
class Record:
    """All that one run found out; times in ms per step."""

    samples: dict[tuple[str, str], list[list[float]]] = field(
        default_factory=lambda: defaultdict(list)
    )  # (model, way) -> rounds -> ms
    digests: dict[tuple[str, str], str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, int]] = field(default_factory=dict)  # parameters, tensors
    rounds: list[dict[str, Any]] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)


def start(ways: list[Way], scratch: Path, record: Record) -> dict[str, Gang]:
    """Start one gang per peer; the peers that cannot start are noted."""
    gangs: dict[str, Gang] = {}
    for peer in dict.fromkeys(way.peer for way in ways):
        try:
            gangs[peer] = Gang(peer, NP, scratch)
        except (GangError, OSError) as error:
            drop(peer, error, gangs, record)
    return gangs


def drop(peer: str, error: Exception, gangs: dict[str, Gang], record: Record) -> None:
    """Go on without this peer, and say why."""
    gangs.pop(peer, None)
    record.dropped[peer] = str(error)
    print(f"  {peer} dropped: {error}", file=sys.stderr, flush=True)


def measure(model: str, way: Way, gang: Gang, steps: int, record: Record) -> None:
    """Measure one round of one way; GangError when ranks fail or their weights differ."""
    answers = gang.ask(
        ASK_TIMEOUT_S, do="train", model=model, steps=steps, warmup=2, active=way.active
    )
    taking_part = [answer for answer in answers if answer["starts"]]
    record.samples[model, way.name].append(report.spans(taking_part, 1e6))
    record.shapes[model] = (taking_part[0]["parameters"], taking_part[0]["tensors"])
    digests = {answer["digest"] for answer in taking_part}
    if way.peer != "local":
        if len(digests) != 1:
            raise GangError(f"{model}: the ranks' weights differ after training with {way.text}")
        record.digests[model, way.name] = digests.pop()


def run(options: argparse.Namespace, record: Record, scratch: Path) -> None:
    """Run all rounds of all models."""
    ways = [way for way in WAYS if way.name in options.ways]
    gangs = start(ways, scratch, record)
    try:
        for number_of_round in range(options.rounds):
            before, looks = machine.load(), [machine.one_way_ns()]
            for model in options.models:
                turn = number_of_round % len(ways)
                for way in ways[turn:] + ways[:turn]:
                    if way.peer not in gangs:
                        continue
                    try:
                        steps = options.steps or MODELS[model]
                        measure(model, way, gangs[way.peer], steps, record)
                    except GangError as error:
                        drop(way.peer, error, gangs, record)
                looks.append(machine.one_way_ns())
            seen = {
                "round": number_of_round + 1,
                "mode": machine.mode_of(*looks),
                "one_way_ns": looks,
                "loadavg": before["loadavg"],
                "steal_s": round(machine.load()["steal_s"] - before["steal_s"], 2),
            }
            record.rounds.append(seen)
            print(
                f"round {seen['round']}/{options.rounds}: mode {seen['mode']}, a cache line "
                f"takes {looks[0]}..{looks[-1]} ns, load {seen['loadavg']:.2f}, "
                f"steal {seen['steal_s']} s",
                flush=True,
            )
    finally:
        for gang in gangs.values():
            gang.close()


def _row(model: str, record: Record, found: dict[str, dict[str, Any]]) -> list[str]:
    parameters, tensors = record.shapes[model]
    row = [model, f"{parameters / 1e6:.1f} M, {tensors}"]
    for way in WAYS:
        here = found.get(way.name)
        row.append(f"{number(here['median'])} ({number(here['p90'])})" if here else "-")
    alone = found.get("alone", {}).get("median")
    for name in COMMUNICATING:
        median = found.get(name, {}).get("median")
        row.append(f"{alone / median:.0%}" if alone and median else "-")
    if alone and "ddp" in found and "kolovod" in found and found["ddp"]["median"] > alone:
        share = (found["kolovod"]["median"] - alone) / (found["ddp"]["median"] - alone)
        row.append(f"{share:.0%}")
    else:
        row.append("-")
    return row


def make(
    record: Record, facts: dict[str, Any], options: argparse.Namespace
) -> tuple[dict[str, Any], str]:
    """Return the JSON and the Markdown of a run."""
    found: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for (model, way), rounds in record.samples.items():
        pooled = report.summary([value for one in rounds for value in one])
        medians = [report.summary(one)["median"] for one in rounds]
        found[model][way] = {**pooled, "round_medians": medians}
    texts = [way.text for way in WAYS]
    efficiencies = [f"efficiency of {way.text}" for way in WAYS if way.name in COMMUNICATING]
    head = ["model", "parameters, tensors", *texts, *efficiencies,
            "Kolovod's overhead over DDP's (gloo)"]  # fmt: skip
    main_table = table(head, [_row(model, record, ways) for model, ways in found.items()])
    modes = ", ".join(dict.fromkeys(one["mode"] for one in record.rounds))
    parts = [
        "# Training step, Kolovod and DDP\n",
        f"`{machine.command_line()}`: {report.machine_line(facts)}, mode {modes}. 2 processes, one "
        "compute thread each; milliseconds per step, median (p90). Efficiency: the step without "
        "communication over the step. How it was measured: the head of bench/training.py.\n",
        main_table,
    ]
    rows: list[goals.Row] = []
    for model, ways in found.items():
        rows += goals.training_rows(model, {name: one["median"] for name, one in ways.items()})
        for other in WAYS:
            digests = {record.digests.get((model, name)) for name in ("ddp", other.name)}
            if other.peer not in ("local", "gloo") and None not in digests:
                same = "bitwise equal to" if len(digests) == 1 else "NOT bitwise equal to"
                parts.append(
                    f"{model}: the weights of {other.text} are {same} those of DDP (gloo).\n"
                )
    if rows:
        parts.append(goals.goals_table(rows))
    for model, ways in found.items():
        if {"kolovod", "kolovod-unwatched"} <= ways.keys():
            more = ways["kolovod"]["median"] / ways["kolovod-unwatched"]["median"] - 1
            parts.append(f"{model}: the sentinel makes a step {more:+.2%} longer.\n")
    parts += [f"Dropped: {who}: {why.splitlines()[-1]}\n" for who, why in record.dropped.items()]
    short = (
        "Training step, 2 processes with one compute thread each; milliseconds, median (p90). "
        "Efficiency: the same step without communication over the step. "
        f"Mode {modes}.\n\n{main_table}\n"
        f"({report.machine_line(facts)}; see [training.md](../bench/results/training.md))\n"
    )
    result = {
        "command": machine.command_line(),
        "machine": facts,
        "rounds": record.rounds,
        "dropped": {who: why.splitlines()[-1] for who, why in record.dropped.items()},
        "models": {model: {"ms": ways} for model, ways in found.items()},
        "digests": {f"{model}/{way}": digest for (model, way), digest in record.digests.items()},
        "short": short.splitlines(),
    }
    return result, "\n".join(parts)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line; see --help."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [way.name for way in WAYS]

    def words(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument("--models", type=words, default=list(MODELS), help=",".join(MODELS))
    parser.add_argument("--ways", type=words, default=names, help=",".join(names))
    parser.add_argument("--rounds", type=int, help="default 5; with --quick 2")
    parser.add_argument("--steps", type=int, help="per round; default 6, 8 and 40; with --quick 3")
    parser.add_argument("--quick", action="store_true", help="under 90 s")
    parser.add_argument("--output", type=Path, default=report.RESULTS, metavar="FOLDER")
    parser.add_argument(
        "--docs", "--readme", action="store_true", help="bring docs/benchmarks.md up to date"
    )
    options = parser.parse_args(arguments)
    for chosen, known in ((options.models, MODELS), (options.ways, names)):
        unknown = sorted(set(chosen) - set(known))
        if unknown:
            parser.error(f"unknown {unknown}: choose from {', '.join(known)}")
    options.rounds = options.rounds or (2 if options.quick else 5)
    options.steps = options.steps or (3 if options.quick else None)
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure, write, and return whether every way could be measured."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    record, facts = Record(), machine.facts()
    print(report.machine_line(facts), flush=True)
    scratch = Path(tempfile.mkdtemp(prefix="kolovod-bench-"))
    try:
        run(options, record, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    result, markdown = make(record, facts, options)
    name = "training-quick" if options.quick else "training"
    report.write(name, result, markdown, options.output)
    if options.docs:
        report.update_page(options.output)
    print(f"\n{markdown}")
    return 1 if record.dropped else 0


if __name__ == "__main__":
    sys.exit(main())
