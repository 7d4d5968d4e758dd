"""torchrun in bench/goodput.py: one on each host, which this process starts again, as Slurm would.

It starts all ranks of all hosts again when one is lost, and they go on from a checkpoint that rank
0 has written every ten steps. Nothing of it kills a rank that hangs: the others fail after gloo's
time-out, which is set to one second, and their torchrun then ends the one that hangs with them.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import goodput_timeline as timeline
import machine
from chaos_faults import places
from chaos_hosts import variable
from chaos_job import NotWholeError
from netbed import Bed, Process

__all__ = ["TorchrunJob"]

RANK = str(machine.BENCH / "goodput_torchrun_rank.py")
WHOLE_S = 180.0
_PORT = 29400
_RUN = ["-m", "torch.distributed.run"]


class TorchrunJob:
    """See the module; what can be done to it is as with a ChaosJob."""

    def __init__(self, bed: Bed, folder: Path, ranks: int, python: str, compute_s: float) -> None:
        self._bed, self._python, self._compute_s = bed, python, compute_s
        self.folder = folder
        (folder / "steps").mkdir(parents=True)
        slots = places(bed.names, ranks)
        self._counts = {host: slots.count(host) for host in bed.names}
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        for host in bed.names:
            self._start(host)

    def _start(self, host: str) -> None:
        hosts = len(self._bed.names)
        options = [
            f"--nnodes=1:{hosts}",
            f"--nproc-per-node={self._counts[host]}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self._bed.names[0]}:{_PORT}",
            "--rdzv-id=goodput",
            "--rdzv-conf=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=2",
            "--max-restarts=1000000",
            "--monitor-interval=0.05",
            f"--local-addr={host}",
        ]
        arguments = [str(self.folder / "steps"), str(self._compute_s)]
        # See bench/elastic_jobs.py; and gloo takes the interface that the host's name leads to.
        variables = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        variables |= {"GLOO_SOCKET_IFNAME": "eth0", "BENCH_HOST": host}
        with (self.folder / "said").open("ab") as said:
            self._agents[host] = self._bed.popen(
                host,
                [self._python, *_RUN, *options, RANK, *arguments],
                stdout=said,
                stderr=said,
                env={**os.environ, **variables},
            )

    def until_whole(self, size: int, slow: Callable[[], None] = lambda: None) -> None:
        """Until so many ranks make steps together. NotWholeError if they do not."""
        begin_ns = time.monotonic_ns()
        while True:
            for host, agent in self._agents.items():
                if agent.poll() is not None:
                    self._start(host)
            steps = timeline.read(self.folder / "steps")
            latest = sorted(steps, key=lambda step: step.at_ns)[-3:]
            if len(latest) == 3 and all(s.size == size and s.at_ns > begin_ns for s in latest):
                return
            if time.monotonic_ns() > begin_ns + WHOLE_S * 1e9:
                raise NotWholeError(
                    f"torchrun: not whole after {WHOLE_S:g} s: {self.said()[-3000:]}"
                )
            time.sleep(0.1)

    def ranks(self) -> dict[int, list[Process]]:
        """The processes in each slot: the host's, by their rank there."""
        found: dict[int, list[Process]] = {}
        first = 0
        for host in self._bed.names:
            for process in self._bed.processes(host):
                local = variable(process.pid, "LOCAL_RANK")
                if local:
                    found.setdefault(first + int(local), []).append(process)
            first += self._counts[host]
        return found

    def agent(self, host: str) -> list[Process]:
        """Its torchrun."""
        pid = self._agents[host].pid
        return [p for p in self._bed.processes(host) if p.pid == pid]

    def keeper(self) -> list[Process]:
        """There is none."""
        return []

    def kill_viewer(self) -> None:
        """There is none."""

    def attach(self) -> None:
        """There is nothing to be attached to."""

    def remove_folder(self) -> None:
        """There is none."""

    def said(self) -> str:
        """What all of them have said so far."""
        return (self.folder / "said").read_text(errors="replace")

    def close(self) -> None:
        """End it. Idempotent."""
        for agent in self._agents.values():
            agent.kill()
            agent.wait()
