"""The seam for engines of others: what goes through it, and what happens when it breaks."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import conformance
import numpy as np
import pytest

from kolovod import _native, backends
from kolovod.backends.host_arithmetic import divided, narrowed, scaled, widened
from kolovod.backends.host_memory import HostMemory
from kolovod.backends.setup import BackendSetup
from kolovod.core.collectives import Collectives
from kolovod.core.objects import Objects
from kolovod.core.ops import Op
from kolovod.errors import (
    BootstrapError,
    InternalError,
    InvalidArgumentError,
    KolovodError,
    MismatchError,
    WaitTimeoutError,
)
from kolovod.numpy import NumpyFrontend
from kolovod.testing.loopback import LoopbackRank, loopback


class Alone:
    """A foreign engine whose world is one rank."""

    def __init__(self):
        self.ops = set()
        self.calls = set()
        self.error = None
        self.memory = HostMemory()

    def allreduce(self, values, op):
        if self.error is not None:
            raise self.error
        assert values.ndim == 1
        assert values.dtype.kind in "iu" or values.dtype in (np.float32, np.float64)
        self.ops.add(op)

    def reducescatter(self, values, op, counts):
        assert counts == [values.size]
        self.allreduce(values, op)
        return values

    def broadcast(self, values, root):
        assert (values.dtype, values.ndim, root) == (np.uint8, 1, 0)
        self.calls.add("broadcast")

    def allgather(self, values, sizes):
        assert (values.dtype, sizes) == (np.uint8, [values.size])
        self.calls.add("allgather")
        return values

    def alltoall(self, values, sent, received, total):
        assert (values.dtype, sent, received) == (np.uint8, [values.size], [values.size])
        assert total == values.size
        self.calls.add("alltoall")
        return values

    def close(self, *, is_healthy):
        self.calls.add("close")


@contextlib.contextmanager
def verbs_over(backend):
    """Verbs over an engine of a world of one that hands its buckets to ``backend``; the engine."""
    config = _native.config_defaults()
    engine = _native.Engine(0, 1, 1, -1, [(-1, "rank 0")], config, external="host")
    carrier = backends.Carrier(engine, backend, 0, 1)
    carrier.start()
    facts = LoopbackRank(engine, 0, 1)
    try:
        yield Collectives(NumpyFrontend(), lambda: facts), engine
    finally:
        engine.shutdown()
        carrier.stop()


@pytest.fixture
def alone():
    """Verbs over an Alone, and that."""
    backend = Alone()
    with verbs_over(backend) as (verbs, _):
        yield verbs, backend
    assert "close" in backend.calls


@pytest.mark.parametrize("dtype", conformance.NUMPY_DTYPES)
def test_every_dtype_goes_through_the_seam(alone, dtype):
    kv, backend = alone
    for case in conformance.reductions(dtype, ((), (0,), (3, 5))):
        conformance.check_allreduce(kv, "numpy", case)
        if case.shape and not case.in_place:
            conformance.check_reducescatter(kv, "numpy", case)
    conformance.check_broadcast(kv, "numpy", dtype, ((3, 5),))
    conformance.check_allgather(kv, "numpy", dtype)
    conformance.check_alltoall(kv, "numpy", dtype)
    carried = {Op.Max, Op.Min} if dtype == "bool" else set(conformance.OPS) - {Op.Average}
    assert backend.ops == carried
    assert backend.calls == {"broadcast", "allgather", "alltoall"}


def test_bfloat16_is_widened_and_rounded_to_even():
    wide = widened(np.array([0x3F80, 0x7FC0, 0xC000], np.uint16), 10)
    np.testing.assert_array_equal(wide, np.array([1.0, np.nan, -2.0], np.float32))
    halfway = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7FFFFFFF], np.uint32)
    narrow = narrowed(halfway.view(np.float32), 10)
    assert [hex(bits) for bits in narrow] == ["0x3f80", "0x3f82", "0x3f81", "0x7fff"]


def test_factors_on_integers_clamp_and_truncate():
    values = np.array([2**62, -(2**62), 5, -5], np.int64)
    quadruple = scaled(values, 4.0, _native.DTYPES["int64"])
    assert quadruple.tolist() == [2**63 - 1, -(2**63), 20, -20]
    assert scaled(values[2:], 0.5, _native.DTYPES["int64"]).tolist() == [2, -2]
    large = np.array([2**62 + 11, -(2**62) - 5], np.int64)
    exact = divided(large, 2, 1.0, _native.DTYPES["int64"])
    assert exact.tolist() == [(2**62 + 11) // 2, -((2**62 + 5) // 2)]


def test_an_error_of_the_foreign_engine_fails_the_operation(alone):
    kv, backend = alone
    backend.error = OSError("the network is gone")
    with pytest.raises(InternalError, match="OSError: the network is gone"):
        kv.allreduce(np.ones(2), "x")


class Slow:
    """A foreign engine that writes to what it is given, and is held up before it returns."""

    def __init__(self):
        self.memory = HostMemory()
        self.started, self.go_on = threading.Event(), threading.Event()

    def broadcast(self, values, root):
        values += 1
        self.started.set()
        assert self.go_on.wait(60)

    def allreduce(self, values, op):
        self.broadcast(values, 0)

    def reducescatter(self, values, op, counts):
        self.broadcast(values, 0)
        return values

    def allgather(self, values, sizes):
        self.broadcast(values, 0)
        return values

    def alltoall(self, values, sent, received, total):
        self.broadcast(values, 0)
        return values

    def close(self, *, is_healthy):
        pass


@pytest.mark.parametrize(
    "verb",
    [
        "allreduce_async_",
        "broadcast_async_",
        "allgather_async",
        "alltoall_async",
        "reducescatter_async",
    ],
)
def test_a_bucket_given_up_leaves_its_tensors_alone(verb):
    backend = Slow()
    with verbs_over(backend) as (verbs, engine):
        tensor = np.zeros(1000, np.float32)
        handle = getattr(verbs, verb)(tensor, **({"root_rank": 0} if "broadcast" in verb else {}))
        with pytest.raises(WaitTimeoutError):
            handle.wait(timeout_s=0)
        assert backend.started.wait(60)
        engine.abort("a rank died, say")
        with pytest.raises(KolovodError, match="a rank died"):
            handle.wait(timeout_s=60)
        backend.go_on.set()
    assert not tensor.any()


def test_a_death_is_a_better_reason_than_the_foreign_engines():
    """As with Gloo: a connection breaks before the system says that its other end died."""

    class Broken(Alone):
        def __init__(self, engine):
            super().__init__()
            self.engine = engine

        def allreduce(self, values, op):
            threading.Timer(0.05, self.engine.abort, ["killed"]).start()
            raise OSError("connection closed by peer")

    config = _native.config_defaults()
    engine = _native.Engine(0, 1, 1, -1, [(-1, "rank 0")], config, external="host")
    carrier = backends.Carrier(engine, Broken(engine), 0, 1)
    carrier.start()
    facts = LoopbackRank(engine, 0, 1)
    try:
        with pytest.raises(KolovodError, match="killed"):
            Collectives(NumpyFrontend(), lambda: facts).allreduce(np.ones(2), "x")
    finally:
        engine.shutdown()
        carrier.stop()


def test_why_the_gpus_were_not_connected_is_told_in_the_meetings_words(monkeypatch):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from kolovod.backends.gpu_memory import GpuMemory

    def connect(index):
        raise MismatchError(f"rank 1 submitted something else than GPU {index}")

    monkeypatch.setattr(torch.cuda, "Stream", lambda index: None)
    memory = GpuMemory(connect)
    for device, said in ((-1, "before any of them joins(?m:$)"), (3, "something else than GPU 3")):
        with pytest.raises(InvalidArgumentError, match=said), memory.work({"device": device}):
            pass


# Making the backends ------------------------------------------------------------------------------


def test_unknown_backend():
    with pytest.raises(InvalidArgumentError, match=r"'smoke'.*native, gloo, mpi, nccl"):
        backends.load("smoke", None, None)


def test_a_backend_whose_thread_cannot_start_is_closed(monkeypatch):
    def fail(carrier):
        raise RuntimeError("can't start new thread")

    backend = Alone()
    monkeypatch.setattr(backends, "load", lambda *_: backend)
    monkeypatch.setattr(backends.Carrier, "start", fail)
    config = _native.config_defaults()
    engine = _native.Engine(0, 1, 1, -1, [(-1, "rank 0")], config, external="host")
    world = SimpleNamespace(rank=0, core=None)
    try:
        with pytest.raises(RuntimeError, match="new thread"):
            backends.start("gloo", world, engine, [0])
    finally:
        engine.shutdown()
    assert backend.calls == {"close"}


def meeting_of(kv):
    return BackendSetup(Objects(kv.world))


def test_what_one_rank_says_all_hear_in_any_order():
    def work(kv):
        rank, meeting = kv.world().rank, meeting_of(kv)
        meeting.put(f"address {rank}", b"%d" % rank)
        if rank == 1:
            assert meeting.get("second") == b"after the first"
        if rank == 2:
            assert meeting.get("address 0") == b"0"
            meeting.put("second", b"after the first")
        meeting.finish()
        return [meeting.get(f"address {r}") for r in range(3)]

    with loopback(3) as world:
        assert world.run(work) == [[b"0", b"1", b"2"]] * 3


def test_a_failure_of_one_rank_is_told_to_all():
    def work(kv):
        meeting = meeting_of(kv)
        if kv.world().rank == 1:
            meeting.fail(ImportError("no such\nlibrary"))
            return
        meeting.put("key", b"")
        with pytest.raises(BootstrapError, match="rank 1 has no backend: ImportError: no such lib"):
            meeting.finish() if kv.world().rank == 0 else meeting.get("address 1")
        meeting.fail(OSError("a consequence"))  # known already: waits for nobody

    with loopback(3) as world:
        world.run(work)


def test_waiting_for_a_word_that_nobody_will_say_ends():
    def work(kv):
        meeting = meeting_of(kv)
        if kv.world().rank == 0:
            with pytest.raises(BootstrapError, match="rank 1 has no backend: BootstrapError"):
                meeting.finish()
            return
        with pytest.raises(BootstrapError, match="no rank has said its 'x'") as caught:
            meeting.get("x")
        meeting.fail(caught.value)

    with loopback(2) as world:
        world.run(work)
