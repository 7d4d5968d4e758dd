"""kolovod.testing.run_ranks: results come back, failures are carried, nothing stays behind."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from subprocess import PIPE
from typing import Any

import forked
import numpy as np
import pytest
from launched import DEADLINE_S, read_pids, wait_until_gone

import kolovod
from kolovod.errors import InvalidArgumentError
from kolovod.testing import RankFailed, run_ranks


def double(rank: int, offset: int) -> int:
    """At module level: travels by reference, found by the caller's search path."""
    return 2 * rank + offset


@pytest.mark.parametrize("n", [1, 3])
def test_results_come_back_by_rank(n: int) -> None:
    assert run_ranks(n, double, 10) == [10 + 2 * rank for rank in range(n)]


def test_closures_arrays_and_variables_travel() -> None:
    base = np.arange(300_000.0)

    def work(rank: int) -> tuple[Any, str]:
        return base + rank, os.environ["MINE"]

    results = run_ranks(2, work, env={"MINE": "yes"})
    for rank, (array, variable) in enumerate(results):
        np.testing.assert_array_equal(array, base + rank)
        assert variable == "yes"


def test_a_forked_rank_is_like_a_new_process() -> None:
    """Those of tests/support/forked.py, in what a test may look at."""

    def facts(rank: int) -> tuple[Any, ...]:
        of_the_job = ("KOLOVOD_", "MASTER_PORT", "LC_CTYPE")  # the last is Python's own doing
        own = {k: v for k, v in os.environ.items() if not k.startswith(of_the_job)}
        session = os.getsid(0) == os.getpid()
        handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)]
        output = sys.stdout.write_through, os.isatty(0), os.read(0, 1)
        return own, session, os.getppid(), os.getcwd(), sys.argv, sys.path, handlers, output

    new, forks = (run(2, facts, env={"MINE": "yes"}) for run in (run_ranks, forked.run_ranks))
    assert new == forks


def test_the_processes_form_a_world_when_asked() -> None:
    def work(rank: int) -> tuple[bool, int, int, list[float]]:
        before = kolovod.is_initialized()
        kolovod.init()
        total = kolovod.allreduce(np.full(3, rank + 1.0), op=kolovod.Sum)
        return before, kolovod.rank(), kolovod.size(), total.tolist()

    assert run_ranks(2, work) == [(False, rank, 2, [3.0] * 3) for rank in range(2)]


def test_an_exception_is_carried_with_its_traceback() -> None:
    def work(rank: int) -> None:
        if rank == 1:
            raise ValueError("a bad batch")
        time.sleep(60)

    with pytest.raises(RankFailed, match="a bad batch") as caught:
        run_ranks(2, work)
    assert (caught.value.rank, caught.value.exit_code) == (1, 1)
    assert "ValueError: a bad batch" in caught.value.traceback_text
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.rank, copy.exit_code, str(copy)) == (1, 1, str(caught.value))


def test_the_cause_is_raised_not_its_consequence() -> None:
    def work(rank: int) -> None:
        kolovod.init()
        if rank == 1:
            raise ValueError("the cause")
        kolovod.allreduce(np.ones(4))

    with pytest.raises(RankFailed, match="the cause") as caught:
        run_ranks(2, work)
    assert caught.value.rank == 1


def test_an_exit_code_is_carried_with_the_last_output() -> None:
    def work(rank: int) -> None:
        print("some last words", file=sys.stderr)
        sys.exit(7 if rank == 0 else 0)

    with pytest.raises(RankFailed, match="rank 0 ended with exit code 7") as caught:
        run_ranks(2, work)
    assert caught.value.exit_code == 7
    assert "some last words" in caught.value.traceback_text


def test_an_early_end_is_a_failure_too() -> None:
    with pytest.raises(RankFailed, match="rank 0 ended with exit code 0 before the function"):
        run_ranks(1, lambda rank: sys.exit(0))


def test_a_killed_rank_is_named() -> None:
    def work(rank: int) -> None:
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(RankFailed, match=r"rank 0 was killed by signal 9") as caught:
        run_ranks(2, work)
    assert caught.value.exit_code == 137


@pytest.mark.slow
def test_late_ranks_are_named_with_where_they_are() -> None:
    def work(rank: int) -> None:
        if rank == 1:
            stuck_here()

    def stuck_here() -> None:
        time.sleep(600)

    limit_s = 20  # within which interpreters start on a busy machine, too
    with pytest.raises(RankFailed, match=f"rank 1 did not finish within {limit_s} s") as caught:
        run_ranks(2, work, timeout_s=limit_s)
    assert "stuck_here" in caught.value.traceback_text


def test_a_result_that_cannot_travel_is_an_error_of_its_rank() -> None:
    def work(rank: int) -> Any:
        return threading.Lock() if rank == 0 else None

    with pytest.raises(RankFailed, match="pickle") as caught:
        run_ranks(2, work)
    assert caught.value.rank == 0


def test_keep_going_returns_what_there_is() -> None:
    def work(rank: int) -> int:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.3)
        return rank

    first, second, third = run_ranks(3, work, keep_going=True)
    assert (first, third) == (0, 2)
    assert isinstance(second, RankFailed)
    assert second.exit_code == 137


def test_keep_going_raises_when_nobody_is_left() -> None:
    def work(rank: int) -> None:
        raise ValueError(f"rank {rank} as well")

    with pytest.raises(RankFailed, match="as well"):
        run_ranks(2, work, keep_going=True)


def test_output_is_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(2, lambda rank: print("hello from", rank))
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == [f"[{rank}]<stdout>:hello from {rank}" for rank in range(2)]


def test_no_descriptor_is_left_open() -> None:
    run_ranks(1, double, 0)  # what is opened once for all is open now
    gc.collect()  # or what another test has left in circles is closed meanwhile
    before = len(os.listdir("/proc/self/fd"))
    run_ranks(2, double, 0)
    with pytest.raises(RankFailed):
        run_ranks(2, lambda rank: sys.exit(1))
    assert len(os.listdir("/proc/self/fd")) == before


def test_zero_ranks_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"run_ranks\(0\)"):
        run_ranks(0, double, 0)


def test_the_stack_of_modules_stays_importable(tmp_path: Path) -> None:
    """A module that only the caller's search path has is found in the new process."""
    (tmp_path / "only_here.py").write_text("def where(rank):\n    return __file__\n")
    sys.path.insert(0, str(tmp_path))
    try:
        import only_here

        assert run_ranks(1, only_here.where) == [str(tmp_path / "only_here.py")]
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("only_here", None)


INTERRUPTED_TWICE = """
import os, signal, sys, time
import kolovod
from kolovod.launch import local

graces_s = iter([60.0, 1.0])  # within the first of which the second interrupt comes

def interrupt(*_):
    local._SWEEP_GRACE_S = next(graces_s)
    raise KeyboardInterrupt

signal.signal(signal.SIGINT, interrupt)

def told_to_end(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("told, pid", os.getpid(), flush=True)

def work():
    signal.signal(signal.SIGTERM, told_to_end)
    print("pid", os.getpid(), flush=True)
    time.sleep(600)

try:
    kolovod.run(work, np=2)
except KeyboardInterrupt:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("interrupted", flush=True)
    sys.stdin.read()
"""


def test_a_second_interrupt_leaves_no_rank_behind() -> None:
    """Of a program that goes on, as the kernel of a notebook does."""
    command = [sys.executable, "-c", INTERRUPTED_TWICE]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True) as program:
        try:
            pids = read_pids(program, 2)
            program.send_signal(signal.SIGINT)
            assert sorted(read_pids(program, 2)) == sorted(pids)  # which have a minute to end
            program.send_signal(signal.SIGINT)
            assert program.stdout is not None
            assert program.stdout.readline() == "interrupted\n"
            wait_until_gone(pids)
            assert program.poll() is None
        finally:
            program.kill()
            program.communicate(timeout=DEADLINE_S)
