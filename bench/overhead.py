"""What Kolovod adds to a training step of 500 small parameters: ``bench/overhead.py``.

- a gradient's hook: microseconds per parameter, submitting the buckets included (two ranks);
- a step: Kolovod's and DDP's (gloo) beside two processes that do not communicate, as
  bench/training.py measures it;
- a world of one: our step and plain PyTorch's, by turns in one process; there must be no hook.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import goals
import machine
import report
import training
from gangs import Gang
from report import number, table

MODEL = "mlp"
ASK_TIMEOUT_S = 300.0


def ask(size: int, scratch: Path, **command: Any) -> list[dict[str, Any]]:
    """Return what the ranks of a Kolovod world answer."""
    folder = scratch / command["do"]
    folder.mkdir()
    gang = Gang("kolovod", size, folder)
    try:
        return gang.ask(ASK_TIMEOUT_S, model=MODEL, **command)
    finally:
        gang.close()


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Return all figures. Raises GangError where a rank fails, RuntimeError for wrong results."""
    steps = argparse.Namespace(
        ways=["alone", "ddp", "kolovod"], models=[MODEL], rounds=options.rounds, steps=options.steps
    )
    record = training.Record()
    training.run(steps, record, scratch)
    hooks = ask(2, scratch, do="hooks", steps=options.steps, warmup=3)
    (alone,) = ask(1, scratch, do="alone", steps=options.steps, warmup=3)
    if alone["hooks"] or alone["wrong"]:
        raise RuntimeError(
            f"a world of one: {alone['hooks']} hooks, {alone['wrong']} wrong weights"
        )
    return {
        "step_ms": {
            way: report.summary([value for one in rounds for value in one])
            for (_, way), rounds in record.samples.items()
        },
        "rounds": record.rounds,
        "dropped": {who: why.splitlines()[-1] for who, why in record.dropped.items()},
        "hook_us": report.summary([ns / 1e3 for answer in hooks for ns in answer["ns"]]),
        "calling_us": max(answer["calling_ns"] for answer in hooks) / 1e3,
        "alone": {name: report.summary(alone[name]) for name in ("plain", "ours")},
        "alone_share": _median(alone["ours"]) / _median(alone["plain"]) - 1,
    }


def _median(values: list[float]) -> float:
    return report.quantile(values, 0.5)


def make(found: dict[str, Any], facts: dict[str, Any]) -> str:
    """Return the Markdown of a run."""
    medians = {way: one["median"] for way, one in found["step_ms"].items()}
    names = {way.name: way.text for way in training.WAYS}
    base = medians.get("alone")
    rows = [
        [names[way], f"{number(one['median'])} ({number(one['p90'])})",
         f"{medians[way] - base:+.2f}" if base is not None else "-"]
        for way, one in found["step_ms"].items()
    ]  # fmt: skip
    added = medians["kolovod"] - base if base is not None and "kolovod" in medians else None
    hook, alone = found["hook_us"], found["alone"]
    modes = ", ".join(dict.fromkeys(one["mode"] for one in found["rounds"]))
    return "\n".join(
        [
            "# What a step costs more\n",
            f"`{machine.command_line()}`: {report.machine_line(facts)}, mode {modes}. 500 "
            "parameters of 2 to 8 KB; median (p90). How it was measured: the head of "
            "bench/overhead.py.\n",
            table(["2 processes", "step, ms", "more than without communication"], rows),
            f"A hook takes {number(hook['median'])} us (p90 {number(hook['p90'])}); that PyTorch "
            f"calls one at all, {number(found['calling_us'])} us.\n",
            f"In a world of one a step takes {alone['ours']['median']:.3f} ms, plain PyTorch's "
            f"{alone['plain']['median']:.3f} ms: {found['alone_share']:+.2%}.\n",
            goals.goals_table(goals.overhead_rows(hook["median"], added, found["alone_share"])),
            *(f"Dropped: {who}: {why}\n" for who, why in found["dropped"].items()),
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure, write, and say whether everything could be measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=40, help="per round")
    parser.add_argument("--output", type=Path, default=report.RESULTS, metavar="FOLDER")
    options = parser.parse_args(arguments)
    facts = machine.facts()
    print(report.machine_line(facts), flush=True)
    scratch = Path(tempfile.mkdtemp(prefix="kolovod-bench-"))
    try:
        found = measure(options, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    markdown = make(found, facts)
    result = {"command": machine.command_line(), "machine": facts, **found}
    report.write("overhead", result, markdown, options.output)
    print(f"\n{markdown}")
    return 1 if found["dropped"] else 0


if __name__ == "__main__":
    sys.exit(main())
