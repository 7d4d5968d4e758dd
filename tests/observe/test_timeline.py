"""Timelines of real worlds: all ranks in one file, valid while it is written."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import run_ranks
from waiting import until

import kolovod as kv
from kolovod.errors import InvalidArgumentError, NotInitializedError
from kolovod.observe.summary import read, summarize

ODD_NAME = 'a "quoted"\nname \\ of \u0161'


def ones(count: int = 4) -> np.ndarray:
    return np.ones(count, np.float32)


def work_in_world(rank: int, before: Callable[[], None] | None = None) -> int:
    kv.init()
    if before is not None:
        before()
    for _ in range(5):
        with kv.span("forward"):
            time.sleep(0.002)
        kv.allreduce(ones(), name="metric")
        handles = [kv.allreduce_async(ones(), name=f"g{i}") for i in range(3)]
        handles += [kv.allreduce_async(ones()) for _ in range(3)]
        for handle in handles:
            handle.wait()
        kv.allreduce(ones(), name=ODD_NAME)
    kv.barrier()
    kv.shutdown()
    return time.monotonic_ns()


def rows_of(events: list[dict[str, Any]]) -> dict[tuple[int, int], str]:
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }


def count(events: list[dict[str, Any]], rank: int, row: str, name: str) -> int:
    rows = rows_of(events)
    return sum(
        event["name"] == name and rows.get((event["pid"], event["tid"])) == row
        for event in events
        if event["pid"] == rank + 1 and event["ph"] == "X"
    )


def check_work(events: list[dict[str, Any]], size: int) -> None:
    """All that ``work_in_world`` did is there, of every rank, in the order in which it was."""
    started = events[0]["args"]["start_time_since_epoch_in_micros"]
    assert abs(started / 1e6 - time.time()) < 600
    for rank in range(size):
        for name in ("metric", "g0", "g2", ODD_NAME):
            assert count(events, rank, f"allreduce.{name}", "ALLREDUCE") == 5, (rank, name)
            assert count(events, rank, f"allreduce.{name}", "NEGOTIATE_ALLREDUCE") == 5
        unnamed = sum(
            count(events, rank, f"allreduce.noname{lane}", "ALLREDUCE")
            for lane in ("", " (2)", " (3)")
        )
        assert unnamed == 15
        # The first may have ended before the timeline, which rank 0 begins when it is ready.
        assert count(events, rank, "MainThread", "forward") >= 4
        assert count(events, rank, "MainThread", "wait") >= 5
    for event in events:
        assert event["ph"] in "MXi"
        if event["ph"] == "X":
            assert event["dur"] >= 0
    one_clock(events, size)


def one_clock(events: list[dict[str, Any]], size: int) -> None:
    """Nobody has an operation's result before all submit it, give or take how clocks are known.

    Nothing is known of when they begin to carry it: a small one may be over on one rank by then.
    """
    rows = rows_of(events)
    ranks_of: dict[int, list[int]] = {}  # by bucket
    submitted: list[list[float]] = [[] for _ in range(size)]
    ended: list[list[float]] = [[] for _ in range(size)]
    for event in events:
        if rows.get((event["pid"], event.get("tid", 0))) != "allreduce.metric":
            continue
        if event["name"] == "NEGOTIATE_ALLREDUCE":
            submitted[event["pid"] - 1].append(event["ts"])
        elif event["name"] == "ALLREDUCE":
            ended[event["pid"] - 1].append(event["ts"] + event["dur"])
            ranks_of.setdefault(event["args"]["bucket"], []).append(event["pid"] - 1)
    assert [sorted(ranks) for ranks in ranks_of.values()] == [list(range(size))] * 5
    for number in range(5):
        last = max(sorted(each)[number] for each in submitted)
        assert last < min(sorted(each)[number] for each in ended) + 20_000


@pytest.mark.parametrize(
    ("size", "hosts"), [(1, ()), (2, ()), (4, ()), (3, ("a", "b", "a"))], ids=str
)
def test_from_the_environment(size: int, hosts: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    run_ranks(size, work_in_world, env={"HOROVOD_TIMELINE": str(path)}, hosts=hosts)
    events = read(path)
    check_work(events, size)
    assert not any(event["name"] == "CYCLE_START" for event in events)
    summary = summarize(events)
    assert [rank.rank for rank in summary.ranks] == list(range(size))
    assert summary.operations >= 5 * 8
    assert summary.lost == 0


def test_started_and_stopped_by_all_ranks(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"

    def work(rank: int) -> None:
        kv.init()
        kv.allreduce(ones(), name="before")
        # Rank 0 may begin while the other one is still in it: what is under way is shown, too.
        kv.barrier()
        kv.start_timeline(first, mark_cycles=True)
        kv.start_timeline(first, mark_cycles=True)
        assert is_recording()
        kv.barrier()
        kv.allreduce(ones(), name="within")
        kv.stop_timeline()
        kv.allreduce(ones(), name="between")
        kv.barrier()
        kv.start_timeline(second)
        assert is_recording()
        kv.barrier()
        kv.allreduce(ones(), name="again")
        kv.shutdown()

    run_ranks(2, work)
    events = read(first)
    for rank in range(2):
        assert count(events, rank, "allreduce.within", "ALLREDUCE") == 1
        assert count(read(second), rank, "allreduce.again", "ALLREDUCE") == 1
    assert any(event["name"] == "CYCLE_START" for event in events)
    rows = {*rows_of(events).values(), *rows_of(read(second)).values()}
    assert not rows & {"allreduce.before", "allreduce.between"}


def is_recording() -> bool:
    from kolovod.core import spans

    return spans.log.on


@pytest.mark.parametrize("hosts", [(), ("a", "b")], ids=["one host", "two hosts"])
def test_dynamic_needs_rank_0_only(hosts: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"

    def start() -> None:
        if kv.rank() == 0:
            kv.start_timeline(path)
        until(is_recording)
        kv.barrier()

    run_ranks(2, work_in_world, start, env={"KOLOVOD_TIMELINE": "Dynamic"}, hosts=hosts)
    check_work(read(path), 2)


def test_process_sets_have_rows_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"

    def work(rank: int) -> None:
        kv.init()
        pair = kv.add_process_set([1, 2])
        if rank > 0:
            kv.allreduce(ones(), name="pair", process_set=pair)
        kv.remove_process_set(pair)
        kv.shutdown()

    run_ranks(3, work, env={"KOLOVOD_TIMELINE": str(path)})
    events = read(path)
    found = [count(events, rank, "allreduce.pair in set 1", "ALLREDUCE") for rank in range(3)]
    assert found == [0, 1, 1]


@pytest.mark.slow
def test_the_file_is_valid_at_every_moment(tmp_path: Path) -> None:
    """Stopped again and again, and at last killed, in the midst of its work."""
    path = tmp_path / "timeline.json"
    script = (
        "import os, numpy as np, kolovod as kv\n"
        "kv.init()\n"
        "print(os.getpid(), flush=True)\n"
        "while True: kv.allreduce(np.ones(1000, np.float32), name='x')\n"
    )
    environment = {**os.environ, "KOLOVOD_TIMELINE": str(path)}
    process = subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        sizes = set()
        deadline = time.monotonic() + 90
        while len(sizes) < 20 and time.monotonic() < deadline:
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            sizes.add(len(json.loads(path.read_text())))
            process.send_signal(signal.SIGCONT)
            time.sleep(random.uniform(0, 0.06))
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    finally:
        process.kill()
        process.communicate()
    assert len(sizes) >= 20
    assert len(read(path)) >= max(sizes)  # which leaves half an event out


@pytest.mark.slow
def test_a_later_world_does_not_overwrite_the_first(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"

    def work(rank: int) -> None:
        for name in ("first", "second"):
            kv.init()
            kv.allreduce(ones(), name=name)
            kv.barrier()
            kv.shutdown()

    run_ranks(2, work, env={"KOLOVOD_TIMELINE": str(path)})
    assert count(read(path), 1, "allreduce.first", "ALLREDUCE") == 1
    (other,) = set(tmp_path.iterdir()) - {path}
    assert other.name == "timeline.world2.json"
    assert count(read(other), 1, "allreduce.second", "ALLREDUCE") == 1


def test_what_does_not_fit_between_two_looks_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    kv.init()
    try:
        kv.start_timeline(path)
        total = 5_000
        # While the interpreter is held, nobody reads the records.
        before, _ = sys.getswitchinterval(), sys.setswitchinterval(30)
        try:
            for _ in range(total):
                kv.allreduce(ones(), name="fast")
        finally:
            sys.setswitchinterval(before)
        kv.stop_timeline()
    finally:
        kv.shutdown()
    events = read(path)
    shown = count(events, 0, "allreduce.fast", "ALLREDUCE")
    assert shown + summarize(events).lost == total


def test_a_forked_child_leaves_it_alone(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    kv.init()
    try:
        kv.start_timeline(path)
        child = os.fork()
        if child == 0:
            os._exit(0 if not is_recording() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        kv.allreduce(ones(), name="after")
        kv.stop_timeline()
    finally:
        kv.shutdown()
    assert count(read(path), 0, "allreduce.after", "ALLREDUCE") == 1


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(NotInitializedError):
        kv.start_timeline(tmp_path / "a.json")
    with pytest.raises(NotInitializedError):
        kv.stop_timeline()
    kv.init()
    try:
        with pytest.raises(InvalidArgumentError, match=r"no/such/folder.*No such file"):
            kv.start_timeline("no/such/folder/a.json")
        with pytest.raises(InvalidArgumentError, match=r"/dev/full.*No space left"):
            kv.start_timeline("/dev/full")
        kv.stop_timeline()
        kv.allreduce(ones())
    finally:
        kv.shutdown()


def test_a_folder_that_is_missing_fails_init(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_TIMELINE", "no/such/folder/a.json")
    with pytest.raises(InvalidArgumentError, match="no/such/folder"):
        kv.init()
    assert not kv.is_initialized()


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    script = (
        "import os, sys, time, numpy as np, kolovod as kv\n"
        "kv.init()\n"
        "for i in range(8):\n"
        "    mark = f'{sys.argv[1]}/{i}'\n"
        "    while kv.rank() == 1 and not os.path.exists(mark): time.sleep(0.001)\n"
        "    time.sleep(0.02 * kv.rank())\n"  # after rank 0, and by so much
        "    handle = kv.allreduce_async(np.ones(4, np.float32), name='loss')\n"
        "    if kv.rank() == 0: open(mark, 'w').close()\n"
        "    handle.wait()\n"
    )
    command = [sys.executable, "-m", "kolovod"]
    run = [*command, "run", "-np", "2", "--timeline", str(path), sys.executable, "-c", script]
    run.append(str(tmp_path))
    subprocess.run(run, check=True, timeout=60)
    shown = subprocess.run(
        [*command, "timeline", str(path)], check=True, timeout=60, capture_output=True, text=True
    ).stdout
    assert "Straggler: rank 1" in shown
    assert "they are counted by allreduce.loss." in shown
    for bad in (tmp_path / "missing.json", tmp_path):
        failed = subprocess.run(
            [*command, "timeline", str(bad)], timeout=60, capture_output=True, text=True
        )
        assert failed.returncode == 2
        assert str(bad) in failed.stderr
