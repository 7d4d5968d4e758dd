"""kolovod.affinity: the engine's threads on the cores that the user names."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest

import kolovod
from kolovod.affinity import core_of
from kolovod.errors import InvalidArgumentError
from kolovod.testing import run_ranks

CORES = sorted(os.sched_getaffinity(0))


def test_core_of_a_rank() -> None:
    first, last = CORES[0], CORES[-1]
    assert core_of("", 1, 2) is None
    assert core_of(f"{first}, {last}", 1, 2) == last
    assert core_of(f"{first},{last},{first}", 0, 2) == first  # more than ranks: well
    with pytest.raises(InvalidArgumentError, match=r"1 core\(s\) for the 2 ranks of this host"):
        core_of(str(first), 0, 2)
    unusable = str(CORES[-1] + 1)
    with pytest.raises(InvalidArgumentError, match=f"local rank 0 cannot use core {unusable}"):
        core_of(unusable, 0, 1)


def threads() -> dict[str, list[int]]:
    """The cores that each thread of this process may use."""
    found = {}
    for thread in os.listdir("/proc/self/task"):
        found[thread] = sorted(os.sched_getaffinity(int(thread)))
    return found


def place_of_threads(rank):
    before = threads()
    kolovod.init(process_sets=[[1]])
    after = threads()
    assert {t: cores for t, cores in after.items() if t in before} == before
    bound = [cores for t, cores in after.items() if t not in before]
    # With a set, which has an engine of its own, on rank 1.
    assert len(bound) == 1 + rank, after
    core = [CORES[0], CORES[-1]][rank]
    assert all(cores == [core] for cores in bound), after
    assert kolovod.allreduce(np.ones(1000), op=kolovod.Sum)[-1] == 2
    return True


@pytest.mark.parametrize("variable", ["KOLOVOD_THREAD_AFFINITY", "HOROVOD_THREAD_AFFINITY"])
def test_only_the_engine_is_bound(variable):
    assert all(run_ranks(2, place_of_threads, env={variable: f"{CORES[0]},{CORES[-1]}"}))


def test_the_launcher_refuses_before_it_starts_a_rank():
    command = [sys.executable, "-m", "kolovod", "run", "-np", "3", "--label-hosts", "a:2,b:1"]
    command += ["--thread-affinity", f"{CORES[0]}", "--", "echo", "started"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert re.search(r"1 core\(s\) for the 2 ranks of this host", done.stderr)
    assert "started" not in done.stdout
