"""The place where a rank runs: on which machine, and how many cores it may use there."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, NamedTuple

from kolovod.rendezvous.rank_environment import usable_cores

__all__ = [
    "Whereabouts",
    "clock_identity",
    "core_quota",
    "parse_whereabouts",
    "text_of",
    "whereabouts",
]

_CHARACTERS = 64
_MOST_CORES = 1 << 20


class Whereabouts(NamedTuple):
    """The machine and the cores of one rank."""

    machine: str
    """Equal for ranks of one kernel, on hosts that are containers, too; "" unknown."""
    cores: float
    """The cores that its process may use, by affinity and the control group's quota."""
    mask: str
    """The set of these cores: bit n of this hexadecimal number for core n, without the quota."""


def clock_identity() -> str:
    """Return a text that processes with the same CLOCK_MONOTONIC have in common; "" unknown."""
    try:
        return f"{_boot()} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return ""


def whereabouts() -> Whereabouts:
    """Return the whereabouts of this process."""
    cores: float = usable_cores()
    quota = core_quota()
    try:
        machine = hashlib.sha256(_boot().encode()).hexdigest()[:12]
    except OSError:
        machine = ""
    mask = sum(1 << core for core in os.sched_getaffinity(0))
    return Whereabouts(machine, min(cores, quota) if quota > 0 else cores, f"{mask:x}")


def parse_whereabouts(said: Any) -> Whereabouts:
    """Parse what another rank says of itself. Raises what Python does for anything else."""
    machine, cores, mask = said
    if not 0 < float(cores) <= _MOST_CORES or not len(mask) <= _MOST_CORES // 4:
        raise ValueError(f"{cores!r} cores, {len(mask)} digits")
    return Whereabouts(str(machine)[:_CHARACTERS], float(cores), f"{int(mask, 16):x}")


def core_quota() -> float:
    """Return how many cores' worth of time the control group allows; 0: no limit."""
    parts = text_of("/sys/fs/cgroup/cpu.max").split()
    if len(parts) == 2 and parts[0].isdecimal():
        return int(parts[0]) / int(parts[1])
    quota, period = (
        text_of("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"),
        text_of("/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
    )
    if quota.isdecimal() and period.isdecimal():
        return int(quota) / int(period)
    return 0.0


def text_of(path: str) -> str:
    """Return the text of one of the system's files; "" if it cannot be read."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
