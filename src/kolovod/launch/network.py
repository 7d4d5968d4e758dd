"""Addresses at which a process can be reached, and the one of them that answers.

Which network two hosts have in common is found by asking, not by comparing names of interfaces: a
server listens at all addresses of its host that are worth it and tells them; a client tries them in
that order, and stays with the first where somebody proves the secret.
"""

from __future__ import annotations

import fcntl
import ipaddress
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kolovod.errors import AuthenticationError, BootstrapError, InvalidArgumentError
from kolovod.launch.auth import Channel, connect

__all__ = [
    "Interface",
    "address_of",
    "connect_any",
    "interfaces",
    "is_loopback",
    "listen",
    "own_addresses",
    "split_addresses",
]

LOOPBACK = "127.0.0.1"
_STAGGER_S = 0.25  # before the next address is tried as well, as RFC 8305 has it
_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915  # netdevice(7)
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
_MAX_ADDRESSES = 32


@dataclass(frozen=True)
class Interface:
    """A network interface that is up."""

    name: str
    address: str
    """IPv4 or IPv6, without a port."""
    speed_mbit_per_s: int
    """What the driver says; 0 if it says nothing."""
    is_loopback: bool


def interfaces() -> list[Interface]:
    """Of this host (or network namespace), the fastest first; IPv4 before IPv6.

    An interface's first IPv4 address, and its IPv6 addresses but for link-local ones.
    """
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFFLAGS, request)
                (flags,) = struct.unpack_from("H", answer, 16)
                if not flags & _IFF_UP:
                    continue
                loopback, speed = bool(flags & _IFF_LOOPBACK), _speed(name)
                found += [Interface(name, a, speed, loopback) for a in _ipv6_addresses(name)]
                address = fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]
                found.append(Interface(name, socket.inet_ntoa(address), speed, loopback))
            except OSError:  # gone meanwhile, or without an IPv4 address
                continue
    return sorted(found, key=lambda i: (i.is_loopback, -i.speed_mbit_per_s, ":" in i.address))


def _speed(name: str) -> int:
    try:
        return max(0, int(Path(f"/sys/class/net/{name}/speed").read_text()))
    except (OSError, ValueError):  # virtual ones often do not know
        return 0


def _ipv6_addresses(name: str) -> list[str]:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return []
    listed = [line.split() for line in lines]
    addresses = [ipaddress.IPv6Address(int(f[0], 16)) for f in listed if f[5] == name]
    return [str(address) for address in addresses if not address.is_link_local]


def own_addresses(wanted: Sequence[str] = ()) -> list[str]:
    """Where other hosts may reach this one: all addresses but loopback ones, the fastest first.

    ``wanted``: only these, in this order: names of interfaces, or networks as 10.1.0.0/16. Raises
    InvalidArgumentError if one is not there. On a host without a network: the loopback address.
    """
    present = interfaces()
    if not wanted:
        return [i.address for i in present if not i.is_loopback] or [LOOPBACK]
    chosen: list[str] = []
    for item in wanted:
        matches = [i.address for i in present if _matches(i, item)]
        if not matches:
            listed = ", ".join(f"{i.name} ({i.address})" for i in present) or "none"
            raise InvalidArgumentError(
                f"interface {item!r} is not on {socket.gethostname()}; there: {listed}"
            )
        chosen += [address for address in matches if address not in chosen]
    return chosen


def _matches(interface: Interface, item: str) -> bool:
    if "/" not in item:
        return interface.name == item
    try:
        network = ipaddress.ip_network(item, strict=False)
    except ValueError:
        raise InvalidArgumentError(
            f"interface {item!r}: expected a name, or a network as 10.1.0.0/16"
        ) from None
    return ipaddress.ip_address(interface.address) in network


def is_loopback(address: str) -> bool:
    """Whether ``address``, without a port, is one that only this host reaches."""
    return ipaddress.ip_address(address).is_loopback


def listen(addresses: Sequence[str], backlog: int) -> list[socket.socket]:
    """A listening socket at each of the addresses that can be had, each with a port of its own.

    Raises BootstrapError if there is none.
    """
    sockets: list[socket.socket] = []
    reason = "no address was given"
    for address in addresses[:_MAX_ADDRESSES]:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            sockets.append(socket.create_server((address, 0), family=family, backlog=backlog))
        except OSError as error:
            reason = f"{address}: {error.strerror or error}"
    if not sockets:
        raise BootstrapError(f"cannot listen at any address of this host ({reason})")
    return sockets


def address_of(sock: socket.socket) -> str:
    """Where a socket listens, as "ip:port" or "[ip]:port"."""
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_addresses(text: str) -> list[tuple[str, int]]:
    """From "10.0.0.1:500,[fd00::1]:500", or with host names. Raises BootstrapError."""
    found = []
    for item in text.split(",")[:_MAX_ADDRESSES]:
        host, _, port = item.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise BootstrapError(f"{text!r}: expected host:port, or several with commas between")
        found.append((host.strip("[]"), int(port)))
    return found


def connect_any(addresses: str, secret: str, label: str, deadline: float) -> Channel:
    """Connect to the first of ``addresses`` ("ip:port,ip:port") that proves the secret.

    The next one is tried as well when one fails, or has not answered within a quarter of a second.
    Raises AuthenticationError if nobody proves it but somebody answers, OSError with every reason
    if nobody does.
    """
    targets = [
        (family, place, f"{host}:{port}")
        for host, port in split_addresses(addresses)
        for family, _, _, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    ]
    if len(targets) == 1:
        family, place, _ = targets[0]
        return connect(family, place, secret, label, deadline)
    attempts = [
        (text, partial(connect, family, place, secret, label, deadline))
        for family, place, text in targets
    ]
    return _first(attempts, deadline)


def _first(attempts: Sequence[tuple[str, Callable[[], Channel]]], deadline: float) -> Channel:
    """What the first attempt that succeeds returns; the others are given up."""
    results: queue.SimpleQueue[tuple[str, Channel | Exception]] = queue.SimpleQueue()
    lock = threading.Lock()
    won = False

    def run(text: str, attempt: Callable[[], Channel]) -> None:
        nonlocal won
        try:
            channel = attempt()
        except Exception as error:
            results.put((text, error))
            return
        with lock:
            is_first, won = not won, True
        if is_first:
            results.put((text, channel))
        else:
            channel.close()

    waiting, failed = 0, {}
    pending = list(attempts)
    while pending or waiting:
        if pending:
            args = pending.pop(0)
            threading.Thread(target=run, args=args, name="kolovod connect", daemon=True).start()
            waiting += 1
        limit_s = _STAGGER_S if pending else max(0.0, deadline - time.monotonic()) + 1
        try:
            text, result = results.get(timeout=limit_s)
        except queue.Empty:
            if pending:
                continue
            break
        waiting -= 1
        if isinstance(result, Channel):
            return result
        failed[text] = result
    for error in failed.values():
        if isinstance(error, AuthenticationError):
            raise error
    reasons = "; ".join(f"{text}: {error}" for text, error in failed.items())
    raise ConnectionError(reasons or "nobody answers in time")
