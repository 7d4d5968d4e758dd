"""A running job, live, by ``kolovod top``."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from launched import ready_job, run
from slow import slow_but
from waiting import until

from kolovod.launch.running_jobs import running_jobs
from kolovod.launch.stacks_text import line_of, main_first

SCRIPT = """
import os, sys, time
import numpy as np
import kolovod

def load_a_batch():
    time.sleep(0.005)
    if os.path.exists(sys.argv[1]):
        time.sleep(120)

kolovod.init()
print("ready", flush=True)
while True:
    if kolovod.rank() == 1:
        load_a_batch()
    kolovod.allreduce(np.ones(1000, np.float32), name="gradient")
"""
DEADLINE_S = 60.0


@contextmanager
def job(late: str, *, by_shell: bool = False) -> Iterator[str]:
    """Its name. Two ranks that step; rank 1 is late for ever when there is a file ``late``."""
    script = [sys.executable, "-c", SCRIPT, late]
    if by_shell:
        script = ["sh", "-c", '"$@"; true', "sh", *script]
    with ready_job("--", *script):
        (name,) = [each.name for each in running_jobs() if late in each.ranks[0].command]
        yield name


def shows_steps(name: str) -> str:
    shown = run("top", name, "--once")
    assert shown.returncode == 0, shown.stderr
    return shown.stdout if "steps/s (by what comes again)" in shown.stdout else ""


def shows_stacks(name: str) -> bool:
    stacks = run("stacks", name)
    known = "load_a_batch" in stacks.stdout or "allreduce" in stacks.stdout
    return known and stacks.returncode == 0


@pytest.mark.parametrize("by_shell", slow_but([False], [False, True]), ids=["python", "shell"])
def test_one_picture(tmp_path, by_shell: bool) -> None:
    with job(str(tmp_path / "late"), by_shell=by_shell) as name:
        shown = until(lambda: shows_steps(name), "all ranks have answered in time")
        assert f"job {name}" in shown
        assert "2 ranks on 1 host" in shown
        until(lambda: shows_stacks(name), "the stacks of all ranks")


@pytest.mark.slow
def test_who_is_late_and_where_for_programs(tmp_path) -> None:
    late = tmp_path / "late"
    with job(str(late)) as name:
        late.touch()
        with subprocess.Popen(
            [sys.executable, "-m", "kolovod", "top", name, "--json", "--interval", "0.5"],
            stdout=subprocess.PIPE, text=True,
        ) as top:  # fmt: skip
            try:
                deadline = time.monotonic() + DEADLINE_S
                assert top.stdout is not None
                said: dict = {}
                while time.monotonic() < deadline:
                    said = json.loads(top.stdout.readline())
                    if said["late_at"]:
                        break
            finally:
                top.kill()
        (where,) = said["late_at"].values()
        assert "in load_a_batch" in where
        by_rank = {each["rank"]: each for each in said["ranks"]}
        assert by_rank[1]["late"] == "allreduce.gradient"
        assert by_rank[0]["late"] == ""
        assert str(by_rank[1]["pid"]) in said["late_at"]


def test_keys_in_a_terminal(tmp_path) -> None:
    with job(str(tmp_path / "late")) as name:
        main, end = pty.openpty()
        environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "150", "LINES": "40"}
        command = [sys.executable, "-m", "kolovod", "top", name, "--interval", "0.5"]
        with subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=environ) as top:
            try:
                os.close(end)
                seen(main, "q quit")
                os.write(main, b"\x1b[B")
                os.write(main, b"s")
                seen(main, 'File "<string>"')
                os.write(main, b"q")
                seen(main, "\x1b[?1049l")  # the terminal is as it was
                assert top.wait(DEADLINE_S) == 0
            finally:
                top.kill()
                os.close(main)


def seen(fd: int, text: str) -> None:
    """Wait until it has been drawn."""
    shown, deadline = "", time.monotonic() + DEADLINE_S
    poll = select.poll()  # select takes descriptors below 1,024 only
    poll.register(fd, select.POLLIN)
    while text not in shown:
        assert time.monotonic() < deadline, shown
        if poll.poll(200):
            try:
                shown += os.read(fd, 1 << 16).decode(errors="replace")
            except OSError:  # the other end is closed
                assert text in shown, shown


def test_bad_arguments() -> None:
    shown = run("top", "nosuchjob")
    assert shown.returncode == 2
    assert "JOB 'nosuchjob'" in shown.stderr or "no job has a rank" in shown.stderr
    shown = run("top", "--interval", "0")
    assert shown.returncode == 2
    assert "--interval 0: expected 0.5 to 3 seconds" in shown.stderr
    assert run("top", "--interval", "5").returncode == 2


def test_the_line_that_a_thread_is_at() -> None:
    stacks = """Thread 0x01 (most recent call first):
  File "/home/me/train.py", line 3 in prefetch

Current thread 0x02 (most recent call first):
  File "/usr/lib/python3.11/site-packages/numpy/core.py", line 7 in wait
  File "/home/me/train.py", line 12 in load
  File "/home/me/train.py", line 30 in <module>
"""
    assert line_of(stacks) == "/home/me/train.py:12 in load (in wait)"
    first, other = main_first(stacks).split("\n\n")
    assert first.startswith("Current thread 0x02")
    assert other.endswith("in prefetch")
    assert main_first("") == ""
    only = 'Thread 0x1 (most recent call first):\n  File "/usr/lib/python3.11/x.py", line 2 in y\n'
    assert line_of(only) == "/usr/lib/python3.11/x.py:2 in y"
    assert line_of("") == ""
