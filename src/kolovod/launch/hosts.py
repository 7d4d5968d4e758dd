"""Hosts and their slots as a user writes them, and which rank goes where. Decides, does nothing."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from kolovod.errors import CommandArgumentError

__all__ = ["HostSlots", "assign", "is_this_host", "parse_host_file", "parse_hosts"]

_MAX_SLOTS = 1024  # ranks of one host, as in csrc/collectives/reduce.h
_NAME = r"(?:\w[\w.-]*@)?(?:\w[\w.-]*|\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\])"
_ITEM = re.compile(rf"({_NAME})(?::(\d+))?")
_LINE = re.compile(rf"({_NAME})(?::(\d+)|\s+slots\s*=\s*(\d+))?")


@dataclass(frozen=True)
class HostSlots:
    """A host, by the name that ssh knows it by, and how many ranks it takes."""

    name: str
    slots: int


def parse_hosts(text: str) -> list[HostSlots]:
    """Parse "host1:4,host2:2". Without a number a host has one slot; IPv6 stands in brackets.

    A host that is named twice has the slots of both. Raises InvalidArgumentError.
    """
    found = []
    for item in text.split(","):
        match = _ITEM.fullmatch(item.strip())
        if match is None:
            raise CommandArgumentError(
                f"hosts {text!r}: {item!r} is not of the form HOST:SLOTS, as in a:2,b:4 "
                "([::1]:2 for an IPv6 address)"
            )
        found.append(_host(match[1], match[2], f"hosts {text!r}"))
    return _merged(found)


def parse_host_file(text: str, path: str, slots: int = 1) -> list[HostSlots]:
    """Parse lines "host slots=4" or "host:4"; ``#`` begins a comment. ``path``: for messages.

    ``slots``: where a line has no number. Raises InvalidArgumentError.
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        rest = line.split("#")[0].strip()
        if not rest:
            continue
        match = _LINE.fullmatch(rest)
        if match is None:
            raise CommandArgumentError(
                f"{path}, line {number}: {line.strip()!r} is not of the form: HOST slots=N"
            )
        count = match[2] or match[3] or str(slots)
        found.append(_host(match[1], count, f"{path}, line {number}"))
    if not found:
        raise CommandArgumentError(f"the host file {path} names no host")
    return _merged(found)


def _host(name: str, slots: str | None, where: str) -> HostSlots:
    count = 1 if slots is None else int(slots)
    if not 1 <= count <= _MAX_SLOTS:
        raise CommandArgumentError(
            f"{where}: {name} has {slots} slots; expected 1 to {_MAX_SLOTS} ranks on a host"
        )
    user, at, host = name.rpartition("@")
    if host.startswith("["):
        try:
            ipaddress.IPv6Address(host[1:-1])
        except ValueError:
            raise CommandArgumentError(f"{where}: {host} is not an IPv6 address") from None
    return HostSlots(f"{user}{at}{host.strip('[]')}", count)


def _merged(hosts: Sequence[HostSlots]) -> list[HostSlots]:
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return [HostSlots(name, count) for name, count in slots.items()]


def assign(hosts: Sequence[HostSlots], size: int | None) -> list[str]:
    """Return the host of each rank: the slots of the first host are filled first.

    ``size``: how many ranks; None: as many as there are slots. Raises InvalidArgumentError if there
    are too few.
    """
    slots = sum(host.slots for host in hosts)
    if size is not None and size > slots:
        listed = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        raise CommandArgumentError(
            f"{size} ranks were asked for, but the hosts {listed} have {slots} slots"
        )
    return [host.name for host in hosts for _ in range(host.slots)][:size]


def is_this_host(name: str) -> bool:
    """Return whether ``name``, as a user wrote it, is this machine (or network namespace).

    A name with a user is not: it asks for that user's login.
    """
    if "@" in name:
        return False
    if name in ("localhost", socket.gethostname()):
        return True
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return any(_is_own_address(family, address) for family, _, _, _, address in found)


def _is_own_address(family: int, address: tuple[object, ...]) -> bool:
    """Return whether ``address`` can be bound to: only one of our own can."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address[0], 0, *address[2:]))
        except OSError:
            return False
        return True
