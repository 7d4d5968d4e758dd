"""kolovod.net.addresses: addresses, and the one that answers. Loopback only."""

from __future__ import annotations

import contextlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from ports import refusing_port
from waiting import DEADLINE_S

from kolovod.errors import AuthenticationError, BootstrapError, InvalidArgumentError
from kolovod.net import addresses as net_addresses
from kolovod.net.addresses import (
    Interface,
    address_of,
    connect_any,
    endpoint,
    listen,
    own_addresses,
    reach,
    split_addresses,
)
from kolovod.net.channel import greet, new_secret
from kolovod.net.server import Server


@contextlib.contextmanager
def servers(secret, *addresses, answer="yes"):
    """One server at each; yields where they listen."""

    def say(channel):
        channel.send(answer, time.monotonic() + DEADLINE_S)

    sockets = listen(addresses, 8)
    running = [Server(sock, secret, "test", say) for sock in sockets]
    places = [address_of(sock) for sock in sockets]
    try:
        for server in running:
            server.start()
        yield places
    finally:
        for server in running:
            server.close()


def ask(addresses, secret, limit_s=DEADLINE_S):
    deadline = time.monotonic() + limit_s
    with contextlib.closing(connect_any(",".join(addresses), secret, "test", deadline)) as channel:
        return channel.receive(deadline)


@pytest.fixture
def closed():
    """Addresses at which connections are refused, for as long as the test lasts."""
    with refusing_port() as one, refusing_port() as other:
        yield [address_of(one), address_of(other)]


@pytest.fixture
def mute():
    """Accepts, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield address_of(sock)


def test_the_first_that_proves_the_secret_is_taken(mute, closed, monkeypatch):
    monkeypatch.setattr(net_addresses, "HANDSHAKE_TIMEOUT_S", 0.3)  # of one that says nothing

    def greet_in_peace(sock, *arguments, **options):
        *others, limit = arguments
        if endpoint(*sock.getpeername()[:2]) != mute:  # who does say something may take longer
            limit = time.monotonic() + DEADLINE_S
        return greet(sock, *others, limit, **options)

    monkeypatch.setattr(net_addresses, "greet", greet_in_peace)
    secret = new_secret()
    with servers(secret, "127.0.0.1", "::1") as (four, six):
        assert six.startswith("[::1]:")
        for addresses in ([four], [six], [closed[0], four], [mute, six], [six, mute, four]):
            assert ask(addresses, secret) == "yes"
        # A stranger's server, as on a network of the same numbers at another site.
        with servers(new_secret(), "127.0.0.1") as (stranger,):
            assert ask([stranger, four], secret) == "yes"
            with pytest.raises(AuthenticationError):
                ask([stranger, closed[0]], secret)


def test_nobody_answers(mute, closed, monkeypatch):
    with pytest.raises(OSError, match=rf"{closed[0]}: .*refused.*; {closed[1]}: .*refused"):
        ask(closed, new_secret())
    monkeypatch.setattr(net_addresses, "HANDSHAKE_TIMEOUT_S", 3600.0)  # the caller's limit counts
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask, [mute, mute], new_secret(), limit_s=0.5)
        with pytest.raises(OSError, match=r"time|deadline"):
            asking.result(DEADLINE_S)


def test_addresses_that_were_not_tried_in_time_are_named(closed):
    with pytest.raises(ConnectionError) as told:
        next(reach(",".join(closed), time.monotonic()))
    assert str(told.value) == "; ".join(f"{address}: no answer in time" for address in closed)


def test_addresses_as_text():
    assert split_addresses("10.0.0.1:5,[fd00::1]:6,node-1:7") == [
        ("10.0.0.1", 5),
        ("fd00::1", 6),
        ("node-1", 7),
    ]
    for text in ("", "a", "a:0", "a:x", "a:70000", ":5"):
        with pytest.raises(BootstrapError, match="expected host:port"):
            split_addresses(text)


def test_interfaces_are_chosen_by_name_and_by_network(monkeypatch):
    present = [
        Interface("ib0", "10.2.0.1", 100_000, False),
        Interface("ib0", "fd00::1", 100_000, False),
        Interface("eth0", "10.1.0.1", 1_000, False),
        Interface("lo", "127.0.0.1", 0, True),
    ]
    monkeypatch.setattr(net_addresses, "interfaces", lambda: present)
    assert own_addresses() == ["10.2.0.1", "fd00::1", "10.1.0.1"]
    assert own_addresses(["eth0", "10.2.0.0/16"]) == ["10.1.0.1", "10.2.0.1"]
    assert own_addresses(["lo"]) == ["127.0.0.1"]
    with pytest.raises(InvalidArgumentError, match=r"interface 'eth9' is not on .*ib0 \(10.2.0.1"):
        own_addresses(["eth9"])
    with pytest.raises(InvalidArgumentError, match=r"'10.9/x': expected a name, or a network"):
        own_addresses(["10.9/x"])
    monkeypatch.setattr(net_addresses, "interfaces", lambda: present[-1:])
    assert own_addresses() == ["127.0.0.1"]


def test_the_interfaces_of_this_host():
    found = net_addresses.interfaces()
    assert any(i.is_loopback and i.address == "127.0.0.1" for i in found)
    assert [i.is_loopback for i in found] == sorted(i.is_loopback for i in found)
    for interface in found:
        family = socket.AF_INET6 if ":" in interface.address else socket.AF_INET
        assert socket.inet_pton(family, interface.address)


def test_addresses_that_cannot_be_had_are_left_out():
    sockets = listen(["192.0.2.254", "127.0.0.1"], 1)  # the first is of no host (RFC 5737)
    assert [address_of(sock).rpartition(":")[0] for sock in sockets] == ["127.0.0.1"]
    sockets[0].close()
    with pytest.raises(BootstrapError, match=r"192\.0\.2\.254"):
        listen(["192.0.2.254"], 1)


def test_a_lasting_port_is_none_that_outgoing_connections_get():
    first = int(net_addresses._PORTS_OF_CONNECTIONS.read_text().split()[0])
    with contextlib.ExitStack() as stack:
        made = [
            stack.enter_context(sock)
            for _ in range(20)
            for sock in listen(["127.0.0.1", "::1"], 8, lasting=True)
        ]
        ports = [sock.getsockname()[1] for sock in made]
        assert all(first // 2 <= port < first for port in ports)
        (again,) = listen(["127.0.0.1"], 8, lasting=True)
        address = address_of(again)
        again.close()
        (later,) = net_addresses.listen_again(address, 8)
        assert address_of(later) == address
        later.close()
        with pytest.raises(BootstrapError, match=r"cannot listen at 127.0.0.1:\d+ again"):
            net_addresses.listen_again(address_of(made[0]), 8)


def test_where_all_tried_ports_are_taken_the_system_chooses(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(net_addresses, "_some_ports", lambda: [port, 0])
        (made,) = listen(["127.0.0.1"], 8, lasting=True)
        with made:
            assert made.getsockname()[1] not in (0, port)
