"""The backend nccl when a rank dies, or when there can be none; Gloo is in NCCL's place."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from forked import run_torch_ranks as run_ranks  # noqa: E402
from waiting import Marks  # noqa: E402

from kolovod.core.ops import Sum  # noqa: E402
from kolovod.errors import (  # noqa: E402
    BootstrapError,
    CollectiveError,
    InvalidArgumentError,
    RankLostError,
)
from kolovod.testing import RankFailed  # noqa: E402


def one_is_killed(rank, marks):
    from gloo_for_nccl import instead_of_nccl

    import kolovod

    kv = instead_of_nccl()
    kolovod.init()
    kv.allreduce(torch.ones(3))
    marks.make(rank)
    if rank == 1:
        marks.wait_for(0)  # which has its result
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankLostError) as caught:
        kv.allreduce(torch.ones(3))
    kolovod.shutdown()
    kolovod.init(comm=[0])
    assert kv.allreduce(torch.ones(3), op=Sum).tolist() == [1] * 3
    return caught.value.rank


def test_a_killed_rank_is_named(tmp_path):
    first, second = run_ranks(2, one_is_killed, Marks(tmp_path), keep_going=True)
    assert isinstance(second, RankFailed)
    assert first == 1


def hangs_in_nccl(rank):
    """NCCL itself never notices that a rank is gone."""
    from gloo_for_nccl import Event, OverGloo, RamMemory, instead_of_nccl

    import kolovod

    kv = instead_of_nccl()
    kolovod.init()
    kv.allreduce(torch.ones(3))
    if rank == 1:
        OverGloo.allreduce = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    else:
        OverGloo.allreduce = lambda *_: None
        done = Event()
        done.query = lambda: False
        marks = iter([Event(), done])
        RamMemory.mark = lambda self: next(marks)
    with pytest.raises(RankLostError) as caught:
        kv.allreduce(torch.ones(3))
    kolovod.shutdown()
    return caught.value.rank, OverGloo.aborted


def test_the_communicator_is_aborted_when_a_rank_dies_while_it_is_at_work():
    first, second = run_ranks(2, hangs_in_nccl, keep_going=True)
    assert isinstance(second, RankFailed)
    assert first == (1, 1)


def cannot_begin(rank):
    os.environ["KOLOVOD_BACKEND"] = "nccl"
    import kolovod
    from kolovod.backends import nccl

    torch.cuda.device_count = lambda: 0
    count = nccl._count_gpus
    texts = []
    for gpus in (2, 1):
        nccl._count_gpus = (lambda n: lambda: n)(gpus) if rank == 0 or gpus == 1 else count
        with pytest.raises((BootstrapError, InvalidArgumentError)) as caught:
            kolovod.init()
        texts.append(f"{type(caught.value).__name__}: {caught.value}")
    return texts, torch.cuda.is_initialized()


def test_ranks_without_gpus_of_their_own_are_told_in_init():
    (first, few), is_initialized = (by_rank := run_ranks(2, cannot_begin))[0]
    second, few_too = by_rank[1][0]
    assert first.startswith("BootstrapError: rank 1 has no backend: SettingError: backend")
    assert second.startswith("SettingError: backend 'nccl'")
    for text in (few, few_too):
        assert "ranks [0, 1] on host" in text
        assert "see only 1 GPU(s)" in text
    for text in (first, second, few):
        assert "leave KOLOVOD_BACKEND unset" in text
    assert not is_initialized


def test_the_engine_ends_when_there_can_be_no_driver(monkeypatch):
    import kolovod
    from kolovod import _native, backends
    from kolovod.backends import nccl

    def fail(engine, *_):
        engines.append(engine)
        raise RuntimeError("can't start new thread")

    engines = []
    monkeypatch.setenv("KOLOVOD_BACKEND", "nccl")
    monkeypatch.setattr(nccl, "_count_gpus", lambda: 1)
    monkeypatch.setattr(backends, "Carrier", fail)
    with pytest.raises(RuntimeError, match="new thread"):
        kolovod.init()
    (engine,) = engines
    with pytest.raises(_native.EngineError):
        engine.submit(_native.VERBS["barrier"], "", [], 0, 1.0, 1.0, 0, False)


def link_fails(rank):
    """NCCL's connections fail, and no rank is lost: the operation would wait for ever."""
    from gloo_for_nccl import Event, OverGloo, RamMemory, instead_of_nccl

    import kolovod

    noted = []
    OverGloo._failure = lambda self: "".join(noted)
    kv = instead_of_nccl()
    kolovod.init()
    kv.allreduce(torch.ones(3))
    never = Event()
    never.query = lambda: False
    RamMemory.mark = lambda self: never
    if rank == 1:
        noted.append("remote process exited or there was a network error")
    with pytest.raises(CollectiveError) as caught:
        kv.allreduce(torch.ones(3))
    return str(caught.value)


def test_an_error_that_nccl_has_noted_ends_the_operation_on_all_ranks():
    for said in run_ranks(2, link_fails):
        assert "remote process exited or there was a network error" in said


LIBRARY = """
typedef int ncclResult_t;
static int now = 0, asked = 0;
void set(int result, int answer) { now = result; asked = answer; }
ncclResult_t ncclCommGetAsyncError(void* comm, ncclResult_t* error) {
  if (comm != (void*)0x7fff12345678) return 4;
  *error = now;
  return asked;
}
const char* ncclGetErrorString(ncclResult_t result) {
  return result == 6 ? "remote process exited" : "another error";
}
"""


def test_what_nccl_is_asked(tmp_path):
    import ctypes

    from kolovod.backends.nccl_errors import AsyncErrors

    (tmp_path / "nccl.c").write_text(LIBRARY)
    path = tmp_path / "libnccl.so.2"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, tmp_path / "nccl.c"], check=True)
    library = ctypes.CDLL(str(path))
    errors = AsyncErrors(0x7FFF12345678, library)
    for result, answer, found in (
        (0, 0, ""),
        (7, 0, ""),  # a communicator that is not blocking is still at work
        (6, 0, "remote process exited (ncclResult_t 6)"),
        (0, 3, "another error (ncclResult_t 3)"),
    ):
        library.set(result, answer)
        assert errors.found() == found
    library.set(0, 0)
    assert AsyncErrors(1, library).found() == "another error (ncclResult_t 4)"
    older = tmp_path / "older.so"  # not the process's own names: it may have loaded an NCCL
    subprocess.run(["cc", "-shared", "-o", older, "-x", "c", os.devnull], check=True)
    with pytest.raises(AttributeError):
        AsyncErrors(1, ctypes.CDLL(str(older)))
