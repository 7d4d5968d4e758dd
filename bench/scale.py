"""How the forming of a world and its negotiation grow with the ranks: ``bench/scale.py``.

All ranks are simulated on this machine, each as a host of its own: the ranks of a process are its
threads (bench/scale_ranks.py), with a segment, an engine and TCP connections each, and a launcher's
rendezvous server that all meet at. They broadcast 1 KiB and then negotiate steps of one operation
without elements, which carry nothing. For 2, 4, ... 512 ranks:

- rendezvous: seconds from the first rank's begin to the last one's engine, which has all its
  connections for the control plane by then;
- first broadcast: seconds more until the last rank has it, connections for data included, which
  are made on first use; and how many of these the busiest rank then has;
- messages: in a step in the steady state (a cached name), sent and received by the busiest rank and
  in the mean;
- a step: the median; all ranks share the cores, so it grows with them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import machine
import report
from report import number, table

from kolovod.net.channel import new_secret
from kolovod.rendezvous.server import RendezvousServer

SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 512)
RANKS_PER_PROCESS = 64
GOAL_S = 10.0


class Process:
    """Some of the ranks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(machine.BENCH / "scale_ranks.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout

    def say(self, line: str) -> None:
        """Let it read ``line``."""
        self._in.write(line + "\n")
        self._in.flush()

    def hear(self, expected: str) -> None:
        """Wait for a line. RuntimeError if it is another one."""
        line = self._out.readline().strip()
        if line != expected:
            raise RuntimeError(f"expected {expected!r} of a process of ranks, got {line[:2000]!r}")

    def answers(self) -> list[dict[str, Any]]:
        """Return what it tells in the end, by rank."""
        said: list[dict[str, Any]] = json.loads(self._out.readline())
        return said

    def end(self) -> None:
        """End it, if it has not ended."""
        self._process.kill()
        self._process.communicate()


def simulate(size: int, steps: int) -> dict[str, Any]:
    """Simulate a world of ``size`` ranks. RuntimeError names a rank that failed."""
    secret = new_secret()
    processes: list[Process] = []
    server = RendezvousServer(secret, size)
    server.start()
    try:
        for first in range(0, size, RANKS_PER_PROCESS):
            ranks = list(range(first, min(first + RANKS_PER_PROCESS, size)))
            processes.append(Process())
            world = {"size": size, "ranks": ranks, "steps": steps, "store": server.address}
            processes[-1].say(json.dumps({**world, "secret": secret}))
        for what in ("ready", "counted"):
            for process in processes:
                process.hear(what)
            for process in processes:
                process.say("go on")
        answers = [answer for process in processes for answer in process.answers()]
    finally:
        for process in processes:
            process.end()
        server.close()
    for answer in answers:
        if "error" in answer:
            raise RuntimeError(answer["error"])
    begun = min(answer["begun"] for answer in answers)
    formed = max(answer["formed"] for answer in answers)
    return {
        "ranks": size,
        "rendezvous_s": formed - begun,
        "broadcast_s": max(answer["carried"] for answer in answers) - formed,
        "connections": max(answer["connections"] for answer in answers),
        "messages": max(answer["messages"] for answer in answers),
        "mean_messages": sum(answer["messages"] for answer in answers) / size,
        "step_ms": max(answer["step_s"] for answer in answers) * 1e3,
    }


def make(found: list[dict[str, Any]], facts: dict[str, Any], load: dict[str, float]) -> str:
    """Return the Markdown of a run."""
    rows = [
        [
            str(one["ranks"]),
            f"{one['rendezvous_s']:.2f}",
            f"{one['broadcast_s']:.2f}",
            str(one["connections"]),
            f"{one['messages']:.1f}",
            f"{one['mean_messages']:.1f}",
            number(one["step_ms"]),
        ]
        for one in found
    ]
    last = found[-1]
    reached = "reached" if last["rendezvous_s"] < GOAL_S else "missed"
    return "\n".join(
        [
            "# What more ranks cost\n",
            f"`{machine.command_line()}`: {report.machine_line(facts)}, load average "
            f"{load['loadavg']:.1f} before the run. Simulated: every rank is a host of its own and "
            f"a thread, {RANKS_PER_PROCESS} to a process; steps without elements. How it was "
            "measured: the head of bench/scale.py.\n",
            table(
                [
                    "ranks",
                    "rendezvous, s",
                    "first broadcast, s",
                    "connections, busiest rank",
                    "messages per step, busiest rank",
                    "mean",
                    "step, ms",
                ],
                rows,
            ),
            f"Goal: 512 ranks meet in less than {GOAL_S:g} s. {last['ranks']} ranks took "
            f"{last['rendezvous_s']:.2f} s: {reached}.\n",
            "![curves](scale.svg)\n",
        ]
    )


def draw(found: list[dict[str, Any]]) -> str:
    """Draw three curves over the number of ranks, as SVG; both axes are logarithmic."""
    from math import log2

    width, height, left, top = 300, 220, 50, 30
    panels = (
        ("rendezvous, s", "rendezvous_s"),
        ("messages per step, busiest rank", "messages"),
        ("step, ms", "step_ms"),
    )
    parts = []
    ranks = [log2(one["ranks"]) for one in found]
    for panel, (title, key) in enumerate(panels):
        x0 = panel * (width + 20)
        values = [log2(max(one[key], 1e-6)) for one in found]
        low, high = int(min(values) // 1), int(max(values) // 1) + 1
        span = max(ranks[-1] - ranks[0], 1.0)

        def place(rank: float, value: float) -> tuple[float, float]:
            across = x0 + left + (rank - ranks[0]) / span * (width - left - 10)  # noqa: B023
            up = (value - low) / (high - low) * (height - top - 30)  # noqa: B023
            return across, height - 30 - up

        text = '<text x="{:.0f}" y="{:.0f}" text-anchor="{}">{}</text>'
        parts.append(text.format(x0 + width / 2, 18, "middle", title))
        every = max(1, (high - low) // 6)
        for level in range(low, high + 1, every):
            x, y = place(ranks[0], level)
            line = '<line x1="{:.0f}" y1="{:.1f}" x2="{:.0f}" y2="{:.1f}" stroke="#ddd"/>'
            parts.append(line.format(x, y, x0 + width - 10, y))
            parts.append(text.format(x - 6, y + 4, "end", f"{2.0**level:g}"))
        points = [place(*point) for point in zip(ranks, values, strict=True)]
        for (x, y), one in zip(points, found, strict=True):
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>')
            parts.append(text.format(x, height - 12, "middle", one["ranks"]))
        way = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{way}" fill="none" stroke="black"/>')
    body = "\n".join(parts)
    size = f'width="{3 * (width + 20)}" height="{height}"'
    font = 'font-family="sans-serif" font-size="11"'
    paper = '<rect width="100%" height="100%" fill="white"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>{paper}\n{body}\n</svg>\n'


def main(arguments: list[str] | None = None) -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="RANKS")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path, default=report.RESULTS, metavar="FOLDER")
    options = parser.parse_args(arguments)
    facts, load = machine.facts(), machine.load()
    print(report.machine_line(facts), flush=True)
    found = []
    for size in options.sizes:
        found.append(simulate(size, options.steps))
        print(json.dumps(found[-1]), flush=True)
    markdown = make(found, facts, load)
    result = {"command": machine.command_line(), "machine": {**facts, **load}, "worlds": found}
    report.write("scale", result, markdown, options.output)
    (options.output / "scale.svg").write_text(draw(found))
    print(f"\n{markdown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
