"""How much of the communication hides behind the backward pass: ``bench/overlap.py``.

Two hosts of one rank each, which are network namespaces joined by a limited link (scripts/netbed),
so this needs root. A model of equal layers is trained with ``DistributedOptimizer``. By turns, with
a barrier before each: forward, backward and update of the same model that does not communicate,
an average of all its gradients, one of the last bucket's, and a whole distributed step. Each takes
max(end) - min(start) over the ranks; medians.

Nothing can be hidden of the last bucket, whose gradients backward makes last. So a step should take

    forward + max(backward, communication) + last bucket + update

The batch decides which of the two is the longer one. The hosts share this machine's cores with the
links between them, so what the cores have to work is told beside it; the goal is that of the bound:

    (hosts x (forward + backward + update) + what they work during communication) / cores
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
import report
from gangs import Commands, Gang
from overlap_rank import PHASES
from report import number, table

from kolovod.gradients import plan

sys.path.insert(0, str(machine.ROOT / "scripts"))

import netbed

ASK_TIMEOUT_S = 300.0
NAMES = ("host0", "host1")
GOAL = 1.10


@dataclass(frozen=True)
class Case:
    """A link, and a model for it."""

    link: str
    bits_per_s: float
    width: int
    layers: int
    batch: int

    @property
    def bucket_bytes(self) -> int:
        """The size of the optimizer's buckets, by its rule for the link."""
        layer_bytes = 4 * self.width**2
        return max(plan.bucket_bytes(self.bits_per_s / 8e6, layer_bytes * self.layers), layer_bytes)

    @property
    def megabytes(self) -> float:
        """The size of the gradients."""
        return 4e-6 * self.width**2 * self.layers


CASES = [
    Case(link, bits_per_s, width, 32, batch)
    for link, bits_per_s, width, batches in (
        ("1G", 1e9, 512, (128, 512, 1024)),
        ("100M", 100e6, 256, (1024, 4096, 8192)),
    )
    for batch in batches
]


def measure(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Return medians in ms by phase, and elements that were wrong."""
    with netbed.Bed(NAMES, with_sshd=False) as bed, netbed.Job(bed, NAMES) as job:
        for name in NAMES:  # before the world forms, since that measures the link
            bed.limit(name, case.bits_per_s)
        worker = [sys.executable, str(machine.BENCH / "worker.py"), "kolovod"]
        commands: Commands = [
            (bed.command(name, worker), job.environment(rank)) for rank, name in enumerate(NAMES)
        ]
        gang = Gang("kolovod", len(NAMES), bed.folder, commands=commands)
        try:
            answers = gang.ask(
                ASK_TIMEOUT_S,
                do="overlap",
                width=case.width,
                layers=case.layers,
                batch=case.batch,
                last_bytes=case.bucket_bytes,
                steps=options.steps,
                warmup=2,
            )
        finally:
            gang.close()
    found: dict[str, Any] = {
        "wrong": sum(answer["wrong"] for answer in answers),
        "busy_ms": answers[0]["busy_ms"],
    }
    for phase in PHASES:
        clocks = [dict(zip(("starts", "ends"), a["readings"][phase], strict=True)) for a in answers]
        found[phase] = report.summary(report.spans(clocks, 1e6))
    return found


def bound_ms(found: dict[str, Any]) -> float:
    """Return what a step should take; see the head of this file."""
    median = {phase: found[phase]["median"] for phase in PHASES}
    hidden: float = max(median["backward"], median["communication"])
    return float(median["forward"] + hidden + median["last_bucket"] + median["update"])


def cores_bound_ms(found: dict[str, Any]) -> float:
    """Return what it takes at least where hosts and links share the cores."""
    alone = sum(found[phase]["median"] for phase in ("forward", "backward", "update"))
    return float((len(NAMES) * alone + found["busy_ms"]) / machine.cores())


def make(results: list[tuple[Case, dict[str, Any]]], facts: dict[str, Any]) -> str:
    """Return the Markdown of a run."""
    rows = []
    for case, found in results:
        times = [number(found[phase]["median"]) for phase in PHASES]
        share = found["step"]["median"] / bound_ms(found)
        one_by_one = sum(found[p]["median"] for p in ("forward", "backward", "communication"))
        rows.append(
            [f"{case.link}, {case.megabytes:.0f} MB, batch {case.batch}", *times,
             number(bound_ms(found)), number(cores_bound_ms(found)),
             f"{share:.2f}", "yes" if share <= GOAL else "**no**",
             f"{(one_by_one + found['update']['median']) / found['step']['median']:.2f}x"]
        )  # fmt: skip
    head = ["link, gradients", *(phase.replace("_", " ") for phase in PHASES),
            "bound", "cores' bound", "step / bound",
            f"up to {GOAL:g}", "over no overlap"]  # fmt: skip
    wrong = sum(found["wrong"] for _, found in results)
    return "\n".join(
        [
            "# Communication behind the backward pass\n",
            f"`{machine.command_line()}`: {report.machine_line(facts)}, load average "
            f"{facts['loadavg']:.1f} at the start. 2 hosts of one rank, which share this machine's "
            "cores with the links between them; milliseconds, medians. How it was measured: the "
            "head of bench/overlap.py.\n",
            table(head, rows),
            f"Wrong elements: {wrong}.\n",
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure, write, and say whether every result was right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--links", default="1G,100M", help="of 1G,100M")
    parser.add_argument("--steps", type=int, default=9, help="of each case")
    parser.add_argument("--quick", action="store_true", help="one small case")
    parser.add_argument("--output", type=Path, default=report.RESULTS, metavar="FOLDER")
    options = parser.parse_args(arguments)
    unknown = set(options.links.split(",")) - {case.link for case in CASES}
    if unknown:
        parser.error(f"unknown links {sorted(unknown)}: choose from 1G, 100M")
    reason = netbed.unavailable()
    if reason:
        print(f"bench/overlap.py: {reason}", file=sys.stderr)
        return 1
    facts = {**machine.facts(), **machine.load()}
    cases = [case for case in CASES if case.link in options.links.split(",")]
    if options.quick:
        cases, options.steps = [Case("1G", 1e9, 256, 8, 64)], 3
    results = []
    for case in cases:
        results.append((case, measure(case, options)))
        print(
            f"{case.link}, batch {case.batch}: {results[-1][1]['step']['median']:.1f} ms",
            flush=True,
        )
    markdown = make(results, facts)
    result = {
        "command": machine.command_line(),
        "machine": facts,
        "cases": [
            {**vars(case), **found, "bound_ms": bound_ms(found),
             "cores_bound_ms": cores_bound_ms(found)}
            for case, found in results
        ],
    }  # fmt: skip
    report.write("overlap-quick" if options.quick else "overlap", result, markdown, options.output)
    print(f"\n{markdown}")
    return 1 if any(found["wrong"] for _, found in results) else 0


if __name__ == "__main__":
    sys.exit(main())
