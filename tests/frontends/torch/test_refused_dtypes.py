"""Complex and float8 tensors: refused at once, by name, and without keeping other ranks waiting."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from forked import run_torch_ranks as run_ranks  # noqa: E402
from torch_loopback import run  # noqa: E402

import horovod.torch as hvd  # noqa: E402
import kolovod.torch as kvt  # noqa: E402
from kolovod.core.ops import Adasum  # noqa: E402
from kolovod.errors import CollectiveAbortedError, InvalidArgumentError  # noqa: E402
from kolovod.torch.functions import Functions  # noqa: E402

FLOAT8 = [getattr(torch, name) for name in dir(torch) if name.startswith("float8_")]
WAYS_OUT = {
    **dict.fromkeys([torch.complex64, torch.complex128], "view_as_real"),
    **dict.fromkeys(FLOAT8, "bfloat16"),
}

# How each is called with one tensor.
VERBS = {
    **dict.fromkeys(
        [
            *("allreduce", "allreduce_", "allreduce_async", "allreduce_async_"),
            *("allgather", "allgather_async", "alltoall", "alltoall_async"),
            *("reducescatter", "reducescatter_async"),
        ],
        lambda verb, tensor: verb(tensor),
    ),
    **dict.fromkeys(
        [
            *("grouped_allreduce", "grouped_allreduce_"),
            *("grouped_allreduce_async", "grouped_allreduce_async_"),
            *("grouped_allgather", "grouped_allgather_async"),
            *("grouped_reducescatter", "grouped_reducescatter_async"),
        ],
        lambda verb, tensor: verb([torch.ones(2), tensor]),
    ),
    **dict.fromkeys(
        ["broadcast", "broadcast_", "broadcast_async", "broadcast_async_"],
        lambda verb, tensor: verb(tensor, 0),
    ),
}


@pytest.mark.parametrize("dtype", WAYS_OUT)
@pytest.mark.parametrize("size", [1, 2])
def test_every_verb(dtype, size):
    """On one rank: the other is not disturbed."""

    def work(kv, rank):
        if rank == size - 1:
            for name, call in VERBS.items():
                text = f"{dtype} is not supported.*{WAYS_OUT[dtype]}"
                with pytest.raises(InvalidArgumentError, match=text):
                    call(getattr(kv, name), torch.zeros(2).to(dtype))
        return kv.allreduce(torch.ones(1)).item()

    assert run(size, work) == [1.0] * size


def parameters(dtype):
    """One as usual, and one of ``dtype``."""
    good, bad = torch.ones(2), torch.ones(2).to(dtype)
    return [("good", torch.nn.Parameter(good)), ("bad", torch.nn.Parameter(bad))]


def backward(named):
    sum((p.abs() if p.is_complex() else p.float()).sum() for _, p in named).backward()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"compression": kvt.Compression.fp16}, {"groups": 1}], ids=str
)
def test_gradients(dtype, everywhere, options):
    def work(kv, rank):
        named = parameters(dtype if everywhere or rank == 1 else torch.float32)
        optimizer = torch.optim.SGD([p for _, p in named], lr=1.0)
        optimizer = kvt.DistributedOptimizer(optimizer, named, collectives=kv, **options)
        text = f"gradient of 'bad': {dtype} is not supported.*{WAYS_OUT[dtype]}"
        if named[1][1].dtype != dtype:
            text = "another rank has a gradient that cannot be averaged"
        with pytest.raises(InvalidArgumentError, match=text):
            backward(named)
        del optimizer

    run(2, work)


def test_steps_that_adasum_is_to_combine():
    def work(kv, rank):
        named = parameters(torch.complex64)
        optimizer = torch.optim.SGD([p for _, p in named], lr=1.0)
        optimizer = kvt.DistributedOptimizer(optimizer, named, collectives=kv, op=Adasum)
        backward(named)
        with pytest.raises(InvalidArgumentError, match=r"'bad': torch\.complex64 is not"):
            optimizer.step()
        assert named[0][1].tolist() == [1, 1]  # no step was taken

    run(2, work)


def test_starting_equal():
    def work(kv, rank):
        functions = Functions(kv)
        for dtype in (torch.complex64, torch.float8_e5m2):
            state = {"weight": torch.ones(2), "buffer": torch.ones(2).to(dtype)}
            with pytest.raises(InvalidArgumentError, match=f"params..buffer..: {dtype} is not"):
                functions.broadcast_parameters(state)
            parameter = torch.nn.Parameter(torch.ones(2))
            optimizer = torch.optim.SGD([parameter], lr=1.0)
            optimizer.state[parameter] = {"momentum_buffer": torch.ones(2).to(dtype)}
            with pytest.raises(InvalidArgumentError, match=f"optimizer's state: {dtype} is not"):
                functions.broadcast_optimizer_state(optimizer, 1)
        functions.broadcast_parameters({"weight": torch.ones(2)})

    run(2, work)


def through_horovod(rank):
    hvd.init()
    if rank == 1:
        for dtype in (torch.complex64, torch.float8_e5m2):
            for name, call in VERBS.items():
                with pytest.raises(ValueError, match=f"{dtype} is not supported"):
                    call(getattr(hvd, name), torch.zeros(2).to(dtype))
            sparse = torch.sparse_coo_tensor([[0]], torch.ones(1).to(dtype), (2,))
            with pytest.raises(ValueError, match=f"{dtype} is not supported"):
                hvd.sparse_allreduce_async(sparse, "sparse", hvd.Sum)
    assert hvd.allreduce(torch.ones(1)).item() == 1.0
    named = parameters(torch.complex64 if rank == 1 else torch.float32)
    optimizer = torch.optim.SGD([p for _, p in named], lr=1.0)
    optimizer = hvd.DistributedOptimizer(optimizer, named)
    with pytest.raises(ValueError, match=r"gradient of 'bad'" if rank == 1 else "another rank"):
        backward(named)
    optimizer.zero_grad()
    with pytest.raises(CollectiveAbortedError, match="rank 1"):
        backward(named)
    return "told"


def test_through_horovod_in_real_processes():
    told, failed = run_ranks(2, through_horovod, keep_going=True)
    assert told == "told"
    assert "gradient of 'bad': torch.complex64 is not supported" in str(failed)
