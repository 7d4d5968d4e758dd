"""Where ranks are, by ``kolovod stacks``."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from launched import ready_job, run

from kolovod.core import stacks
from kolovod.errors import InvalidArgumentError
from kolovod.launch.running_jobs import RunningJob, RunningRank, running_jobs
from kolovod.launch.stacks_command import chosen

SCRIPT = """
import os, sys, threading, time
import numpy as np
import kolovod

def load_a_batch():
    print("ready", flush=True)
    sys.stdin.read()
    time.sleep(60)

def prefetch():
    time.sleep(60)

kolovod.init()
threading.Thread(target=prefetch, daemon=True).start()
if os.fork() == 0:  # its stacks are none of the rank's
    time.sleep(60)
    os._exit(0)
if kolovod.rank() == 1:
    load_a_batch()
print("ready", flush=True)
kolovod.allreduce(np.ones(3), name="gradient")
"""
SCRIPT += f"# {secrets.token_hex(8)}\n"  # so that it is not another one's, who runs this test, too
DEADLINE_S = 60.0


@contextmanager
def job() -> Iterator[RunningJob]:
    """Rank 0 waits in an operation, rank 1 is late."""
    with ready_job("--", sys.executable, "-c", SCRIPT):
        (found,) = [each for each in running_jobs() if SCRIPT in each.ranks[0].command]
        yield found


def test_all_ranks_and_threads() -> None:
    with job() as found:
        for _ in range(2):  # what was read is not read again
            done = run("stacks", found.name)
            assert done.returncode == 0, done.stderr
            first, second = done.stdout.split("rank 1, pid ")
            assert first.startswith(f"rank 0, pid {found.ranks[0].pid}:\n")
            assert second.startswith(f"{found.ranks[1].pid}:\n")
            assert "in allreduce" in first
            assert "in load_a_batch" in second
            for text in (first, second):
                assert text.count(" in prefetch\n") == 1
                assert text.count("(most recent call first)") >= 2
        only = run("stacks", found.name, "--rank", "1").stdout
        assert only.startswith("rank 1, pid ")
        assert "rank 0" not in only
        wrong = run("stacks", found.name, "--rank", "7")
        assert wrong.returncode == 2
        assert f"--rank 7: on this host job {found.name} has rank 0, 1" in wrong.stderr
        os.kill(found.ranks[1].pid, signal.SIGSTOP)
        try:
            stopped = run("stacks", found.name)
        finally:
            os.kill(found.ranks[1].pid, signal.SIGCONT)
        assert stopped.returncode == 1
        assert "in allreduce" in stopped.stdout
        assert "  no stacks: no answer within 2 s; the system says T (stopped)" in stopped.stdout
        assert "in load_a_batch" in run("stacks", found.name).stdout


def test_who_has_not_initialized_is_left_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        with pytest.raises(stacks.StacksUnavailableError, match=r"has not called kolovod\.init"):
            stacks.of_process(other.pid)
        assert other.poll() is None
        other.kill()
    with pytest.raises(stacks.StacksUnavailableError, match="it has ended"):
        stacks.of_process(other.pid)


def test_which_job() -> None:
    one, two = (RunningJob(name, ranks=[RunningRank(0, 1, (), 1.0, "S")]) for name in ("ab", "ac"))
    assert chosen([one], "") is one
    assert chosen([one, two], "ac") is two
    for jobs, name, message in (
        ([], "", "no job has a rank on this host"),
        ([one, two], "", "several jobs are on this host, ab, ac: name one"),
        ([one, two], "a", "several jobs"),
        ([one], "b", "JOB 'b': no such job is on this host; there are ab"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            chosen(jobs, name)
