"""What the machine of the GPU check is, how fast it copies, and whether processes map memory."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

from gpu_ranks import Findings, cuda, on_ranks, settle, timed_ms

TOOLS = ("g++", "nvcc", "compute-sanitizer", "nvidia-cuda-mps-control")
COPIED_BYTES = 1 << 28
MAPPED = 1 << 24  # float32 elements


def surroundings(device: str) -> Findings:
    """Return the device's name and versions, for every row; a problem where there is none."""
    import torch

    import kolovod

    found = Findings()
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions["kolovod"] = kolovod.__version__
    for name in ("jax", "numpy"):
        if importlib.util.find_spec(name) is not None:
            versions[name] = importlib.metadata.version(name)
    name = "cpu"
    if device == "cuda":
        if not torch.cuda.is_available():
            found.problems.append(
                f"PyTorch {torch.__version__} finds no GPU here; '--device cpu' rehearses what "
                "needs none"
            )
            return found
        name = torch.cuda.get_device_name(0)
        versions["cuda"] = str(torch.version.cuda)
        if torch.distributed.is_nccl_available():
            versions["nccl"] = ".".join(map(str, cuda().nccl.version()))
        versions["driver"] = driver()
    found.figures = {"device": name, "versions": versions}
    return found


def driver() -> str:
    """Return the version of NVIDIA's kernel module, by /proc or NVML's package; else unknown."""
    path = Path("/proc/driver/nvidia/version")
    if path.exists():
        words = path.read_text().splitlines()[0].split()
        numbers = [word for word in words if word.replace(".", "").isdigit()]
        if numbers:
            return numbers[0]
    try:
        library = importlib.import_module("pynvml")
        library.nvmlInit()
        return str(library.nvmlSystemGetDriverVersion())
    except Exception:  # whatever keeps it from saying
        return "unknown"


def part_facts(device: str) -> Findings:
    """Return cores, shared memory, tools, packages; a GPU's memory and how fast it is copied."""
    found = Findings()
    figures = found.figures
    figures["cores"] = len(os.sched_getaffinity(0))
    shared = os.statvfs("/dev/shm")
    figures["dev_shm_mb"] = shared.f_blocks * shared.f_frsize >> 20
    figures["tools"] = [tool for tool in TOOLS if shutil.which(tool)]
    figures["has_pytest"] = importlib.util.find_spec("pytest") is not None
    if device == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(0)
        figures["memory_gb"], figures["free_gb"] = round(total / 1e9, 1), round(free / 1e9, 1)
        figures["gb_per_s"] = copy_rates()
        start = time.perf_counter()
        torch.empty(1 << 26, dtype=torch.uint8, pin_memory=True)
        figures["pin_64_mib_ms"] = round((time.perf_counter() - start) * 1e3, 1)
    return found


def copy_rates() -> dict[str, float]:
    """Return GB/s between pinned memory and the GPU, and within it, by direction."""
    import torch

    host = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    far = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(far)
    works = {
        "host to GPU": lambda: far.copy_(host, non_blocking=True),
        "GPU to host": lambda: host.copy_(far, non_blocking=True),
        "within the GPU": lambda: other.copy_(far),
    }
    rates = {}
    for label, work in works.items():
        timed_ms(work, 1, "cuda")
        rates[label] = round(COPIED_BYTES / timed_ms(work, 10, "cuda") / 1e6, 1)
    return rates


def part_ipc(device: str) -> Findings:
    """For a plane of our own: one process maps another's memory and adds in the order of ranks."""
    found = Findings()
    by_rank = found.noted("ranks", lambda: on_ranks(2, maps, device, timeout_s=13))
    for rank, each in enumerate(by_rank or ()):
        if not each["equal"]:
            found.problems.append(f"rank {rank}: the sums of the two ranks differ")
    return found


def maps(kv: Any) -> dict[str, Any]:
    """Return the sum of both ranks' memory, its rate, and how long an event of the other takes."""
    import torch

    rank = kv.rank()
    own = torch.full((MAPPED,), 0.1 * (rank + 1), device="cuda")
    settle("cuda")
    shared: Any = own.untyped_storage()
    handles = kv.allgather_object(shared._share_cuda_())
    storage: Any = torch.UntypedStorage._new_shared_cuda(*handles[1 - rank])
    peer: Any = torch.tensor([], dtype=torch.float32, device="cuda")
    peer = peer.set_(storage, own.storage_offset(), (MAPPED,))
    parts = [own, peer] if rank == 0 else [peer, own]
    total = parts[0] + parts[1]
    settle("cuda")
    kv.barrier()
    both = kv.allgather(total[:1000].cpu()[None])
    taken_ms = timed_ms(lambda: torch.add(parts[0], parts[1], out=total), 10, "cuda")
    event = cuda().Event(interprocess=True)
    event.record()
    events = kv.allgather_object(event.ipc_handle())
    theirs = cuda().Event.from_ipc_handle(torch.device("cuda", 0), events[1 - rank])
    laps = []
    for _ in range(50):
        kv.barrier()
        start = time.perf_counter()
        event.record()
        theirs.synchronize()
        laps.append((time.perf_counter() - start) * 1e6)
    kv.barrier()
    return {
        "equal": bool(torch.equal(both[0], both[1])),
        "add_gb_per_s": round(3 * MAPPED * 4 / taken_ms / 1e6, 1),
        "event_us": round(statistics.median(laps), 1),
    }
