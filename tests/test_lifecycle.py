"""kolovod.core.world: worlds form, end and form again, in real processes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import run_ranks
from waiting import Marks, until

import kolovod as kv
from kolovod.core.world import current
from kolovod.errors import (
    AuthenticationError,
    CollectiveAbortedError,
    InterruptedByRankError,
    InvalidArgumentError,
    NotInitializedError,
    RankLostError,
    StartTimeoutError,
)
from kolovod.rendezvous import bootstrap, segment_handover
from kolovod.testing import RankFailed


def ranks_sum(value: float) -> float:
    """The sum of ``value`` over the world's ranks."""
    return float(kv.allreduce(np.array([value]), op=kv.Sum)[0])


def sum_for_ever() -> None:
    """Operations without end, for those who wait for a failure."""
    while True:
        ranks_sum(1)


# --- one process ---


def test_verbs_before_init_are_refused() -> None:
    assert not kv.is_initialized()
    with pytest.raises(NotInitializedError, match=r"call init\(\) first"):
        kv.rank()
    kv.shutdown()  # nothing to do


def test_without_a_launcher_the_size_is_one() -> None:
    kv.init()
    try:
        kv.init()  # again: nothing happens
        kv.init(comm=[0])
        kv.init(comm=iter({0}))
        world = current()
        assert (kv.rank(), kv.size(), kv.local_rank(), kv.local_size()) == (0, 1, 0, 1)
        assert (kv.cross_rank(), kv.cross_size()) == (0, 1)
        assert world.members == (0,)
        assert ranks_sum(2.5) == 2.5
        with pytest.raises(InvalidArgumentError, match=r"shutdown\(\) first"):
            kv.init(comm=[0, 1])
    finally:
        kv.shutdown()
        kv.shutdown()
    assert not kv.is_initialized()


def test_a_second_world_has_another_epoch_and_nothing_leaks() -> None:
    epochs = []
    open_files = []
    gc.collect()  # or what another test has left in circles is closed meanwhile
    for _ in range(4):
        kv.init()
        epochs.append(current().epoch)
        kv.shutdown()
        open_files.append(len(os.listdir("/proc/self/fd")))
    assert len(set(epochs)) == 4
    assert len(set(open_files[1:])) == 1


@pytest.mark.parametrize(
    ("comm", "message"),
    [
        ([], r"comm=\[\]: expected launcher ranks from 0 to 0"),
        ([0, 1], r"from 0 to 0"),
        ([-1], r"from 0 to 0"),
        ([0, 0], r"named twice"),
        (["0"], r"whole numbers"),
        (7, r"comm=7"),
    ],
)
def test_a_wrong_comm_is_named(comm: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        kv.init(comm=comm)
    assert not kv.is_initialized()


def test_a_wrong_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KOLOVOD_FUSION_BYTES", "lots")
    with pytest.raises(InvalidArgumentError, match="KOLOVOD_FUSION_BYTES='lots'"):
        kv.init()


# --- several processes ---


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_facts_and_a_sum(n: int) -> None:
    def work(rank: int) -> tuple[int, ...]:
        kv.init()
        total = ranks_sum(rank)
        world = current()
        facts = (kv.rank(), kv.size(), kv.local_rank(), kv.local_size())
        return (*facts, kv.cross_rank(), kv.cross_size(), world.epoch, int(total))

    total = n * (n - 1) // 2
    assert run_ranks(n, work) == [(r, n, r, n, 0, 1, 1, total) for r in range(n)]


def test_worlds_form_again_and_leave_no_descriptor() -> None:
    def work(rank: int) -> tuple[list[int], list[float], set[int]]:
        epochs, sums, files = [], [], []
        for _ in range(4):
            kv.init()
            epochs.append(current().epoch)
            sums.append(ranks_sum(1))
            kv.shutdown()
            files.append(len(os.listdir("/proc/self/fd")))
        return epochs, sums, set(files[1:])

    for epochs, sums, files in run_ranks(3, work):
        assert epochs == [1, 2, 3, 4]
        assert sums == [3.0] * 4
        assert len(files) == 1


def test_a_smaller_world_numbers_its_ranks_anew() -> None:
    def work(rank: int) -> tuple[int, int, tuple[int, ...], float] | str:
        if rank == 1:
            with pytest.raises(InvalidArgumentError) as caught:
                kv.init(comm=[2, 0, 3])
            return str(caught.value)
        kv.init(comm=(member for member in (3, 2, 0)))  # whatever can be iterated, even once only
        with pytest.raises(InvalidArgumentError, match=r"comm=\[1, 0\]"):
            kv.init(comm=reversed(range(2)))
        return kv.rank(), kv.size(), current().members, ranks_sum(rank)

    results = run_ranks(4, work)
    assert "does not contain this process, which the launcher started as rank 1" in results[1]
    members = (0, 2, 3)
    assert [results[r] for r in members] == [(i, 3, members, 5.0) for i in range(3)]


def test_after_a_kill_the_survivors_form_a_smaller_world() -> None:
    def work(rank: int) -> tuple[int | None, str, float, float]:
        kv.init()
        try:
            ranks_sum(rank)
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            sum_for_ever()
        except RankLostError as error:
            lost, text = error.rank, str(error)
        started = time.monotonic()
        kv.shutdown()
        kv.init(comm=[r for r in range(4) if r != lost])
        total = ranks_sum(rank)
        return lost, text, total, time.monotonic() - started

    results = run_ranks(4, work, keep_going=True)
    assert isinstance(results[1], RankFailed)
    assert results[1].exit_code == 137
    for rank in (0, 2, 3):
        lost, text, total, seconds = results[rank]
        assert lost == 1
        assert re.match(r"rank 1 on host localhost \(pid \d+\)", text)
        assert total == 5.0
        assert seconds < 20  # not the start timeout


def test_a_world_with_a_dead_rank_is_refused_at_once() -> None:
    def work(rank: int) -> tuple[int | None, str]:
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)
        with pytest.raises(RankLostError) as caught:
            kv.init()
        return caught.value.rank, str(caught.value)

    results = run_ranks(3, work, keep_going=True)
    for lost, text in results[:2]:
        assert lost == 2
        assert text.startswith("rank 2 was killed by signal 9 (SIGKILL")


def test_missing_ranks_are_named_after_the_start_timeout(tmp_path: Path) -> None:
    marks = Marks(tmp_path)

    def work(rank: int) -> str:
        marks.meet("begin", rank, 3)  # so that of 0 and 2 none is late
        if rank == 1:
            marks.wait_for("end 0", "end 2")
            return ""
        with pytest.raises(StartTimeoutError) as caught:
            kv.init()
        marks.make(f"end {rank}")
        return str(caught.value)

    texts = run_ranks(3, work, env={"KOLOVOD_START_TIMEOUT_S": "0.5"})
    for rank in (0, 2):
        assert "rank 1 did not call init() within 0.5 s" in texts[rank]
        assert "KOLOVOD_START_TIMEOUT_S" in texts[rank]


def test_a_rank_with_another_secret_is_refused() -> None:
    def work(rank: int) -> str:
        if rank == 0:
            os.environ["KOLOVOD_SECRET"] = "00" * 32
        with pytest.raises(AuthenticationError if rank == 0 else RankLostError) as caught:
            kv.init()
        return str(caught.value)

    texts = run_ranks(2, work)
    assert "KOLOVOD_SECRET" in texts[0]
    assert "rank 0 ended with exit code 0" in texts[1]


def test_garbage_and_silence_at_the_leaders_socket_disturb_nobody(tmp_path: Path) -> None:
    marks = Marks(tmp_path)

    def pester(stop: threading.Event, strangers: list[socket.socket]) -> None:
        name = (tmp_path / "name").read_text()
        while not stop.is_set():
            stranger = socket.socket(socket.AF_UNIX)
            stranger.settimeout(1)
            try:
                stranger.connect(f"\0{name}")
                if len(strangers) % 2:
                    stranger.sendall(os.urandom(500))
            except OSError:
                pass  # the leader was done, or hung up on us
            strangers.append(stranger)
            time.sleep(0.002)

    class Known(segment_handover.Leader):
        def __init__(self, secret: str) -> None:
            super().__init__(secret)
            (tmp_path / "name").write_text(self.name)
            marks.make("listens")

    def work(rank: int) -> tuple[float, int]:
        strangers: list[socket.socket] = []
        stop = threading.Event()
        thread = threading.Thread(target=pester, args=(stop, strangers))
        if rank == 0:
            bootstrap.Leader = Known  # type: ignore[misc]
        if rank == 1:
            marks.wait_for("listens")
            thread.start()
            until(lambda: len(strangers) > 10, "strangers at the leader's socket")
        kv.init()
        total = ranks_sum(1)
        stop.set()
        if rank == 1:
            thread.join()
        for stranger in strangers:
            stranger.close()
        return total, len(strangers)

    results = run_ranks(3, work)
    assert [total for total, _ in results] == [3.0] * 3
    assert results[1][1] > 10


def test_the_cause_of_a_crash_reaches_the_others() -> None:
    def work(rank: int) -> str:
        kv.init()
        if rank == 0:
            raise KeyError("no such column")
        with pytest.raises(CollectiveAbortedError) as caught:
            sum_for_ever()
        assert isinstance(caught.value, InterruptedByRankError)
        assert caught.value.rank == 0
        return str(caught.value)

    failed, text = run_ranks(2, work, keep_going=True)
    assert isinstance(failed, RankFailed)
    assert "KeyError: 'no such column'" in text


# --- forks ---


def test_a_forked_child_is_no_rank_and_harms_nobody() -> None:
    def work(rank: int) -> tuple[str, float]:
        kv.init()
        ranks_sum(1)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            texts = []
            for verb in (kv.rank, kv.init, lambda: ranks_sum(1)):
                try:
                    verb()
                except NotInitializedError as error:
                    texts.append(str(error))
            kv.shutdown()
            os.write(writer, "\n".join(texts).encode())
            os._exit(0)
        os.close(writer)
        with open(reader, encoding="utf-8") as file:
            said = file.read()
        assert os.waitpid(child, 0)[1] == 0
        return said, ranks_sum(1)

    for rank, (said, total) in enumerate(run_ranks(2, work)):
        lines = said.split("\n")
        assert len(lines) == 3
        assert all(f"was forked from rank {rank} (pid " in line for line in lines)
        assert total == 2.0


def test_a_child_that_ends_normally_does_not_end_the_world() -> None:
    def child() -> None:
        sys.exit(0)  # runs the exit hooks that fork has copied

    def work(rank: int) -> float:
        kv.init()
        context = multiprocessing.get_context("fork")
        workers = [context.Process(target=child) for _ in range(2)]
        for worker in workers:
            worker.start()
        subprocess.run(["true"], check=True)
        for worker in workers:
            worker.join()
        return ranks_sum(1)

    assert run_ranks(2, work) == [2.0, 2.0]


def test_a_kill_is_noticed_though_a_forked_child_lives_on() -> None:
    def work(rank: int) -> int | None:
        kv.init()
        if rank == 0:
            if os.fork() == 0:
                time.sleep(30)  # holds every descriptor of the dead rank open
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RankLostError) as caught:
            sum_for_ever()
        kv.shutdown()
        kv.init(comm=[1, 2])
        assert ranks_sum(1) == 2.0
        return caught.value.rank

    assert run_ranks(3, work, keep_going=True)[1:] == [0, 0]


def test_the_child_of_a_world_of_one_may_make_its_own() -> None:
    kv.init()
    child = os.fork()
    if child == 0:
        try:
            with pytest.raises(NotInitializedError):
                kv.rank()
            kv.init()
            os._exit(0 if ranks_sum(4) == 4 else 1)
        except BaseException:
            os._exit(2)
    status = os.waitpid(child, 0)[1]
    kv.shutdown()
    assert os.waitstatus_to_exitcode(status) == 0
