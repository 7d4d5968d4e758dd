"""The peers in bench/goodput.py: torchrun and torchft on the same hosts, with the same faults.

What has ended this process starts again, as a scheduler would: the torchrun of a host; with torchft
each rank, which is a replica group of its own. Both are tuned to notice soon (elastic_jobs.py has
what for), and neither has anything that kills a rank which hangs, nor a process like our keeper:

- torchrun starts all ranks of all hosts again when one is lost. They go on from a checkpoint that
  rank 0 has written every ten steps. Where a rank hangs the others fail after gloo's time-out of
  two seconds, and torchrun ends it with them;
- torchft's ranks go on without the one that is lost. One that hangs stays as it is, so after
  ``HANG_S`` without a step of it, while others make some, it is killed here, as an operator would.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

import goodput_timeline as timeline
import machine
from chaos_faults import places
from chaos_hosts import by_slot
from chaos_job import NotWholeError
from netbed import Bed, Process

__all__ = ["PEERS", "PeerJob"]

RANK = str(machine.BENCH / "goodput_peer_rank.py")
WHOLE_S = 180.0
HANG_S = 5.0
_PORT = 29400


class PeerJob:
    """What can be done to it is as with a ChaosJob; what it lacks is left out."""

    numbered_by: ClassVar[str]
    """The variable that says which rank a process is, from ``_first_of`` its host on."""

    def __init__(self, bed: Bed, folder: Path, ranks: int, python: str, compute_s: float) -> None:
        self._bed, self._python, self._compute_s = bed, python, compute_s
        self.folder = folder
        (folder / "steps").mkdir(parents=True)
        self._places = places(bed.names, ranks)
        self._started: dict[str, tuple[str, list[str], Mapping[str, str]]] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, host: str, command: list[str], more: Mapping[str, str]) -> None:
        """Start something on a host; it is started again whenever it has ended."""
        self._started[name] = host, command, more
        # Gloo takes the address of the host's name, unless it is told an interface.
        variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "BENCH_HOST": host}
        with (self.folder / "said").open("ab") as said:
            self._processes[name] = self._bed.popen(
                host, command, stdout=said, stderr=said, env={**os.environ, **variables, **more}
            )

    def until_whole(self, size: int, slow: Callable[[], None] = lambda: None) -> None:
        """Wait until so many ranks make steps together. NotWholeError if they do not."""
        begin_ns = time.monotonic_ns()
        while True:
            for name, process in list(self._processes.items()):
                if process.poll() is not None:
                    self.start(name, *self._started[name])
            self.end_hanging()
            steps = timeline.read(self.folder / "steps")
            latest = sorted(steps, key=lambda step: step.at_ns)[-3:]
            if len(latest) == 3 and all(s.size == size and s.at_ns > begin_ns for s in latest):
                return
            if time.monotonic_ns() > begin_ns + WHOLE_S * 1e9:
                raise NotWholeError(f"not whole for {WHOLE_S:g} s\n{self.said()[-3000:]}")
            time.sleep(0.2)

    def end_hanging(self) -> None:
        """Do what an operator would where a rank hangs; nothing by default."""

    def ranks(self) -> dict[int, list[Process]]:
        """Return the processes in each slot, whoever has started them."""
        return by_slot(self._bed, self.numbered_by, self._first_of)

    def _first_of(self, host: str) -> int:
        return 0

    def agent(self, host: str) -> list[Process]:
        """Return the ranks of a host, and what has started them: a lost container has both."""
        return [process for process in self._bed.processes(host) if RANK in process.command]

    def keeper(self) -> list[Process]:
        """Return nothing: there is no keeper."""
        return []

    def kill_viewer(self) -> None:
        """Do nothing: there is no viewer."""

    def attach(self) -> None:
        """Do nothing: there is nothing to be attached to."""

    def remove_folder(self) -> None:
        """Do nothing: there is no folder."""

    def said(self) -> str:
        """Return what all of them have said so far."""
        return (self.folder / "said").read_text(errors="replace")

    def close(self) -> None:
        """End it. Idempotent."""
        for process in self._processes.values():
            process.kill()
            process.wait()


class TorchrunJob(PeerJob):
    """One torchrun on each host, which meet at the first."""

    numbered_by = "LOCAL_RANK"

    def __init__(self, bed: Bed, folder: Path, ranks: int, python: str, compute_s: float) -> None:
        super().__init__(bed, folder, ranks, python, compute_s)
        for host in bed.names:
            options = [
                f"--nnodes=1:{len(bed.names)}",
                f"--nproc-per-node={self._places.count(host)}",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint={bed.names[0]}:{_PORT}",
                "--rdzv-id=goodput",
                "--rdzv-conf=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=2",
                "--max-restarts=1000000",
                "--monitor-interval=0.05",
                f"--local-addr={host}",
            ]
            rank = [RANK, "torchrun", str(folder / "steps"), str(compute_s)]
            # Without it ranks of torch 2.13 never connect again (elastic_jobs.py).
            more = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            self.start(host, host, [python, "-m", "torch.distributed.run", *options, *rank], more)

    def _first_of(self, host: str) -> int:
        return self._places.index(host)


class TorchftJob(PeerJob):
    """A lighthouse on the first host, and a replica group for each rank."""

    numbered_by = "BENCH_SLOT"

    def __init__(self, bed: Bed, folder: Path, ranks: int, python: str, compute_s: float) -> None:
        super().__init__(bed, folder, ranks, python, compute_s)
        self._since_s: dict[str, float] = {}
        lighthouse = str(Path(python).with_name("torchft_lighthouse"))
        most = str(ranks // 2 + 1)  # with fewer, ranks that start anew begin with step 0 among them
        flags = ["--min_replicas", most, "--bind", f"[::]:{_PORT}", "--join_timeout_ms", "1000"]
        flags += ["--heartbeat_timeout_ms", "500", "--quorum_tick_ms", "10"]
        self.start("lighthouse", bed.names[0], [lighthouse, *flags], {})
        told = {
            "lighthouse": f"http://{bed.names[0]}:{_PORT}",
            "timeout_s": 1.0,
            "heartbeat_ms": 50,
        }
        for slot, host in enumerate(self._places):
            more = {"BENCH_TORCHFT": json.dumps(told), "BENCH_SLOT": str(slot)}
            rank = [python, RANK, "torchft", str(folder / "steps"), str(compute_s)]
            self.start(f"rank {slot}", host, rank, more)

    def end_hanging(self) -> None:
        """Kill each rank that has noted nothing for a while; the first step may take longer."""
        now = time.time()
        newest: dict[str, float] = {}
        for path in (self.folder / "steps").glob("*.*"):
            slot = path.name.partition(".")[0]
            newest[slot] = max(newest.get(slot, 0.0), path.stat().st_mtime)
        for slot, at_s in newest.items():
            killed_s = self._since_s.get(slot, 0.0)
            if max(newest.values()) - at_s > HANG_S and now - killed_s > 4 * HANG_S:
                self._since_s[slot] = now
                for process in self.ranks().get(int(slot), ()):
                    os.kill(process.pid, signal.SIGKILL)


PEERS: dict[str, Callable[[Bed, Path, int, str, float], PeerJob]] = {
    "torchrun": TorchrunJob,
    "torchft": TorchftJob,
}
