"""The torch.distributed backend: each verb against gloo's in the same processes, and its errors."""

from __future__ import annotations

import datetime
import re

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.distributed as dist  # noqa: E402
import torch.distributed._functional_collectives as functional  # noqa: E402
from forked import run_torch_ranks as run_ranks  # noqa: E402
from torch.distributed import checkpoint  # noqa: E402
from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: E402
from torch.distributed.tensor import Shard, distribute_tensor  # noqa: E402
from waiting import until  # noqa: E402

import kolovod  # noqa: E402
import kolovod.torch  # noqa: E402 - registers the backend
from kolovod.errors import (  # noqa: E402
    InvalidArgumentError,
    MismatchError,
)

DTYPES = ["uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
MOVED_ONLY = ["complex64", "float8_e4m3fn", "uint32"]


def numbers(dtype, *shape, seed=0):
    """The same on both backends, different on every rank, small enough for every dtype."""
    draw = torch.Generator().manual_seed(100 * dist.get_rank() + seed)
    values = torch.randint(0, 5, shape, generator=draw)
    if dtype.is_complex:
        return torch.complex(values.double(), values.double() + 1).to(dtype)
    return values.to(dtype)


def in_float(tensor):
    """For comparing: torch compares few of the rare dtypes."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def dense_for_gloo(group, tensor):
    """Gloo takes a tensor with gaps and reduces other memory than its elements."""
    return tensor if group is None else tensor.contiguous()


def allreduce(group, dtype):
    results = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        for shape in ((), (0,), (7,), (3, 5)):
            tensor = numbers(dtype, *shape)
            dist.all_reduce(tensor, op, group=group)
            results.append(tensor)
    strided = dense_for_gloo(group, numbers(dtype, 4, 6).t()[1:3])
    dist.all_reduce(strided, group=group)
    return [*results, strided]


def reduce(group, dtype):
    results = []
    for root in range(dist.get_world_size()):
        tensor = numbers(dtype, 9)
        before = tensor.clone()
        dist.reduce(tensor, dst=root, group=group)
        if dist.get_rank() == root:  # elsewhere gloo leaves what it likes, and Kolovod nothing
            results.append(tensor)
        elif group is None:
            assert (tensor == before).all()
    return results


def reduce_scatter(group, dtype):
    size = dist.get_world_size()
    single = torch.empty(3, 2).to(dtype)
    dist.reduce_scatter_single(single, numbers(dtype, 3 * size, 2), group=group)
    part = torch.empty(4).to(dtype)
    dist.reduce_scatter(part, [numbers(dtype, 4, seed=s) for s in range(size)], group=group)
    return [single, part]


def broadcast(group, dtype):
    results = []
    for root in range(dist.get_world_size()):
        strided = dense_for_gloo(group, numbers(dtype, 6, 6)[:, 1::2])
        for tensor in (numbers(dtype, 3, 4), numbers(dtype), strided):
            dist.broadcast(tensor, src=root, group=group)
            results.append(tensor)
    return results


def all_gather(group, dtype):
    size = dist.get_world_size()
    parts = [torch.empty(2, 3).to(dtype) for _ in range(size)]
    dist.all_gather(parts, numbers(dtype, 2, 3), group=group)
    single = torch.empty(2 * size, 3).to(dtype)
    dist.all_gather_single(single, numbers(dtype, 2, 3), group=group)
    return [*parts, single]


def gather(group, dtype):
    results = []
    for root in range(dist.get_world_size()):
        parts = [torch.empty(5).to(dtype) for _ in range(dist.get_world_size())]
        is_root = dist.get_rank() == root
        dist.gather(numbers(dtype, 5), parts if is_root else None, dst=root, group=group)
        results += parts if is_root else []
    return results


def scatter(group, dtype):
    results = []
    for root in range(dist.get_world_size()):
        part = torch.empty(2, 2).to(dtype)
        parts = [numbers(dtype, 2, 2, seed=seed) for seed in range(dist.get_world_size())]
        is_root = dist.get_rank() == root
        dist.scatter(part, parts if is_root else None, src=root, group=group)
        results.append(part)
    return results


def all_to_all(group, dtype):
    rank, size = dist.get_rank(), dist.get_world_size()
    even = torch.empty(2 * size, 3).to(dtype)
    dist.all_to_all_single(even, numbers(dtype, 2 * size, 3), group=group)
    # Rank s sends s + d rows to rank d.
    sent, received = [rank + d for d in range(size)], [s + rank for s in range(size)]
    uneven = torch.empty(sum(received), 2).to(dtype)
    dist.all_to_all_single(uneven, numbers(dtype, sum(sent), 2), received, sent, group=group)
    return [even, uneven]


def objects(group, dtype):
    everything = [None] * dist.get_world_size()
    dist.all_gather_object(everything, {"rank": dist.get_rank(), "of": str(dtype)}, group=group)
    one = [dist.get_rank(), "x" * 50]
    dist.broadcast_object_list(one, src=1, group=group)
    return [torch.tensor(list(repr((everything, one)).encode()))]


REDUCING = [allreduce, reduce, reduce_scatter]
MOVING = [broadcast, all_gather, gather, scatter, all_to_all, objects]


def against_gloo(rank):
    dist.init_process_group("kolovod")
    gloo = dist.new_group(backend="gloo")
    compared = 0
    for name in DTYPES + MOVED_ONLY:
        dtype = getattr(torch, name)
        is_known = name not in MOVED_ONLY  # to gloo, which gets the same numbers as floats else
        for verb in REDUCING + MOVING if is_known else MOVING[:-1]:
            expected = verb(gloo, dtype if is_known else torch.float32)
            for mine, theirs in zip(verb(None, dtype), expected, strict=True):
                if dtype.is_complex:
                    theirs = torch.complex(theirs, theirs + 1)
                assert mine.shape == theirs.shape, verb
                assert (in_float(mine) == in_float(theirs)).all(), (verb, name, mine, theirs)
                compared += 1
    dist.destroy_process_group()
    assert not kolovod.is_initialized()
    return compared


def test_every_verb_equals_gloo():
    assert min(run_ranks(3, against_gloo)) > 300


def sparse_tensors(rank):
    """Of one, two and three indexed dimensions, with and without dense ones, in any order."""
    draw = torch.Generator().manual_seed(rank)
    for sparse_dim, dense in ((1, ()), (2, ()), (3, (2,)), (1, (3, 2)), (1, (0,))):
        for count, dtype in ((0, torch.float32), (4, torch.float64), (5 * rank, torch.int64)):
            indices = torch.randint(0, 4, (sparse_dim, count), generator=draw)  # also twice
            values = torch.randint(-9, 9, (count, *dense), generator=draw).to(dtype)
            shape = (4,) * sparse_dim + dense
            yield torch.sparse_coo_tensor(indices, values, shape)


def sparse_against_gloo(rank):
    dist.init_process_group("kolovod")
    gloo = dist.new_group(backend="gloo")
    compared = 0
    for mine, theirs in zip(sparse_tensors(rank), sparse_tensors(rank), strict=True):
        dist.all_reduce(mine)
        dist.all_reduce(theirs, group=gloo)
        assert mine.is_coalesced()
        assert mine.shape == theirs.shape
        assert mine.dtype == theirs.dtype
        assert (mine.indices() == theirs.indices()).all()
        assert (mine.values() == theirs.values()).all()
        compared += 1
    dist.destroy_process_group()
    return compared


def test_sparse_tensors_equal_gloos():
    assert run_ranks(3, sparse_against_gloo) == [15, 15, 15]


SPARSE = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (1,), check_invariants=True)


def sparse_beyond_gloo(rank):
    tensor = torch.sparse_coo_tensor([[rank]], [float(rank + 1)], (3,))
    first = dist.all_reduce(tensor, async_op=True)
    second = dist.all_reduce(tensor, async_op=True)  # has what the first leaves
    second.wait()
    first.wait()
    assert tensor.to_dense().tolist() == [2.0, 4.0, 0.0]
    empty = torch.sparse_coo_tensor(size=(3,))
    several = [each.to(torch.bfloat16) for each in (empty, SPARSE)]
    works = [dist.all_reduce_coalesced(several, async_op=True) for _ in range(2)]
    works[1].wait()
    assert several[0]._nnz() == 0
    assert several[1].to_dense().tolist() == [12.0]
    strange = torch.sparse_coo_tensor([[0]], [1.0], (3 + rank,))
    with pytest.raises(InvalidArgumentError, match=rf"shape \({4 - rank},\) .*\({3 + rank},\)"):
        dist.all_reduce(strange)
    with pytest.raises(InvalidArgumentError, match="MAX of sparse tensors is not to be had"):
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    with pytest.raises(InvalidArgumentError, match="cannot be reduced as one operation"):
        dist.all_reduce_coalesced([tensor, torch.ones(1)])


def beyond_gloo(rank):
    size = dist.get_world_size()
    mean = torch.tensor([1.0, 2.0]) * (rank + 1)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    assert mean.tolist() == [1.5, 3.0]
    either = torch.tensor([rank == 0, rank == 1, False])
    dist.all_reduce(either, dist.ReduceOp.MAX)
    assert either.tolist() == [True, True, False]
    dist.broadcast(either.logical_not_() if rank == 0 else either, src=0)
    assert either.tolist() == [False, False, True]
    scaled = torch.ones(3) * (rank + 1)
    dist.all_reduce(scaled, dist.ReduceOp.PREMUL_SUM(0.5))
    assert scaled.tolist() == [1.5, 1.5, 1.5]
    uneven = torch.empty(1 + rank)
    dist.reduce_scatter(uneven, [torch.ones(1), torch.arange(2.0)])
    assert uneven.tolist() == ([2.0] if rank == 0 else [0.0, 2.0])
    stacked = torch.empty(size, 3)
    dist.all_gather_single(stacked, torch.full((3,), float(rank)))
    assert stacked.tolist() == [[0.0] * 3, [1.0] * 3]
    parts = [torch.empty(r + 1, dtype=torch.complex64) for r in range(size)]
    dist.all_gather(parts, torch.full((rank + 1,), rank + 1j))
    assert [part.tolist() for part in parts] == [[1j], [1 + 1j, 1 + 1j]]
    received = [torch.empty(2 * rank + s) for s in range(size)]
    dist.all_to_all(received, [torch.full((rank + 2 * d,), float(rank)) for d in range(size)])
    assert [part.tolist() for part in received] == [[0.0] * (2 * rank), [1.0] * (2 * rank + 1)]


def in_place_and_grouped(rank):
    size, group = dist.get_world_size(), dist.group.WORLD
    whole = torch.full((size * 100_000,), -1.0)
    whole[rank * 100_000 : (rank + 1) * 100_000] = rank
    dist.all_gather_single(whole, whole[rank * 100_000 : (rank + 1) * 100_000])
    assert (whole.view(size, -1) == torch.arange(float(size))[:, None]).all()
    dist.all_gather_single(whole, whole[7 : 7 + 100_000])  # overlaps, and not in its place
    assert (whole[rank * 100_000 + 99_000] == whole[rank * 100_000]).all()
    whole = torch.arange(size * 50_000.0)
    part = whole[rank * 50_000 : (rank + 1) * 50_000]
    dist.reduce_scatter_single(part, whole)
    assert (part == size * torch.arange(rank * 50_000.0, (rank + 1) * 50_000.0)).all()
    with dist._coalescing_manager(group, async_ops=True) as manager:
        sums = [torch.full((n,), float(rank)) for n in (1, 10, 1000)]
        for tensor in sums:
            dist.all_reduce(tensor)
    manager.wait()
    assert all((tensor == size * (size - 1) / 2).all() for tensor in sums)
    outputs = [torch.empty(size * n, dtype=d) for n, d in ((2, torch.int64), (3, torch.half))]
    inputs = [torch.full((2,), rank), torch.full((3,), rank, dtype=torch.half)]
    group.all_gather_single_coalesced(outputs, inputs).wait()
    assert outputs[0].tolist() == [0, 0, 1, 1]
    assert outputs[1].tolist() == [0, 0, 0, 1, 1, 1]
    strided = torch.zeros(4, 2).t()
    dist.all_gather_single(strided, torch.full((4,), float(rank)))
    assert strided.tolist() == [[0.0] * 4, [1.0] * 4]


def messages_in_a_batch(rank):
    """PyTorch 2.14 asks the group what carries its tensors, and whether that can coalesce."""
    group = dist.group.WORLD
    for device in ("cpu", torch.device("cuda", 0)):
        backend = group._get_backend(device)
        assert backend.name() == "kolovod"
        assert not backend.supports_coalescing
        assert not backend.supports_splitting
        assert not backend.supports_time_estimate
        assert not backend.supports_tensor_alloc(torch.device(device))
    with pytest.raises(RuntimeError, match="takes tensors on cpu and cuda, not on meta"):
        group._get_backend("meta")
    sent, received = torch.full((3,), float(rank)), torch.empty(3)
    messages = [dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    for request in dist.batch_isend_irecv(messages):
        request.wait()
    assert received.tolist() == [1.0 - rank] * 3


def works_and_futures(rank):
    tensor = torch.full((10,), float(rank))
    first = dist.all_reduce(tensor, async_op=True)
    doubled = first.get_future().then(lambda future: future.value()[0] * 2)
    assert doubled.wait().tolist() == [2.0] * 10
    assert first.is_completed()
    assert first.is_success()
    assert first.exception() is None
    assert first.wait()
    assert first.wait(datetime.timedelta(seconds=1))
    assert first.result()[0] is tensor
    # Several at once, waited for in the other order; nobody waits for the last but a callback.
    seen = []
    tensors = [torch.full((n,), float(rank)) for n in range(1, 6)]
    handles = [dist.all_reduce(each, async_op=True) for each in tensors]
    handles[-1].get_future().add_done_callback(lambda future: seen.append(future.value()))
    for handle in reversed(handles[:-1]):
        handle.wait()
    futures = [dist.all_reduce(each, async_op=True).get_future() for each in tensors]
    torch.futures.wait_all(futures)
    assert [each.tolist() for each in tensors] == [[2.0] * n for n in range(1, 6)]
    until(lambda: seen, "the callback")
    assert seen[0][0] is tensors[-1]
    raising = dist.barrier(async_op=True).get_future().then(lambda future: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        raising.wait()
    polled = dist.all_reduce(tensor, async_op=True)
    until(polled.is_completed)
    assert tensor.tolist() == [2.0] * 10


def same_memory_without_waiting(rank):
    """As on a stream: each operation finds what those submitted before it leave."""
    for _ in range(20):
        whole = torch.full((8,), float(rank))
        handles = [dist.all_reduce(whole, async_op=True) for _ in range(3)]
        handles[-1].wait()
        assert whole.tolist() == [4.0] * 8
        square = torch.full((4, 4), float(rank))
        for part in (square[1:], square.t()[2:], square):  # contiguous, not contiguous, both
            last = dist.all_reduce(part, async_op=True)
        last.wait()
        assert square[0].tolist() == [1.0, 1.0, 2.0, 2.0]
        assert square[1].tolist() == [2.0, 2.0, 4.0, 4.0]
        # What an earlier operation reads is written by a later one, and read again by the next.
        read, gathered = torch.full((2,), float(rank)), torch.empty(4)
        others = [torch.empty(2), torch.empty(2)]
        dist.all_gather_single(gathered, read, async_op=True)
        dist.all_reduce(read, async_op=True)
        dist.all_gather(others, read, async_op=True)
        dist.broadcast(others[1], 0, async_op=True).wait()
        assert gathered.tolist() == [0.0, 0.0, 1.0, 1.0]
        assert [each.tolist() for each in others] == [[1.0, 1.0]] * 2
    # An error is raised by its own work, not by what comes after it on the same memory.
    failing = dist.all_reduce(torch.ones(4)[: 3 + rank], async_op=True)
    with pytest.raises(MismatchError):
        failing.wait()
    tensor = torch.ones(5)
    failing = dist.all_reduce(tensor[: 4 + rank], async_op=True)
    following = dist.all_reduce(tensor, async_op=True)
    following.wait()
    assert tensor.tolist() == [2.0] * 5
    with pytest.raises(MismatchError):
        failing.wait()


def what_is_built_on_top(rank, folder):
    size, group = dist.get_world_size(), dist.group.WORLD
    summed = functional.all_reduce(torch.ones(3), "sum", group)
    assert summed.tolist() == [2.0] * 3
    assert functional.all_gather_tensor(torch.ones(1) * rank, 0, group).tolist() == [0.0, 1.0]
    mean = functional.reduce_scatter_tensor(torch.arange(4.0), "avg", 0, group)
    assert mean.tolist() == [2.0 * rank, 2.0 * rank + 1]
    swapped = functional.all_to_all_single(torch.arange(2.0), None, None, group)
    assert swapped.tolist() == [float(rank)] * 2
    mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
    whole = torch.arange(24.0).reshape(4, 6)
    parts = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(parts.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
    with pytest.raises(InvalidArgumentError, match=r"elastic\.diloco has sharded tensors"):
        kolovod.torch._functions.broadcast_nested({"outer": [parts]}, "elastic.diloco")
    checkpoint.save({"parts": parts}, checkpoint_id=folder)
    loaded = {"parts": distribute_tensor(torch.zeros(4, 6), mesh, [Shard(1)])}
    checkpoint.load(loaded, checkpoint_id=folder)
    assert torch.equal(loaded["parts"].full_tensor(), whole)
    torch.manual_seed(0)
    layer, alone = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    alone.load_state_dict(layer.state_dict())
    optimizers = [
        ZeroRedundancyOptimizer(layer.parameters(), torch.optim.Adam, lr=0.1),
        torch.optim.Adam(alone.parameters(), lr=0.1),
    ]
    for model, optimizer in zip((layer, alone), optimizers, strict=True):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    assert torch.equal(layer.weight, alone.weight)


def bad_arguments(rank):
    ones, size = torch.ones(4), dist.get_world_size()
    cases = [
        (lambda: dist.all_reduce(torch.ones(3).int(), dist.ReduceOp.BAND), "BAND"),
        (lambda: dist.all_reduce(torch.ones(3, dtype=torch.float8_e4m3fn)), "float8_e4m3fn"),
        (lambda: dist.broadcast(torch.ones(3).to_sparse(), 0), "to_dense"),
        (lambda: dist.broadcast(torch.ones(3, device="meta"), 0), "meta"),
        (lambda: dist.all_gather_single(torch.empty(9), ones), r"2 equal parts"),
        (lambda: dist.all_gather_single(torch.empty(8).int(), ones), "int32"),
        (lambda: dist.reduce_scatter_single(torch.empty(3), ones), r"(4,)"),
        (lambda: dist.all_to_all_single(torch.empty(3), torch.empty(3)), "evenly"),
        (lambda: dist.all_to_all_single(ones, ones, [1, 2], [2, 2]), "output_split_sizes"),
    ]
    for call, text in cases:
        with pytest.raises(InvalidArgumentError, match=re.escape(text)):
            call()
    # Found when the ranks' sizes are known: an error here, and the group goes on.
    outputs = [torch.empty(4), torch.empty(4 if rank == 0 else 5)]
    if rank == 0:
        dist.all_gather(outputs, ones)
    else:
        with pytest.raises(InvalidArgumentError, match="rank 1 sent 4 elements"):
            dist.all_gather(outputs, ones)
    if rank == 0:
        with pytest.raises(InvalidArgumentError, match="output 0 has 8 bytes"):
            dist.all_to_all_single(torch.empty(2), ones[:3], [1, 1], [1, 2])
    else:
        dist.all_to_all_single(torch.empty(4), ones[:4], [2, 2], [2, 2])
    with pytest.raises(MismatchError, match=r"rank 0 has \(4,\), rank 1 has \(5,\)"):
        dist.all_reduce(torch.ones(4 + rank))
    with pytest.raises(MismatchError, match="barrier"):
        dist.all_reduce(ones) if rank == 0 else dist.barrier()
    dist.all_reduce(ones)
    assert ones.tolist() == [float(size)] * 4


def in_one_world(rank, folder):
    """Starting processes takes longer than all of this."""
    dist.init_process_group("kolovod")
    sparse_beyond_gloo(rank)
    beyond_gloo(rank)
    in_place_and_grouped(rank)
    messages_in_a_batch(rank)
    works_and_futures(rank)
    same_memory_without_waiting(rank)
    what_is_built_on_top(rank, folder)
    bad_arguments(rank)
    dist.destroy_process_group()
    return True


def test_everything_else(tmp_path):
    assert all(run_ranks(2, in_one_world, str(tmp_path / "checkpoint")))
