"""How an elastic job ends, or goes on, by what is signalled: docs/elastic-reference.md's table.

Each cell is a job of three ranks on one host, whose processes are found by a variable that all of
them inherit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL, SIGSTOP, SIGTERM, SIGUSR1
from typing import NamedTuple

import psutil
import pytest
from launched import KOLOVOD
from waiting import DEADLINE_S, until

from kolovod.launch import job_folders

SCRIPT = """
import os, sys, time
import kolovod.numpy as kv
from kolovod import elastic
kv.init()
folder, slot = sys.argv[1], os.environ["KOLOVOD_SLOT"]
state = elastic.State(step=0)


@state.on_leave
def save(rank):
    with open(f"{folder}/leaves.{slot}", "w") as file:
        time.sleep(0.5)  # all that is signalled to end has been by now
        file.write(str(rank))


@elastic.run
def train(state):
    while True:
        ends = float(os.path.exists(folder + "/end"))
        if elastic.exactly(lambda: kv.allreduce(ends, "ends", op=kv.Max)) > 0:
            return
        state.step += 1
        state.commit()
        with open(f"{folder}/new{slot}", "w") as file:
            file.write(f"{state.step} {kv.size()}")
        os.rename(f"{folder}/new{slot}", f"{folder}/step.{slot}")
        print("x" * 1000, flush=True)
        time.sleep(0.005)


train(state)
"""
RANKS = 3
STOPPED_S = 15.0
"""Longer than an agent may be silent before it is said."""
ALL = (0, 1, 2)


class Ending(NamedTuple):
    """What becomes of a job."""

    code: int
    """The exit code of ``kolovod run``, as ``subprocess`` has it; of a job that goes on, later."""
    leave: tuple[int, ...] = ()
    """The ranks that run ``on_leave``."""
    goes_on: int = 0
    """With so many ranks; 0: it has ended, and nothing is left of it."""


ON = Ending(0, goes_on=RANKS)
LEAVE = Ending(128 + SIGTERM, leave=ALL)
INTERRUPTED = Ending(128 + SIGINT)
TABLE = {
    "viewer": {
        SIGTERM: LEAVE,
        SIGINT: INTERRUPTED,
        SIGHUP: Ending(-SIGHUP, goes_on=RANKS),
        SIGUSR1: LEAVE,
        SIGKILL: Ending(-SIGKILL, goes_on=RANKS),
        SIGSTOP: ON,
    },
    "daemon": {
        SIGTERM: LEAVE,
        SIGINT: INTERRUPTED,
        SIGHUP: ON,
        SIGUSR1: LEAVE,
        SIGKILL: ON,
        SIGSTOP: ON,
    },
    "agent": {
        SIGTERM: LEAVE,
        SIGINT: ON,
        SIGHUP: ON,
        SIGUSR1: ON,
        SIGKILL: Ending(128 + SIGKILL),
        SIGSTOP: ON,
    },
    "one rank": {
        SIGTERM: Ending(0, leave=(1,), goes_on=RANKS - 1),
        SIGINT: ON,
        SIGHUP: ON,
        SIGUSR1: Ending(0, leave=(1,), goes_on=RANKS - 1),
        SIGKILL: ON,
        SIGSTOP: ON,
    },
    "all ranks": {
        SIGTERM: LEAVE,
        SIGINT: INTERRUPTED,
        SIGHUP: Ending(128 + SIGHUP),
        SIGUSR1: LEAVE,
        SIGKILL: Ending(128 + SIGKILL),
        SIGSTOP: ON,
    },
    "everything": {
        SIGTERM: LEAVE,
        SIGINT: INTERRUPTED,
        SIGHUP: Ending(-SIGHUP),
        SIGUSR1: LEAVE,
        SIGKILL: Ending(-SIGKILL),
        SIGSTOP: ON,
    },
}
QUICK = [("everything", SIGTERM), ("all ranks", SIGTERM), ("agent", SIGTERM)]


@dataclass
class Elastic:
    """A job that makes steps."""

    folder: Path
    viewer: subprocess.Popen[str]
    pids: dict[str, list[int]] = field(default_factory=dict)

    def step(self, slot: int) -> tuple[int, int]:
        """Its last one, and of how many ranks."""
        try:
            step, size = (self.folder / f"step.{slot}").read_text().split()
        except (OSError, ValueError):
            return 0, 0
        return int(step), int(size)

    def look(self) -> None:
        """Find its processes."""
        mine = [process for process in psutil.process_iter() if belongs(process, self.folder)]
        (kept,) = job_folders.found()
        ranks = {int(slot): p.pid for p in mine if (slot := variable(p, "KOLOVOD_SLOT"))}
        serving = [p.pid for p in mine if p.cmdline()[1:4] == AGENT]
        self.pids = {
            "viewer": [self.viewer.pid],
            "daemon": [kept.pid],
            "agent": serving,
            "one rank": [ranks[1]],
            "all ranks": [ranks[slot] for slot in ALL],
            "everything": [process.pid for process in mine],
        }

    def goes_on(self, ranks: int) -> None:
        """Wait until so many have made steps together."""
        before = max(self.step(slot)[0] for slot in ALL)

        def have_gone_on() -> bool:
            steps = [self.step(slot) for slot in ALL]
            return sum(step > before + 20 and size == ranks for step, size in steps) == ranks

        until(have_gone_on)


AGENT = ["-m", "kolovod.launch.agent", "serve"]


def variable(process: psutil.Process, name: str) -> str:
    """Of its environment; "" if it has none or is gone."""
    with contextlib.suppress(psutil.Error):
        return str(process.environ().get(name, ""))
    return ""


def belongs(process: psutil.Process, folder: Path) -> bool:
    """Whether a process, which has not ended, is of the job in ``folder``."""
    with contextlib.suppress(psutil.Error):
        lives = process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid()
        return lives and variable(process, "XDG_RUNTIME_DIR") == str(folder)
    return False


@pytest.fixture(name="job")
def made_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Elastic]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with open(tmp_path / "said", "w") as said:
        viewer = subprocess.Popen(
            ["env", "--default-signal=HUP", *KOLOVOD, "run", "--elastic", "-np", str(RANKS), "--",
             sys.executable, str(script), str(tmp_path)],
            stdin=subprocess.DEVNULL, stdout=said, stderr=said, text=True,
        )  # fmt: skip
    job = Elastic(tmp_path, viewer)
    try:
        until(lambda: all(job.step(slot)[1] == RANKS for slot in ALL))
        job.look()
        yield job
    finally:
        print((tmp_path / "said").read_text())
        for process in psutil.process_iter():
            if belongs(process, tmp_path):
                with contextlib.suppress(psutil.Error):
                    process.kill()
        viewer.wait(DEADLINE_S)


def send(signum: int, pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


def cells() -> list[object]:
    every = [(target, signum) for target, row in TABLE.items() for signum in row]
    return [
        pytest.param(*cell, id=f"{cell[0]}, {cell[1].name}",
                     marks=[] if cell in QUICK else [pytest.mark.slow])
        for cell in every
    ]  # fmt: skip


def test_ranks_that_are_told_again_and_again_leave_all_the_same(job: Elastic) -> None:
    """As those are whose launcher, or agent, is slow to pass on what they have heard themselves."""
    while not all((job.folder / f"leaves.{slot}").exists() for slot in ALL):
        send(SIGTERM, job.pids["all ranks"])
        if job.viewer.poll() is not None:
            break
    assert job.viewer.wait(DEADLINE_S) == 128 + SIGTERM
    leaves = sorted(path.read_text() for path in job.folder.glob("leaves.*"))
    assert leaves == [str(rank) for rank in ALL]


@pytest.mark.parametrize(("target", "signum"), cells())
def test_each_ending(job: Elastic, target: str, signum: signal.Signals) -> None:
    ending = TABLE[target][signum]
    send(signum, job.pids[target])
    if signum == SIGSTOP:
        time.sleep(STOPPED_S)
        if target == "daemon":  # whom ranks that print do not wait for
            job.goes_on(RANKS)
        send(signal.SIGCONT, job.pids[target])
    if ending.goes_on:
        job.goes_on(ending.goes_on)
        (job.folder / "end").touch()
    assert job.viewer.wait(DEADLINE_S) == ending.code
    until(lambda: not [p for p in psutil.process_iter() if belongs(p, job.folder)])
    leaves = sorted(path.read_text() for path in job.folder.glob("leaves.*"))
    assert leaves == [str(rank) for rank in ending.leave]
    kept = job_folders.found()
    if ending.code >= 0:  # else somebody may want to see the rest of it
        assert kept == []


def after_the_daemon(job: Elastic) -> None:
    job.look()
    send(SIGKILL, job.pids["daemon"])


def after_the_folders(job: Elastic) -> None:
    for name in ("jobs", "agents"):
        for path in (job.folder / "kolovod" / name).glob("*/*"):
            path.unlink()
        for path in (job.folder / "kolovod" / name).glob("*"):
            path.rmdir()


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [
        [after_the_folders],
        [after_the_daemon, after_the_folders],
        [after_the_folders, after_the_daemon],
    ],
    ids=["folders", "daemon, folders", "folders, daemon"],
)
def test_a_removed_folder_ends_no_job(
    job: Elastic, faults: list[Callable[[Elastic], None]]
) -> None:
    """It is made anew, so that ``kolovod attach`` finds the job, too."""
    for fault in faults:
        if fault is after_the_daemon and not job_folders.found():
            send(SIGKILL, job.pids["daemon"])
        else:
            fault(job)
        job.goes_on(RANKS)
    until(lambda: [kept.is_found() and kept.is_kept() for kept in job_folders.found()] == [True])
    with subprocess.Popen(
        [*KOLOVOD, "attach"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as again:
        assert job.viewer.wait(DEADLINE_S) == 128 + SIGHUP  # the job is shown elsewhere
        (job.folder / "end").touch()
        _, errors = again.communicate(timeout=DEADLINE_S)
    assert again.returncode == 0, errors
    assert job_folders.found() == []
