"""A rank of torchrun's in bench/goodput.py: ``goodput_torchrun_rank.py FOLDER COMPUTE_S``.

Notes its steps as chaos_rank.py does, and does the same work: one array of 2,000 numbers, whose
gradient is reduced over gloo. It needs PyTorch, and nothing of Kolovod.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

CHECKPOINT_EVERY = 10
ELEMENTS = 2_000
TIMEOUT_S = 1.0
LOOPS = signal.SIGRTMIN + 1
"""As chaos_faults.LOOPS."""


def _loop(*_: object) -> None:
    while True:
        pass


def main() -> None:
    """Train until somebody ends it."""
    signal.signal(LOOPS, _loop)
    folder, compute_s = Path(sys.argv[1]), float(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank, size, epoch = dist.get_rank(), dist.get_world_size(), time.time_ns()
    first = torch.tensor([epoch])
    dist.broadcast(first, 0)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S))
    epoch = int(first)  # rises with each start of all ranks
    path = folder.parent / "checkpoint"
    step, weights = 0, torch.zeros(ELEMENTS)
    if path.exists():
        saved = torch.load(path)
        step, weights = saved["step"], saved["weights"]
    name = f"{os.environ['BENCH_HOST']}-{rank}.{time.monotonic_ns()}"
    notes = os.open(folder / name, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC)
    while True:
        time.sleep(compute_s)
        gradient = torch.full((ELEMENTS,), float(step % 7 + rank))
        dist.all_reduce(gradient)
        weights -= 0.01 * gradient / size
        step += 1
        line = f"{time.monotonic_ns()} {step} {size} {rank} {epoch} 0\n"
        os.write(notes, line.encode())
        if rank == 0 and step % CHECKPOINT_EVERY == 0:
            fresh = path.with_suffix(".fresh")
            torch.save({"step": step, "weights": weights}, fresh)
            fresh.replace(path)


if __name__ == "__main__":
    main()
