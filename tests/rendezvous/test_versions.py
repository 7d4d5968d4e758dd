"""Ranks whose releases of Kolovod do not understand each other refuse each other, and say why."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from launched import run_code
from meeting import (  # noqa: F401
    JOIN,
    SECRET,
    joining,
    made_pool,
    made_store,
    member,
    wait_until_joined,
)

from kolovod import _native
from kolovod.errors import BootstrapError
from kolovod.net.channel import Channel, connect
from kolovod.rendezvous import mesh, versions
from kolovod.rendezvous.protocol import Formation
from kolovod.rendezvous.server import LABEL, RendezvousServer
from kolovod.version import __version__

OTHER = {"protocol": _native.PROTOCOL + 1, "version": "9.8.7"}
THEIRS = rf"Kolovod 9\.8\.7 \(protocol {_native.PROTOCOL + 1}\)"
OURS = rf"Kolovod {__version__} \(protocol {_native.PROTOCOL}\)"


def say(address: str, label: str, message: dict[str, Any]) -> Any:
    """The first answer to ``message``."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + 10
    with contextlib.closing(
        connect(socket.AF_INET, (host, int(port)), SECRET, label, deadline)
    ) as channel:
        channel.send(message, deadline)
        return channel.receive(deadline)


def test_a_rank_of_another_release_is_named_to_all(
    server: RendezvousServer, pool: ThreadPoolExecutor
) -> None:
    stranger = {**JOIN, **OTHER, "member": [1, "h", 7, "a field that is new"]}
    waiting = joining(pool, server, 0, [0, 1])
    wait_until_joined(server, 1)
    answer = say(server.address, LABEL, stranger)
    assert (answer["error"], answer["rank"]) == ("version", 1)
    text = rf"rank 1 on host h \(pid 7\) has {THEIRS}, but .* has {OURS}: install the same version"
    with pytest.raises(BootstrapError, match=text):
        waiting.result(10)
    # Whoever comes later hears it at once, whatever the rank has ended with,
    server.mark_dead(1, "exited with code 1")
    with pytest.raises(BootstrapError, match=text):
        joining(pool, server, 0, [0, 1]).result(10)


def test_who_comes_again_with_the_right_release_is_welcome(
    server: RendezvousServer, pool: ThreadPoolExecutor
) -> None:
    assert say(server.address, LABEL, {**JOIN, **OTHER})["error"] == "version"
    ranks = [joining(pool, server, 0, [0, 1])]
    wait_until_joined(server, 1)
    ranks.append(joining(pool, server, 1, [0, 1]))
    assert {rank.result(10).epoch for rank in ranks} == {1}


@pytest.mark.parametrize("message", [{}, [], "JOIN", {**JOIN, "version": 1}, {**JOIN, **OTHER}])
def test_whatever_says_no_version_of_ours_is_answered(
    server: RendezvousServer, message: Any
) -> None:
    answer = say(server.address, LABEL, message)
    assert answer["error"] == "version"
    assert "install the same version of Kolovod everywhere" in answer["message"]
    assert server._groups == {}


def test_a_rank_of_another_host_is_refused() -> None:
    listener = mesh.Listener(["127.0.0.1"], 2)
    world = Formation(1, (member(0), member(1)))
    with contextlib.closing(mesh.Links(0, world, listener, SECRET)) as links:
        listener.start(SECRET, links._serve)
        label = mesh._label(listener.address)
        hello = {"rank": 1, "purpose": "control", "epoch": 1, "stripe": 0}
        assert say(listener.address, label, {**hello, **versions.own()})["welcome"] is True
        for theirs in (OTHER, {}):
            answer = say(listener.address, label, {**hello, **theirs})
            assert answer == {**versions.own(), "welcome": False}


def test_a_rank_that_is_refused_for_its_release_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(channel: Channel) -> None:
        deadline = time.monotonic() + 10
        channel.receive(deadline)
        channel.send({**OTHER, "welcome": False}, deadline)

    there, here = (mesh.Listener(["127.0.0.1"], 2) for _ in range(2))
    there.start(SECRET, serve)
    leader = dataclasses.replace(member(0), host="a", address=there.address)
    world = Formation(1, (leader, member(1)))
    text = rf"rank 0 on host a \(pid 1000\) has {THEIRS}, but rank 1 .* has {OURS}"
    with contextlib.closing(there), contextlib.closing(mesh.Links(1, world, here, SECRET)) as links:
        deadline = time.monotonic() + 10
        with pytest.raises(BootstrapError, match=text):
            links.connect_leaders(deadline, lambda: None)
        # For the engine, which asks while it runs: at once, since no second try will help.
        said: list[str] = []
        board = SimpleNamespace(closed=False, connected=said.append, failed=said.append)
        monkeypatch.setattr(links, "broker", board)
        links._connect_data(0, 0)
        monkeypatch.undo()
        assert [bool(re.search(text, one)) for one in said] == [True]


def test_a_job_with_two_releases() -> None:
    code = """
from kolovod.rendezvous import versions
if rank == 1:
    versions.own = lambda: {"protocol": 99, "version": "9.8.7"}
import kolovod
kolovod.init()
"""
    done = run_code(3, code)
    assert done.returncode == 1
    text = "has Kolovod 9.8.7 (protocol 99), but the rendezvous server where ranks meet, in the"
    told = f"{text} launcher, has {versions.OURS}: {versions.ADVICE}"
    assert done.stderr.count(told) >= 3
