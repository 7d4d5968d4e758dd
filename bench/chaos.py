"""Elastic jobs that are beaten: ``bench/chaos.py``, or ``make soak``; nothing else is one.

The hosts are network namespaces of this machine (scripts/netbed), so this needs root: ranks on each
of them, the launcher on the first. Each job gets some faults, drawn at random (chaos_faults.py has
the rules by which); a seed and the number of a job repeat its faults (``--job``), but not the
moments at which they meet it. What is drawn:

- kill: ``kill -9`` for a rank;
- stop: SIGSTOP for a rank, and SIGCONT after up to 4.4 s;
- loop: a rank is in an endless loop from some line of Python on; its launcher kills it after six
  seconds and two (KOLOVOD_LATE_FAILURE_S is 6 here, more than the longest stop);
- stopped: SIGSTOP for a rank, and no SIGCONT: the same;
- leave: SIGTERM for a rank, whose place stays empty;
- link: a host's cable is pulled, and put in again after up to 4.4 s;
- partition: nothing passes between two sides, for up to 4.4 s;
- viewer, keeper, viewer and keeper: ``kill -9`` for the launcher's processes; then another viewer
  is attached;
- shared memory: /dev/shm of a host is full for up to 4.4 s, and a rank is killed, so that a world
  must form meanwhile;
- tmp: the same of /tmp on the host of that rank;
- slow agent: a rank is killed, and whoever executes another one on its host, its agent, waits for
  up to 4.4 s (fanotify), as if a file server did not answer;
- agent: ``kill -9`` for the agent of a host, with which its ranks end;
- agent stopped: SIGSTOP for one, and SIGCONT after more than the ten seconds until it is woken;
- keeper stopped: the same for up to 14 s;
- suspended: SIGSTOP for all processes on all hosts, and SIGCONT after 15 s, in another order;
- job folder: that of the job is removed on the launcher's host;
- after three of ten another one comes at once, or while the job forms anew.

Then the job has until it is whole: all ranks have made steps together, with new processes where
some had ended. A job that is not whole after 90 seconds hangs. All ranks' notes are compared as
they come, and at a job's end its steps are made again in one process (kolovod.testing.replay): the
weights must be the same after each step, bit for bit. When it has ended no process of it may be
left on any host, no file in /tmp or /dev/shm, no memory there without a name. An exit code while
ranks of the job live, or one that says that the job was killed, is a false ending. A job that fails
is described in build/chaos, with stacks of all its processes, and another one begins; the exit code
is 1 then.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import machine
import report
from chaos_faults import FEWEST, KINDS, Drawing, Fault
from chaos_hosts import ChaosHosts
from chaos_job import ChaosJob, FalseEndError, NotWholeError
from chaos_means import Means
from partitions import StepsDiffer
from report import Json, number, table

sys.path.insert(0, str(machine.ROOT / "scripts"))

from netbed import Bed

from kolovod.testing import ReplayDiffers

KEPT = machine.ROOT / "build" / "chaos"
SETTLED_S = 3.0
"""From the last fault of a job to its end: longer than a silent host takes to be lost."""


@dataclass
class Turn:
    """A fault, or two, and how the job took it."""

    job: int
    faults: list[Fault]
    whole_s: float | None = None
    """From the end of the last one until the job was whole; None: it was not."""
    met_forming: bool = False
    """Whether the second came while the job was not whole."""

    @property
    def kind(self) -> str:
        """The row that it counts in."""
        return self.faults[0].kind if len(self.faults) == 1 else "two"

    def __str__(self) -> str:
        what = ", then ".join(map(str, self.faults))
        what += " (while re-forming)" if self.met_forming else ""
        became = "not whole" if self.whole_s is None else f"whole after {self.whole_s:.2f} s"
        return f"job {self.job}: {what}: {became}"


@dataclass
class Found:
    """Of all jobs; what is added is added under the lock."""

    turns: list[Turn] = field(default_factory=list)
    jobs: int = 0
    steps: int = 0
    worlds: int = 0
    hangs: list[str] = field(default_factory=list)
    inexact: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    false_ends: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def faults(self) -> int:
        """The number of faults so far."""
        return sum(len(turn.faults) for turn in self.turns)

    @property
    def wrong(self) -> list[str]:
        """All that must not be."""
        return [*self.hangs, *self.inexact, *self.leaks, *self.false_ends]

    @property
    def has_failed(self) -> bool:
        """Whether there is anything that must not be."""
        return bool(self.wrong)


class Chaos:
    """Jobs, several at a time, each on hosts of its own."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._names = [chr(ord("a") + index) for index in range(options.hosts)]
        self._until_s = time.monotonic() + options.seconds
        self._numbers = iter(range(options.job or 1, 1 << 30))
        self._replaying = threading.Lock()
        self.found = Found()

    def run(self) -> None:
        """Run all jobs; Ctrl-C lets those that run come to their ends."""
        count = 1 if self._options.job else self._options.at_a_time
        with ThreadPoolExecutor(count) as threads, contextlib.suppress(KeyboardInterrupt):
            try:
                for done in [threads.submit(self._work) for _ in range(count)]:
                    done.result()
            finally:
                self._until_s = 0.0

    def _work(self) -> None:
        """Run jobs on one bed, one after the other; it ends with the thread that has made it."""
        with Bed(self._names) as bed:
            hosts = ChaosHosts(bed)
            while not self._is_over():
                with self.found.lock:
                    job = next(self._numbers)
                self._one_job(bed, hosts, job)
                if self._options.job:
                    break

    def _is_over(self) -> bool:
        with self.found.lock:
            enough = self.found.faults >= self._options.faults
        return bool(enough) or time.monotonic() > self._until_s

    def _one_job(self, bed: Bed, hosts: ChaosHosts, number: int) -> None:
        options, found = self._options, self.found
        kinds = {kind: weight for kind, weight in KINDS.items() if kind in options.kinds}
        drawing = Drawing(options.seed, number, tuple(self._names), options.ranks, kinds)
        job = ChaosJob(bed, hosts, bed.folder / f"job{number}", options.ranks)
        means = Means(bed, hosts, job)
        turns: list[Turn] = []
        steps = 0
        wrong: list[str] | None = None
        try:
            job.until_whole(options.ranks)
            while sum(len(turn.faults) for turn in turns) < options.faults_per_job:
                turns.append(self._turn(job, means, drawing, number))
                with found.lock:
                    found.turns.append(turns[-1])
                if self._is_over():
                    break
            time.sleep(SETTLED_S)  # a short cut may be noticed when all have made steps again
            job.until_whole(len(drawing.slots))
            steps = job.finish(len(drawing.slots), self._replaying)
            left = job.until_clean()
            wrong = found.leaks if left else None
            why = f"left: {'; '.join(left)}"
        except FalseEndError as error:
            wrong, why = found.false_ends, str(error)
        except NotWholeError as error:
            wrong, why = found.hangs, str(error)
        except (StepsDiffer, ReplayDiffers) as error:
            wrong, why = found.inexact, str(error)
        except Exception:
            wrong, why = found.hangs, traceback.format_exc()
        if wrong is not None:
            self._keep(job, number, turns, why)
        job.close()
        hosts.clear()
        bed.heal()
        for name in bed.names:
            bed.set_link(name, up=True)
        with found.lock:
            found.jobs += 1
            found.steps += steps
            found.worlds += len(job.seen.epochs)
            if wrong is not None:
                wrong.append(f"job {number}: {why}")
        said = f"{steps} steps replayed" if wrong is None else why
        print(f"job {number}: {said}; {found.faults} faults so far", flush=True)

    def _turn(self, job: ChaosJob, means: Means, drawing: Drawing, number: int) -> Turn:
        size = len(drawing.slots)
        turn = Turn(number, drawing.draw())
        time.sleep(random.uniform(0.0, 0.3))
        try:
            self._make(job, means, turn, size)
            over_s = time.monotonic()
            job.until_whole(
                len(drawing.slots), lambda: self._keep(job, f"{number}-slow", [turn], "slow")
            )
            turn.whole_s = time.monotonic() - over_s
        except BaseException:
            with self.found.lock:
                self.found.turns.append(turn)
            raise
        finally:
            print(turn, flush=True)
        return turn

    def _make(self, job: ChaosJob, means: Means, turn: Turn, size: int) -> None:
        """Make each fault at its time, and end it; the job is looked at meanwhile."""
        begun_s = time.monotonic()
        events = [(fault.at_s, True, fault) for fault in turn.faults]
        events += [(fault.at_s + fault.lasts_s, False, fault) for fault in turn.faults]
        for at_s, begins, fault in sorted(events, key=lambda event: (event[0], not event[1])):
            while time.monotonic() < begun_s + at_s:
                job.seen.look()
                time.sleep(0.02)
            if begins and fault is not turn.faults[0]:
                turn.met_forming = not job.is_whole(size)
            (means.begin if begins else means.end)(fault)

    def _keep(self, job: ChaosJob, number: int | str, turns: list[Turn], why: str) -> None:
        KEPT.mkdir(parents=True, exist_ok=True)
        path = KEPT / f"{self._options.seed}-{number}.txt"
        lines = [f"{machine.command_line()}; seed {self._options.seed}, job {number}", why]
        lines += map(str, turns)
        with contextlib.suppress(OSError):
            lines += job.stacks()
        path.write_text("\n".join(lines) + "\n")
        print(f"job {number}: {why.splitlines()[0]}: see {path}", flush=True)


def by_kind(turns: list[Turn]) -> Iterator[Json]:
    """Sum up each kind by itself, and those that came two at a time."""
    for kind in [*KINDS, "two"]:
        mine = [turn for turn in turns if turn.kind == kind]
        whole = [turn.whole_s for turn in mine if turn.whole_s is not None]
        yield {
            "kind": kind,
            "turns": len(mine),
            "met_forming": sum(turn.met_forming for turn in mine),
            "whole_s": report.summary(whole) if whole else {"samples": 0},
            "longest": str(max(mine, key=lambda turn: turn.whole_s or 0.0)) if whole else None,
        }


def row(found: Json) -> list[str]:
    """Return the row of a kind."""
    kind, count, whole = found["kind"], str(found["turns"]), found["whole_s"]
    if kind == "two":
        kind = f"two at a time, the second while re-forming in {found['met_forming']}"
        count += " x 2"
    figures = [number(whole.get(key)) for key in ("median", "p90", "max")]
    return [kind, count, str(whole["samples"]), *figures]


def markdown(result: Json) -> str:
    """Return the page."""
    head = ["fault", "times", "whole again", "median s", "90 % s", "longest s"]
    wrong = {key: result[key] for key in ("hangs", "inexact", "leaks", "false_ends")}
    listed = "".join(f"\n- {text.splitlines()[0]}" for texts in wrong.values() for text in texts)
    hangs, inexact, leaks, false_ends = map(len, wrong.values())
    first, last = result["load"]
    return (
        "# Chaos soak\n\n"
        f"`{result['command']}` (seed {result['seed']}) on {report.machine_line(result['machine'])}"
        f", load {first:.1f} to {last:.1f}, in {result['took_s'] / 60:.0f} minutes. "
        f"{result['hosts']} hosts, {result['ranks']} ranks; {result['at_a_time']} jobs at a time. "
        f"{result['faults']} faults in {result['jobs']} jobs; {result['steps']:,} steps in "
        f"{result['worlds']:,} worlds were replayed.\n\n"
        f"**{hangs} hangs, {inexact} jobs with an inexact step, {leaks} jobs that left a process "
        f"or a file, {false_ends} false endings.**{listed}\n\n"
        f"{table(head, map(row, result['kinds']))}\n"
        "Times are from the end of a fault (of two, of the last) until all ranks make steps "
        "together again, with new processes where some had ended. What the faults are says "
        "bench/chaos.py.\n"
    )


def main(arguments: list[str] | None = None) -> int:
    """Beat jobs, and write chaos.json and .md."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=2500)
    parser.add_argument("--seconds", type=float, default=7200.0, help="begin nothing after that")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=5)
    parser.add_argument("--at-a-time", type=int, default=3, metavar="JOBS")
    parser.add_argument("--faults-per-job", type=int, default=12)
    parser.add_argument("--kinds", nargs="*", choices=sorted(KINDS), default=list(KINDS))
    parser.add_argument("--job", type=int, help="only that one")
    parser.add_argument("--output", type=Path, default=report.RESULTS, metavar="FOLDER")
    options = parser.parse_args(arguments)
    if options.ranks < FEWEST or options.hosts < 2:
        parser.error(f"--ranks {options.ranks} --hosts {options.hosts}: at least {FEWEST}, and 2")
    facts, load, begun_s = machine.facts(), [os.getloadavg()[0]], time.monotonic()
    print(f"seed {options.seed}", flush=True)
    chaos = Chaos(options)
    chaos.run()
    load.append(os.getloadavg()[0])
    found = chaos.found
    result: Json = {
        "command": machine.command_line(),
        "seed": options.seed,
        "hosts": options.hosts,
        "ranks": options.ranks,
        "at_a_time": options.at_a_time,
        "kinds": list(by_kind(found.turns)),
        "not_whole": [str(turn) for turn in found.turns if turn.whole_s is None],
        "faults": found.faults,
        "jobs": found.jobs,
        "steps": found.steps,
        "worlds": found.worlds,
        "hangs": found.hangs,
        "inexact": found.inexact,
        "leaks": found.leaks,
        "false_ends": found.false_ends,
        "load": load,
        "took_s": time.monotonic() - begun_s,
        "machine": facts,
    }
    text = markdown(result)
    report.write("chaos", result, text, options.output)
    print(text)
    return int(found.has_failed)


if __name__ == "__main__":
    raise SystemExit(main())
