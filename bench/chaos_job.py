"""A job of bench/chaos.py on hosts that are namespaces, and how each fault is made."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import machine
from chaos_faults import Fault
from partitions import Steps

sys.path.insert(0, str(machine.ROOT / "scripts"))

from netbed import Bed, Process

from kolovod.elastic import MembershipLog
from kolovod.testing import replay

__all__ = ["ChaosHosts", "ChaosJob", "NotWholeError"]

RANK = str(machine.BENCH / "chaos_rank.py")
WHOLE_S = 90.0
"""A job that has not made steps of all ranks for so long after its last fault hangs."""
SLOW_S = 20.0
"""After so long it is noted where its processes are."""
_END_S = 90.0
"""So long may an agent, which nobody needs, go on for a minute."""
_SHM_MIB = 64
"""Docker's default."""
_TO_READ = "*-epoch*-rank*.jsonl"
"""Last operations (docs/late-ranks.md), which are left on purpose when a world fails."""
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


class ChaosHosts:
    """A bed whose hosts have their own /tmp and /dev/shm each, and what is left there."""

    def __init__(self, bed: Bed) -> None:
        self._bed = bed
        kept = [str(bed.folder), str(machine.ROOT), sys.prefix, sys.base_prefix]
        kept = [path for path in kept if path.startswith("/tmp/")]
        lines = ["set -e", "mkdir -p /run/kept"]
        for turn, path in enumerate(kept):
            lines += [f"mkdir /run/kept/{turn}", f"mount --bind '{path}' /run/kept/{turn}"]
        lines.append("mount -t tmpfs -o mode=1777 tmpfs /tmp")
        for turn, path in enumerate(kept):
            lines += [f"mkdir -p '{path}'", f"mount --bind /run/kept/{turn} '{path}'"]
        lines.append(f"mount -t tmpfs -o mode=1777,size={_SHM_MIB}m tmpfs /dev/shm")
        for host in bed.names:
            self.shell(host, "\n".join(lines))

    def shell(self, host: str, text: str) -> str:
        """What a script prints there. NotWholeError if it fails."""
        done = self._bed.run(host, ["sh", "-c", text], timeout_s=30, cwd="/")
        if done.returncode:
            raise NotWholeError(f"on host {host}: {text}: {done.stderr.strip()}")
        return done.stdout.strip()

    def left(self) -> list[str]:
        """Processes, files, and memory of /dev/shm that no name leads to."""
        found = []
        for host in self._bed.names:
            processes = self._bed.processes(host)
            found += [f"{host}: process {p.inner}: {p.command}" for p in processes]
            paths = self.shell(host, f"find /tmp /dev/shm -xdev ! -type d ! -name '{_TO_READ}'")
            found += [f"{host}: {path}" for path in paths.splitlines()]
            used = self.shell(host, "stat -f -c '%b %f' /dev/shm").split()
            if used[0] != used[1] and not paths:
                found.append(f"{host}: {int(used[0]) - int(used[1])} pages of /dev/shm")
        return found

    def clear(self) -> None:
        """End all processes of all hosts, and remove what they have left."""
        for host in self._bed.names:
            while found := self._bed.processes(host):
                for process in found:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)
                time.sleep(0.05)
            self.shell(host, "find /tmp /dev/shm -xdev -mindepth 1 ! -type d -delete")


class ChaosJob:
    """One that runs, with what it notes in ``folder``."""

    def __init__(self, bed: Bed, hosts: ChaosHosts, folder: Path, ranks: int) -> None:
        self._bed, self._hosts = bed, hosts
        self._first = bed.names[0]
        self.folder = folder
        for name in ("steps", "logs", "stacks"):
            (folder / name).mkdir(parents=True)
        (folder / "sitecustomize.py").write_text(_STACKS)
        self._environment = {**os.environ, "PYTHONPATH": str(folder)}
        self._environment.pop("TMPDIR", None)
        counts = [0] * len(bed.names)
        for rank in range(ranks):
            counts[rank % len(counts)] += 1
        places = zip(bed.names, counts, strict=True)
        listed = ",".join(f"{name}:{count}" for name, count in places if count)
        run = ["run", "--elastic-timeout", "60", "-H", listed]
        self._show(*run, "--", sys.executable, RANK, str(folder / "steps"))
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
        """Until so many ranks have made steps together. NotWholeError if they do not.

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
        """Whether all have been in one world until now."""
        return self.seen.is_whole(size, self.seen.count - 5)

    def _latest(self) -> str:
        rows = [f"slot {slot} {' '.join(words[1:5])}" for slot, words in self.seen.latest.items()]
        return "; ".join(["last step, size, rank and epoch", *sorted(rows)])

    def _see_to_viewer(self) -> None:
        code = self._viewer.poll()
        if code is not None:
            raise NotWholeError(f"the job has ended with code {code}")

    def ranks(self) -> dict[int, list[Process]]:
        """The processes in each slot: two where the launcher has lost sight of a host."""
        found: dict[int, list[Process]] = {}
        for host in self._bed.names:
            for process in self._bed.processes(host):
                slot = _variable(process.pid, "KOLOVOD_SLOT")
                if slot:
                    found.setdefault(int(slot), []).append(process)
        return found

    # --- faults ---

    def begin(self, fault: Fault) -> None:
        """Make it."""
        if fault.kind == "shared memory":
            self._hosts.shell(
                fault.hosts[0],
                "fallocate -l $(($(stat -f -c '%a * %S' /dev/shm))) /dev/shm/full || true",
            )
        if fault.kind in ("kill", "shared memory"):
            self._signal(fault.slot, signal.SIGKILL)
        elif fault.kind == "stop":
            self._signal(fault.slot, signal.SIGSTOP)
        elif fault.kind == "leave":
            self._signal(fault.slot, signal.SIGTERM)
        elif fault.kind == "link":
            self._bed.set_link(fault.hosts[0], up=False)
        elif fault.kind == "partition":
            others = [name for name in self._bed.names if name not in fault.hosts]
            self._bed.partition(fault.hosts, others)
        if fault.kind in ("keeper", "viewer and keeper"):
            self._kill_keeper()
        if fault.kind in ("viewer", "viewer and keeper"):
            self._viewer.kill()
            self._viewer.wait()

    def end(self, fault: Fault) -> None:
        """It is over."""
        if fault.kind == "shared memory":
            self._hosts.shell(fault.hosts[0], "rm /dev/shm/full")
        elif fault.kind == "stop":
            self._signal(fault.slot, signal.SIGCONT)
        elif fault.kind == "link":
            self._bed.set_link(fault.hosts[0], up=True)
        elif fault.kind == "partition":
            self._bed.heal()
        elif fault.kind in ("viewer", "viewer and keeper"):
            self._attach()

    def _signal(self, slot: int, number: signal.Signals) -> None:
        for process in self.ranks().get(slot, []):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def _kill_keeper(self) -> None:
        read = "import json, glob; (path,) = glob.glob('/tmp/kolovod-*/jobs/*/job')\n"
        read += "print(json.load(open(path))['pid'])"
        done = self._bed.run(self._first, [sys.executable, "-I", "-S", "-c", read])
        inner = int(done.stdout)
        for process in self._bed.processes(self._first):
            if process.inner == inner:
                os.kill(process.pid, signal.SIGKILL)

    def _attach(self) -> None:
        """Another viewer. Where the keeper is gone, too, that waits for the next one."""
        self._show("attach")

    # --- the end ---

    def finish(self, size: int, lock: contextlib.AbstractContextManager[object]) -> int:
        """Let it come to its end; returns how many steps were replayed, under ``lock``.

        Raises NotWholeError, StepsDiffer, ReplayDiffers.
        """
        (self.folder / "steps" / "end").touch()
        try:
            code = self._viewer.wait(WHOLE_S)
        except subprocess.TimeoutExpired:
            raise NotWholeError(f"no end after {WHOLE_S:g} s: {self._latest()}") from None
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
        """What is left of it, when nothing should be any more."""
        deadline = time.monotonic() + _END_S
        while (left := self._hosts.left()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def stacks(self) -> Iterator[str]:
        """Of all its Python processes, and what the launcher has said last."""
        for host in self._bed.names:
            for process in self._bed.processes(host):
                is_python = Path(process.command.split(" ")[0]).name.startswith("python")
                if is_python and _variable(process.pid, "PYTHONPATH") == str(self.folder):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGUSR2)
                yield f"{host} {process.inner} {process.command}"
        time.sleep(1.0)
        for path in sorted((self.folder / "stacks").iterdir()):
            text = path.read_text()
            if text:
                yield f"--- {path.name}\n{text}"
        yield "--- the launcher\n"
        yield (self.folder / "said").read_text()

    def close(self) -> None:
        """End the process that shows it. Idempotent."""
        self._viewer.kill()
        self._viewer.wait()


def _variable(pid: int, name: str) -> str:
    """Of a process's environment; "" if it has none, or is gone."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return ""
    for line in text.split(b"\0"):
        key, _, value = line.partition(b"=")
        if key.decode() == name:
            return value.decode()
    return ""
