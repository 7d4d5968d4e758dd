"""What worlds of several hosts survive, and what they say: lost ranks, forks, strangers."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from forked import run_ranks

import kolovod
from kolovod.core.ops import Sum
from kolovod.errors import (
    InterruptedByRankError,
    RankLeftError,
    RankLostError,
)
from kolovod.testing import RankFailed


def note(folder, what, rank):
    Path(folder, f"{what}{rank}").touch()


def until_noted(folder, what, ranks):
    """Wait for these ranks to note it."""
    deadline = time.monotonic() + 30
    while not all(Path(folder, f"{what}{rank}").exists() for rank in ranks):
        assert time.monotonic() < deadline, f"not all of {ranks} have noted {what!r}"
        time.sleep(0.005)


def victim(rank, which, how, folder):
    kolovod.init()
    others = [other for other in range(kolovod.size()) if other != which]
    kolovod.allreduce(np.ones(10_000), "t")
    note(folder, "result", rank)
    if rank == which:
        until_noted(folder, "result", others)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raise":
            raise RuntimeError("out of data")
        kolovod.shutdown()
        until_noted(folder, "error", others)  # so that the others' end is not what they hear of
        return None
    begin = time.monotonic()
    try:
        while True:
            kolovod.allreduce(np.ones(10_000), "t")
    except kolovod.errors.CollectiveAbortedError as error:
        note(folder, "error", rank)
        return type(error), error.rank, time.monotonic() - begin
    finally:
        until_noted(folder, "error", others)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize(
    ("how", "error"),
    [("kill", RankLostError), ("raise", InterruptedByRankError), ("leave", RankLeftError)],
)
def test_a_lost_rank_is_named_on_every_host(which, how, error, tmp_path):
    arguments = (which, how, str(tmp_path))
    results = run_ranks(3, victim, *arguments, hosts=["a", "a", "b"], keep_going=True)
    for rank, result in enumerate(results):
        if rank == which:
            assert how == "leave" or isinstance(result, RankFailed)
            continue
        kind, culprit, elapsed_s = result
        assert (kind, culprit) == (error, which)
        assert elapsed_s < 10


@pytest.mark.parametrize(("how", "error"), [("kill", RankLostError), ("leave", RankLeftError)])
def test_a_lost_leader_between_others_is_named_on_every_host(how, error, tmp_path):
    """Hosts 5 and 6 hear from the others by way of host 1 only."""
    hosts = [f"host{rank}" for rank in range(7)]
    results = run_ranks(7, victim, 1, how, str(tmp_path), hosts=hosts, keep_going=True)
    for kind, culprit, elapsed_s in results[:1] + results[2:]:
        assert (kind, culprit) == (error, 1)
        assert elapsed_s < 10


def forking(rank):
    """A child of a dead rank holds its sockets open; the death is noticed all the same."""
    kolovod.init()
    kolovod.allreduce(np.ones(10), "t")
    if rank == 1:
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(RankLostError) as raised:
        kolovod.allreduce(np.ones(10), "t")
    return raised.value.rank, time.monotonic() - begin


def test_a_forked_child_does_not_keep_a_dead_rank_alive():
    results = run_ranks(2, forking, hosts=["a", "b"], keep_going=True)
    culprit, elapsed_s = results[0]
    assert culprit == 1
    assert elapsed_s < 10


def again(rank):
    kolovod.init()

    def resources():
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    kolovod.allreduce(np.ones(3))
    kolovod.shutdown()
    time.sleep(0.3)  # as below
    before = resources()
    for turn in range(10):
        kolovod.init()
        assert kolovod.allreduce(np.full(1000, turn))[0] == turn
        kolovod.shutdown()
    deadline = time.monotonic() + 5
    while resources() != before and time.monotonic() < deadline:
        time.sleep(0.01)  # the system may list a thread that was joined for a moment
    return before, resources()


def test_init_and_shutdown_leave_nothing_behind():
    for before, after in run_ranks(3, again, hosts=["a", "a", "b"]):
        assert before == after


def smaller_world(rank, folder):
    kolovod.init()
    kolovod.allreduce(np.ones(3))
    note(folder, "result", rank)
    if rank == 1:
        until_noted(folder, "result", (0, 2, 3))
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankLostError):
        kolovod.allreduce(np.ones(3))
    kolovod.shutdown()
    kolovod.init(comm=[0, 2, 3])
    return kolovod.allreduce(np.full(3, float(rank)), op=Sum)[0], kolovod.local_size()


def test_survivors_form_a_smaller_world(tmp_path):
    hosts = ["a", "b", "b", "a"]
    results = run_ranks(4, smaller_world, str(tmp_path), hosts=hosts, keep_going=True)
    assert [results[rank] for rank in (0, 2, 3)] == [(5, 2), (5, 1), (5, 2)]


def garbage_listener(rank):
    """Strangers who connect to the ranks' ports while a world forms learn and break nothing."""
    from kolovod.rendezvous import mesh

    ports: list[str] = []
    original = mesh.Listener.__init__

    def watched(self, *args):
        original(self, *args)
        ports.append(self.address)
        host, _, port = self.address.rpartition(":")
        for text in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4000)):
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(text)

    mesh.Listener.__init__ = watched
    kolovod.init()
    assert ports
    assert threading.active_count() < 5
    return kolovod.allreduce(np.ones(2), op=Sum)[0]


def test_strangers_do_not_disturb_the_forming():
    assert run_ranks(2, garbage_listener, hosts=["a", "b"]) == [2, 2]
