"""Where a rank runs: on which machine, and how many cores it may use there."""

from __future__ import annotations

import hashlib
import os
from typing import Any, NamedTuple

from kolovod.observe.examine import core_quota
from kolovod.rendezvous.rank_environment import usable_cores

__all__ = ["Whereabouts", "clock_identity", "parse_whereabouts", "whereabouts"]

_CHARACTERS = 64
_MOST_CORES = 1 << 20


class Whereabouts(NamedTuple):
    """Of one rank."""

    machine: str
    """Equal for ranks of one kernel, on hosts that are containers, too; "" unknown."""
    cores: float
    """That its process may use, by affinity and the control group's quota."""
    mask: str
    """Which these are: bit n of this hexadecimal number for core n, without the quota."""


def clock_identity() -> str:
    """Processes that have the same one read the same CLOCK_MONOTONIC; "" if unknown."""
    try:
        return f"{_boot()} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return ""


def whereabouts() -> Whereabouts:
    """Of this process."""
    cores: float = usable_cores()
    quota = core_quota()
    try:
        machine = hashlib.sha256(_boot().encode()).hexdigest()[:12]
    except OSError:
        machine = ""
    mask = sum(1 << core for core in os.sched_getaffinity(0))
    return Whereabouts(machine, min(cores, quota) if quota > 0 else cores, f"{mask:x}")


def parse_whereabouts(said: Any) -> Whereabouts:
    """What another rank says of itself. Raises what Python does for anything else."""
    machine, cores, mask = said
    if not 0 < float(cores) <= _MOST_CORES or not len(mask) <= _MOST_CORES // 4:
        raise ValueError(f"{cores!r} cores, {len(mask)} digits")
    return Whereabouts(str(machine)[:_CHARACTERS], float(cores), f"{int(mask, 16):x}")


def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
