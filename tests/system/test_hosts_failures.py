"""What worlds of several hosts survive, and what they say: lost ranks, forks, strangers."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from forked import run_ranks
from waiting import until

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
    marks = [Path(folder, f"{what}{rank}") for rank in ranks]
    until(lambda: all(mark.exists() for mark in marks), f"all of {ranks} note {what!r}")


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
    try:
        while True:
            kolovod.allreduce(np.ones(10_000), "t")
    except kolovod.errors.CollectiveAbortedError as error:
        note(folder, "error", rank)
        return type(error), error.rank
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
        assert result == (error, which)


@pytest.mark.parametrize(("how", "error"), [("kill", RankLostError), ("leave", RankLeftError)])
def test_a_lost_leader_between_others_is_named_on_every_host(how, error, tmp_path):
    """Hosts 5 and 6 hear from the others by way of host 1 only."""
    hosts = [f"host{rank}" for rank in range(7)]
    results = run_ranks(7, victim, 1, how, str(tmp_path), hosts=hosts, keep_going=True)
    assert results[:1] + results[2:] == [(error, 1)] * 6


def forking(rank, folder):
    """A child of a dead rank holds its sockets open; the death is noticed all the same."""
    kolovod.init()
    kolovod.allreduce(np.ones(10), "t")
    if rank == 1:
        if os.fork() == 0:
            try:
                note(folder, "child", 1)
                until_noted(folder, "error", [0])
            finally:
                note(folder, "end", 1)
                os._exit(0)
        until_noted(folder, "child", [1])
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankLostError) as raised:
        kolovod.allreduce(np.ones(10), "t")
    child_has_ended = Path(folder, "end1").exists()
    note(folder, "error", 0)
    until_noted(folder, "end", [1])  # before the job's end, which ends the child, too
    return raised.value.rank, child_has_ended


def test_a_forked_child_does_not_keep_a_dead_rank_alive(tmp_path):
    results = run_ranks(2, forking, str(tmp_path), hosts=["a", "b"], keep_going=True)
    assert results[0] == (1, False)


def again(rank):
    kolovod.init()

    def resources():
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def settled():
        """When what has ended is not listed any more: a thread that was joined is, for a moment."""
        counts = resources()
        time.sleep(0.1)
        return counts if resources() == counts else None

    kolovod.allreduce(np.ones(3))
    kolovod.shutdown()
    before = until(settled)
    for turn in range(10):
        kolovod.init()
        assert kolovod.allreduce(np.full(1000, turn))[0] == turn
        kolovod.shutdown()
    with contextlib.suppress(AssertionError):  # which would not say what has grown
        until(lambda: all(now <= then for now, then in zip(resources(), before, strict=True)))
    return before, resources()


def test_init_and_shutdown_leave_nothing_behind():
    for before, after in run_ranks(3, again, hosts=["a", "a", "b"]):
        assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)


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
