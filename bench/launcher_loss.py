"""What it costs an elastic job to lose its launcher: ``bench/launcher_loss.py``.

Ranks reduce 400 KB in a loop, with 5 ms of computing that are slept, and note when each step was
committed. What is killed, by ``kill -9``, takes turns; each round has a fresh job:

- keeper: the process that keeps the job, which is its coordinator and holds the rendezvous;
- both: that, and ``kolovod run``, whose output nobody sees from then on;
- keeper and rank 0: at once, so that no launcher can say that the rank has ended;
- standby: after the keeper, and before another one has come, the rank that has taken its part;
- host (``--hosts``, needs root): three network namespaces of this machine with a rank each. The one
  of launcher and rank 0 is cut off: nothing is closed or refused.

The pause is the longest time between two steps of a surviving rank in the five seconds after. All
steps must have been made, by each rank one after the other, else the run ends.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import machine
import report
from report import Json, number, table

sys.path.insert(0, str(machine.ROOT / "scripts"))

WATCHED_S = 5.0
LIMIT_S = 60.0
RUN = [sys.executable, "-m", "kolovod", "run", "--elastic"]
RANK = """
import os, sys, time
import numpy as np
import kolovod.numpy as kv
from kolovod import elastic

kv.init()
folder = sys.argv[1]
notes = os.open(f"{folder}/{os.environ['KOLOVOD_SLOT']}.{os.getpid()}", os.O_CREAT | os.O_WRONLY)
state = elastic.State(step=0, ends=False)


@elastic.run
def train(state):
    while not state.ends:
        time.sleep(0.005)
        data = np.full(100_000, float(os.path.exists(folder + "/end")), np.float32)
        state.ends = bool(elastic.exactly(lambda: kv.allreduce(data, "data", op=kv.Max))[0])
        state.step += 1
        state.commit()
        line = f"{time.monotonic_ns()} {state.step} {kv.size()} {kv.rank()}"
        os.write(notes, (line + chr(10)).encode())


train(state)
"""
Step = tuple[int, int, int, int]
"""When, which, in a world of how many, as which rank."""


class Running:
    """A job in ``folder``."""

    def __init__(
        self,
        folder: Path,
        popen: Callable[..., subprocess.Popen[str]],
        *flags: str,
        script: str = RANK,
    ):
        """``script``: notes its steps as RANK does. What the launcher says is in ``folder``."""
        self.folder = folder
        (folder / "steps").mkdir()
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
        command = [*RUN, *flags, "--", sys.executable, "-c", script, str(folder / "steps")]
        with (folder / "said").open("w") as said:
            self.process = popen(
                command, stdout=subprocess.DEVNULL, stderr=said, text=True, env=environment
            )

    def steps(self) -> dict[tuple[int, int], list[Step]]:
        """Return the steps of each process, by slot and pid."""
        found = {}
        for path in (self.folder / "steps").glob("*.*"):
            slot, pid = path.name.split(".")
            lines = path.read_text().splitlines()
            found[int(slot), int(pid)] = [
                (int(a), int(b), int(c), int(d)) for a, b, c, d, *_ in map(str.split, lines)
            ]
        return found

    def until_whole(self, size: int) -> None:
        """Wait until all have made some steps in a world of ``size``."""

        def is_whole() -> bool:
            last = [steps[-40:] for steps in self.steps().values()]
            return sum(len(s) == 40 and all(x[2] == size for x in s) for s in last) >= size

        until(is_whole)

    def keeper(self) -> int:
        """Return the keeper's pid, in the namespace where it was started."""
        (job,) = self.folder.glob("kolovod/jobs/*/job")
        return int(json.loads(job.read_text())["pid"])

    def end(self) -> None:
        """Let it come to its end."""
        (self.folder / "steps" / "end").touch()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(LIMIT_S)
        agents = self.folder / "kolovod" / "agents"
        until(lambda: not any(agents.iterdir()))


def until(condition: Callable[[], bool]) -> None:
    """Wait for it. Raises SystemExit if it does not come true."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("the job does not go on: the run ends")
        time.sleep(0.01)


def pause_ms(steps: dict[tuple[int, int], list[Step]], killed_ns: int, dead: set[int]) -> float:
    """Return the longest pause of the surviving processes; ``dead``: pids of others."""
    longest = 0
    until_ns = killed_ns + int(WATCHED_S * 1e9)
    for (_, pid), found in steps.items():
        if pid in dead:
            continue
        times = [at for at, *_ in found]
        numbers = [step for _, step, *_ in found]
        if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            raise SystemExit(f"process {pid} has left a step out, or made one twice")
        for before, after in itertools.pairwise(times):
            if after > killed_ns and before < until_ns:
                longest = max(longest, after - before)
    return longest / 1e6


def on_this_host(folder: Path, np: int, what: str) -> float:
    """Run one round; return its figures."""
    job = Running(folder, subprocess.Popen, "-np", str(np))
    job.until_whole(np)
    lowest = {pid for (_, pid), found in job.steps().items() if found[-1][3] == 0}
    dead: set[int] = set()
    victims = [job.keeper()]
    if what == "both":
        victims.append(job.process.pid)
    if what == "keeper and rank 0":
        dead = lowest
    killed_ns = time.monotonic_ns()
    for pid in (*victims, *dead):
        os.kill(pid, signal.SIGKILL)
    if what == "standby":
        time.sleep(0.1)
        dead = lowest
        killed_ns = time.monotonic_ns()
        for pid in dead:
            os.kill(pid, signal.SIGKILL)
    time.sleep(WATCHED_S + 0.5)
    job.until_whole(np)
    found = pause_ms(job.steps(), killed_ns, dead)
    job.end()
    return found


def between_hosts(folder: Path) -> float:
    """Run one round, where a host is cut off."""
    from netbed import Bed

    with Bed(["a", "b", "c"]) as bed:
        job = Running(folder, lambda *a, **k: bed.popen("a", *a, **k), "-H", "a:1,b:1,c:1")
        job.until_whole(3)
        killed_ns = time.monotonic_ns()
        bed.set_link("a", up=False)
        time.sleep(WATCHED_S)
        alone = {pid for (slot, pid) in job.steps() if slot == 0}
        found = pause_ms(job.steps(), killed_ns, alone)
        if not any(steps[-1][2] == 2 for (_, pid), steps in job.steps().items()):
            raise SystemExit("the others do not go on: the run ends")
    return found


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Give a folder for one round."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as path:
        yield Path(path)


def main() -> None:
    """Measure, and write launcher_loss.json and .md."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--np", type=int, default=4)
    parser.add_argument("--hosts", action="store_true", help="the round of several hosts, too")
    parser.add_argument("--output", type=Path, default=report.RESULTS, metavar="FOLDER")
    options = parser.parse_args()
    facts, load = machine.facts(), [os.getloadavg()[0]]
    kinds = ["keeper", "both", "keeper and rank 0", "standby"]
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    if options.hosts:
        found["host"] = []
    for turn in range(options.rounds):
        for kind, values in found.items():
            with folder() as path:
                values.append(
                    between_hosts(path) if kind == "host" else on_this_host(path, options.np, kind)
                )
            print(f"round {turn}, {kind}: {values[-1]:.1f} ms", flush=True)
    load.append(os.getloadavg()[0])
    result: Json = {
        "command": machine.command_line(),
        "pauses_ms": found,
        "np": options.np,
        "load": load,
        "machine": facts,
    }
    rows = [
        [kind, *(number(report.quantile(values, share)) for share in (0.5, 0.9, 1.0))]
        for kind, values in found.items()
    ]
    head = ["killed", "median ms", "90 % ms", "longest ms"]
    markdown = (
        "# An elastic job loses its launcher\n\n"
        f"`{machine.command_line()}` on {report.machine_line(facts)}, load {load[0]:.1f} to "
        f"{load[1]:.1f}; {options.rounds} rounds, {options.np} ranks (host: 3). The longest pause "
        f"between two steps; what each line is, says bench/launcher_loss.py. No step was lost.\n\n"
        f"{table(head, rows)}\n"
    )
    report.write("launcher_loss", result, markdown, options.output)


if __name__ == "__main__":
    main()
