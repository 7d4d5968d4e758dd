"""The jobs of bench/elastic.py: how each system is started, and what its ranks have noted."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import machine

LIMIT_S = 120.0
LOOK_S = 0.02
RANK = str(machine.BENCH / "elastic_rank.py")


class JobError(RuntimeError):
    """A job does not go on."""


class Step(NamedTuple):
    """A step that a process has completed."""

    at_ns: int
    number: int
    size: int
    rank: int
    wasted: int
    """Times that it computed gradients in vain before."""


class Process:
    """What a rank has noted so far."""

    def __init__(self, path: Path) -> None:
        self.pid = int(path.stem)
        self.born_ns = self.ready_ns = 0
        self.steps: list[Step] = []
        self.phases: list[tuple[int, int, int]] = []
        self._file = path.open("rb")
        self._rest = b""

    def read(self) -> None:
        """Read what is new."""
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        for line in lines:
            what, at_ns, *more = json.loads(line)
            if what == "step":
                self.steps.append(Step(at_ns, *more))
            elif what == "phases":
                self.phases.append((more[0], more[1], more[2]))
            elif what == "born":
                self.born_ns = more[0]
            elif what == "ready":
                self.ready_ns = at_ns

    def is_alive(self) -> bool:
        """Return whether it runs; a process that nobody has waited for does not."""
        try:
            text = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return text.rpartition(")")[2].split()[0] not in "ZX"


class Job:
    """A job of ``np`` ranks, until ``close``."""

    def __init__(self, np: int, folder: Path) -> None:
        self.np, self.folder = np, folder
        self.processes: dict[int, Process] = {}
        self._started: list[subprocess.Popen[bytes]] = []

    def launch(self, command: list[str], environment: dict[str, str] | None = None) -> None:
        """Start a process of the job, whose output goes into the folder."""
        with (self.folder / "output").open("ab") as output:
            self._started.append(
                subprocess.Popen(
                    command,
                    stdout=output,
                    stderr=output,
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **(environment or {})},
                    start_new_session=True,
                )
            )

    def replace(self, victim: Process) -> None:
        """Start another process in the place of one that was killed, unless the system does."""

    def read(self) -> list[Process]:
        """Read the notes of all processes that run."""
        for path in self.folder.glob("*.log"):
            if int(path.stem) not in self.processes:
                self.processes[int(path.stem)] = Process(path)
        alive = [process for process in self.processes.values() if process.is_alive()]
        for process in self.processes.values():
            process.read()
        return alive

    def wait(self, ready: Callable[[list[Process]], Any], what: str) -> Any:
        """Wait until ``ready(processes)`` returns something true: that. JobError after a while."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            found = ready(self.read())
            if found:
                return found
            time.sleep(LOOK_S)
        raise JobError(f"{what}: not within {LIMIT_S:g} s; the job's last words:\n{self._tail()}")

    def _tail(self) -> str:
        lines = (self.folder / "output").read_text(errors="replace").splitlines()
        told = [line for line in lines if "[INFO]" not in line]  # torchft's, several for each step
        return "\n".join(told[-30:])

    def whole(self, after_ns: int = 0) -> list[Process]:
        """Wait until all ranks have made steps together; return their processes."""

        def ready(alive: list[Process]) -> list[Process]:
            last = [process.steps[-1] for process in alive if process.steps]
            is_whole = len(last) == len(alive) == self.np and all(
                step.size == self.np and step.at_ns > after_ns for step in last
            )
            return alive if is_whole else []

        found: list[Process] = self.wait(ready, f"{self.np} ranks that make steps")
        return found

    def stop(self) -> None:
        """Let all ranks end after the same step, soon."""
        processes = self.whole()
        last = max(process.steps[-1].number for process in processes)
        fresh = self.folder / "stop.fresh"
        fresh.write_text(str(last + 300))
        fresh.replace(self.folder / "stop")
        self.wait(lambda alive: not alive, "the end")

    def close(self) -> None:
        """End whatever is left."""
        for process in self._started:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 5
        for process in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for rank in self.read():
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)


class KolovodJob(Job):
    """``kolovod run --elastic``, which starts replacements by itself."""

    def __init__(self, np: int, folder: Path, kind: str) -> None:
        super().__init__(np, folder)
        self.kind = kind
        run = [sys.executable, "-m", "kolovod", "run", "--elastic", "-np", str(np)]
        self.launch([*run, "--max-np", str(np), "--", sys.executable, RANK, kind, str(folder)])


class TorchftJob(Job):
    """A lighthouse, and a replica group for each rank, which this process starts again."""

    def __init__(self, np: int, folder: Path, python: str, *, tuned: bool) -> None:
        super().__init__(np, folder)
        port = _free_port()
        self._python = python
        self._count = 0
        flags = ["--heartbeat_timeout_ms", "500", "--quorum_tick_ms", "10"] if tuned else []
        flags += ["--join_timeout_ms", "1000"] if tuned else []
        lighthouse = str(Path(python).with_name("torchft_lighthouse"))
        bind = ["--min_replicas", "1", "--bind", f"[::]:{port}"]
        self.launch([lighthouse, *bind, *flags])
        options: dict[str, Any] = {"lighthouse": f"http://localhost:{port}"}
        if tuned:
            options |= {"heartbeat_ms": 50, "timeout_s": 1.0}
        self._options = json.dumps(options)
        for _ in range(np):
            self._launch_rank()

    def _launch_rank(self) -> None:
        self._count += 1
        environment = {"BENCH_TORCHFT": self._options, "BENCH_NAME": f"r{self._count}_"}
        environment["OMP_NUM_THREADS"] = "1"
        self.launch([self._python, RANK, "torchft", str(self.folder)], environment)

    def replace(self, victim: Process) -> None:
        self._launch_rank()


class TorchrunJob(Job):
    """torchrun, which starts all ranks again when one is lost."""

    def __init__(self, np: int, folder: Path, python: str, *, tuned: bool) -> None:
        super().__init__(np, folder)
        run = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={np}"]
        run += ["--max-restarts=1000"]
        environment = {"OMP_NUM_THREADS": "1"}
        if tuned:
            run += ["--monitor-interval=0.01"]
            # By default ranks of torch 2.13 that are started again find the addresses of those
            # before them in the agent's store, so gloo never connects.
            environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self.launch([*run, RANK, "torchrun", str(folder)], environment)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
