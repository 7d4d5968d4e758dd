"""Files in memory that this worker's processes hold or have left: a neighbour's do not count.

Several workers of pytest, and other users, have files in ``/dev/shm`` at the same time. A file is
of this worker if one of the worker's processes has it open or mapped, or if its name has the mark
of the worker, which everything that it starts finds in the environment (``guard.MARK_NAME``).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

FOLDER = "/dev/shm"
_FOLDERS = (f"{FOLDER}/", "/memfd:kolovod-")
# A process that has had a world goes on to show itself, and how its stacks are asked for.
_KEPT = ("/memfd:kolovod-live-", "/memfd:kolovod-stacks-")


def of_worker(mark: str, processes: Iterable[int] = ()) -> set[str]:
    """What this process, and those in ``processes``, hold, and what bears ``mark``, as words."""
    found = {f"{FOLDER}/{name}" for name in _names() if mark[:8] in name}
    for pid in (os.getpid(), *processes):
        for path in (*_opened(pid), *_mapped(pid)):
            if path.startswith(_FOLDERS) and not path.startswith(_KEPT):
                found.add(f"memory of process {pid}: {path}")
    return found


def _names() -> list[str]:
    return os.listdir(FOLDER) if os.path.isdir(FOLDER) else []


def _opened(pid: int) -> Iterator[str]:
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):  # it ended meanwhile
        for fd in os.listdir(folder):
            with contextlib.suppress(OSError):  # a thread has closed it
                path = os.readlink(f"{folder}/{fd}")
                yield f"{path} (descriptor {fd})"


def _mapped(pid: int) -> Iterator[str]:
    """Only where some shared memory is present: the list of all mappings is long."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        present = [line.split()[1] for line in status.splitlines() if line.startswith("RssShmem:")]
        if present == ["0"]:
            return
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)  # addresses, rights, offset, device, inode, path
            if len(fields) == 6:
                yield f"{fields[5]} (mapped, inode {fields[4]})"
