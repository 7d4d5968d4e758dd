"""How much of its work a job gets done while it is beaten: ``bench/goodput.py``.

Eight ranks on four hosts, which are network namespaces of this machine (scripts/netbed), so this
needs root; the launcher is on the first. They train synchronously: a step computes for 50 ms, which
are slept, so that eight ranks are no load for two cores, and exchanges a gradient (chaos_rank.py).
Every ten seconds a fault is drawn from a seed, and made as bench/chaos.py makes it:

- kill: ``kill -9`` for a rank;
- stop: SIGSTOP for a rank, and SIGCONT after 1 to 3 s;
- loop: a rank is in an endless loop of Python for good;
- stopped: SIGSTOP for a rank, for good;
- link: a host's cable is pulled, and put in again after 1 to 3 s;
- agent: ``kill -9`` for the agent of a host, with which its two ranks end;
- keeper: ``kill -9`` for the launcher's process in the background.

The next one waits until the job was whole for two seconds. The others wait for a rank that hangs
half a second (KOLOVOD_LATE_FAILURE_S=0.5, ten times a step's time); it has another half to notice.

- goodput: samples that were committed in the time of the faults, a second, over those of the same
  job without faults (half of that time is before, half after it). Each rank brings one batch to a
  step in which it takes part, so a step of seven of eight ranks counts seven eighths. A step that
  was made again counts once.
- back: from the moment of a fault until all eight ranks make steps together, and go on to do so
  without a pause of half a second; and the same from its end, where it lasts.

Kolovod's steps are all made again in one process at the end (kolovod.testing.replay): the weights
must be the same after each step, bit for bit, else there are no figures. What a long recovery has
waited for is printed, with what the launcher has said. ``--peers torchrun torchft`` do the same as
far as they can, one after the other (goodput_peers.py); their steps are not replayed. They need
PyTorch, and torchft, in the environment whose Python ``--torch`` names (bench/elastic.py says how
to make it).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import goodput_timeline as timeline
import machine
import report
from chaos_faults import Fault
from chaos_hosts import ChaosHosts
from chaos_job import ChaosJob, NotWholeError
from chaos_means import Means
from goodput_peers import PEERS, PeerJob
from report import Json, number, table

sys.path.insert(0, str(machine.ROOT / "scripts"))

from netbed import Bed

KINDS = ("kill", "stop", "loop", "stopped", "link", "agent", "keeper")
SHORTEST_S, LONGEST_S = 1.0, 3.0
"""Of what lasts."""
LATE_FAILURE_S = 0.5
COMPUTE_S = 0.05
SETTLED_S = 2.0
LONG_S = 5.0
"""Longer recoveries are described."""
GOODPUT, BACK_P90_S, BACK_LONGEST_S = 0.97, 2.0, 5.0
"""What is wanted."""
Job = ChaosJob | PeerJob


@dataclass
class Turn:
    """A fault, and how the job took it."""

    fault: Fault
    begin_ns: int
    until_ns: int = 0
    """When the next one came."""
    said_from: int = 0
    """Where what the launcher has said since then begins."""


class Drawing:
    """Draws faults; the same seed draws the same."""

    def __init__(self, seed: int, hosts: Sequence[str], ranks: int, kinds: Sequence[str]) -> None:
        self._random = random.Random(seed)
        self._hosts, self._ranks, self._kinds = hosts, ranks, kinds

    def draw(self) -> Fault:
        """Draw the next fault."""
        draw = self._random
        kind = draw.choice(self._kinds)
        lasts_s = draw.uniform(SHORTEST_S, LONGEST_S) if kind in ("stop", "link") else 0.0
        if kind == "keeper":
            return Fault(kind)
        if kind in ("link", "agent"):
            return Fault(kind, lasts_s=lasts_s, hosts=(draw.choice(self._hosts),))
        return Fault(kind, lasts_s=lasts_s, slot=draw.randrange(self._ranks))


class Run:
    """A job that is beaten for some time, beside some without faults."""

    def __init__(self, bed: Bed, hosts: ChaosHosts, job: Job, options: argparse.Namespace) -> None:
        self._job, self._options = job, options
        self._means = Means(bed, hosts, job)
        self._drawing = Drawing(options.seed, bed.names, options.ranks, options.kinds)
        self.turns: list[Turn] = []
        self.calm_ns: list[tuple[int, int]] = []
        self.faulty_ns = 0, 0

    def make(self) -> None:
        """Make the whole run. NotWholeError if the job does not go on."""
        options = self._options
        self._job.until_whole(options.ranks)
        self._be_calm()
        begin_ns, begin_s = time.monotonic_ns(), time.monotonic()
        next_s = begin_s
        while time.monotonic() < begin_s + options.seconds:
            self._turn()
            next_s = max(next_s + options.every_s, time.monotonic())
            self._wait(min(next_s, begin_s + options.seconds))
        self.faulty_ns = begin_ns, time.monotonic_ns()
        self.turns[-1].until_ns = self.faulty_ns[1]
        self._be_calm()

    def _be_calm(self) -> None:
        time.sleep(SETTLED_S)
        begin_ns = time.monotonic_ns()
        time.sleep(self._options.calm_s / 2)
        self.calm_ns.append((begin_ns, time.monotonic_ns()))

    def _turn(self) -> None:
        fault = self._drawing.draw()
        said_from = len(self._job.said())
        turn = Turn(fault, time.monotonic_ns(), said_from=said_from)
        if self.turns:
            self.turns[-1].until_ns = turn.begin_ns
        self.turns.append(turn)
        print(f"{len(self.turns)}: {fault}", flush=True)
        self._means.begin(fault)
        self._wait(time.monotonic() + fault.lasts_s)
        self._means.end(fault)
        self._wait(time.monotonic() + 0.5)  # until what is killed has ended
        self._job.until_whole(self._options.ranks)
        self._wait(time.monotonic() + SETTLED_S)

    @staticmethod
    def _wait(until_s: float) -> None:
        time.sleep(max(0.0, until_s - time.monotonic()))


def judged(run: Run, steps: list[timeline.Step], said: str, ranks: int) -> Json:
    """Return the figures of a run."""
    calm = [timeline.samples_per_s(steps, *span) for span in run.calm_ns]
    calm_rate = sum(calm) / len(calm)
    turns: list[Json] = []
    for turn in run.turns:
        fault = turn.fault
        back_s = timeline.back_s(steps, turn.begin_ns, turn.until_ns, ranks)
        rate = timeline.samples_per_s(steps, turn.begin_ns, turn.until_ns)
        turns.append(
            {
                "fault": str(fault),
                "kind": fault.kind,
                "lasts_s": fault.lasts_s,
                "back_s": back_s,
                "seconds": (turn.until_ns - turn.begin_ns) / 1e9,
                "goodput": rate / calm_rate,
            }
        )
        if back_s is None or back_s - fault.lasts_s > LONG_S:
            print(f"{fault}: back after {back_s} s. What was said since then:")
            print(said[turn.said_from :][:3000], flush=True)
    return {
        "goodput": timeline.samples_per_s(steps, *run.faulty_ns) / calm_rate,
        "seconds": (run.faulty_ns[1] - run.faulty_ns[0]) / 1e9,
        "steps": len(steps),
        "calm_samples_per_s": calm,
        "turns": turns,
    }


def rows(turns: list[Json]) -> Iterator[list[str]]:
    """Yield rows for all faults together, then for each kind."""
    for kind in ("all", *KINDS):
        mine = [turn for turn in turns if kind in ("all", turn["kind"])]
        if not mine:
            continue
        backs = [math.inf if t["back_s"] is None else t["back_s"] for t in mine]
        after = [max(0.0, s - t["lasts_s"]) for s, t in zip(backs, mine, strict=True)]
        share = sum(t["goodput"] * t["seconds"] for t in mine) / sum(t["seconds"] for t in mine)
        figures = [quantiles(values) for values in (backs, after)]
        yield [kind, str(len(mine)), f"{share:.1%}", *figures[0], *figures[1]]


def quantiles(values: list[float]) -> list[str]:
    """Return median, 90 % and longest."""
    found = [report.quantile(values, share) for share in (0.5, 0.9, 1.0)]
    return ["never" if math.isinf(value) else number(value) for value in found]


def goals(turns: list[Json], goodput: float) -> list[list[str]]:
    """Return the goals, also missed ones, as missed. Recovery counts from a fault's end."""
    after = [
        math.inf if t["back_s"] is None else max(0.0, t["back_s"] - t["lasts_s"]) for t in turns
    ]
    p90, longest = report.quantile(after, 0.9), max(after)
    said = quantiles(after)
    return [
        ["goodput", f"{goodput:.1%}", f"{GOODPUT:.0%}", _reached(goodput >= GOODPUT)],
        [
            "all ranks back, 90 %",
            f"{said[1]} s",
            f"{BACK_P90_S:g} s",
            _reached(p90 <= BACK_P90_S),
        ],
        [
            "longest",
            f"{said[2]} s",
            f"{BACK_LONGEST_S:g} s",
            _reached(longest <= BACK_LONGEST_S),
        ],
    ]


def _reached(yes: bool) -> str:
    return "yes" if yes else "no"


def markdown(found: Json, options: argparse.Namespace, facts: Json, load: list[float]) -> str:
    """Return the result file."""
    head = ["fault", "times", "goodput", "back, median s", "90 %", "longest"]
    head += ["from its end, median s", "90 %", "longest"]
    ours = found["kolovod"]
    parts = [
        "# Goodput\n",
        f"`{command_line()}` (seed {options.seed}) on {report.machine_line(facts)}, load "
        f"{load[0]:.1f} to {load[1]:.1f}. {options.ranks} ranks on {options.hosts} hosts, steps of "
        f"{COMPUTE_S * 1e3:g} ms, a fault every {options.every_s:g} s. "
        "What goodput is, and how it was measured: the head of bench/goodput.py.\n",
    ]
    for name, one in found.items():
        if "failed" in one:
            parts.append(f"**{name}: did not go on** ({one['failed']}).\n")
            continue
        replayed = "all replayed: the same weights, bit for bit" if one is ours else "not replayed"
        checked = f"{one['seconds']:.0f} s, {one['steps']:,} steps, {replayed}"
        calm = ", ".join(f"{rate:.1f}" for rate in one["calm_samples_per_s"])
        parts += [
            f"**{name}: {one['goodput']:.1%}** ({checked}; without faults {calm} batches/s).\n",
            table(head, rows(one["turns"])),
        ]
    wanted = goals(ours["turns"], ours["goodput"])
    parts.append(table(["goal (from a fault's end)", "measured", "wanted", "reached"], wanted))
    return "\n".join(parts)


def command_line() -> str:
    """Return the command line as a reader would type it, with an environment of his own."""
    words = machine.command_line().split()
    at = words.index("--torch") + 1 if "--torch" in words else 0
    return " ".join([*words[:at], "torch/bin/python", *words[at + 1 :]] if at else words)


def beat_kolovod(bed: Bed, hosts: ChaosHosts, options: argparse.Namespace) -> Json:
    """Return our own figures. Raises what ChaosJob does where a step is not exact."""
    arguments = ["--compute-s", str(COMPUTE_S), "--memory-files"]
    job = ChaosJob(
        bed, hosts, bed.folder / "kolovod", options.ranks,
        late_failure_s=LATE_FAILURE_S, options=arguments,
    )  # fmt: skip
    try:
        run = Run(bed, hosts, job, options)
        run.make()
        job.finish(options.ranks, contextlib.nullcontext())
        return judged(run, timeline.read(job.folder / "steps"), job.said(), options.ranks)
    except BaseException:
        kept = machine.ROOT / "build" / "goodput.txt"
        kept.parent.mkdir(exist_ok=True)
        kept.write_text("\n".join(job.stacks()))
        print(f"see {kept}", flush=True)
        raise
    finally:
        job.close()
        hosts.clear()


def beat_peer(name: str, bed: Bed, hosts: ChaosHosts, options: argparse.Namespace) -> Json:
    """Return a peer's figures; "failed": why there are none."""
    mine = argparse.Namespace(**vars(options))
    mine.kinds = [kind for kind in options.kinds if kind != "keeper"]
    mine.seconds = options.peer_seconds or options.seconds
    job = PEERS[name](bed, bed.folder / name, options.ranks, options.torch, COMPUTE_S)
    try:
        run = Run(bed, hosts, job, mine)
        run.make()
        return judged(run, timeline.read(job.folder / "steps"), job.said(), options.ranks)
    except NotWholeError as error:  # whose fault it is must be looked at; the others are measured
        print(f"{name}: {error}", flush=True)
        return {"failed": f"after {len(run.turns)} faults {str(error).splitlines()[0]}"}
    finally:
        job.close()
        hosts.clear()


def main(arguments: list[str] | None = None) -> int:
    """Measure, and write goodput.json and .md."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1800.0, help="with faults")
    parser.add_argument("--calm-s", type=float, default=120.0, help="without faults")
    parser.add_argument("--every-s", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=[], help="measure them, too")
    parser.add_argument("--peer-seconds", type=float, help="with faults, for peers; the same")
    parser.add_argument("--torch", metavar="PYTHON", default=sys.executable, help="for peers")
    parser.add_argument("--output", type=Path, default=report.RESULTS, metavar="FOLDER")
    options = parser.parse_args(arguments)
    facts, load = machine.facts(), [os.getloadavg()[0]]
    print(f"seed {options.seed}", flush=True)
    names = [chr(ord("a") + index) for index in range(options.hosts)]
    found: Json = {}
    for name in ("kolovod", *options.peers):
        with Bed(names) as bed:
            hosts = ChaosHosts(bed, str(Path(options.torch).absolute().parent.parent))
            if name == "kolovod":
                found[name] = beat_kolovod(bed, hosts, options)
            else:
                found[name] = beat_peer(name, bed, hosts, options)
    load.append(os.getloadavg()[0])
    text = markdown(found, options, facts, load)
    result = {
        "command": command_line(),
        **found,
        "seed": options.seed,
        "load": load,
        "machine": facts,
    }
    report.write("goodput", result, text, options.output)
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
