"""What it takes an elastic job to go on after ``kill -9``: ``bench/elastic.py``.

Kolovod, torchft and torchrun train the same model (bench/elastic_rank.py: ten tensors, 400 KB, 5 ms
of computing that are slept), by turns in one run, each as its documentation shows (*defaults*) and
with shorter times where there are some to choose (*tuned*). A rank is killed, then, when the job
is whole again, the next one; each round has a fresh job. All clocks are this machine's.

- next step: from the kill until the last survivor has completed a step without the dead rank;
  torchrun starts all ranks again, so there until the last of those has completed one;
- joiner: from the start of the process that takes the dead one's place to its first step with all
  others, which includes Python's start and the imports; and from where the script is ready;
- lost: steps whose gradients the survivors had computed, and that were thrown away. torchrun goes
  on from a checkpoint, written every 10 steps;
- where Kolovod's time goes: until the script of the last survivor hears of the loss, until the next
  world is agreed upon, until it is formed, and the meeting with the step that is repeated;
- cost without failures: two ranks with gradients as large as ResNet-50's step by turns as in an
  elastic job and as in another one (bench/elastic_cost_rank.py); the ticket by itself.

Each round of Kolovod's is replayed in one process (kolovod.testing.replay) from its ranks'
membership logs: steps and weights must be the same, bit for bit, else the run ends. A job whose
survivors make no step in two minutes counts as stuck, and its round ends.

torchft needs an environment of its own, whose Python is given by --torchft (torchrun is PyTorch's,
there, too)::

    python -m venv /tmp/torchft && /tmp/torchft/bin/pip install torch==2.13.0 torchft==0.2.0 numpy

Without --torchft only Kolovod and torchrun are measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import elastic_rank
import machine
import report
from elastic_jobs import Job, JobError, KolovodJob, Process, TorchftJob, TorchrunJob
from report import Json, number, table

from kolovod.elastic import MembershipLog
from kolovod.testing import replay

PHASES = ("hear", "agree", "form", "repeat")
TIMES_TORCHFT = 50.0
TICKET_SHARE = 0.003
MS = 1e6
INTERRUPTED = "The run was interrupted before all was measured. "


def systems(options: argparse.Namespace) -> dict[str, tuple[Callable[[Path], Job], int]]:
    """Return, by name, how to start a job, and how many kills it has in a round."""
    np, many = options.np, options.many
    found: dict[str, tuple[Callable[[Path], Job], int]] = {
        "kolovod": (lambda folder: KolovodJob(np, folder, "kolovod"), options.kills),
        f"kolovod, {many} ranks": (
            lambda folder: KolovodJob(many, folder, "kolovod-numpy"),
            options.kills,
        ),
    }
    for name, tuned in (("defaults", False), ("tuned", True)):
        if options.torchft:
            found[f"torchft, {name}"] = (
                lambda folder, tuned=tuned: TorchftJob(np, folder, options.torchft, tuned=tuned),  # type: ignore[misc]
                options.peer_kills,
            )
        python = options.torchft or sys.executable
        found[f"torchrun, {name}"] = (
            lambda folder, tuned=tuned, python=python: TorchrunJob(np, folder, python, tuned=tuned),  # type: ignore[misc]
            options.peer_kills,
        )
    return {key: value for key, value in found.items() if value[1]}


def kill_one(job: Job, rank: int) -> Json:
    """Kill a rank, and see how the job goes on."""
    before = job.whole()
    by_rank = sorted(before, key=lambda process: (process.steps[-1].rank, process.pid))
    victim = by_rank[rank]
    survivors = [process for process in before if process is not victim]
    time.sleep(random.uniform(0.2, 0.25))
    killed_ns = time.monotonic_ns()
    os.kill(victim.pid, signal.SIGKILL)
    job.replace(victim)
    restarts_all = isinstance(job, TorchrunJob)

    def resumed(alive: list[Process]) -> list[int]:
        if restarts_all:
            known = {process.pid for process in before}
            fresh = [process for process in alive if process.pid not in known]
            firsts = [process.steps[0].at_ns for process in fresh if process.steps]
            return firsts if len(firsts) == job.np else []
        nexts = [_next_step(process, killed_ns, job.np) for process in survivors]
        return [step.at_ns for step in nexts if step is not None] if all(nexts) else []

    next_ns = max(job.wait(resumed, "the next step"))
    after = job.whole(next_ns)
    joiner = next(process for process in after if process not in before)
    first = next(step for step in joiner.steps if step.size == job.np)
    found: Json = {
        "rank": rank,
        "next_ms": (next_ns - killed_ns) / MS,
        "joiner_ms": (first.at_ns - joiner.born_ns) / MS,
        "joiner_ready_ms": (first.at_ns - joiner.ready_ns) / MS,
        "lost": _lost(survivors, after, killed_ns, restarts_all),
    }
    phases = [p for process in survivors for p in process.phases if p[0] > killed_ns]
    if phases:
        ends = [max(moments) for moments in zip(*phases, strict=True)]
        spans = zip(PHASES, [killed_ns, *ends], [*ends, next_ns], strict=True)
        found["phases_ms"] = {name: (end - begin) / MS for name, begin, end in spans}
    return found


def _next_step(process: Process, killed_ns: int, np: int) -> Any:
    """Return the first step that the process has made without the one that was killed."""
    steps = (step for step in process.steps if step.at_ns > killed_ns)
    return next((step for step in steps if step.size < np or step.wasted), None)


def _lost(survivors: list[Process], after: list[Process], killed_ns: int, restarts: bool) -> int:
    if restarts:
        last = max(process.steps[-1].number for process in survivors)
        return last + 1 - min(process.steps[0].number for process in after)
    return max(
        sum(step.wasted for step in process.steps if step.at_ns > killed_ns)
        for process in survivors
    )


def one_round(
    name: str, start: Callable[[Path], Job], kills: int, first: int, found: list[Json]
) -> int:
    """Run a fresh job; kill its ranks in turns, from ``first`` on. Every second is rank 0.

    Returns the steps that were replayed.
    """
    folder = Path(tempfile.mkdtemp(prefix="kolovod-elastic-"))
    job = start(folder)
    try:
        for turn in range(first, first + kills):
            rank = 0 if turn % 2 == 0 else 1 + turn // 2 % (job.np - 1)
            found.append({"system": name, **kill_one(job, rank)})
            print(json.dumps(found[-1]), flush=True)
        if isinstance(job, KolovodJob):
            job.stop()
            return verify(folder, job.np, job.kind)
    except JobError as error:  # whose fault it is must be looked at; the others are measured
        print(f"{name}: {error}", flush=True)
        found.append({"system": name, "failed": str(error).splitlines()[0]})
    finally:
        job.close()
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def verify(folder: Path, np: int, kind: str) -> int:
    """Return how many steps were replayed.

    Raises ReplayDiffers unless all weights are those of a replay, JobError for lost steps.
    """
    paths = sorted(folder.glob("*.members"))
    if len(paths) != np:
        raise JobError(f"{len(paths)} of {np} ranks have come to the end")
    logs = [MembershipLog.load(path) for path in paths]
    wanted = int((folder / "stop").read_text())
    for log in logs:
        if len(log.steps) != wanted or log.steps != logs[0].steps:
            raise JobError(f"a rank has made {len(log.steps)} steps, another {wanted} or others")
    model: Any = elastic_rank.MODELS[kind]()
    replay(logs[0], model.compute, model.apply, model.tensors)
    print(f"replayed: {wanted} steps of {np} ranks are the same, bit for bit", flush=True)
    return wanted


def cost(options: argparse.Namespace) -> Json:
    """Return what steps cost while nothing fails, as rank 0 has it."""
    folder = Path(tempfile.mkdtemp(prefix="kolovod-elastic-"))
    script = str(machine.BENCH / "elastic_cost_rank.py")
    command = [sys.executable, "-m", "kolovod", "run", "--elastic", "-np", "2", "--"]
    command += [sys.executable, script, str(folder), str(options.steps), str(options.compute_s)]
    try:
        subprocess.run(command, check=True, timeout=900)
        found: Json = json.loads((folder / "cost.0.json").read_text())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {name: report.summary(values) for name, values in found.items()}


def summarize(found: list[Json]) -> Json:
    """Return statistics of each figure, by system."""
    result: Json = {}
    for name in dict.fromkeys(one["system"] for one in found):
        all_of = [one for one in found if one["system"] == name]
        mine = [one for one in all_of if "failed" not in one]
        if not mine:
            continue
        result[name] = {
            "failed": len(all_of) - len(mine),
            "next": statistics([one["next_ms"] for one in mine]),
            "next of rank 0": statistics([one["next_ms"] for one in mine if one["rank"] == 0]),
            "joiner": statistics([one["joiner_ms"] for one in mine]),
            "joiner, ready": statistics([one["joiner_ready_ms"] for one in mine]),
            "lost": max(one["lost"] for one in mine),
            "lost, mean": sum(one["lost"] for one in mine) / len(mine),
        }
        phases = [one["phases_ms"] for one in mine if "phases_ms" in one]
        if phases:
            result[name]["phases"] = {
                phase: statistics([one[phase] for one in phases]) for phase in PHASES
            }
    return result


def statistics(values: list[float]) -> Json:
    """Return median, p99 and extremes; empty for no value."""
    if not values:
        return {}
    return {**report.summary(values), "p99": report.quantile(values, 0.99)}


def make(result: Json, facts: Json, load: tuple[float, float]) -> str:
    """Return the Markdown of a run."""
    kills: Json = result["kills"]
    rows = [
        [
            name,
            *(number(one["next"][key]) for key in ("median", "p99", "min")),
            number(one["next of rank 0"].get("median")),
            *(number(one[key]["median"] / 1e3) for key in ("joiner", "joiner, ready")),
            f"{one['lost, mean']:.1f} ({one['lost']})",
            str(one["next"]["samples"]),
            str(one["failed"]),
        ]
        for name, one in kills.items()
    ]
    head = ["after kill -9", "next step, ms", "p99", "min", "of rank 0", "joiner, s"]
    head += ["from ready, s", "steps lost (most)", "kills", "stuck jobs"]
    phases = [
        [name, *(_median_and_p99(one["phases"][phase]) for phase in PHASES)]
        for name, one in kills.items()
        if "phases" in one
    ]
    parts = [
        "# After kill -9\n",
        f"`{command_line()}`: {report.machine_line(facts)}, load average {load[0]:.1f} before the "
        f"run and {load[1]:.1f} after it. {INTERRUPTED * result['interrupted']}Medians of all "
        "kills. How it was measured: the head of bench/elastic.py.\n",
        table(head, rows),
        *_stuck_text(result),
        f"{result['replayed']:,} steps of Kolovod's were replayed in one process: the same "
        "weights, bit for bit.\n",
        "Where the time goes, ms, median (p99):\n",
        table(["", *PHASES], phases),
    ]
    if result["cost"]:
        parts.append(_cost_text(result["cost"]))
    parts.append(table(["goal", "measured", "wanted", "reached"], goals(result)))
    return "\n".join(parts)


def _stuck_text(result: Json) -> list[str]:
    """Return lines on systems that went on after no kill at all."""
    failed = {one["system"]: one["failed"] for one in result["samples"] if "failed" in one}
    lines = [
        f"- {name}: {why.partition(';')[0]}"
        for name, why in failed.items()
        if name not in result["kills"]
    ]
    return ["No job went on after a kill, so these have no row:\n", *lines, ""] if lines else []


def command_line() -> str:
    """Return the command line as a reader would type it, with an environment of his own."""
    words = machine.command_line().split()
    at = words.index("--torchft") + 1 if "--torchft" in words else 0
    return " ".join([*words[:at], "torchft/bin/python", *words[at + 1 :]] if at else words)


def _median_and_p99(figures: Json) -> str:
    return f"{number(figures['median'])} ({number(figures['p99'])})"


def _cost_text(found: Json) -> str:
    elastic, fixed = found["elastic"]["median"], found["fixed"]["median"]
    ticket = found["tickets_us"]
    return (
        f"Without failures, gradients of ResNet-50, 2 ranks: a step takes {elastic:.1f} ms in an "
        f"elastic job (p90 {found['elastic']['p90']:.1f}), {fixed:.1f} ms (p90 "
        f"{found['fixed']['p90']:.1f}) in another one: {elastic / fixed - 1:+.1%}. The ticket "
        f"takes {ticket['median']:.0f} us (p90 {ticket['p90']:.0f}): "
        f"{ticket['median'] / elastic / 1e3:.2%} of the step.\n"
    )


def goals(result: Json) -> list[list[str]]:
    """Return rows of the goals; those that were missed stay in the table, as missed."""
    rows = []
    kills = result["kills"]
    for name, one in kills.items():
        if not name.startswith("kolovod"):
            continue
        few = name == "kolovod"
        for key, limit in (("median", 100.0 if few else None), ("p99", 300.0 if few else 500.0)):
            if limit is not None:
                value = one["next"][key]
                rows.append(
                    [f"{name}: {key} to the next step", f"{number(value)} ms", f"{limit:g} ms",
                     _reached(value <= limit)]
                )  # fmt: skip
        rows.append([f"{name}: steps lost", str(one["lost"]), "0", _reached(one["lost"] == 0)])
    ours = kills.get("kolovod", {}).get("next", {}).get("median")
    for name in ("torchft, defaults", "torchft, tuned"):
        if ours and name in kills:
            times = kills[name]["next"]["median"] / ours
            wanted = f"{TIMES_TORCHFT:g}x" if name == "torchft, defaults" else "-"
            verdict = _reached(times >= TIMES_TORCHFT) if wanted != "-" else "-"
            rows.append([f"times faster than {name}", report.times(times), wanted, verdict])
    if result["cost"]:
        share = result["cost"]["tickets_us"]["median"] / result["cost"]["elastic"]["median"] / 1e3
        rows.append(
            ["the ticket, of a step", f"{share:.2%}", f"{TICKET_SHARE:.1%}",
             _reached(share <= TICKET_SHARE)]
        )  # fmt: skip
    return rows


def _reached(yes: bool) -> str:
    return "yes" if yes else "no"


def main(arguments: list[str] | None = None) -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--torchft", default="", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--np", type=int, default=4)
    parser.add_argument("--many", type=int, default=16, help="ranks of the larger job")
    parser.add_argument("--kills", type=int, default=8, help="a round, of Kolovod's; at most 8")
    parser.add_argument("--peer-kills", type=int, default=3, help="a round, of each other system's")
    parser.add_argument("--steps", type=int, default=100, help="for the cost; 0: leave it out")
    parser.add_argument("--compute-s", type=float, default=0.1, help="of a step, for the cost")
    parser.add_argument("--only", default="", metavar="TEXT", help="systems whose names have it")
    parser.add_argument("--output", type=Path, default=report.RESULTS, metavar="FOLDER")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no rank is left behind
    facts, before = machine.facts(), machine.load()["loadavg"]
    print(report.machine_line(facts), f"load average {before:.1f}", flush=True)
    found: list[Json] = []
    result: Json = {"cost": None, "replayed": 0, "interrupted": False}
    try:
        for turn in range(options.rounds):
            for name, (start, kills) in systems(options).items():
                if options.only in name:
                    result["replayed"] += one_round(name, start, kills, turn * kills, found)
        result["cost"] = cost(options) if options.steps else None
    except KeyboardInterrupt:
        result["interrupted"] = True
    result["kills"], result["samples"] = summarize(found), found
    after = machine.load()["loadavg"]
    markdown = make(result, facts, (before, after))
    result = {
        "command": command_line(),
        "machine": {**facts, "loadavg": [before, after]},
        **result,
    }
    report.write("elastic", result, markdown, options.output)
    print(f"\n{markdown}")
    ours = [one for one in found if "failed" in one and one["system"].startswith("kolovod")]
    return 1 if ours else 0


if __name__ == "__main__":
    sys.exit(main())
