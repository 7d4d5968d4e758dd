"""kolovod.launch.hosts: what users write, and which rank goes where."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kolovod.errors import InvalidArgumentError
from kolovod.launch.hosts import HostSlots, assign, is_this_host, parse_host_file, parse_hosts


def test_hosts_as_users_write_them():
    assert parse_hosts("a:2, node-1.x.org:4,me@b,[fd00::1]:3") == [
        HostSlots("a", 2),
        HostSlots("node-1.x.org", 4),
        HostSlots("me@b", 1),
        HostSlots("fd00::1", 3),
    ]
    assert parse_hosts("a:2,b:1,a:3") == [HostSlots("a", 5), HostSlots("b", 1)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is not of the form HOST:SLOTS"),
        ("a:2,,b", "'' is not of the form"),
        ("a:two", "'a:two' is not of the form"),
        ("a:0", "a has 0 slots; expected 1 to 1024"),
        ("a:2000", "a has 2000 slots"),
        ("fd00::1:2", "is not of the form"),
        ("[fd00::1::2]:2", "is not an IPv6 address"),
        ("-oProxyCommand:1", "is not of the form"),
        ("a;b:1", "is not of the form"),
    ],
)
def test_wrong_hosts(text, said):
    with pytest.raises(InvalidArgumentError) as caught:
        parse_hosts(text)
    assert said in str(caught.value)


def test_a_host_file():
    text = "# mine\na slots=2\n\nb:3   # three\n c \n[::1] slots = 1\n"
    assert parse_host_file(text, "f") == [
        HostSlots("a", 2),
        HostSlots("b", 3),
        HostSlots("c", 1),
        HostSlots("::1", 1),
    ]
    with pytest.raises(InvalidArgumentError, match="f, line 2: 'b slots=x' is not of the form"):
        parse_host_file("a\nb slots=x\n", "f")
    with pytest.raises(InvalidArgumentError, match="the host file f names no host"):
        parse_host_file("# nothing\n", "f")


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_ranks_fill_the_hosts_in_order(slots, data):
    hosts = [HostSlots(f"h{index}", count) for index, count in enumerate(slots)]
    size = data.draw(st.none() | st.integers(1, sum(slots)))
    placed = assign(hosts, size)
    assert len(placed) == (sum(slots) if size is None else size)
    assert placed == sorted(placed)
    for host in hosts:
        assert placed.count(host.name) <= host.slots
    full = [host for host in hosts if host.name in placed][:-1]
    assert all(placed.count(host.name) == host.slots for host in full)


def test_too_few_slots():
    with pytest.raises(InvalidArgumentError, match=r"5 ranks were .* hosts a:2,b:2 have 4 slots"):
        assign(parse_hosts("a:2,b:2"), 5)


def test_which_names_are_this_host():
    for name in ("localhost", "127.0.0.1", "::1", socket.gethostname()):
        assert is_this_host(name), name
    for name in ("192.0.2.254", "no-such-host.invalid", "root@localhost", "a" * 300):
        assert not is_this_host(name), name
