"""What a process holds, for tests of what it leaves behind."""

from __future__ import annotations

import gc
import os
from pathlib import Path


def of_this_process():
    """What a leak would make grow: KiB of memory, descriptors, threads, mappings."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4
    mappings = len(Path("/proc/self/maps").read_text().splitlines())
    return resident, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), mappings
