"""A rank of a peer in bench/goodput.py: ``goodput_peer_rank.py SYSTEM FOLDER COMPUTE_S``.

Notes its steps as chaos_rank.py does, and does the same work: one array of 2,000 numbers, whose
gradient is reduced over gloo. It needs PyTorch, and torchft for that, and nothing of Kolovod. The
epoch in its notes rises where steps are made again.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CHECKPOINT_EVERY = 10
ELEMENTS = 2_000
TIMEOUT_S = 2.0
LOOPS = signal.SIGRTMIN + 1
"""As chaos_faults.LOOPS."""


def _loop(*_: object) -> None:
    while True:
        pass


class Notes:
    """A file of this process's, in which it says what it has done."""

    def __init__(self, folder: Path, name: str) -> None:
        path = folder / f"{name}.{time.monotonic_ns()}"
        self._fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC)

    def say(self, step: int, size: int, rank: int, epoch: int) -> None:
        """Note a step that is done."""
        os.write(self._fd, f"{time.monotonic_ns()} {step} {size} {rank} {epoch} 0\n".encode())


def torchrun(folder: Path, compute_s: float) -> None:
    """Train in a process group over gloo, with a checkpoint to go on from."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))  # to meet
    rank, size = dist.get_rank(), dist.get_world_size()
    path = folder.parent / "checkpoint"
    step, weights = 0, torch.zeros(ELEMENTS)
    if path.exists():
        saved = torch.load(path)
        step, weights = saved["step"], saved["weights"]
    started = torch.tensor([time.time_ns()])
    dist.broadcast(started, 0)  # and all have loaded: the first step would come too late for some
    dist.all_reduce(torch.zeros(ELEMENTS))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S))
    notes = Notes(folder, f"{os.environ['BENCH_HOST']}-{rank}")
    while True:
        time.sleep(compute_s)
        gradient = torch.full((ELEMENTS,), float(step % 7 + rank))
        dist.all_reduce(gradient)
        weights -= 0.01 * gradient / size
        step += 1
        notes.say(step, size, rank, int(started))
        if rank == 0 and step % CHECKPOINT_EVERY == 0:
            fresh = path.with_suffix(f".{os.getpid()}")  # one that hangs may be rank 0, too
            torch.save({"step": step, "weights": weights}, fresh)
            fresh.replace(path)


def torchft(folder: Path, compute_s: float) -> None:
    """Train as a replica group with one rank; a step whose reduction fails is made again."""
    from torchft import Manager, ProcessGroupGloo  # type: ignore[import-not-found]

    logging.disable(logging.CRITICAL)
    options: dict[str, Any] = json.loads(os.environ["BENCH_TORCHFT"])
    host, slot = socket.gethostname(), os.environ["BENCH_SLOT"]
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    weights = torch.zeros(ELEMENTS)

    def load(state: dict[str, Any]) -> None:
        weights.copy_(state["weights"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"weights": weights},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=options["lighthouse"],
        replica_id=f"r{slot}_{time.time_ns()}_",
        hostname=host,
        heartbeat_interval=timedelta(milliseconds=options["heartbeat_ms"]),
        timeout=timedelta(seconds=options["timeout_s"]),
    )
    notes = Notes(folder, slot)
    while True:
        step = manager.current_step()
        manager.start_quorum()
        time.sleep(compute_s)
        gradient = torch.full((ELEMENTS,), float(step % 7 + int(slot)))
        manager.allreduce(gradient).wait()
        if manager.should_commit():
            weights -= 0.01 * gradient
            notes.say(step + 1, manager.num_participants(), int(slot), 0)


SYSTEMS: dict[str, Callable[[Path, float], None]] = {"torchrun": torchrun, "torchft": torchft}


if __name__ == "__main__":
    signal.signal(LOOPS, _loop)
    torch.set_num_threads(1)
    SYSTEMS[sys.argv[1]](Path(sys.argv[2]), float(sys.argv[3]))
