"""What a process holds, for tests of what it leaves behind."""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path

from waiting import until


def of_this_process():
    """What a leak would make grow: KiB of memory, descriptors, threads, mappings."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4
    mappings = len(Path("/proc/self/maps").read_text().splitlines())
    return resident, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), mappings


def of_this_process_again(before):
    """The same, once no more descriptors and threads are listed than ``before``; or all the same.

    A thread that was joined is listed by the system for a moment more.
    """
    with contextlib.suppress(AssertionError):  # the caller says what has grown
        until(lambda: all(now <= then for now, then in zip(_listed(), before[1:3], strict=True)))
    return of_this_process()


def _listed():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
