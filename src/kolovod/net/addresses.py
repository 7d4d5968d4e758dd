"""Addresses at which a process can be reached, and the one of them that answers.

Which network two hosts have in common is found by asking, not by comparing names of interfaces: a
server listens at all addresses of its host that are worth it and tells them; a client tries them in
that order, and stays with the first where somebody proves the secret.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import math
import os
import random
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kolovod.errors import AuthenticationError, BootstrapError, SettingError
from kolovod.net.channel import HANDSHAKE_TIMEOUT_S, Channel, greet, retried

__all__ = [
    "LOOPBACK",
    "Interface",
    "address_of",
    "addresses_beside",
    "connect_any",
    "endpoint",
    "first_that_greets",
    "interface_to",
    "interfaces",
    "is_loopback",
    "listen",
    "listen_again",
    "own_addresses",
    "reach",
    "resolve",
    "split_addresses",
]

LOOPBACK = "127.0.0.1"
_STAGGER_S = 0.25  # before the next address is tried as well, as RFC 8305 has it
_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915  # netdevice(7)
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
_MAX_ADDRESSES = 32
_MAX_TOLD = 8  # addresses of one rank
_STOP_PERIOD_S = 0.1
_PORTS_OF_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIED_PORTS = 64


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
    """Return those of this host (or network namespace), the fastest first; IPv4 before IPv6.

    Each has its first IPv4 address, and its IPv6 addresses except link-local ones.
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
    """Return the addresses at which other hosts may reach this one, the fastest first.

    These are all but loopback addresses; on a host without a network, the loopback address.
    ``wanted``: take only these, in this order: names of interfaces, or networks as 10.1.0.0/16.
    Raises InvalidArgumentError if one is not there.
    """
    present = interfaces()
    if not wanted:
        return [i.address for i in present if not i.is_loopback] or [LOOPBACK]
    chosen: list[str] = []
    for item in wanted:
        matches = [i.address for i in present if _matches(i, item)]
        if not matches:
            listed = ", ".join(f"{i.name} ({i.address})" for i in present) or "none"
            raise SettingError(
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
        raise SettingError(
            f"interface {item!r}: expected a name, or a network as 10.1.0.0/16"
        ) from None
    return ipaddress.ip_address(interface.address) in network


def is_loopback(address: str) -> bool:
    """Return whether only this host can reach ``address``, which has no port."""
    return ipaddress.ip_address(address).is_loopback


def listen(
    addresses: Sequence[str], backlog: int, port: int = 0, *, lasting: bool = False
) -> list[socket.socket]:
    """Return a listening socket at each of the addresses that can be had.

    ``port``: of all of them; 0: each has a free one of its own. ``lasting``: a port that the system
    gives to nobody by itself, so that a later process can ``listen_again`` there. Raises
    BootstrapError if there is none.
    """
    sockets: list[socket.socket] = []
    reason = "no address was given"
    for address in addresses[:_MAX_ADDRESSES]:
        try:
            ports = _some_ports() if lasting and not port else [port]
            sockets.append(_listen_at(address, ports, backlog))
        except OSError as error:
            reason = f"{address}: {error.strerror or error}"
    if not sockets:
        raise BootstrapError(f"cannot listen at any address of this host ({reason})")
    return sockets


def _listen_at(address: str, ports: Iterable[int], backlog: int) -> socket.socket:
    """Return a socket that listens at the first of ``ports`` that is free; 0: the system's choice.

    Raises the OSError of the last one.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    *others, last = ports
    for port in others:
        with contextlib.suppress(OSError):
            return socket.create_server((address, port), family=family, backlog=backlog)
    return socket.create_server((address, last), family=family, backlog=backlog)


def _some_ports() -> list[int]:
    """Return ports below those of outgoing connections, drawn at random, and 0 in the end."""
    try:
        first = int(_PORTS_OF_CONNECTIONS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 0
    below = range(first // 2, first)
    return [*random.sample(below, min(_TRIED_PORTS, len(below))), 0]


def listen_again(addresses: str, backlog: int) -> list[socket.socket]:
    """Return a listening socket at each of "ip:port,ip:port", where a process listened before.

    Raises BootstrapError if one cannot be had.
    """
    sockets: list[socket.socket] = []
    try:
        for host, port in split_addresses(addresses):
            sockets.append(_listen_at(host, [port], backlog))
    except OSError as error:
        for sock in sockets:
            sock.close()
        raise BootstrapError(f"cannot listen at {addresses} again: {error}") from error
    return sockets


def address_of(sock: socket.socket) -> str:
    """Return the address at which a socket listens, as "ip:port" or "[ip]:port"."""
    return endpoint(*sock.getsockname()[:2])


def endpoint(host: str, port: int) -> str:
    """Return "host:port", or "[ip]:port" for IPv6: ``split_addresses`` takes it apart again."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(host: str) -> list[str]:
    """Return the addresses that ``host`` stands for here, IPv4 and IPv6, as a client tries them.

    Raises OSError if it is not known.
    """
    return list(dict.fromkeys(place[0] for _, place in _resolved(host, 0)))


def split_addresses(text: str, what: str = "address") -> list[tuple[str, int]]:
    """Take apart "10.0.0.1:500,[fd00::1]:500", or the same with host names.

    Raises BootstrapError that calls it ``what``.
    """
    found = []
    for item in text.split(",")[:_MAX_ADDRESSES]:
        host, _, port = item.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise BootstrapError(
                f"{what}={text!r}: expected host:port, or several with commas between"
            )
        found.append((host.strip("[]"), int(port)))
    return found


def _resolved(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    """Return the addresses to connect to; numeric ones need no name service, nor a codec."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        return [(family, (host, port))]
    except ValueError:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return [(family, (str(place[0]), port)) for family, _, _, _, place in found]


def interface_to(addresses: str) -> str:
    """Return the address of this host's interface to the first of ``addresses``.

    Raises BootstrapError if there is none.
    """
    host, port = split_addresses(addresses)[0]
    try:
        family, place = _resolved(host, port)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing
            name: str = probe.getsockname()[0]
            return name
    except OSError as error:
        raise BootstrapError(f"no interface of this host leads to {addresses}: {error}") from error


def addresses_beside(store: str, wanted: Sequence[str], turn: int) -> list[str]:
    """Return the addresses, the best first, at which a rank of the job of ``store`` is to listen.

    If that is on the loopback interface, so is the rank's address: all ranks are here.
    ``turn``: this rank's place on its host, by which ranks prefer different ones of several
    interfaces that are ``wanted``, and so use them all. Raises what ``own_addresses`` raises.
    """
    leading = interface_to(store)
    if is_loopback(leading):
        return [leading]
    if wanted:
        turn %= len(wanted)
        return own_addresses([*wanted[turn:], *wanted[:turn]])[:_MAX_TOLD]
    found = own_addresses()
    speeds = {i.address: i.speed_mbit_per_s for i in interfaces()}
    found.sort(key=lambda address: (-speeds.get(address, 0), address != leading))
    return found[:_MAX_TOLD]


def reach(
    addresses: str, deadline: float, stop: Callable[[], bool] = lambda: False
) -> Iterator[socket.socket]:
    """Yield connections to those of ``addresses`` ("ip:port,ip:port") that answer, as they come.

    The next one is tried as well when one fails, or has not answered within a quarter of a second.
    The caller closes what it gets, and ends the iteration when it has what it wants; it ends by
    itself once ``stop()``. Raises ConnectionError, with every reason, if none has answered by the
    ``deadline``.
    """
    pending = [
        (family, place, f"{host}:{port}")
        for host, port in split_addresses(addresses)
        for family, place in _resolved(host, port)
    ]
    waiting: dict[int, tuple[socket.socket, str]] = {}
    failed: list[str] = []
    answered = False
    poll = select.poll()
    next_at = 0.0
    try:
        while (pending or waiting) and not stop():
            now = time.monotonic()
            if now >= deadline:
                late = [text for *_, text in (*waiting.values(), *pending)]
                failed += [f"{text}: no answer in time" for text in late]
                break
            if pending and (now >= next_at or not waiting):
                family, place, text = pending.pop(0)
                sock = socket.socket(family, socket.SOCK_STREAM)
                sock.setblocking(False)
                sock.connect_ex(place)  # what became of it is asked below
                waiting[sock.fileno()] = sock, text
                poll.register(sock, select.POLLOUT)
                next_at = now + _STAGGER_S
            until = min(deadline, next_at if pending else deadline, now + _STOP_PERIOD_S)
            for fd, _ in poll.poll(max(0.0, until - now) * 1000 + 1):
                sock, text = waiting.pop(fd)
                poll.unregister(fd)
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    failed.append(f"{text}: {os.strerror(code)}")
                    sock.close()
                    next_at = 0.0
                else:
                    answered = True
                    yield sock
    finally:
        for sock, _ in waiting.values():
            sock.close()
    if not answered and not stop():
        raise ConnectionError("; ".join(failed))


def connect_any(
    addresses: str,
    secret: str,
    label: str,
    deadline: float,
    *,
    encrypted: bool = False,
    reach_s: float = math.inf,
) -> Channel:
    """Connect to the first of ``addresses`` ("ip:port,ip:port") where somebody proves the secret.

    ``encrypted``: what passes is encrypted. ``reach_s``: for a host to take the connection, if
    less than until the ``deadline``: its kernel does, however busy its processes are. Raises
    AuthenticationError if nobody proves it but somebody answers, OSError if nobody does.
    """

    def attempt() -> Channel:
        found = reach(addresses, min(deadline, time.monotonic() + reach_s))
        return first_that_greets(found, addresses, secret, label, deadline, encrypted=encrypted)

    return retried(attempt, deadline)


def first_that_greets(
    found: Iterator[socket.socket],
    addresses: str,
    secret: str,
    label: str,
    deadline: float,
    *,
    encrypted: bool = False,
) -> Channel:
    """Do the handshake on those that are ``found``, one after the other, until one succeeds.

    Where there are several, one that says nothing for ten seconds is given up. Raises what the
    last one did; AuthenticationError before others.
    """
    refused: Exception | None = None
    for sock in found:
        limit = deadline
        if "," in addresses:
            limit = min(deadline, time.monotonic() + HANDSHAKE_TIMEOUT_S)
        try:
            return greet(sock, secret, label, limit, encrypted=encrypted)
        except (AuthenticationError, EOFError, OSError) as error:
            sock.close()
            if refused is None or isinstance(error, AuthenticationError):
                refused = error
    raise refused or ConnectionError("given up")
