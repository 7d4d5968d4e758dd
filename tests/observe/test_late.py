"""Late ranks, in real processes: who is named, and where it is."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import run_ranks
from slow import slow_but
from waiting import Marks

import kolovod as kv
from kolovod.core import stacks
from kolovod.core.world import current
from kolovod.errors import LateRankError

REPORT = {"KOLOVOD_LATE_REPORT_S": "5", "KOLOVOD_LAST_OPERATIONS_DIR": "none"}
PATIENCE_S = 60.0


def ones() -> np.ndarray:
    return np.ones(4, np.float32)


class Signpost:
    """A pipe with a name: a late rank reads it until the others have reported that it is late."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "reported")
        os.mkfifo(self.path)

    def open(self) -> int:
        return os.open(self.path, os.O_RDWR)  # which does not wait for the other end

    def when_reported(self, engine: Any = None) -> threading.Thread:
        """On a rank that waits: tell the late ones once there is a report, by whatever rank."""
        engine = engine or current().engine

        def watch() -> None:
            deadline = time.monotonic() + PATIENCE_S
            while engine.stats()["late_reports"] == 0 and time.monotonic() < deadline:
                time.sleep(0.02)
            os.write(fd, b"12345678")

        fd = self.open()
        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        return thread


def sleep_in_python(fd: int) -> None:
    os.set_blocking(fd, False)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            os.read(fd, 1)
            return
        except BlockingIOError:
            time.sleep(0.02)


def hold_the_gil(fd: int) -> None:
    # A system call that goes on after a signal; no other thread runs Python meanwhile.
    ctypes.PyDLL(None).read(fd, ctypes.create_string_buffer(1), 1)


def wait_natively(fd: int) -> None:
    ctypes.CDLL(None).read(fd, ctypes.create_string_buffer(1), 1)


def be_late(
    rank: int, post: Signpost, how: Callable[[int], None], uses: int, late: int
) -> float | None:
    kv.init()
    kv.barrier()  # those who wait begin together
    for _ in range(uses):
        kv.allreduce(ones(), name="layer1.weight")
    if rank == late:
        how(post.open())
    else:
        post.when_reported()
    return float(kv.allreduce(ones(), name="layer1.weight", op=kv.Sum)[0])


def report_of(capfd_text: str) -> str:
    """Without the launcher's marks."""
    lines = capfd_text.splitlines()
    return "\n".join(line.partition("<stderr>:")[2] for line in lines if "<stderr>:" in line)


# --- reports ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("uses", "how"),
    [(0, sleep_in_python), (4, sleep_in_python), (4, hold_the_gil)],
)
def test_a_late_rank_is_named_with_its_stack(
    uses: int, how: Callable[[int], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    post = Signpost(tmp_path)
    assert run_ranks(3, be_late, post, how, uses, 1, env=REPORT) == [3.0] * 3
    text = report_of(capsys.readouterr().err)
    first, *stack = text.splitlines()
    assert first.startswith("kolovod: rank 1 on host localhost (pid ")
    (waited_s,) = re.findall(r" has not submitted 'layer1.weight' \(allreduce, ([\d.]+) s", first)
    assert float(waited_s) >= 5
    assert first.endswith("; ranks 0, 2 wait")
    assert stack[0] == "  rank 1, its main thread:"
    inside = [line for line in stack if __file__ in line]
    assert f"in {how.__name__}" in inside[0]
    assert "in be_late" in inside[1]


@pytest.mark.slow
def test_a_stack_is_waited_for_whose_writer_is_interrupted_in_the_middle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    post = Signpost(tmp_path)
    kept: list[Any] = []

    def register(signum: int, file: int, **options: bool) -> None:
        @ctypes.CFUNCTYPE(None, ctypes.c_int)
        def write(signum: int) -> None:
            os.write(file, b"half a stack, ")
            time.sleep(0.5)
            os.write(file, b"and the rest\n")

        kept.append(write)
        ctypes.CDLL(None).signal(signum, write)

    def work(rank: int) -> None:
        faulthandler.register = register
        be_late(rank, post, wait_natively, 0, 1)

    run_ranks(2, work, env=REPORT)
    assert "  half a stack, and the rest" in report_of(capsys.readouterr().err)


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 1])
def test_a_stopped_rank_does_not_answer_and_goes_on_when_continued(
    late: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    post, marks = Signpost(tmp_path), Marks(tmp_path)

    def let_go_on(fd: int, pid: int) -> None:
        sleep_in_python(fd)
        marks.make("continued")
        os.kill(pid, signal.SIGCONT)

    def work(rank: int) -> float:
        kv.init()
        pids = kv.allgather_object(os.getpid())
        for _ in range(4):
            kv.allreduce(ones(), name="t")
        if rank == late:
            marks.wait_for("continued")
        elif rank == 2:
            os.kill(pids[late], signal.SIGSTOP)
            marks.make("stopped")
            threading.Thread(target=let_go_on, args=(post.open(), pids[late]), daemon=True).start()
        if rank != late:
            marks.wait_for("stopped")
            post.when_reported()
        return float(kv.allreduce(ones(), name="t", op=kv.Sum)[0])

    assert run_ranks(3, work, env=REPORT) == [3.0] * 3
    text = report_of(capsys.readouterr().err)
    assert text.startswith(f"kolovod: rank {late} on host localhost")
    assert f"  rank {late} does not answer: its process is stopped" in text


@pytest.mark.slow
def test_a_rank_that_is_stopped_in_a_bucket_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    post = Signpost(tmp_path)

    def work(rank: int) -> float:
        kv.init()
        pids = kv.allgather_object(os.getpid())
        data = np.ones(1 << 22, np.float32)
        over = threading.Event()
        if rank == 0:
            fd = post.open()

            def stop_and_continue() -> None:
                while not any(op["name"] == "big" and op["bucket"] for op in kv.last_operations()):
                    time.sleep(0)
                os.kill(pids[1], signal.SIGSTOP)
                sleep_in_python(fd)
                os.kill(pids[1], signal.SIGCONT)
                over.set()

            threading.Thread(target=stop_and_continue, daemon=True).start()
            post.when_reported()
        while data[0]:
            data[0] = not over.is_set() if rank == 0 else 0
            result = kv.allreduce(data, name="big", op=kv.Sum)
            data[0] = result[0]
        return float(result[-1])

    assert run_ranks(2, work, env=REPORT) == [2.0] * 2
    text = report_of(capsys.readouterr().err)
    assert "kolovod: rank 1 on host localhost" in text.splitlines()[0]
    assert "'big' (allreduce, " in text.splitlines()[0]
    assert "  rank 1 does not answer" in text


@pytest.mark.slow
def test_different_tensors_of_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    post = Signpost(tmp_path)

    def work(rank: int) -> None:
        kv.init()
        kv.barrier()  # one report is of both
        names = {0: ["x"], 1: ["y"], 2: ["x", "y"]}[rank]
        handles = {name: kv.allreduce_async(ones(), name=name) for name in names}
        post.when_reported()
        sleep_in_python(post.open())
        for name in ("x", "y"):
            if name not in handles:
                handles[name] = kv.allreduce_async(ones(), name=name)
        for handle in handles.values():
            handle.wait()

    run_ranks(3, work, env=REPORT)
    text = report_of(capsys.readouterr().err)
    assert " has not submitted 'x' (allreduce, " in text
    assert " has not submitted 'y' (allreduce, " in text
    lines = [line for line in text.splitlines() if line.startswith("kolovod: ")][:2]
    found = {line.split(" ")[2]: line for line in lines}
    assert "'y'" in found["0"]
    assert found["0"].endswith("; ranks 1, 2 wait")
    assert "'x'" in found["1"]
    assert found["1"].endswith("; ranks 0, 2 wait")


@pytest.mark.slow
def test_a_process_set_is_said_and_its_ranks_have_the_numbers_of_the_world(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    post = Signpost(tmp_path)

    def work(rank: int) -> None:
        kv.init()
        some = kv.add_process_set([1, 2])
        if rank == 2:
            sleep_in_python(post.open())
        elif rank == 1:
            post.when_reported(some.membership().engine)
        if rank != 0:
            kv.allreduce(ones(), name="t", process_set=some)

    run_ranks(3, work, env=REPORT)
    first = report_of(capsys.readouterr().err).splitlines()[0]
    assert first.startswith("kolovod: rank 2 on host localhost")
    assert first.endswith("; rank 1 waits; process set [1, 2]")


def test_nothing_is_said_while_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    def work(rank: int) -> int:
        kv.init()
        end = time.monotonic() + 1.0
        while kv.allreduce(np.array([float(time.monotonic() < end)]), name="go", op=kv.Min)[0]:
            pass
        return current().engine.stats()["late_reports"]

    assert run_ranks(2, work, env={**REPORT, "KOLOVOD_LATE_REPORT_S": "10"}) == [0, 0]
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_the_stack_is_the_main_threads_whoever_calls_init(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    post = Signpost(tmp_path)

    def work(rank: int) -> None:
        thread = threading.Thread(target=kv.init)
        thread.start()
        thread.join()
        be_late(rank, post, sleep_in_python, 0, 1)

    run_ranks(2, work, env=REPORT)
    assert "in sleep_in_python" in report_of(capsys.readouterr().err)


@pytest.mark.slow
def test_a_process_that_takes_the_signal_for_itself_is_not_hurt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    post = Signpost(tmp_path)

    def work(rank: int) -> None:
        kv.init()
        signal.signal(stacks.SIGNAL, signal.SIG_DFL)  # which would end the process
        be_late(rank, post, sleep_in_python, 0, 1)

    run_ranks(2, work, env=REPORT)
    text = report_of(capsys.readouterr().err)
    assert f"no stack: this process has changed its handler of signal {stacks.SIGNAL}" in text


@pytest.mark.slow
def test_a_signal_that_is_used_already_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    post = Signpost(tmp_path)

    def work(rank: int) -> int:
        caught = []
        signal.signal(stacks.SIGNAL, lambda number, frame: caught.append(number))
        be_late(rank, post, sleep_in_python, 0, 1)
        return len(caught)

    assert run_ranks(2, work, env=REPORT) == [0, 0]
    assert "in sleep_in_python" in report_of(capsys.readouterr().err)


def test_a_forked_child_has_no_handler() -> None:
    def caught() -> bool:
        with open("/proc/self/status") as file:
            mask = next(line for line in file if line.startswith("SigCgt:"))
        return bool(int(mask.split()[1], 16) >> (stacks.SIGNAL - 1) & 1)

    def work(rank: int) -> tuple[bool, int]:
        kv.init()
        child = os.fork()
        if child == 0:
            os._exit(1 if caught() else 0)
        return caught(), os.waitpid(child, 0)[1]

    assert run_ranks(2, work) == [(True, 0)] * 2


# --- several hosts ---


@pytest.mark.slow
def test_a_rank_that_is_late_alone_on_its_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    post = Signpost(tmp_path)

    def work(rank: int) -> float:
        kv.init()
        for _ in range(4):
            kv.allreduce(ones(), name="t")
        post.when_reported()  # on all ranks: it is the late one's host that reports
        if rank == 2:
            sleep_in_python(post.open())
        return float(kv.allreduce(ones(), name="t", op=kv.Sum)[0])

    hosts = ["a", "a", "b"]
    assert run_ranks(3, work, env=REPORT, hosts=hosts) == [3.0] * 3
    first, *stack = report_of(capsys.readouterr().err).splitlines()
    assert first.startswith("kolovod: rank 2 on host b (pid ")
    assert " has not submitted 't' (allreduce, " in first
    assert first.endswith("; ranks 0, 1 wait")
    assert any("in sleep_in_python" in line for line in stack)


@pytest.mark.slow
@pytest.mark.parametrize("stopped", slow_but((0,), (0, 2)))
def test_a_host_whose_leader_is_stopped(
    stopped: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    post, marks = Signpost(tmp_path), Marks(tmp_path)

    def let_go_on(fd: int, pid: int) -> None:
        sleep_in_python(fd)
        marks.make("go on")
        os.kill(pid, signal.SIGCONT)

    def work(rank: int) -> float:
        kv.init()
        pids = kv.allgather_object(os.getpid())
        marks.make(f"through {rank}")
        if rank == stopped:
            marks.wait_for("go on")
        else:
            if rank == 1:
                marks.wait_for("through 0", "through 1", "through 2")
                os.kill(pids[stopped], signal.SIGSTOP)
                threading.Thread(
                    target=let_go_on, args=(post.open(), pids[stopped]), daemon=True
                ).start()
            post.when_reported()
        return float(kv.allreduce(ones(), name="t", op=kv.Sum)[0])

    hosts = ["a", "b", "c"]
    assert run_ranks(3, work, env=REPORT, hosts=hosts) == [3.0] * 3
    text = report_of(capsys.readouterr().err)
    name = f"kolovod: rank {stopped} on host {hosts[stopped]} (pid "
    assert name in text
    line = next(line for line in text.splitlines() if line.startswith(name))
    assert ", which leads its host, does not answer; here every rank has submitted 't' (" in line


# --- the second limit ---


@pytest.mark.slow
@pytest.mark.parametrize("report_s", ["0", "5"])
def test_after_the_second_limit_every_rank_fails(report_s: str, tmp_path: Path) -> None:
    folder = str(tmp_path)

    def lag_behind() -> None:  # in no other function of Python, since the innermost one is told
        deadline = time.monotonic() + PATIENCE_S
        while len(os.listdir(folder)) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)

    def work(rank: int) -> tuple[int | None, str, float]:
        kv.init()
        kv.allreduce(ones(), name="t")
        started = time.monotonic()
        if rank == 2:
            lag_behind()
        with pytest.raises(LateRankError) as caught:
            kv.allreduce(ones(), name="t")
        (tmp_path / f"failed {rank}").touch()
        return caught.value.rank, str(caught.value), time.monotonic() - started

    limits = {"KOLOVOD_LATE_REPORT_S": report_s, "KOLOVOD_LATE_FAILURE_S": "8"}
    for late, text, seconds in run_ranks(3, work, env={**REPORT, **limits}):
        assert late == 2
        assert " has not submitted 't' (allreduce, " in text
        assert " in lag_behind" in text
        assert "the limit is 8 s" in text
        assert seconds < PATIENCE_S
