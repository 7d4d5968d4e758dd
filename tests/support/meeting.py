"""Ranks that meet at a rendezvous server: what its tests share."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from waiting import DEADLINE_S, until

from kolovod.net.channel import connect, new_secret
from kolovod.rendezvous import versions
from kolovod.rendezvous.client import Joined, join
from kolovod.rendezvous.protocol import Formation, Member
from kolovod.rendezvous.server import LABEL, RendezvousServer

SECRET = new_secret()
TIMEOUT_S = 20.0
JOIN = {
    **versions.own(),
    "members": [[0, 1]],
    "member": [0, "h", 1, "", "", 0, "", False],
    "config": {},
    "notes": {},
    "timeout_s": 1,
    "scope": 0,
}


@pytest.fixture(name="server")
def made_store() -> Iterator[RendezvousServer]:
    with contextlib.closing(RendezvousServer(SECRET, 8)) as made:
        made.start()
        yield made


@pytest.fixture(name="pool")
def made_pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as made:
        yield made


def member(rank: int, pid: int | None = None) -> Member:
    return Member(rank, "localhost", 1000 + rank if pid is None else pid, "", f"socket-{rank}", 0)


def meet(*arguments: Any) -> Formation:
    """Only until the answer."""
    with join(*arguments) as joined:
        return joined.formation


def all_join(pool: ThreadPoolExecutor, server: RendezvousServer, ranks: list[int]) -> list[Joined]:
    waiting = [
        pool.submit(join, server.address, SECRET, ranks, member(rank), TIMEOUT_S) for rank in ranks
    ]
    return [future.result(DEADLINE_S) for future in waiting]


def joining(
    pool: ThreadPoolExecutor,
    server: RendezvousServer,
    rank: int,
    members: list[int],
    timeout_s: float = 20.0,
    scope: int = 0,
) -> Future[Formation]:
    return pool.submit(
        meet, server.address, SECRET, members, member(rank), timeout_s, None, None, scope
    )


def come_and_go(server: RendezvousServer, waiting: int) -> None:
    """Rank 1 of three joins, as the one that makes ``waiting``, and its connection breaks."""
    address = ("127.0.0.1", int(server.address.split(":")[1]))
    deadline = time.monotonic() + DEADLINE_S
    with contextlib.closing(connect(socket.AF_INET, address, SECRET, LABEL, deadline)) as channel:
        facts = {"members": [[0, 2]], "member": [1, *JOIN["member"][1:]], "timeout_s": TIMEOUT_S}
        channel.send({**JOIN, **facts}, deadline)
        wait_until_joined(server, waiting)


def wait_until_joined(server: RendezvousServer, count: int) -> None:
    def joined() -> int:
        return sum(len(group.joined) for group in list(server._groups.values()))

    until(lambda: joined() == count, f"{count} ranks join")
