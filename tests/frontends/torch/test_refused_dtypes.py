"""Complex tensors work; float8 is sent, or refused by name without keeping other ranks waiting."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from forked import run_torch_ranks as run_ranks  # noqa: E402
from torch_loopback import run  # noqa: E402

import horovod.torch as hvd  # noqa: E402
import kolovod.torch as kvt  # noqa: E402
from kolovod import _native  # noqa: E402
from kolovod.core.ops import Adasum  # noqa: E402
from kolovod.errors import CollectiveAbortedError, InvalidArgumentError  # noqa: E402
from kolovod.torch.functions import Functions  # noqa: E402

FLOAT8 = [
    getattr(torch, name)
    for name in _native.FURTHER_DTYPES
    if name[:6] == "float8" and hasattr(torch, name)
]
COMPLEX = [torch.complex64, torch.complex128]

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


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("size", [1, 2])
def test_every_verb(dtype, size):
    """Those that combine refuse it, on one rank: the other is not disturbed. Others send it."""

    def work(kv, rank):
        for name, call in VERBS.items():
            verb, tensor = getattr(kv, name), torch.full((2,), rank + 1.0).to(dtype)
            if "reduce" not in name:
                result = call(verb, tensor)
                result = result.wait() if "async" in name else result
                result = result[0] if name.startswith("alltoall") else result
                sent = result[1] if isinstance(result, list) else result
                assert sent.dtype == dtype
                one_for_all = "broadcast" in name
                assert sent.float().tolist() == (
                    [1.0, 1.0]
                    if one_for_all
                    else [
                        r + 1.0
                        for r in range(size)
                        for _ in range(2 if "gather" in name else 2 // size)
                    ]
                )
            elif rank == size - 1:
                with pytest.raises(InvalidArgumentError, match="not combined; convert to bfloat16"):
                    call(verb, tensor)
        return kv.allreduce(torch.ones(1), "after").item()

    assert run(size, work) == [1.0] * size


def parameters(dtype):
    """One as usual, and one of ``dtype``."""
    good, bad = torch.ones(2), torch.ones(2).to(dtype)
    return [("good", torch.nn.Parameter(good)), ("bad", torch.nn.Parameter(bad))]


def backward(named):
    sum((p.abs() if p.is_complex() else p.float()).sum() for _, p in named).backward()


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"compression": kvt.Compression.fp16}, {"groups": 1}], ids=str
)
def test_gradients(everywhere, options):
    dtype = torch.float8_e4m3fn

    def work(kv, rank):
        named = parameters(dtype if everywhere or rank == 1 else torch.float32)
        optimizer = torch.optim.SGD([p for _, p in named], lr=1.0)
        optimizer = kvt.DistributedOptimizer(optimizer, named, collectives=kv, **options)
        text = f"gradient of 'bad': {dtype} is not supported.*bfloat16"
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


@pytest.mark.parametrize("options", [{}, {"compression": kvt.Compression.fp16}], ids=str)
@pytest.mark.parametrize("dtype", COMPLEX)
def test_complex_gradients_are_averaged(dtype, options):
    """As one process does with the mean of the losses; a gradient may be a conjugate view."""
    inputs = [torch.tensor([1 + 2j, 3 - 1j], dtype=dtype) * (rank + 1) for rank in range(2)]

    def loss(weight, rank):
        return (weight.conj() * inputs[rank]).abs().square().sum()

    def work(kv, rank):
        weight = torch.nn.Parameter(torch.ones(2, dtype=dtype))
        optimizer = torch.optim.SGD([weight], lr=0.01, momentum=0.5)
        optimizer = kvt.DistributedOptimizer(
            optimizer, [("weight", weight)], collectives=kv, **options
        )
        for _ in range(3):
            optimizer.zero_grad()
            loss(weight, rank).backward()
            optimizer.step()
        return weight.detach()

    alone = torch.nn.Parameter(torch.ones(2, dtype=dtype))
    optimizer = torch.optim.SGD([alone], lr=0.01, momentum=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        ((loss(alone, 0) + loss(alone, 1)) / 2).backward()
        optimizer.step()
    for weight in run(2, work):
        torch.testing.assert_close(weight, alone.detach())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e5m2, torch.uint32])
def test_starting_equal(dtype):
    def work(kv, rank):
        functions = Functions(kv)
        state = {"weight": torch.ones(2), "buffer": torch.full((2,), rank + 1.0).to(dtype)}
        functions.broadcast_parameters(state, 1)
        assert state["buffer"].to(torch.complex64).tolist() == [2, 2]
        kind = dtype if dtype.is_complex else torch.float32
        parameter = torch.nn.Parameter(torch.ones(2, dtype=kind))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        buffer = torch.full((2,), rank + 1.0).to(dtype)
        optimizer.state[parameter] = {"momentum_buffer": buffer}
        functions.broadcast_optimizer_state(optimizer, 1)
        found = optimizer.state[parameter]["momentum_buffer"]
        assert found.to(torch.complex64).tolist() == [2, 2]

    run(2, work)


def test_a_tensor_made_by_expand():
    def work(kv, rank):
        functions = Functions(kv)
        mask = torch.full((1, 1), bool(rank)).expand(2, 3)
        functions.broadcast_parameters({"mask": mask}, 1)
        assert mask.all()
        assert mask.stride() == (0, 0)
        rows = torch.arange(6.0).view(2, 3) if rank else torch.zeros(1, 3).expand(2, 3)
        if rank == 0:
            with pytest.raises(InvalidArgumentError, match=r"made by expand\(\).*contiguous"):
                functions.broadcast_parameters({"rows": rows}, 1)
        else:
            functions.broadcast_parameters({"rows": rows}, 1)

    run(2, work)


def through_horovod(rank):
    hvd.init()
    if rank == 1:
        for name, call in VERBS.items():
            if "reduce" in name:
                with pytest.raises(ValueError, match="not for tensors of float8_e5m2"):
                    call(getattr(hvd, name), torch.zeros(2).to(torch.float8_e5m2))
    assert hvd.allreduce(torch.ones(1)).item() == 1.0
    named = parameters(torch.float8_e5m2 if rank == 1 else torch.float32)
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
    assert "gradient of 'bad': torch.float8_e5m2 is not supported" in str(failed)
