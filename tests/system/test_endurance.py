"""Many worlds in one process, and surroundings that are not as usual."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from forked import run_ranks
from leaks import of_this_process, of_this_process_again

WORLDS = 1000
WARM_UP = 300  # until caches of the allocator are full


def form_and_leave(rank):
    import kolovod

    def worlds(count):
        for turn in range(count):
            kolovod.init()
            if turn % 10 == 0:
                total = kolovod.allreduce(np.ones(3), op=kolovod.Sum)
                assert total.tolist() == [kolovod.size()] * 3
            kolovod.shutdown()

    worlds(WARM_UP)
    before = of_this_process()
    worlds(WORLDS - WARM_UP)
    return before, of_this_process_again(before), threading.active_count()


@pytest.mark.slow
def test_a_thousand_worlds_leave_nothing_behind():
    for before, after, threads in run_ranks(2, form_and_leave, timeout_s=100):
        assert after[0] - before[0] < 1024  # KiB; a segment alone has more
        assert after[1] <= before[1]  # descriptors
        assert after[2] <= before[2]  # threads
        assert after[3] <= before[3] + 2  # the allocator may map another arena
        assert threads == 1


SCRIPT = """
import os, time
if os.environ.get("BECOME") and os.environ["KOLOVOD_RANK"] == "1":
    import kolovod.numpy  # while it can be read
    os.setgid(int(os.environ["BECOME"]))
    os.setuid(int(os.environ["BECOME"]))
import numpy as np
import kolovod
kolovod.init()
total = kolovod.allreduce(np.full(1_000_000, kolovod.rank() + 1.0), op=kolovod.Sum)
assert (total == 3).all()
print("sum is right", flush=True)
"""


def run_surrounded(*prefix, **variables):
    """SCRIPT as two ranks, each behind the command ``prefix``."""
    command = [sys.executable, "-m", "kolovod", "run", "-np", "2", "--", *prefix]
    return subprocess.run(
        [*command, sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **variables},
    )


def may_unshare(*flags):
    try:
        return subprocess.run(["unshare", *flags, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("size", ["64k", "1m"])
def test_a_tiny_dev_shm_does_not_matter(size):
    if not may_unshare("-m"):
        pytest.skip("needs the right to make a mount namespace")
    mount = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
    done = run_surrounded("unshare", "-m", "sh", "-c", mount, "sh")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum is right") == 2


def test_ranks_in_pid_namespaces_of_their_own():
    if not may_unshare("--pid", "--fork"):
        pytest.skip("needs the right to make a pid namespace")
    done = run_surrounded("unshare", "--pid", "--fork")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum is right") == 2


def test_ranks_of_different_users_are_told_so():
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    done = run_surrounded(BECOME="65534")
    assert done.returncode != 0
    assert "runs as user 65534, but rank 0" in done.stderr
    assert "start them all as the same user" in done.stderr
