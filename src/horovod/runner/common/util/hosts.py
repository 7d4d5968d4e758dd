"""Hosts and their slots, as -H and host files write them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["HostInfo", "parse_host_files", "parse_hosts"]

_ITEM = re.compile(r"[\w.-]+:[0-9]+")


@dataclass(frozen=True)
class HostInfo:
    """A host and how many ranks it takes."""

    hostname: str
    slots: int

    @staticmethod
    def from_string(host_string: str) -> HostInfo:
        """Make one of "host:4". Raises ValueError."""
        if _ITEM.fullmatch(host_string.strip()) is None:
            raise ValueError(f"Invalid host input {host_string!r}: expected name:slots, as a:2,b:4")
        hostname, slots = host_string.strip().rsplit(":", 1)
        return HostInfo(hostname, int(slots))


def parse_hosts(hosts_string: str) -> list[HostInfo]:
    """Return the hosts in "a:2,b:4". Raises ValueError."""
    return [HostInfo.from_string(item) for item in hosts_string.split(",")]


def parse_host_files(filename: str) -> str:
    """A file with lines "host slots=4" as "host:4,...". Raises ValueError."""
    hosts = []
    try:
        lines = Path(filename).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the host file {filename} cannot be read: {error}") from None
    for line in lines:
        text = line.split("#")[0].strip()
        if not text:
            continue
        found = re.fullmatch(r"([\w.-]+)(?:\s+slots\s*=\s*(\d+))?", text)
        if found is None:
            raise ValueError(f"{filename}: line {line!r} is not of the form: host slots=N")
        hosts.append(f"{found[1]}:{found[2] or 1}")
    if not hosts:
        raise ValueError(f"the host file {filename} names no host")
    return ",".join(hosts)


def labels_of(infos: Sequence[HostInfo], count: int) -> list[str]:
    """The host of each of ``count`` ranks: the first one's slots are filled first.

    Two names of one machine, localhost and 127.0.0.1 say, are two hosts, as Horovod has it.
    """
    return [info.hostname for info in infos for _ in range(info.slots)][:count]
