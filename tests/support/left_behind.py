"""What a test may leave behind: processes, threads, files in shared memory.

Counted are those of this process and what it has started: other workers of pytest and other users
of the machine come and go meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Iterator
from pathlib import Path

import forked
import psutil

from kolovod.launch import orphan_reaper

SHARED_MEMORY = Path("/dev/shm")
# Processes and threads that a library starts once and keeps on purpose.
_KEPT_PROCESSES = ("resource_tracker", "forkserver", "ray::", "/site-packages/ray/", "pyspark")
"""The last three: of a cluster that ends with its file of tests (ray_cluster, spark_session)."""
_KEPT_THREADS = ("pytest_timeout", "tqdm", "pin_memory")


def everything() -> set[str]:
    """All that is there now, by a name for people."""
    return _children() | _threads() | memory_files()


def memory_files() -> set[str]:
    """Files in shared memory that may be a test's; of whom they are, their names do not say."""
    names = os.listdir(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else []
    return {
        str(SHARED_MEMORY / name) for name in names if "kolovod" in name or name.startswith("tmp")
    }


def held_elsewhere(things: Collection[str]) -> set[str]:
    """Those that are files which a process has open, or mapped, that no test here has started."""
    files = {thing for thing in things if thing.startswith(f"{SHARED_MEMORY}/")}
    if not files:
        return set()
    mark = os.environ.get(orphan_reaper.MARK_NAME, "").split(",")[-1]
    own = {os.getpid(), *_descendants(), *(orphan_reaper.job_processes(mark) if mark else ())}
    others = {int(name) for name in os.listdir("/proc") if name.isdecimal()} - own
    return {file for pid in others for file in files.intersection(_files_of(pid))}


def _files_of(pid: int) -> Iterator[str]:
    """What a process has open, and what it has mapped, as far as it may be looked at."""
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                yield os.readlink(f"/proc/{pid}/fd/{fd}")
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            yield line.split(maxsplit=5)[-1]


def _below(pid: int) -> Iterator[int]:
    """Children of a process, theirs, and so on: from files that say it without looking at all."""
    with contextlib.suppress(OSError):  # it, or the thread, ended meanwhile
        for thread in os.listdir(f"/proc/{pid}/task"):
            for child in map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split()):
                yield child
                yield from _below(child)


def _descendants() -> Iterator[int]:
    if os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        return _below(os.getpid())
    return (process.pid for process in psutil.Process().children(recursive=True))


def _children() -> set[str]:
    found, servers = set(), forked.servers()
    for pid in _descendants():
        if pid in servers:
            continue
        try:
            process = psutil.Process(pid)
            command = " ".join(process.cmdline())
            if not any(word in command for word in _KEPT_PROCESSES):
                found.add(f"process {pid}: {command or process.name()}")
        except psutil.Error:
            continue  # it ended meanwhile
    return found


def _threads() -> set[str]:
    # A thread that a library's C++ has started may come by Python, in a line of its log say. Python
    # has a dummy for it from then on, also when it has ended.
    return {
        f"thread {thread.name} ({thread.ident})"
        for thread in threading.enumerate()
        if not isinstance(thread, threading._DummyThread)
        and not any(word in thread.name for word in _KEPT_THREADS)
    }
