"""A job of bench/chaos.py and bench/goodput.py on hosts that are namespaces: how it goes on."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import machine
from chaos_faults import places
from chaos_hosts import ChaosHosts, by_slot
from partitions import Steps

sys.path.insert(0, str(machine.ROOT / "scripts"))

from netbed import Bed, Process

from kolovod.elastic import MembershipLog
from kolovod.testing import replay

__all__ = ["LATE_FAILURE_S", "ChaosJob", "FalseEndError", "NotWholeError"]

RANK = str(machine.BENCH / "chaos_rank.py")
WHOLE_S = 90.0
"""A job that has not made steps of all ranks for so long after its last fault hangs."""
SLOW_S = 20.0
"""After so long it is noted where its processes are."""
LATE_FAILURE_S = 6.0
"""So long the others wait for a rank that hangs: more than the 4.4 s at most of one that is stopped
and comes back, so that only what never comes back is killed for it."""
_END_S = 90.0
"""So long may an agent, which nobody needs, go on for a minute."""
_DIES_S = 1.0
"""From the end of a job to that of its ranks' processes, at most."""
_NO_JOB = 2
"""What ``kolovod attach`` ends with where it finds no job."""
_FOLDER_S = 10.0
"""So long the folder by which it is found may take to be there again."""
_LAUNCHER = [sys.executable, "-m", "kolovod"]
# Runs in every Python of a job: the stacks of a process that is sent SIGUSR2.
_STACKS = """
import faulthandler, os, signal
folder = os.path.join(os.path.dirname(__file__), "stacks")
kept = open(os.path.join(folder, f"{os.uname().nodename}.{os.getpid()}"), "a")
faulthandler.register(signal.SIGUSR2, kept, all_threads=True)
"""


class NotWholeError(RuntimeError):
    """A job does not go on, or has not ended as it should."""


class FalseEndError(NotWholeError):
    """A job is said to have ended, or to have been killed, and that is not so."""


class ChaosJob:
    """One that runs, with what it notes in ``folder``."""

    def __init__(
        self,
        bed: Bed,
        hosts: ChaosHosts,
        folder: Path,
        ranks: int,
        *,
        late_failure_s: float = LATE_FAILURE_S,
        options: Sequence[str] = (),
    ) -> None:
        """``options``: of its ranks (chaos_rank.py)."""
        self._bed, self._hosts = bed, hosts
        self._first = bed.names[0]
        self._removed_s = -math.inf
        self.folder = folder
        for name in ("steps", "logs", "stacks"):
            (folder / name).mkdir(parents=True)
        (folder / "sitecustomize.py").write_text(_STACKS)
        self._environment = {**os.environ, "PYTHONPATH": str(folder)}
        self._environment["KOLOVOD_LATE_FAILURE_S"] = f"{late_failure_s:g}"
        for name in ("TMPDIR", "XDG_RUNTIME_DIR"):
            self._environment.pop(name, None)
        slots = places(bed.names, ranks)
        listed = ",".join(f"{n}:{slots.count(n)}" for n in bed.names if n in slots)
        run = ["run", "--elastic-timeout", "60", "-H", listed]
        self._show(*run, "--", hosts.python, RANK, str(folder / "steps"), *options)
        self.seen = Steps(folder / "steps")

    def _show(self, *arguments: str) -> None:
        with (self.folder / "said").open("a") as said:
            self._viewer = self._bed.popen(
                self._first,
                [*_LAUNCHER, *arguments],
                stdout=said,
                stderr=said,
                env=self._environment,
            )

    # --- how it goes ---

    def until_whole(self, size: int, slow: Callable[[], None] = lambda: None) -> None:
        """Wait until so many ranks have made steps together. NotWholeError if they do not.

        ``slow()`` is called once, where that takes a while.
        """
        begun_s = time.monotonic()
        is_slow = False
        self.seen.look()
        begun = self.seen.count
        while not self.seen.is_whole(size, begun + 3):
            self._see_to_viewer()
            took_s = time.monotonic() - begun_s
            if took_s > SLOW_S and not is_slow:
                is_slow = True
                slow()
            if took_s > WHOLE_S:
                raise NotWholeError(f"not whole after {WHOLE_S:g} s: {self._latest()}")
            time.sleep(0.05)

    def is_whole(self, size: int) -> bool:
        """Return whether all have been in one world until now."""
        return self.seen.is_whole(size, self.seen.count - 5)

    def _latest(self) -> str:
        rows = [f"slot {slot} {' '.join(words[1:5])}" for slot, words in self.seen.latest.items()]
        return "; ".join(["last step, size, rank and epoch", *sorted(rows)])

    def _see_to_viewer(self) -> None:
        code = self._viewer.poll()
        if code == _NO_JOB and time.monotonic() < self._removed_s + _FOLDER_S:
            self.attach()  # again, as a user would
        elif code is not None:
            self._see_whether_ended(code)
            raise NotWholeError(f"the job has ended with code {code}")

    def _see_whether_ended(self, code: int) -> None:
        """Raises FalseEndError if the job has not ended as its exit code says.

        Its ranks live; or a signal has killed it, which nothing here does to a whole job.
        """
        deadline = time.monotonic() + _DIES_S
        while (ranks := self.ranks()) and time.monotonic() < deadline:
            time.sleep(0.05)
        if ranks:
            slots = ", ".join(map(str, sorted(ranks)))
            raise FalseEndError(f"exit code {code}, but the ranks of slots {slots} live")
        if code < 0 or code > 128:
            raise FalseEndError(f"the job is said to have been killed: exit code {code}")

    def ranks(self) -> dict[int, list[Process]]:
        """Return the processes in each slot: two where the launcher has lost sight of a host."""
        return by_slot(self._bed, "KOLOVOD_SLOT")

    def agent(self, host: str) -> list[Process]:
        """Return the process that runs the ranks of a host; none, or two, while one is replaced."""
        processes = self._bed.processes(host)
        return [p for p in processes if "kolovod.launch.agent serve" in p.command]

    def keeper(self) -> list[Process]:
        """Return the process that keeps the job; none while another one is started."""
        read = "import json, glob\nfor path in glob.glob('/tmp/kolovod-*/jobs/*/job'):\n"
        read += " print(json.load(open(path))['pid'])"
        done = self._bed.run(self._first, [sys.executable, "-I", "-S", "-c", read])
        pids = done.stdout.split()
        return [p for p in self._bed.processes(self._first) if str(p.inner) in pids]

    # --- what is done to it beside signals ---

    def kill_viewer(self) -> None:
        """Kill the process that shows it."""
        self._viewer.kill()
        self._viewer.wait()

    def attach(self) -> None:
        """Start another viewer. Where the keeper is gone, too, that waits for the next one."""
        self._show("attach")

    def remove_folder(self) -> None:
        """Remove the folder by which it is found on the host of its launcher."""
        self._removed_s = time.monotonic()
        self._hosts.shell(self._first, "rm -rf /tmp/kolovod-*/jobs/*")

    # --- the end ---

    def finish(self, size: int, lock: contextlib.AbstractContextManager[object]) -> int:
        """Let it come to its end; return how many steps were replayed, under ``lock``.

        Raises NotWholeError, StepsDiffer, ReplayDiffers.
        """
        (self.folder / "steps" / "end").touch()
        try:
            code = self._viewer.wait(WHOLE_S)
        except subprocess.TimeoutExpired:
            raise NotWholeError(f"no end after {WHOLE_S:g} s: {self._latest()}") from None
        self._see_whether_ended(code)
        self.seen.look()
        if code:
            raise NotWholeError(f"the job has ended with code {code}")
        logs = [MembershipLog.load(path) for path in sorted((self.folder / "logs").iterdir())]
        if len(logs) != size:
            raise NotWholeError(f"{len(logs)} of {size} ranks have come to the end")
        for log in logs:
            if log.steps != logs[0].steps or len(log.steps) != self.seen.count:
                raise NotWholeError(
                    f"a rank has made {len(log.steps)} steps, another {self.seen.count} or others"
                )
        with lock:
            from chaos_rank import Model

            model = Model()
            replay(logs[0], model.compute, model.apply, model.tensors)
        return self.seen.count

    def until_clean(self) -> list[str]:
        """Wait until nothing of it is left; return what is left all the same."""
        deadline = time.monotonic() + _END_S
        while (left := self._hosts.left()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def said(self) -> str:
        """Return what the launcher has said so far."""
        return (self.folder / "said").read_text(errors="replace")

    def stacks(self) -> Iterator[str]:
        """Return the stacks of all its Python processes, and what the launcher has said last."""
        yield from self._hosts.stacks(self.folder)
        yield "--- the launcher\n"
        yield self.said()

    def close(self) -> None:
        """End the process that shows it. Idempotent."""
        self.kill_viewer()
