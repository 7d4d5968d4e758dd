"""The seam for engines of others, and MPI through it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import conformance
import numpy as np
import pytest

from kolovod import _native, backends
from kolovod.collectives import Collectives
from kolovod.errors import (
    InternalError,
    InvalidArgumentError,
    KolovodError,
    WaitTimeoutError,
)
from kolovod.numpy import NumpyFrontend
from kolovod.ops import Op
from kolovod.testing import run_ranks
from kolovod.testing.loopback import LoopbackRank


class Alone:
    """A foreign engine whose world is one rank."""

    def __init__(self):
        self.ops = set()
        self.roots = set()
        self.error = None

    def allreduce(self, values, op):
        if self.error is not None:
            raise self.error
        assert values.ndim == 1
        assert values.dtype.kind in "iu" or values.dtype in (np.float32, np.float64)
        self.ops.add(op)

    def broadcast(self, values, root):
        assert values.dtype == np.uint8
        self.roots.add(root)


@pytest.fixture
def alone():
    """Verbs over an engine that hands its buckets to an Alone, and that."""
    config = _native.config_defaults()
    engine = _native.Engine(0, 1, 1, -1, [(-1, "rank 0")], config, external=True)
    backend = Alone()
    driver = backends.ExternalDriver(engine, backend, 1)
    driver.start()
    facts = LoopbackRank(engine, 0, 1)
    yield Collectives(NumpyFrontend(), lambda: facts), backend
    engine.shutdown()
    driver.stop()


@pytest.mark.parametrize("dtype", conformance.NUMPY_DTYPES)
def test_every_dtype_goes_through_the_seam(alone, dtype):
    kv, backend = alone
    for case in conformance.reductions(dtype, ((), (0,), (3, 5))):
        conformance.check_allreduce(kv, "numpy", case)
    conformance.check_broadcast(kv, "numpy", dtype, ((3, 5),))
    carried = {Op.Max, Op.Min} if dtype == "bool" else set(conformance.OPS) - {Op.Average}
    assert backend.ops == carried
    assert backend.roots == {0}


def test_bfloat16_is_widened_and_rounded_to_even():
    widened = backends.base._widened(np.array([0x3F80, 0x7FC0, 0xC000], np.uint16), 10)
    np.testing.assert_array_equal(widened, np.array([1.0, np.nan, -2.0], np.float32))
    halfway = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7FFFFFFF], np.uint32)
    narrowed = backends.base._narrowed(halfway.view(np.float32), 10)
    assert [hex(bits) for bits in narrowed] == ["0x3f80", "0x3f82", "0x3f81", "0x7fff"]


def test_factors_on_integers_clamp_and_truncate():
    values = np.array([2**62, -(2**62), 5, -5], np.int64)
    scaled = backends.base._scaled(values, 4.0, _native.DTYPES["int64"])
    assert scaled.tolist() == [2**63 - 1, -(2**63), 20, -20]
    assert backends.base._scaled(values[2:], 0.5, _native.DTYPES["int64"]).tolist() == [2, -2]
    large = np.array([2**62 + 11, -(2**62) - 5], np.int64)
    exact = backends.base._finished(large, 2, 1.0, _native.DTYPES["int64"])
    assert exact.tolist() == [(2**62 + 11) // 2, -((2**62 + 5) // 2)]


def test_an_error_of_the_foreign_engine_fails_the_operation(alone):
    kv, backend = alone
    backend.error = OSError("the network is gone")
    with pytest.raises(InternalError, match="OSError: the network is gone"):
        kv.allreduce(np.ones(2), "x")


@pytest.mark.parametrize("verb", ["allreduce_async_", "broadcast_async_"])
def test_a_bucket_given_up_leaves_its_tensors_alone(verb):
    started, go_on = threading.Event(), threading.Event()

    class Slow:
        def allreduce(self, values, op):
            values += 1
            started.set()
            assert go_on.wait(60)

        def broadcast(self, values, root):
            self.allreduce(values, None)

    config = _native.config_defaults()
    engine = _native.Engine(0, 1, 1, -1, [(-1, "rank 0")], config, external=True)
    driver = backends.ExternalDriver(engine, Slow(), 1)
    driver.start()
    facts = LoopbackRank(engine, 0, 1)
    verbs = Collectives(NumpyFrontend(), lambda: facts)
    tensor = np.zeros(1000, np.float32)
    handle = getattr(verbs, verb)(tensor, **({"root_rank": 0} if "broadcast" in verb else {}))
    with pytest.raises(WaitTimeoutError):
        handle.wait(timeout_s=0)
    assert started.wait(60)
    engine.abort("a rank died, say")
    with pytest.raises(KolovodError, match="a rank died"):
        handle.wait(timeout_s=60)
    go_on.set()
    driver.stop()
    engine.shutdown()
    assert not tensor.any()


def test_unknown_backend():
    with pytest.raises(InvalidArgumentError, match=r"'smoke'.*mpi, native|'smoke'.*native, mpi"):
        backends.load("smoke", 0, 2)


# MPI ----------------------------------------------------------------------------------------------

ON_EACH_RANK = """
import conformance, numpy as np
import kolovod
from kolovod.backends.mpi import MpiBackend
from kolovod.errors import MismatchError
from kolovod.numpy import collectives as kv

calls = {"allreduce": 0, "broadcast": 0}
for verb in calls:
    def counted(self, *args, verb=verb, original=getattr(MpiBackend, verb)):
        calls[verb] += 1
        original(self, *args)
    setattr(MpiBackend, verb, counted)

kolovod.init()
assert kolovod.size() == 2
for dtype in conformance.NUMPY_DTYPES:
    for case in conformance.reductions(dtype, ((), (0,), (3, 5), (1025,))):
        conformance.check_allreduce(kv, "numpy", case)
    conformance.check_broadcast(kv, "numpy", dtype, ((0,), (3, 5)))
    conformance.check_allgather(kv, "numpy", dtype)
conformance.check_grouped(kv, "numpy", ("int32", "float16"), ((3, 5), (0,)))
conformance.check_allreduce(kv, "numpy", conformance.Case(
    "float32", (700_001,), conformance.Average, (1.0, 1.0), True, False))
assert calls["allreduce"] > 100 and calls["broadcast"] > 100, calls
try:
    kolovod.allreduce(np.ones(2 + kolovod.rank()), "odd")
    raise SystemExit("a mismatch went unnoticed")
except MismatchError:
    pass
assert kolovod.broadcast_object("rank %d" % kolovod.rank(), 1) == "rank 1"
kolovod.barrier()
kolovod.shutdown()
kolovod.init()  # again, in the same processes
assert kolovod.allreduce(1, op=kolovod.Sum) == 2
print("done", kolovod.rank(), flush=True)
"""


@pytest.fixture
def mpirun():
    """The command that starts MPI processes; skips where there is none."""
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed: pip install 'kolovod[mpi]'")
    beside = Path(sys.executable).parent / "mpirun"
    command = str(beside) if beside.exists() else shutil.which("mpirun")
    if command is None:
        pytest.skip("there is no mpirun: pip install 'kolovod[mpi]'")
    return command


def environment(**extra):
    path = [str(Path(conformance.__file__).parent), *sys.path]
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    allowed["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"  # on one core
    allowed |= {"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**os.environ, **allowed, "PYTHONPATH": os.pathsep.join(filter(None, path)), **extra}


def run_command(command, **extra):
    return subprocess.run(
        command, env=environment(**extra), capture_output=True, text=True, timeout=100, check=False
    )


def test_mpi_carries_allreduce_and_broadcast(mpirun):
    command = [mpirun, "-n", "2", sys.executable, "-c", ON_EACH_RANK]
    ended = run_command(command, KOLOVOD_BACKEND="mpi")
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.split("\n"))[-2:] == ["done 0", "done 1"]


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
