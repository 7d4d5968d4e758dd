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
from waiting import until

from kolovod.core import stacks
from kolovod.errors import InvalidArgumentError
from kolovod.launch import orphan_reaper
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

def combine():  # the verb itself is a call of C, which stacks do not show
    print("ready", flush=True)
    kolovod.allreduce(np.ones(3), name="gradient")

if kolovod.rank() == 1:
    load_a_batch()
combine()
"""
SCRIPT += f"# {secrets.token_hex(8)}\n"  # so that it is not another one's, who runs this test, too
DEADLINE_S = 60.0


@contextmanager
def job() -> Iterator[RunningJob]:
    """Rank 0 waits in an operation, rank 1 is late."""
    with ready_job("--", sys.executable, "-c", SCRIPT):
        (found,) = [each for each in running_jobs() if SCRIPT in each.ranks[0].command]
        yield found


def shown(name: str, code: int, *texts: str) -> str:
    """What it says, once all ``texts`` are there: ranks go on, and may not answer in time."""

    def found() -> str:
        done = run("stacks", name)
        whole = done.returncode == code and all(text in done.stdout for text in texts)
        return done.stdout if whole else ""

    return until(found, f"exit code {code} and {texts}")


@pytest.mark.slow
def test_all_ranks_and_threads() -> None:
    with job() as found:
        shown(found.name, 0, "in combine", "in load_a_batch")
        for _ in range(2):  # what was read is not read again
            text = shown(found.name, 0)
            first, second = text.split("rank 1, pid ")
            assert first.startswith(f"rank 0, pid {found.ranks[0].pid}:\n")
            assert second.startswith(f"{found.ranks[1].pid}:\n")
            assert "in combine" in first
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
            until(lambda: orphan_reaper.is_stopped(found.ranks[1].pid))
            no_answer = "  no stacks: no answer within 2 s; the system says T (stopped)"
            shown(found.name, 1, "in combine", no_answer)
        finally:
            os.kill(found.ranks[1].pid, signal.SIGCONT)
        shown(found.name, 0, "in load_a_batch")


SLOW = """
import ctypes, faulthandler, os, time
from kolovod.core import stacks

def register(signum, file, **options):
    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def write(signum):
        os.write(file, b"half a stack, ")
        time.sleep(1)
        os.write(file, b"and the rest")
    kept.append(write)
    ctypes.CDLL(None).signal(signum, write)

kept = []
faulthandler.register = register
stacks.answer_others()
print("ready", flush=True)
ctypes.CDLL(None).read(0, ctypes.create_string_buffer(1), 1)  # it goes on after a signal
"""


@pytest.mark.slow
def test_who_is_interrupted_in_the_middle_is_waited_for() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SLOW], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        for _ in range(2):
            text = until(lambda: stacks.of_process(other.pid, timeout_s=60))
            assert text == "half a stack, and the rest"


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
