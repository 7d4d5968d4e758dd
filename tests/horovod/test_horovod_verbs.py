"""Horovod's verbs in real processes: results, gradients, handles, errors."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from dying import die  # noqa: E402
from forked import run_torch_ranks as run_ranks  # noqa: E402

import horovod.torch as hvd  # noqa: E402
from horovod.common.exceptions import HorovodInternalError  # noqa: E402


def full(value, *shape):
    return torch.full(shape or (2, 3), float(value))


def check_results(rank, size):
    total, x = size * (size + 1) / 2, full(rank + 1)
    assert torch.equal(hvd.allreduce(x), full(total / size))
    assert torch.equal(hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0), full(2 * total))
    assert torch.equal(hvd.allreduce(x, compression=hvd.Compression.fp16), full(total / size))
    a, b = hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum, name="group")
    assert (a[0, 0], b[0, 0]) == (total, 2 * total)
    assert type(hvd.grouped_allreduce_([x.clone()])) is tuple
    assert hvd.allreduce_(x, op=hvd.Max) is x
    assert torch.equal(x, full(size))
    with pytest.warns(DeprecationWarning, match="average"):
        assert torch.equal(hvd.allreduce(full(rank + 1), average=False), full(total))
    with pytest.raises(ValueError, match="give op only"):
        hvd.allreduce(x, average=True, op=hvd.Sum)
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bfloat16):
        assert hvd.allreduce(torch.ones(3, dtype=dtype), op=hvd.Sum).tolist() == [size] * 3
    assert hvd.allreduce(torch.full((2,), 2 * rank + 1), op=hvd.Average).tolist() == [size] * 2

    gathered = hvd.allgather(torch.full((rank, 2), rank))
    assert gathered[:, 0].tolist() == [r for r in range(size) for _ in range(r)]
    assert hvd.broadcast(full(rank), size - 1)[0, 0] == size - 1
    y = full(rank)
    assert hvd.broadcast_(y, 0) is y
    assert y[0, 0] == 0

    even = hvd.alltoall(torch.arange(2 * size) + 100 * rank)
    assert even.tolist() == [100 * r + 2 * rank + i for r in range(size) for i in (0, 1)]
    splits = torch.tensor([1] * size, dtype=torch.int32)
    rows, received = hvd.alltoall(torch.arange(size + 1), splits)
    assert rows.tolist() == [rank] * size
    assert received.tolist() == [1] * size
    assert received.dtype == torch.int32
    part = hvd.reducescatter(torch.ones(size + 1, 2), op=hvd.Sum)
    assert part.tolist() == [[size] * 2] * (2 if rank == 0 else 1)
    assert hvd.grouped_reducescatter([torch.ones(size)])[0].tolist() == [1]
    assert [o["r"] for o in hvd.allgather_object({"r": rank})] == list(range(size))
    assert hvd.broadcast_object({"from": rank}, 0) == {"from": 0}
    hvd.barrier()


def check_handles(rank, size):
    x = full(rank)
    first, second = hvd.allreduce_async(x, name="a"), hvd.allreduce_async_(x, name="b")
    assert second == first + 1
    assert type(first) is int
    mean = full((size - 1) / 2)
    assert torch.equal(hvd.synchronize(first), mean)
    assert hvd.synchronize(second) is x
    assert hvd.synchronize(second) is None
    with pytest.raises(ValueError, match="synchronized before"):
        hvd.poll(second)
    group = hvd.grouped_allreduce_async([full(1), full(2)], op=hvd.Sum)
    while not hvd.poll(group):
        pass
    results = hvd.synchronize(group)
    assert isinstance(results, tuple)
    assert [result[0, 0] for result in results] == [size, 2 * size]
    rows, received = hvd.synchronize(hvd.alltoall_async(torch.arange(size)))
    assert rows.tolist() == [rank] * size
    assert received.tolist() == [1] * size
    # One name for two kinds of verb, at the same time.
    handles = [
        hvd.allreduce_async(full(1), name="same"),
        hvd.allgather_async(full(1), name="same"),
        hvd.broadcast_async(full(rank), 0, name="same"),
        hvd.reducescatter_async(torch.ones(size, 1), name="same", op=hvd.Sum),
    ]
    shapes = [tuple(hvd.synchronize(handle).shape) for handle in handles]
    assert shapes == [(2, 3), (2 * size, 3), (2, 3), (1, 1)]


def check_gradients(rank, size):
    """Every rank's loss is (rank + 1) * sum(result)."""
    total, weight = size * (size + 1) / 2, rank + 1

    def gradient(verb, *shape):
        x = torch.ones(shape, requires_grad=True)
        (weight * verb(x).sum()).backward()
        return x.grad

    assert torch.equal(gradient(lambda x: hvd.allreduce(x, op=hvd.Sum), 2), full(total, 2))
    assert torch.equal(gradient(hvd.allreduce, 2), full(total / size, 2))
    scaled = gradient(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=3.0), 2)
    assert torch.equal(scaled, full(3 * total, 2))
    grouped = gradient(lambda x: sum(hvd.grouped_allreduce([x, x], op=hvd.Sum)), 2)
    assert torch.equal(grouped, full(2 * total, 2))
    assert torch.equal(gradient(hvd.allgather, 3, 2), full(total / size, 3, 2))
    both = gradient(lambda x: hvd.grouped_allgather([x, 2 * x])[1], 2)
    assert torch.equal(both, full(2 * total / size, 2))
    root = gradient(lambda x: hvd.broadcast(x, 0), 2)
    assert torch.equal(root, full(total / size if rank == 0 else 0, 2))
    exchanged = gradient(hvd.alltoall, size)
    assert exchanged.tolist() == [r + 1 for r in range(size)]
    scattered = gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum), size)
    assert scattered.tolist() == [size * (r + 1) for r in range(size)]
    scattered = gradient(hvd.reducescatter, size)
    assert scattered.tolist() == [r + 1 for r in range(size)]
    halves = gradient(lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16), 2)
    assert torch.equal(halves, full(total / size, 2))


def check_sparse(rank, size):
    indices = torch.tensor([[rank, size]])
    x = torch.sparse_coo_tensor(indices, torch.ones(2, 2), (size + 1, 2))
    for op, divisor in ((hvd.Average, size), (hvd.Sum, 1)):
        dense = hvd.sparse_allreduce_async(x, f"sparse.{op}", op)().to_dense()
        torch.testing.assert_close(dense[:size], full(1 / divisor, size, 2))
        torch.testing.assert_close(dense[size], full(size / divisor, 2))
    with pytest.raises(ValueError, match="give Average or Sum"):
        hvd.sparse_allreduce_async(x, "sparse.max", hvd.Max)


def check_errors(rank, size):
    if size == 1:
        return
    x = torch.ones(2 + rank)
    with pytest.raises(HorovodInternalError, match="rank 1 has"):
        hvd.allreduce(x, name="shape")
    with pytest.raises(RuntimeError, match="rank 1 has"):
        hvd.broadcast(torch.ones(2), rank, name="root")
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    for process_set in ([0], 0, "world"):
        with pytest.raises(ValueError, match="give a ProcessSet"):
            hvd.allreduce(torch.ones(1), process_set=process_set)
    # A name is pending for sure as long as another rank has not submitted it: each rank in turn.
    for first in range(size):
        for submit in (
            lambda: hvd.grouped_allreduce_async([torch.ones(1)] * 2, name="twice"),
            lambda: hvd.allreduce_async(torch.ones(1), name="twice"),
        ):
            if rank == first:
                handle = submit()
                with pytest.raises(ValueError, match="already pending"):
                    submit()
            hvd.barrier()
            if rank != first:
                handle = submit()
            hvd.synchronize(handle)
    with pytest.raises(ValueError, match="splits"):
        hvd.alltoall(torch.ones(4), torch.ones(size))
    with pytest.raises(ValueError, match="bits8"):
        hvd.allreduce(torch.empty(1, dtype=torch.bits8))
    for form in ("allreduce_", "allreduce_async", "allgather_async", "reducescatter_async"):
        with pytest.raises(ValueError, match="at least one"):
            getattr(hvd, f"grouped_{form}")([])


def check_join(rank, size):
    for step in range(rank + 1):
        mean = hvd.allreduce(torch.ones(1), name="uneven")
        assert mean.item() == pytest.approx((size - step) / size)
    assert hvd.join() == size - 1


def check_process_sets(rank, size):
    assert hvd.global_process_set.process_set_id == 0
    assert hvd.global_process_set.ranks == list(range(size))
    assert (hvd.global_process_set.size(), hvd.global_process_set.rank()) == (size, rank)
    if size == 1:
        return
    ps = hvd.ProcessSet([size - 1, 0] if size > 2 else [1])
    first, last = ps.ranks[0], ps.ranks[-1]
    assert (ps.process_set_id, ps.size(), ps.included()) == (None, None, None)
    assert hvd.add_process_set(ps) is ps
    assert ps.size() == len(ps.ranks) == min(size - 1, 2)
    if ps.included():
        kwargs = {"process_set": ps}
        assert hvd.allreduce(full(rank), op=hvd.Sum, **kwargs)[0, 0] == size - 1  # 0 + (size - 1)
        assert hvd.broadcast(full(rank), last, **kwargs)[0, 0] == last
        assert hvd.broadcast(full(rank), first, **kwargs)[0, 0] == first
        assert hvd.allgather(full(rank, 1), **kwargs).tolist() == ps.ranks
        assert hvd.broadcast_object(rank, size - 1, **kwargs) == size - 1
        hvd.barrier(ps)
    else:
        with pytest.raises(ValueError, match="not in"):
            hvd.allreduce(full(rank), process_set=ps)
        with pytest.raises(ValueError, match="not in"):
            ps.rank()
    assert hvd.remove_process_set(ps) is True
    assert ps.process_set_id is None
    assert hvd.remove_process_set(ps) is False
    assert hvd.remove_process_set(hvd.global_process_set) is False


def everything(rank, size):
    with pytest.raises(ValueError, match="init"):
        hvd.rank()
    with pytest.raises(HorovodInternalError, match="init"):
        hvd.allreduce(torch.ones(1))
    hvd.init()
    hvd.init()
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_size()) == (rank, size, rank, 1)
    assert hvd.mpi_ops.is_homogeneous()
    assert hvd.gloo_enabled()
    assert not hvd.mpi_enabled()
    for check in (check_results, check_handles, check_gradients, check_sparse, check_errors,
                  check_process_sets, check_join):  # fmt: skip
        check(rank, size)
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    assert hvd.allreduce_async(torch.ones(1)) == 1  # handles are counted anew
    hvd.synchronize(1)
    hvd.shutdown()
    return True


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_everything(size):
    assert all(run_ranks(size, everything, size, timeout_s=100))


def test_a_lost_rank_is_a_horovod_internal_error():
    def work(rank):
        hvd.init()
        die(rank, 1)
        with pytest.raises(HorovodInternalError, match="rank 1"):
            hvd.allreduce(torch.ones(1))
        return True

    results = run_ranks(3, work, keep_going=True)
    assert results[0] is results[2] is True
