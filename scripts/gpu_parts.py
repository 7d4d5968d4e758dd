"""The parts of the GPU check, the most valuable first; and one of them in this process.

    python scripts/gpu_parts.py gpu_verbs:part_verbs cuda FILE

calls that function with the device, and writes what it has found to FILE: figures and problems.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import NamedTuple

from gpu_ranks import Findings, patience


class Part(NamedTuple):
    """A part, which is a process of its own."""

    work: str
    """``module:function``: it takes the device, "cuda" or "cpu", and returns Findings."""
    limit_s: float
    """How long it may take on a GPU; about one and a half times what it should."""
    needs_gpu: bool
    text: str
    """What it looks at."""


SURROUNDINGS = Part("gpu_facts:surroundings", 20, False, "the device and the versions")
"""Comes before all parts, which have its figures in their rows."""
PARTS = {
    "facts": Part("gpu_facts:part_facts", 15, False, "cores, tools, rates of copies"),
    "verbs": Part(
        "gpu_verbs:part_verbs", 36, False,
        "every verb, dtype and layout, staged, with 1, 2 and 4 ranks: equal to host memory's bits",
    ),
    "streams": Part(
        "gpu_streams:part_streams", 52, True,
        "late producers and consumers on several streams, memory that is used again, staged",
    ),
    "training": Part(
        "gpu_training:part_training", 44, False,
        "twelve ways to train on two ranks, staged: equal weights, those of one rank",
    ),
    "groups": Part(
        "gpu_groups:part_groups", 36, False,
        "torch.distributed's group, staged: every verb, streams, futures, DDP and FSDP2",
    ),
    "edges": Part(
        "gpu_edges:part_edges", 32, False,
        "gradients are final after backward, memory taken away, ranks that are not alike",
    ),
    "nccl": Part(
        "gpu_nccl:part_nccl", 56, True,
        "NCCL with one rank: verbs, streams, optimizer, a second world; two ranks are refused",
    ),
    "nccl_shared": Part(
        "gpu_nccl:part_nccl_shared", 48, True,
        "whether NCCL takes two ranks on one GPU (NCCL_HOSTID); every verb on them",
    ),
    "nccl_faults": Part(
        "gpu_nccl:part_nccl_faults", 50, True,
        "NCCL: results used late, overlapping sets, an early shutdown, a killed rank",
    ),
    "times": Part(
        "gpu_times:part_times", 110, False,
        "training steps beside plain PyTorch and DDP over gloo; verbs; memory",
    ),
    "elastic": Part(
        "gpu_jobs:part_elastic", 32, False, "an elastic job of three ranks, one of which is killed"
    ),
    "context": Part(
        "gpu_jobs:part_context", 24, False, "no CUDA context before a tensor is on a GPU"
    ),
    "graphs": Part(
        "gpu_graphs:part_graphs", 68, True,
        "captures of CUDA graphs beside what is on its way; torch.compile",
    ),
    "nccl_training": Part(
        "gpu_training:part_nccl_training", 42, True, "the ways to train, over NCCL"
    ),
    "front_ends": Part(
        "gpu_jobs:part_front_ends", 20, False,
        "JAX, torch.distributed, DDP, float8, complex: right values, or an error that says why",
    ),
    "ipc": Part(
        "gpu_facts:part_ipc", 14, True, "a process maps another's GPU memory and adds it up"
    ),
    "sanitized": Part(
        "gpu_graphs:part_sanitized", 26, True, "PyTorch's detector of races between streams"
    ),
}  # fmt: skip


def limit_s(part: Part, device: str) -> float:
    """Return how long a part may take."""
    return part.limit_s * patience(device)


def main() -> int:
    """Run one part; its process is to be started by gpu_check.py, which ends it."""
    work, device, path = sys.argv[1:]
    module, name = work.split(":")
    Findings.path = Path(path)
    found: Findings = getattr(importlib.import_module(module), name)(device)
    found.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
