"""The page of bench/slow_links.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import machine
import report
from report import number, table

WANTED_LOSS = {"int8": 0.01, "int4": 0.02}
WANTED_POINTS = -0.5
GOAL_HEAD = ["", "measured", "wanted", "reached"]

Rows = list[list[str]]


def at_most(what: str, value: float, wanted: float, form: str) -> list[str]:
    """Return a row of the goals."""
    return [what, f"{value:{form}}", f"{wanted:g}", "yes" if value <= wanted else "**no**"]


def at_least(what: str, value: float, wanted: float, form: str) -> list[str]:
    """Return a row of the goals."""
    return [what, f"{value:{form}}", f"{wanted:g}", "yes" if value >= wanted else "**no**"]


def less(values: list[float], others: list[float]) -> list[float]:
    """Subtract pair by pair."""
    return [a - b for a, b in zip(values, others, strict=True)]


def losses_page(found: report.Json) -> str:
    """Return the page of the part ``losses``."""
    rows: Rows = []
    wanted: Rows = []
    for codec, losses in found["text"].items():
        off = less(losses, found["text"]["none"])
        row = [codec, f"{statistics.mean(losses):.4f}", ", ".join(f"{d:+.4f}" for d in off)]
        if codec == "alone":
            rows.append(["one rank alone", *row[1:], "-", "-"])
            continue
        accuracies = [100 * share for share in found["digits"][codec]]
        points = less(accuracies, [100 * share for share in found["digits"]["none"]])
        rows.append([
            *row, f"{statistics.mean(accuracies):.2f}", ", ".join(f"{p:+.2f}" for p in points)
        ])  # fmt: skip
        if codec in WANTED_LOSS:
            mean = statistics.mean(off)
            wanted.append(
                at_most(f"{codec}: loss above float32's", mean, WANTED_LOSS[codec], "+.4f")
            )
            mean = statistics.mean(points)
            wanted.append(at_least(f"{codec}: digits, points", mean, WANTED_POINTS, "+.2f"))
    head = [
        "gradients", "validation loss, mean", "less float32's, by seed", "digits, %, mean",
        "less float32's, by seed",
    ]  # fmt: skip
    return "## Losses\n\n" + table(head, rows) + "\n" + table(GOAL_HEAD, wanted)


def times_page(found: report.Json) -> str:
    """Return the page of the part ``time``."""
    text = "## Time to float32's loss over 100 Mbit/s\n"
    for count, took in found.items():
        rows, seconds = times_rows(took)
        ours, best = min(
            (seconds.get(f"kolovod {codec}", float("inf")), codec) for codec in WANTED_LOSS
        )
        wanted: Rows = []
        if "ddp fp16" in seconds:
            name = f"{best}: time over that of DDP with fp16"
            wanted.append(at_most(name, ours / seconds["ddp fp16"], 0.5, ".2f"))
        power = [(taken, way) for way, taken in seconds.items() if "powersgd" in way]
        if power:
            taken, way = min(power)
            wanted.append(at_least(f"{best}: times faster than {way}", taken / ours, 1.5, ".2f"))
        head = ["way", "seconds", "steps", "ms a step", "MB a step, all hosts"]
        text += f"\n### {count} hosts\n\n" + table(head, rows) + "\n" + table(GOAL_HEAD, wanted)
    return text


def times_rows(took: dict[str, list[Any]]) -> tuple[Rows, dict[str, float]]:
    """Return a row for each way; and median seconds of those that reached the loss each time."""
    rows: Rows = []
    seconds = {}
    for way, turns in took.items():
        reached = all(one["reached"] for one in turns)
        if reached:
            seconds[way] = statistics.median(one["seconds"] for one in turns)
        step_ms = statistics.median(1000 * one["seconds"] / one["steps"] for one in turns)
        rows.append([
            way,
            f"{seconds[way]:.1f}" if reached else "not reached",
            f"{statistics.median(one['steps'] for one in turns):g}",
            number(step_ms),
            f"{statistics.median(one['sent_mb'] / one['steps'] for one in turns):.2f}",
        ])  # fmt: skip
    return rows, seconds


def seldom_page(found: report.Json, text: dict[str, list[float]]) -> str:
    """Return the page of ``diloco``; ``text``: losses of synchronous training and one rank."""
    rows: Rows = []
    wanted: Rows = []
    for name, kind in found["ours"].items():
        turns = kind["turns"]
        utilization = 100 * statistics.median(one["utilization"] for one in turns)
        mb = statistics.median(one["round_mb"] for one in turns)
        goals = [at_least(f"{name}: utilization, %", utilization, 95, ".1f")]
        alone = 100 * statistics.median(one["alone"] for one in turns)
        row = [name, f"{statistics.mean(one['loss'] for one in turns):.4f}", "-", "-"]
        if text:
            share = 100 * statistics.mean(
                (single - one["loss"]) / (single - together)
                for one, together, single in zip(turns, text["none"], text["alone"], strict=True)
            )
            row[2] = f"{share:.0f}"
            goals.append(at_least(f"{name}: of the way to synchronous, %", share, 80, ".0f"))
        other = found["torchft"].get(str(kind["fragments"]))
        if other:
            row[3] = f"{other / mb:.1f}"
            goals.append(at_least(f"{name}: times fewer bytes than torchft", other / mb, 7, ".1f"))
        rows.append([*row, f"{utilization:.1f}", f"{alone:.0f}", f"{mb:.2f}"])
        if kind["codec"] == "int4":
            wanted += goals
    head = [
        "DiLoCo", "validation loss, mean", "of the way from one rank to synchronous, %",
        "times fewer bytes than torchft", "utilization, %",
        "a step alone over one with DiLoCo, %", "MB a round, all hosts",
    ]  # fmt: skip
    title = "## DiLoCo over 100 Mbit/s and 100 ms there and back\n\n"
    return title + table(head, rows) + "\n" + table(GOAL_HEAD, wanted)


def command() -> str:
    """Return how this process was started, whatever the path of torchft's environment."""
    words = machine.command_line().split()
    if "--torchft" in words:
        words[words.index("--torchft") + 1] = "torchft/bin/python"
    return " ".join(words)


def page(result: report.Json) -> str:
    """Return the result for people."""
    text = "# Slow links\n\nHow it was measured: the head of bench/slow_links.py.\n"
    losses = result.get("losses", {}).get("found", {}).get("text", {})
    pages: dict[str, Callable[[report.Json], str]] = {
        "losses": losses_page,
        "time": times_page,
        "diloco": lambda found: seldom_page(found, losses),
    }
    for part, of in pages.items():
        if part in result:
            run = result[part]
            machine_line = report.machine_line(run["machine"])
            loads = f"load {run['load'][0]:.1f} to {run['load'][1]:.1f}"
            title, body = of(run["found"]).split("\n", 1)
            text += f"\n{title}\n\n`{run['command']}` on {machine_line}, {loads}.\n{body}"
    return text
