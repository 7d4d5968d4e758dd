"""Hosts of bench/chaos.py and bench/goodput.py: a bed whose hosts can run out of things."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import machine
from slow_exec import SlowExec

sys.path.insert(0, str(machine.ROOT / "scripts"))

from netbed import Bed, Process

__all__ = ["ChaosHosts", "HostError", "by_slot", "variable"]

SHARED_MEMORY, TEMPORARY = "/dev/shm", "/tmp"
"""What can be filled."""
_SIZE_MIB = 64
"""Of each; Docker's default for /dev/shm."""
_TO_READ = "*-epoch*-rank*.jsonl"
"""Last operations (docs/late-ranks.md), which are left on purpose when a world fails."""


class HostError(RuntimeError):
    """A command on a host has failed."""


class ChaosHosts:
    """A bed whose hosts have their own /tmp, /dev/shm and Python each, and what is left there."""

    def __init__(self, bed: Bed, *kept: str) -> None:
        """``kept``: folders that hosts see though they are in the machine's /tmp."""
        self._bed = bed
        self._slow: dict[str, SlowExec] = {}
        self.python = str(bed.folder / "python")
        """Runs Python. Each host has a file of its own there, whose execution can be slow."""
        all_kept = {str(bed.folder), str(machine.ROOT), sys.prefix, sys.base_prefix, *kept}
        seen = sorted(path for path in all_kept if path.startswith("/tmp/"))
        lines = ["set -e", "mkdir -p /run/kept"]
        for turn, path in enumerate(seen):
            lines += [f"mkdir /run/kept/{turn}", f"mount --bind '{path}' /run/kept/{turn}"]
        lines.append(f"mount -t tmpfs -o mode=1777,size={_SIZE_MIB}m tmpfs {TEMPORARY}")
        for turn, path in enumerate(seen):
            lines += [f"mkdir -p '{path}'", f"mount --bind /run/kept/{turn} '{path}'"]
        lines.append(f"mount -t tmpfs -o mode=1777,size={_SIZE_MIB}m tmpfs {SHARED_MEMORY}")
        Path(self.python).touch()
        for host in bed.names:
            own = self._own_python(host)
            own.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
            own.chmod(0o755)
            self.shell(host, "\n".join([*lines, f"mount --bind '{own}' '{self.python}'"]))

    def _own_python(self, host: str) -> Path:
        return self._bed.folder / f"python.{host}"

    def shell(self, host: str, text: str) -> str:
        """Run a script there; return what it prints. HostError if it fails."""
        done = self._bed.run(host, ["sh", "-c", text], timeout_s=30, cwd="/")
        if done.returncode:
            raise HostError(f"on host {host}: {text}: {done.stderr.strip()}")
        return done.stdout.strip()

    def fill(self, host: str, folder: str) -> None:
        """Leave no block free in a file system, until ``empty``."""
        self.shell(
            host, f"fallocate -l $(($(stat -f -c '%a * %S' {folder}))) {folder}/full || true"
        )

    def empty(self, host: str, folder: str) -> None:
        """Give back what ``fill`` has taken."""
        self.shell(host, f"rm -f {folder}/full")

    def slow_down(self, host: str) -> None:
        """Let whoever executes ``python`` there wait in execve(2), until ``speed_up``."""
        self._slow[host] = SlowExec(self._own_python(host))

    def speed_up(self, host: str) -> None:
        """Let them go on. Idempotent."""
        if host in self._slow:
            self._slow.pop(host).close()

    def left(self) -> list[str]:
        """Return processes, files, and memory of /dev/shm that no name leads to."""
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
            self.speed_up(host)
            while found := self._bed.processes(host):
                for process in found:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)
                time.sleep(0.05)
            self.shell(host, "find /tmp /dev/shm -xdev -mindepth 1 ! -type d -delete")

    def stacks(self, folder: Path) -> Iterator[str]:
        """Return all processes, and the stacks of those of the job that notes in ``folder``."""
        for host in self._bed.names:
            for process in self._bed.processes(host):
                is_python = Path(process.command.split(" ")[0]).name.startswith("python")
                if is_python and variable(process.pid, "PYTHONPATH") == str(folder):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGUSR2)
                yield f"{host} {process.inner} {process.command}"
        time.sleep(1.0)
        for path in sorted((folder / "stacks").iterdir()):
            text = path.read_text()
            if text:
                yield f"--- {path.name}\n{text}"


def by_slot(
    bed: Bed, name: str, first_of: Callable[[str], int] = lambda host: 0
) -> dict[int, list[Process]]:
    """Return the processes of all hosts that have the variable ``name``, by the number that it is.

    ``first_of(host)`` is added to it.
    """
    found: dict[int, list[Process]] = {}
    for host in bed.names:
        for process in bed.processes(host):
            slot = variable(process.pid, name)
            if slot:
                found.setdefault(first_of(host) + int(slot), []).append(process)
    return found


def variable(pid: int, name: str) -> str:
    """Return a variable of a process's environment; "" if it has none, or is gone."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return ""
    for line in text.split(b"\0"):
        key, _, value = line.partition(b"=")
        if key.decode() == name:
            return value.decode()
    return ""
