"""kolovod.rendezvous.server: ranks meet, or hear at once why not."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from meeting import (  # noqa: F401
    JOIN,
    SECRET,
    TIMEOUT_S,
    all_join,
    joining,
    made_pool,
    made_store,
    meet,
    member,
    wait_until_joined,
)
from waiting import DEADLINE_S, until

from kolovod.errors import (
    AuthenticationError,
    BootstrapError,
    InvalidArgumentError,
)
from kolovod.net.channel import connect, encode, new_secret
from kolovod.net.messages import MAX_RANKS
from kolovod.rendezvous import versions
from kolovod.rendezvous.client import join
from kolovod.rendezvous.protocol import Formation, Member, encode_members, parse_answer
from kolovod.rendezvous.server import LABEL, RendezvousServer


@pytest.mark.parametrize("size", [1, 2, 8])
def test_everybody_hears_about_everybody(
    server: RendezvousServer, pool: ThreadPoolExecutor, size: int
) -> None:
    members = list(range(size))
    formations = [joining(pool, server, rank, members) for rank in reversed(members)]
    expected = Formation(1, tuple(member(rank) for rank in members))
    assert [formation.result(DEADLINE_S) for formation in formations] == [expected] * size


def test_the_first_members_config_is_told_to_all(
    server: RendezvousServer, pool: ThreadPoolExecutor
) -> None:
    members = [1, 3, 4, 5, 7]
    formations = [
        pool.submit(meet, server.address, SECRET, members, member(rank), 20.0, {"a": rank, "b": -1})
        for rank in reversed(members)
    ]
    for formation in formations:
        assert formation.result(DEADLINE_S).config == {"a": 1, "b": -1}
        assert [m.rank for m in formation.result(DEADLINE_S).members] == members


def test_ranks_that_wait_have_no_threads(
    server: RendezvousServer, pool: ThreadPoolExecutor
) -> None:
    before = threading.active_count()
    members = list(range(16))
    waiting = [joining(pool, server, rank, members) for rank in members[1:]]
    wait_until_joined(server, 15)
    # Those of the pool; the last handshake's thread ends.
    until(lambda: threading.active_count() <= before + 15)
    waiting.append(joining(pool, server, 0, members))
    assert {formation.result(DEADLINE_S).epoch for formation in waiting} == {1}
    until(lambda: not server._waiting)


def test_who_joins_again_is_counted_once(
    server: RendezvousServer, pool: ThreadPoolExecutor
) -> None:
    first = joining(pool, server, 0, [0, 1])
    wait_until_joined(server, 1)
    again = joining(pool, server, 0, [0, 1])
    until(lambda: len(server._waiting) == 2)
    joining(pool, server, 1, [0, 1]).result(DEADLINE_S)
    assert again.result(DEADLINE_S).epoch == 1
    server.close()
    with pytest.raises(BootstrapError):
        first.result(DEADLINE_S)


@pytest.mark.slow
def test_the_answer_to_all_ranks_there_may_be() -> None:
    """Each told at several addresses: in messages of at most 1 MiB, and nothing is lost."""
    told = ",".join(["[fd00:1234:5678:9abc:def0:1234:5678:9abc]:40000"] * 8)
    everybody = [
        Member(rank, f"host-{rank}", rank, "pid:[4026531836]", "kolovod-" + "0" * 32, 1000, told)
        for rank in range(MAX_RANKS)
    ]
    parts = encode_members(everybody)
    bodies = [encode(part) for part in parts]  # which refuses what is too long
    assert sum(map(len, bodies)) > 20 << 20
    bodies[0] = encode({"epoch": 1, "config": {}, "notes": {}, **parts[0]})
    received = map(json.loads, bodies)
    formation = parse_answer(lambda: next(received), range(MAX_RANKS), None)
    assert formation.members == tuple(everybody)
    assert next(received, None) is None


def test_an_answer_of_several_messages(pool: ThreadPoolExecutor) -> None:
    """The whole rendezvous of one rank among 4096, without the other 4095 connections."""
    size = 4096
    with contextlib.closing(RendezvousServer(SECRET, size)) as made:
        made.start()
        me = dataclasses.replace(member(size - 1), socket="kolovod-" + "0" * 32)
        waiting = pool.submit(meet, made.address, SECRET, range(size), me, TIMEOUT_S)
        wait_until_joined(made, 1)
        nobody = SimpleNamespace(send_encoded=lambda *_: None)
        with made._lock:
            (group,) = made._groups.values()
            for rank in range(size - 1):
                facts = dataclasses.replace(me, rank=rank, host=f"host-{rank // 8}")
                group.joined[rank] = (facts, nobody)
            made._complete(group)
        members = waiting.result(DEADLINE_S).members
    assert [m.rank for m in members] == list(range(size))
    assert members[-1] == me
    assert members[17].host == "host-2"


def test_every_world_has_a_new_epoch(server: RendezvousServer, pool: ThreadPoolExecutor) -> None:
    epochs = []
    for members in ([0, 1, 2], [0, 1, 2], [0, 2]):
        joined = all_join(pool, server, members)
        epochs.append({one.formation.epoch for one in joined})
        # Else one that goes before the others is lost, and so is the next world.
        formed = [pool.submit(one.formed, time.monotonic() + TIMEOUT_S) for one in joined]
        for one, future in zip(joined, formed, strict=True):
            future.result(DEADLINE_S)
            one.close()
    assert epochs == [{1}, {2}, {3}]


def test_disjoint_worlds_form_side_by_side(
    server: RendezvousServer, pool: ThreadPoolExecutor
) -> None:
    first = [joining(pool, server, rank, [0, 1]) for rank in (0,)]
    second = [joining(pool, server, rank, [2, 3]) for rank in (2, 3)]
    assert [[m.rank for m in f.result(DEADLINE_S).members] for f in second] == [[2, 3]] * 2
    first.append(joining(pool, server, 1, [0, 1]))
    assert len({f.result(DEADLINE_S).epoch for f in first}) == 1


def test_different_worlds_that_wait_for_each_other_are_refused(
    server: RendezvousServer, pool: ThreadPoolExecutor
) -> None:
    first = joining(pool, server, 1, [0, 1, 2])
    wait_until_joined(server, 1)
    second = joining(pool, server, 2, [1, 2])
    for future in (first, second):
        with pytest.raises(InvalidArgumentError, match=r"\[1, 2\], but rank 1 for \[0, 1, 2\]"):
            future.result(DEADLINE_S)


def test_two_processes_of_one_rank_are_told_apart(
    server: RendezvousServer, pool: ThreadPoolExecutor
) -> None:
    first = joining(pool, server, 0, [0, 1])
    wait_until_joined(server, 1)
    with pytest.raises(InvalidArgumentError, match=r"pid 1000\) has joined already.*pid 77 now"):
        join(server.address, SECRET, [0, 1], member(0, pid=77), TIMEOUT_S)
    joining(pool, server, 1, [0, 1]).result(DEADLINE_S)
    assert first.result(DEADLINE_S).epoch == 1


def test_another_jobs_secret_is_refused(server: RendezvousServer) -> None:
    with pytest.raises(AuthenticationError, match="KOLOVOD_SECRET"):
        join(server.address, new_secret(), [0], member(0), TIMEOUT_S)


def test_garbage_and_silence_do_not_disturb(
    server: RendezvousServer, pool: ThreadPoolExecutor
) -> None:
    port = int(server.address.split(":")[1])
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(16)]
    for stranger in strangers[:4]:
        stranger.sendall(os.urandom(1000))
    strangers[4].sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    formations = [joining(pool, server, rank, [0, 1]) for rank in (0, 1)]
    assert [formation.result(DEADLINE_S).epoch for formation in formations] == [1, 1]
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize(
    "message",
    [
        versions.own(),
        {**versions.own(), "members": [[1, 0]]},
        {**JOIN, "members": []},
        {**JOIN, "members": [0, 1]},
        {**JOIN, "members": [[0, 1], [1, 2]]},
        {**JOIN, "members": [[0, 1 << 40]]},
        {**JOIN, "member": [5, "h", 1, "", "", 0, "", False]},
        {**JOIN, "member": [0, "h"]},
        {**JOIN, "config": [1]},
        {**JOIN, "config": {str(number): number for number in range(1000)}},
        {**JOIN, "timeout_s": 0},
    ],
)
def test_a_malformed_request_is_answered(server: RendezvousServer, message: object) -> None:
    address = ("127.0.0.1", int(server.address.split(":")[1]))
    deadline = time.monotonic() + DEADLINE_S
    with contextlib.closing(connect(socket.AF_INET, address, SECRET, LABEL, deadline)) as channel:
        channel.send(message, deadline)
        assert channel.receive(deadline)["error"] == "malformed"
    assert server._groups == {}


@pytest.mark.parametrize("address", ["", "nowhere", "host:", "host:port", ":1"])
def test_a_wrong_address_is_named(address: str) -> None:
    with pytest.raises(BootstrapError, match=r"KOLOVOD_STORE=.*expected host:port"):
        join(address, SECRET, [0], member(0), TIMEOUT_S)
