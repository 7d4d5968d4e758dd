"""What becomes of a job in which one rank goes wrong: the table of docs/failures.md, cell by cell.

Every place in a training script, every way to go wrong there, 2 to 4 ranks, over shared memory and
over TCP, each a job of ``kolovod run``: its exit code, whom it names, what the other ranks are told
and when, and that nothing is left behind. The cells of one test run side by side, since a stopped
rank and the limits of a wait need time but no core.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from frameworks import is_installed
from launched import KOLOVOD
from paths import SUPPORT
from slow import slow_but, thorough_but

from kolovod.launch import orphan_reaper

PLACES = ("import", "init", "first op", "backward", "checkpoint", "shutdown", "atexit")
FAULTS = ("exit 7", "exception", "SIGTERM", "SIGSEGV", "SIGKILL", "SIGSTOP")
FORMING, ENDING = ("import", "init"), ("shutdown", "atexit")
HOSTS = {
    "shm": {2: "a:2", 3: "a:3", 4: "a:4"},
    "tcp": {2: "a:1,b:1", 3: "a:2,b:1", 4: "a:2,b:2"},
}
LIMITS = ("--late-report-s", "1", "--late-failure-s", "10", "--start-timeout-s", "20")
"""Long enough for ranks of jobs that begin side by side on a busy machine."""
LIMIT_S = {"import": 20.0, "init": 20.0}  # for a stopped rank; else 10
LONG_LIMITS = ("--late-failure-s", "60", "--start-timeout-s", "60")  # for those that end
# No speed, but that nobody waits for one of the LONG_LIMITS. That others hear of it before the
# launcher ends them counts besides: they ignore SIGTERM, and SIGKILL comes five seconds after that.
HEARD_S, ENDED_S = 25.0, 50.0
AT_ONCE = 3
WORD = "kolovod: "  # of the launcher's

CODES = {"exit 7": 7, "exception": 1, "SIGTERM": 143, "SIGSEGV": 139, "SIGKILL": 137, "SIGSTOP": 1}
CAUSES = {
    "exit 7": r"ended with exit code 7",
    "exception": r"ended with exit code 1\. The last lines of its stderr:(?s:.*)\n"
    r"  ValueError: loss is nan\n  at step 17\n",
    "SIGTERM": r"was killed by signal 15 \(SIGTERM\)",
    "SIGSEGV": r"was killed by signal 11 \(SIGSEGV\)",
    "SIGKILL": r"was killed by signal 9 \(SIGKILL: kill -9, or",
    "SIGSTOP": r"was killed by the launcher: it was stopped \(SIGSTOP\) for 10 s",
}
_RANK = r"rank {c} on host \w+ \(pid \d+\)"
_DIED = rf"RankLostError {{c}} {_RANK} died"
_LEFT = rf"{_RANK} (has left the world|shut down with \d+ operation)"
HEARD = {
    # Or another rank, which that one's leaving has ended, was faster to say so.
    "exit 7": rf"RankLeftError {{c}} {_LEFT}|"
    rf"InterruptedByRankError \d rank \d .* aborted: kolovod.errors.RankLeftError: {_LEFT}",
    "exception": rf"InterruptedByRankError {{c}} {_RANK} aborted: ValueError: loss is nan(;|$)",
    "SIGTERM": _DIED,
    "SIGSEGV": _DIED,
    "SIGKILL": _DIED,
    # Or another rank was faster to give up, and the launcher has ended this one.
    "SIGSTOP": rf"LateRankError {{c}} {_RANK}|{_DIED}",
}
FORMING_HEARD = r"RankLostError {c} rank {c}\b"
FORMING_LATE = r"StartTimeoutError None .*rank {c}\b"


class Cell(NamedTuple):
    """One job."""

    place: str
    fault: str
    size: int
    way: str
    framework: str = "numpy"
    obeys: bool = False
    """Whether SIGTERM ends the others, as in most scripts, so that they have half a second."""

    @property
    def culprit(self) -> int:
        """Each rank has its turn, rank 0 and those that lead a host among them."""
        return (PLACES.index(self.place) + FAULTS.index(self.fault) + self.size) % self.size

    @property
    def is_heard(self) -> bool:
        """Whether the others wait for the culprit."""
        return self.place not in ENDING

    @property
    def limits(self) -> tuple[str, ...]:
        """Of the launcher: short ones where they are what ends the wait."""
        return LIMITS if self.fault == "SIGSTOP" else LONG_LIMITS

    @property
    def is_vague(self) -> bool:
        """Whether the engine does not know which rank of another host keeps it waiting.

        While links are measured it does not say who is silent; and who is stopped in the middle
        of an operation is told from who waits for that one only on its own host.
        """
        far = self.way == "tcp" and self.fault == "SIGSTOP"
        return far and (self.place == "init" or (self.place == "backward" and self.size > 2))

    @property
    def culprits_host(self) -> str:
        """Its label."""
        sizes = [part.split(":") for part in HOSTS[self.way][self.size].split(",")]
        return "".join(host * int(count) for host, count in sizes)[self.culprit]

    def told(self) -> str:
        """What the others are told, if they are."""
        if self.is_vague:
            return "StartTimeoutError None|LateRankError|RankLostError"
        if self.place == "atexit" and self.fault == "exit 7":
            wanted = _DIED  # it cannot leave: see the script
        elif self.place not in FORMING:
            wanted = HEARD[self.fault]
        else:
            wanted = FORMING_LATE if self.fault == "SIGSTOP" else FORMING_HEARD
            if self.place == "init" and self.way == "tcp":
                # Another host hears of its leader, which gave up, and not of the rank behind that.
                wanted += rf"|RankLostError \d rank \d on host {self.culprits_host} "
        return wanted.format(c=self.culprit)

    @property
    def code(self) -> int:
        """The launcher's."""
        if self.place == "atexit" and self.fault == "exception":
            return 0  # Python says that it ignores it, and ends with 0
        if self.place in ENDING and self.fault == "SIGSTOP":
            return 137  # nobody waits for it in an operation: the launcher kills it
        return CODES[self.fault]

    def first_words(self) -> str:
        """What the launcher says of the first to fail."""
        if self.fault != "SIGSTOP" or self.place in ENDING:
            name = rf"rank {self.culprit}( on host \w)? \(pid \d+\)"
            return rf"the first to fail was {name}: it {CAUSES[self.fault]}"
        if self.is_vague:
            return r"the first to fail was rank"
        # Another one gave up; what it wrote last, which is shown, has the name.
        return rf"the first to fail was rank (?!{self.culprit}\b)(?s:.*)\n  .*rank {self.culprit}\b"


def run(cell: Cell, folder: Path) -> list[str]:
    """The job, and what is wrong with its end."""
    mark = secrets.token_hex(16)
    flags = ["-np", str(cell.size), "--label-hosts", HOSTS[cell.way][cell.size], *cell.limits]
    script = [str(SUPPORT / "faulty_script.py")]
    # Of several that wait for a stopped rank the first to give up has the others ended, too.
    on_sigterm = "ends" if cell.obeys or cell.fault == "SIGSTOP" else "goes on"
    words = [cell.place, cell.fault, str(cell.culprit), cell.framework, on_sigterm]
    done = subprocess.run(
        [*KOLOVOD, "run", *flags, "--", sys.executable, *script, *words],
        capture_output=True,
        text=True,
        timeout=90,
        env={
            **os.environ,
            "TMPDIR": str(folder),
            orphan_reaper.MARK_NAME: mark,
            "OMP_NUM_THREADS": "1",
        },
    )
    wrong = list(problems(cell, done, time.monotonic()))
    if left := orphan_reaper.job_processes(mark):
        wrong.append(f"left behind: processes {left}")
    if cell.framework != "torch" and (left := list(folder.iterdir())):
        wrong.append(f"left behind: {left}")
    return [*wrong, done.stdout, done.stderr] if wrong else []


def problems(cell: Cell, done: subprocess.CompletedProcess[str], ended_at: float) -> Iterator[str]:
    if done.returncode != cell.code:
        yield f"exit code {done.returncode} instead of {cell.code}"
    if cell.code == 0:
        if "Exception ignored in atexit callback" not in done.stderr or WORD in done.stderr:
            yield "it should end well, with a word of Python's alone"
    elif not re.search(cell.first_words(), done.stderr):
        yield f"nothing like {cell.first_words()!r}"
    if "terminate called" in done.stderr:
        yield "a thread came back to an interpreter that was gone"
    began = re.findall(r"<stdout>:at (\S+)\n", done.stdout)
    if len(began) != 1:
        yield "the rank did not come to that place"
        return
    limit_s = LIMIT_S.get(cell.place, 10.0) if cell.fault == "SIGSTOP" else 0.0
    if (took_s := ended_at - float(began[0])) > limit_s + ENDED_S:
        yield f"the job went on for {took_s:.1f} s"
    heard = re.findall(r"\[(\d)\]<stdout>:heard (\S+) (.*)\n", done.stdout)
    ranks, others = {int(rank) for rank, _, _ in heard}, set(range(cell.size)) - {cell.culprit}
    # Of several that wait for a stopped rank the first to give up has the job ended.
    enough = ranks and ranks <= others if cell.fault == "SIGSTOP" else ranks == others
    if cell.is_heard and not enough:
        yield f"ranks {ranks} were told of it instead of {others}"
    for rank, at, text in heard:
        if not re.match(cell.told(), text):
            yield f"rank {rank} was told {text!r}, and nothing like {cell.told()!r}"
        if (took_s := float(at) - float(began[0])) > limit_s + HEARD_S:
            yield f"rank {rank} was told after {took_s:.1f} s"


def failures(cells: list[Cell], folder: Path) -> list[str]:
    """Of all cells, side by side: what is wrong with those that fail."""

    def told(cell: Cell) -> str:
        own = folder / "-".join(map(str, cell)).replace(" ", "_")
        own.mkdir(parents=True)
        wrong = run(cell, own)
        return "\n".join([f"{cell}, rank {cell.culprit}:", *wrong]) if wrong else ""

    with ThreadPoolExecutor(AT_ONCE) as pool:
        # First those that take long.
        ordered = sorted(cells, key=lambda cell: cell.fault != "SIGSTOP")
        return list(filter(None, pool.map(told, ordered)))


def check_all(cells: list[Cell], folder: Path) -> None:
    """Every cell that fails is told."""
    if failed := failures(cells, folder):
        pytest.fail("\n\n".join(failed), pytrace=False)


def sample(place: str) -> list[Cell]:
    """For every change: two ranks, by turns over shared memory and over TCP."""
    ways = ("shm", "tcp") if PLACES.index(place) % 2 else ("tcp", "shm")
    return [Cell(place, fault, 2, ways[n % 2]) for n, fault in enumerate(FAULTS)]


@pytest.mark.parametrize("place", slow_but((), PLACES))
def test_two_ranks(place: str, tmp_path: Path) -> None:
    check_all(sample(place), tmp_path)


@pytest.mark.parametrize("fault", ["exception", "SIGKILL"])
def test_half_a_second_is_enough_to_hear_of_it(fault: str, tmp_path: Path) -> None:
    """docs/failures.md: so long after the fault the others get SIGTERM.

    Once is enough: where other processes have the cores just then, a rank may stand still so long.
    """
    for attempt in range(5):
        cell = Cell("first op", fault, 2, "shm", obeys=True)
        if not (failed := failures([cell], tmp_path / str(attempt))):
            return
    pytest.fail("\n\n".join(failed), pytrace=False)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("size", thorough_but([3], [2, 3, 4]))
@pytest.mark.parametrize("way", HOSTS)
def test_all_others(place: str, size: int, way: str, tmp_path: Path) -> None:
    cells = [Cell(place, fault, size, way) for fault in FAULTS]
    check_all([cell for cell in cells if cell not in sample(place)], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.skipif(not is_installed("torch"), reason="PyTorch is not installed")
@pytest.mark.parametrize("place", ["backward", "checkpoint"])
def test_pytorch(place: str, tmp_path: Path) -> None:
    """Its threads, and what it does when the interpreter ends, could make a difference."""
    ways = ("shm", "tcp") * 3
    faults = FAULTS if place == "backward" else ("exception", "SIGKILL")
    check_all(
        [Cell(place, fault, 2, way, "torch") for fault, way in zip(faults, ways, strict=False)],
        tmp_path,
    )


def test_every_cell_is_run_once() -> None:
    every = {
        Cell(place, fault, size, way)
        for place in PLACES
        for fault in FAULTS
        for size in (2, 3, 4)
        for way in HOSTS
    }
    assert len(every) == 252
    sampled = {cell for place in PLACES for cell in sample(place)}
    assert len(sampled) == 42
    assert sampled < every
    assert {cell.culprit for cell in every if cell.size == 4} == {0, 1, 2, 3}
