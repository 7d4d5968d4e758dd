"""kolovod.core.affinity: the engine's threads on the cores that the user names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading

import numpy as np
import pytest
from frameworks import is_installed

import kolovod
from kolovod.core.affinity import core_of
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
    # Who only answers those who watch (observe/live) is where it likes.
    apart = {str(each.native_id) for each in threading.enumerate() if each.name == "kolovod-live"}
    return {
        thread: sorted(os.sched_getaffinity(int(thread)))
        for thread in os.listdir("/proc/self/task")
        if thread not in apart
    }


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


def place_of_carriers(rank, backend):
    """The carrier's thread is bound, too, and nothing else: PyTorch computes with all cores."""
    from kolovod import _native

    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.pop(name, None)
    make, counted = _native.Engine, []

    def engine(*args, **kwargs):
        counted.append(args[5]["cores"])
        return make(*args, **kwargs)

    _native.Engine = engine
    assert "torch" not in sys.modules
    if backend == "nccl":
        from kolovod.backends import nccl

        nccl._count_gpus = lambda: __import__("torch") and 2
    os.environ["KOLOVOD_BACKEND"] = backend
    kolovod.init(process_sets=[[1]])
    _native.Engine = make
    assert set(counted) == {len(CORES)}
    carriers = [t for t in threading.enumerate() if t.name == "kolovod-backend"]
    core = [CORES[0], CORES[-1]][rank]
    places = [sorted(os.sched_getaffinity(thread.native_id)) for thread in carriers]
    kolovod.barrier()
    kolovod.shutdown()
    return places == [[core]] * len(places), len(places), sys.modules["torch"].get_num_threads()


@pytest.mark.skipif(len(CORES) < 2, reason="bound and not bound are the same on one core")
@pytest.mark.skipif(not is_installed("torch"), reason="PyTorch is not installed")
@pytest.mark.parametrize(("backend", "counts"), [("gloo", [1, 1]), ("nccl", [1, 2])])
@pytest.mark.slow
def test_a_carrier_is_bound_and_pytorch_is_not(backend, counts):
    """With nccl a process set has a carrier of its own."""
    env = {"KOLOVOD_THREAD_AFFINITY": f"{CORES[0]},{CORES[-1]}"}
    by_rank = run_ranks(2, place_of_carriers, backend, env=env)
    assert [count for _, count, _ in by_rank] == counts
    for is_bound, _, computing in by_rank:
        assert is_bound
        assert computing > 1


def test_the_launcher_refuses_before_it_starts_a_rank():
    command = [sys.executable, "-m", "kolovod", "run", "-np", "3", "--label-hosts", "a:2,b:1"]
    command += ["--thread-affinity", f"{CORES[0]}", "--", "echo", "started"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert re.search(r"1 core\(s\) for the 2 ranks of this host", done.stderr)
    assert "started" not in done.stdout
