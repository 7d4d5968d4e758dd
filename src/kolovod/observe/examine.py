"""The facts of a host that matter to a job: for ``doctor``, without a verdict."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from kolovod import _native
from kolovod.observe.whereabouts import core_quota, text_of
from kolovod.rendezvous.rank_environment import usable_cores
from kolovod.version import __version__

__all__ = ["examine"]

_DISTRIBUTIONS = {
    "torch": ("torch",),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-intel"),
    "keras": ("keras",),
    "jax": ("jax",),
    "mxnet": ("mxnet",),
    "mpi4py": ("mpi4py",),
    "nccl": ("nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-nccl-cu11"),
}
_MATRIX = 384
_COPY_BYTES = 32 << 20


def examine() -> dict[str, Any]:
    """Return facts of this host, which JSON can hold. Takes about a fifth of a second."""
    return {
        "kolovod": __version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "found": {name: _version(candidates) for name, candidates in _DISTRIBUTIONS.items()},
        "gpus": _gpus(),
        "mpirun": _mpirun(),
        "shm_free_bytes": _free_bytes("/dev/shm"),
        "memfd": _memfd(),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "locked_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "cores": usable_cores(),
        "cores_present": os.cpu_count() or 0,
        "core_quota": core_quota(),
        "load": os.getloadavg()[0],
        "memory_free_bytes": _memory_free(),
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
        "libcrypto": _libcrypto(),
        "ciphers": _ciphers(),
        "ptrace_scope": text_of("/proc/sys/kernel/yama/ptrace_scope"),
        "matmul_s": _time(_multiply),
        "copy_bytes_per_s": _copy_bytes_per_s(),
    }


def _version(candidates: tuple[str, ...]) -> str:
    """Return a version from the list of what is installed: importing frameworks takes seconds."""
    from importlib import metadata  # here, since that alone takes each process a tenth of its start

    for name in candidates:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return ""


def _gpus() -> list[str]:
    """Return the GPUs' models, by the driver's own files: no context is made on them."""
    models = []
    for folder in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with contextlib.suppress(OSError):
            for line in folder.read_text().splitlines():
                if line.startswith("Model:"):
                    models.append(line.partition(":")[2].strip())
    return models


def _mpirun() -> str:
    beside = Path(sys.executable).parent
    return shutil.which("mpirun", path=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}") or ""


def _libcrypto() -> str:
    """Return libcrypto's version; "" where ``--encrypt`` cannot work."""
    try:
        return _native.libcrypto()
    except _native.EngineError:
        return ""


def _ciphers() -> int:
    """Return the ciphers as bits, see ``_native.offered_ciphers``."""
    try:
        return _native.offered_ciphers()
    except _native.EngineError:
        return 0


def _free_bytes(folder: str) -> int:
    """Return the bytes that are free there; -1 where there is no such folder."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return -1


def _memfd() -> str:
    try:
        os.close(os.memfd_create("kolovod-doctor"))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _memory_free() -> int:
    for line in text_of("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return -1


def _multiply() -> None:
    matrix = np.ones((_MATRIX, _MATRIX), np.float32)
    matrix @ matrix


def _copy_bytes_per_s() -> float:
    source, target = np.ones(_COPY_BYTES, np.uint8), np.ones(_COPY_BYTES, np.uint8)
    return _COPY_BYTES / _time(lambda: np.copyto(target, source))


def _time(work: Any) -> float:
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
