"""Binding the engine's threads to a core."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from kolovod.errors import SettingError
from kolovod.rendezvous.rank_environment import local_and_cross

__all__ = ["check_affinity", "core_of", "threads_on"]


def core_of(affinity: str, local_rank: int, local_size: int) -> int | None:
    """The core of this rank's engine by ``Settings.thread_affinity``, None for "".

    Raises InvalidArgumentError if that names too few cores, or one that this process cannot use.
    """
    if not affinity:
        return None
    cores = [int(core) for core in affinity.split(",")]
    what = f"thread affinity {affinity!r} (KOLOVOD_THREAD_AFFINITY or HOROVOD_THREAD_AFFINITY)"
    if len(cores) < local_size:
        raise SettingError(
            f"{what}: {len(cores)} core(s) for the {local_size} ranks of this host; name one for "
            "each, with commas between them"
        )
    usable = sorted(os.sched_getaffinity(0))
    if cores[local_rank] not in usable:
        raise SettingError(
            f"{what}: local rank {local_rank} cannot use core {cores[local_rank]}; the system "
            f"allows it {', '.join(map(str, usable))}"
        )
    return cores[local_rank]


def check_affinity(affinity: str, hosts: Sequence[str]) -> None:
    """Call ``core_of`` for the ranks on ``hosts``: for a launcher, before it starts any rank."""
    for rank in range(len(hosts)):
        core_of(affinity, *local_and_cross(hosts, rank)[:2])


@contextlib.contextmanager
def threads_on(core: int | None) -> Iterator[None]:
    """Threads that the calling one starts meanwhile are bound to ``core``; None: to no core.

    A thread inherits what its creator may use, so nobody needs to know its number.
    """
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
