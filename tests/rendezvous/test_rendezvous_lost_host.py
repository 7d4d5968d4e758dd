"""A host vanishes while ranks of an elastic job meet: the rendezvous server's, or another rank's.

The start timeout is longer than the tests: it is not by that.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from netbed import Bed, Job, unavailable
from reached_by_ssh import environment

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())
LIMIT_S = 30.0
JOIN = """
import socket, sys, time
from kolovod.errors import KolovodError
from kolovod.net import lost_hosts
from kolovod.net.channel import Channel
from kolovod.net.addresses import split_addresses
from kolovod.rendezvous.client import join
from kolovod.rendezvous.protocol import Member
server, rank = sys.argv[1], int(sys.argv[2])
plain = Channel.send

def send(channel, message, deadline):
    plain(channel, message, deadline)
    Channel.send = plain
    while lost_hosts._has_unacknowledged(channel.fileno()):
        time.sleep(0.005)
    print("has joined", flush=True)

Channel.send = send
for place in split_addresses(server):
    socket.create_connection(place).close()  # so this host knows where the other one is
secret = sys.stdin.readline().strip()
print("ready", flush=True)
sys.stdin.readline()
print("joins", flush=True)
try:
    join(server, secret, (0, 1, 2), Member(rank, f"h{rank}", 1, "", "", 0), 600.0, scope=1)
except KolovodError as error:
    print(error, flush=True)
"""


class Rank:
    """One on a host of its own."""

    def __init__(self, bed: Bed, host: str, job: Job, rank: int) -> None:
        command = [sys.executable, "-c", JOIN, job.server, str(rank)]
        self.process = bed.popen(
            host,
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        self.say(job.secret, "ready")

    def say(self, line: str, answer: str = "joins") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        self.hear(answer)

    def hear(self, answer: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"{answer}\n"

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(name="ranks")
def made_ranks(bed: Bed) -> Iterator[list[Rank]]:
    with Job(bed, ["s"]) as job, ExitStack() as cleanup:
        ranks = []
        for rank, host in enumerate("ab"):
            ranks.append(Rank(bed, host, job, rank))
            cleanup.callback(ranks[-1].close)
        yield ranks


@pytest.fixture(name="bed")
def made_bed() -> Iterator[Bed]:
    with Bed(["a", "b", "s"], with_sshd=False) as bed:
        yield bed


def said(rank: Rank) -> str:
    text: str = rank.process.communicate(timeout=LIMIT_S)[0]
    return text


@pytest.mark.slow
def test_the_servers_host_before_a_rank_comes(bed: Bed, ranks: list[Rank]) -> None:
    bed.set_link("s", up=False)
    ranks[0].say("go")
    assert "rank 0 cannot reach the job's rendezvous server at" in said(ranks[0])


@pytest.mark.slow
def test_the_servers_host_while_a_rank_waits(bed: Bed, ranks: list[Rank]) -> None:
    ranks[0].say("go")
    ranks[0].hear("has joined")
    bed.set_link("s", up=False)
    assert "rank 0 cannot reach the job's rendezvous server at" in said(ranks[0])


@pytest.mark.slow
def test_another_ranks_host(bed: Bed, ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.say("go")
    for rank in ranks:
        rank.hear("has joined")
    bed.set_link("b", up=False)
    assert "rank 1 on host h1 (pid 1) ended while the world was forming" in said(ranks[0])
