"""MPI as the engine, beyond its rows in the conformance table."""

from __future__ import annotations

import subprocess
import sys

import pytest
import worlds
from forked import run_ranks

from kolovod.errors import InvalidArgumentError

pytestmark = pytest.mark.frameworks

ON_EACH_RANK = """
import conformance, numpy as np
import kolovod
from kolovod.backends import mpi
from kolovod.errors import MismatchError
from kolovod.numpy import collectives as kv

calls = dict.fromkeys(("allreduce", "broadcast", "allgather", "alltoall", "reducescatter"), 0)
for verb in calls:
    def counted(self, *args, verb=verb, original=getattr(mpi.MpiBackend, verb)):
        calls[verb] += 1
        return original(self, *args)
    setattr(mpi.MpiBackend, verb, counted)

kolovod.init()
for limit in (mpi._MAX_COUNT, 7):  # as if int could count to 7: larger tensors go in parts
    mpi._MAX_COUNT = limit
    for case in conformance.reductions("float32", ((3, 5), (101,)), ((False, False),)):
        conformance.check_allreduce(kv, "numpy", case)
        conformance.check_reducescatter(kv, "numpy", case)
    conformance.check_broadcast(kv, "numpy", "int16", ((0,), (3, 5)))
    conformance.check_allgather(kv, "numpy", "int16")
    conformance.check_alltoall(kv, "numpy", "int16")
    assert all(count > 10 for count in calls.values()), calls
    calls.update(dict.fromkeys(calls, 0))
try:
    kolovod.allreduce(np.ones(2 + kolovod.rank()), "odd")
    raise SystemExit("a mismatch went unnoticed")
except MismatchError:
    pass
print(f"done {kolovod.rank()}\\n", end="", flush=True)
"""


@pytest.fixture
def mpirun():
    """The command that starts MPI processes; skips where there is none."""
    if why := worlds.no_mpi():
        pytest.skip(why)
    return worlds.mpirun()


def run_command(command, **extra):
    return subprocess.run(
        command,
        env=worlds.mpi_environment(**extra),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_mpi_carries_every_verb_whatever_the_size(mpirun):
    command = [mpirun, "-n", "3", sys.executable, "-c", ON_EACH_RANK]
    ended = run_command(command, KOLOVOD_BACKEND="mpi")
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.split("\n"))[-3:] == ["done 0", "done 1", "done 2"]


def test_kolovod_run_starts_mpirun(mpirun):
    command = [sys.executable, "-m", "kolovod", "run", "-np", "2", "--backend", "mpi", "--"]
    ended = run_command([*command, sys.executable, "-c", ON_EACH_RANK])
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("done") == 2


def init_and_return_the_error(rank):
    import kolovod

    try:
        kolovod.init()
    except InvalidArgumentError as error:
        return str(error)
    return "the world was formed"


def test_mpi_without_mpirun_says_how_to_start(mpirun):
    for text in run_ranks(2, init_and_return_the_error, env={"KOLOVOD_BACKEND": "mpi"}):
        assert "MPI has 1 process(es), the world 2 rank(s)" in text
        assert "kolovod run -np 2 --backend mpi" in text
