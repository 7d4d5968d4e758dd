"""The backend nccl, with Gloo in NCCL's place (gloo_for_nccl.py); a real GPU is in test_gpu.py."""

from __future__ import annotations

import contextlib
import os

import numpy as np
import pytest
from slow import slow_but

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from forked import run_torch_ranks as run_ranks  # noqa: E402

from kolovod.core.ops import Adasum, Average, Sum  # noqa: E402
from kolovod.errors import (  # noqa: E402
    CollectiveAbortedError,
    DuplicateNameError,
    InternalError,
    InvalidArgumentError,
    MismatchError,
)
from kolovod.metrics import Metrics  # noqa: E402


def conforms(rank):
    from gloo_for_nccl import instead_of_nccl
    from worlds import BRIEF, FULL, check, lines

    import kolovod
    import kolovod.torch as kvt

    kv = instead_of_nccl()
    extent = (BRIEF if int(os.environ["KOLOVOD_SIZE"]) > 2 else FULL)["torch"]
    kolovod.init()
    for line in lines(extent, "torch"):
        check(kv, "torch", line, extent)
    kv.allreduce(torch.ones(1))
    assert kolovod.allreduce(rank, op=Sum) == sum(range(kolovod.size()))
    assert [record["device"] for record in kolovod.last_operations()[-2:]] == [
        "GPU memory",
        "host memory",
    ]
    joins(kv, rank, kolovod.size())
    evaluates(kv, rank)
    if kolovod.size() > 2:
        of_a_set(kv, rank, kvt.add_process_set([0, 1]))
    kolovod.shutdown()


def joins(kv, rank, size):
    """Uneven data on GPUs, twice: unnamed operations begin anew."""
    for _ in range(2):
        for turn in range(rank + 1):
            total = kv.allreduce(torch.full((5,), rank + 1), None, Sum)
            assert total.tolist() == [sum(range(turn + 1, size + 1))] * 5
        assert kv.join() == size - 1


def evaluates(kv, rank):
    """Metrics.gather_samples, where rank 0 has no rows, and knows nothing of the others'."""
    is_empty = rank == 0 and kv.world().size > 1
    indices = [] if is_empty else [0, 1]
    rows = torch.empty(0) if is_empty else torch.tensor([[1, 2], [3, 4]])
    assert Metrics(kv).gather_samples(rows, 2, indices).tolist() == [[1, 2], [3, 4]]


def of_a_set(kv, rank, process_set):
    if rank < 2:
        total = kv.allreduce(torch.ones(3), op=Sum, process_set=process_set)
        assert total.tolist() == [2] * 3
        assert kv.broadcast(torch.full((2,), rank), 1, process_set=process_set).tolist() == [1, 1]


@pytest.mark.parametrize("size", slow_but([1], [1, 3]))
def test_conformance(size):
    run_ranks(size, conforms, timeout_s=100, env={"KOLOVOD_SIZE": str(size)})


def several_things(rank):
    """One world after the other, in the same processes, which take long to start."""
    works = (
        trains, joins_gradients, waits_for_the_producer, adds_adasum, sends, mixes, refuses,
        joins_first, keeps_results, shares_a_gpu,
    )  # fmt: skip
    return {work.__name__: work(rank) for work in works}


@pytest.fixture(scope="module")
def of_two_ranks():
    """What each of ``several_things`` has returned on either rank."""
    by_rank = run_ranks(2, several_things, timeout_s=100)
    return {name: [results[name] for results in by_rank] for name in by_rank[0]}


def trains(rank):
    from gloo_for_nccl import instead_of_nccl
    from optimizing import Net, inputs, wrapped

    import kolovod

    kv = instead_of_nccl()
    kolovod.init()
    net = Net()
    optimizer = wrapped(net, kv)
    found = []
    for step in range(3):
        optimizer.zero_grad()
        net(inputs(rank), use_b=step > 0).backward()
        optimizer.step()
        found.append((net.a.grad.tolist(), None if net.b.grad is None else net.b.grad.tolist()))
    layer = torch.nn.Embedding(4, 2, sparse=True)
    with torch.no_grad():
        layer.weight.zero_()
    other = torch.optim.SGD(layer.parameters(), lr=1.0)
    other = kolovod.torch.DistributedOptimizer(other, layer.named_parameters(), collectives=kv)
    for _ in range(2):
        other.zero_grad()
        layer(torch.tensor([rank, 2])).sum().backward()
        other.step()
    kolovod.shutdown()
    return found, layer.weight.tolist()


def test_an_optimizer_steps_with_averages(of_two_ranks):
    found, weights = of_two_ranks["trains"][0]
    assert found == [([1.5] * 3, None), ([1.5] * 3, [1.5] * 3), ([1.5] * 3, [1.5] * 3)]
    assert weights == [[-1.0, -1.0], [-1.0, -1.0], [-2.0, -2.0], [0.0, 0.0]]


def joins_gradients(rank):
    """Of two dtypes, one of which is not dense row by row, and one that a rank has not used."""
    from gloo_for_nccl import instead_of_nccl

    import kolovod

    kv = instead_of_nccl()
    kolovod.init()
    net = torch.nn.Sequential(
        torch.nn.Conv2d(2, 2, 3, bias=False).to(memory_format=torch.channels_last),
        *(torch.nn.Linear(2, 3) for _ in range(3)),
        torch.nn.Linear(2, 2, dtype=torch.bfloat16),
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    optimizer = kolovod.torch.DistributedOptimizer(
        optimizer, net.named_parameters(), collectives=kv
    )
    device, counts = kv.frontend.device, []
    submit = device.submit

    def counted(tensor):
        if tensor.is_floating_point():  # and not what ranks tell each other of the step
            counts.append(tensor.numel())
        submit(tensor)

    device.submit = counted
    for step in range(3):
        counts.clear()
        optimizer.zero_grad()
        loss = 0
        for number, parameter in enumerate(net.parameters()):
            if (step, rank, number) != (1, 0, 2):
                loss = loss + (parameter * (rank + 1.0) * (number + 1)).float().sum()
        loss.backward()
        optimizer.step()
    found = [
        (parameter.grad / (n + 1)).unique().tolist() for n, parameter in enumerate(net.parameters())
    ]
    strides = net[0].weight.grad.stride() == net[0].weight.stride()
    kolovod.shutdown()
    return found, sorted(counts), strides


def test_gradients_of_a_bucket_are_one_tensor_of_each_dtype(of_two_ranks):
    elements = [6, 36 + 3 * 9]
    assert of_two_ranks["joins_gradients"] == [([[1.5]] * 9, elements, True)] * 2


def waits_for_the_producer(rank):
    from gloo_for_nccl import OverGloo, instead_of_nccl

    import kolovod

    kv = instead_of_nccl()
    kolovod.init()
    tensor = torch.zeros(4)
    kv.frontend.device.late_work = lambda: tensor.fill_(rank + 1)
    handle = kv.allreduce_async(tensor, "late", Average)
    result = handle.wait().tolist()
    before = OverGloo.ended, OverGloo.aborted
    kolovod.shutdown()
    return result, OverGloo.ended - before[0], OverGloo.aborted - before[1]


def test_a_bucket_comes_after_what_its_submitters_streams_had_before_it(of_two_ranks):
    assert of_two_ranks["waits_for_the_producer"] == [([1.5] * 4, 1, 0)] * 2


def keeps_results(rank):
    """Results that the backend makes are on its stream; who drops them may still read them."""
    from gloo_for_nccl import instead_of_nccl

    import kolovod

    kv = instead_of_nccl()
    kolovod.init()
    tensor = torch.full((2,), rank)
    results = [
        kv.allgather(tensor), kv.alltoall(tensor)[0], kv.reducescatter(tensor, op=Sum),
        kv.allgather_async(tensor).wait(), *kv.grouped_allgather([tensor, tensor]),
    ]  # fmt: skip
    device = kv.frontend.device
    noted = [result.data_ptr() for result in results if result.data_ptr() in device.noted]
    kolovod.shutdown()
    return len(noted), len(results)


def test_memory_of_results_is_noted_where_it_is_used(of_two_ranks):
    assert of_two_ranks["keeps_results"] == [(6, 6)] * 2


def sends(rank):
    """Unequal numbers of messages, and one refused, before operations without a name.

    Messages between tensors on the device go by way of host memory.
    """
    from gloo_for_nccl import instead_of_nccl

    import kolovod
    from kolovod.core.transfers import Transfers
    from kolovod.core.world import current

    kv = instead_of_nccl()
    kolovod.init()
    received = np.zeros(2)
    if rank == 0:
        handles = [kolovod.isend(np.full(2, 7.0 + number), 1) for number in range(2)]
        with pytest.raises(InvalidArgumentError, match="rank 7 is not in"):
            kolovod.isend(np.zeros(2), 7)
    else:
        kolovod.recv(received, 0)
    handle = kv.allreduce_async(torch.ones(3), None, Sum)
    total = handle.wait(20).tolist()  # less than the stand-in's own limit
    if rank == 1:
        kolovod.recv(received, 0)
    else:
        for handle in handles:
            handle.wait(20)
    messages = Transfers(kv.frontend, current)
    tensor = torch.full((2, 3), rank + 1.0).t()
    assert messages.recv(tensor, 1) == 1 if rank == 0 else messages.send(tensor, 0) is None
    assert tensor.tolist() == [[2.0] * 2] * 3
    ends_in_the_middle()
    return total, received.tolist()


def test_messages_do_not_number_what_has_no_name(of_two_ranks):
    assert of_two_ranks["sends"] == [([2] * 3, [0, 0]), ([2] * 3, [8, 8])]


def mixes(rank):
    from gloo_for_nccl import instead_of_nccl

    import kolovod
    from kolovod.core.world import current
    from kolovod.torch import TorchCollectives, TorchFrontend

    on_device = instead_of_nccl()
    kolovod.init()
    in_host_memory = TorchCollectives(TorchFrontend(), current)
    kv = on_device if rank == 0 else in_host_memory
    texts = []
    for name in ("named", None):
        with pytest.raises(MismatchError) as caught:
            kv.allreduce(torch.ones(3), name)
        texts.append(str(caught.value))
    handle = kv.allreduce_async(torch.ones(3), "asynchronous")
    with pytest.raises(MismatchError):
        handle.wait(30)
    group = [torch.ones(2), on_device.frontend.device.pinned(2, torch.float32)]
    with pytest.raises(InvalidArgumentError, match="several devices"):
        on_device.grouped_allreduce(group, "both")
    total = on_device.allreduce(torch.ones(3), None, Sum)
    ends_in_the_middle()
    return texts, total.tolist()


def ends_in_the_middle():
    """What can never be complete aborts the world, perhaps before a rank has left the barrier."""
    import kolovod

    with contextlib.suppress(CollectiveAbortedError):
        kolovod.barrier()
    kolovod.shutdown()


def test_a_name_on_a_gpu_here_and_in_host_memory_there_is_an_error(of_two_ranks):
    for texts, total in of_two_ranks["mixes"]:
        assert len(texts) == 2
        for text in texts:
            assert "device differs: rank 0 has GPU memory, rank 1 has host memory" in text
        assert total == [2] * 3


def refuses(rank):
    """Each on rank 0 only: the other rank goes on, and the next operations match again."""
    from gloo_for_nccl import instead_of_nccl

    import kolovod
    from kolovod.core.world import current

    kv = instead_of_nccl()
    kolovod.init()
    engine = current().engine
    x, beside = torch.ones(2), kv.frontend.device.pinned(2, torch.float32)
    kv.allreduce(x)

    def refused(kind, text, call, *arguments):
        before = engine.pending()
        with pytest.raises(kind, match=text):
            call(*arguments)
        assert engine.pending() == before

    handles = []
    for kind, text, call, *arguments in (
        (InvalidArgumentError, "several devices", kv.grouped_allreduce, [x, beside]),
        (InvalidArgumentError, "root rank 7", kv.broadcast, x, 7),
    ):
        if rank == 0:
            refused(kind, text, call, *arguments)
        else:
            handles.append(kv.allreduce_async(torch.ones(1)))  # which nobody answers
        for _ in range(2):
            assert kv.allreduce(x, None, Sum).tolist() == [2, 2]
    if rank == 0:
        handle = kv.allreduce_async(beside, "taken")
        refused(DuplicateNameError, "already pending", kv.allreduce, x, "taken")
        kv.barrier()
    else:
        kv.barrier()
        handle = kv.allreduce_async(beside, "taken")
    handle.wait()
    if rank == 0:
        refused(InvalidArgumentError, "root rank 7", kv.broadcast, x, 7, "again")
    kv.barrier()
    assert kv.broadcast(x + rank, 1, "again").tolist() == [2, 2]
    ends_in_the_middle()
    return len(handles)


def test_what_one_rank_refuses_leaves_nothing_behind_and_has_its_number(of_two_ranks):
    assert of_two_ranks["refuses"] == [0, 2]


def joins_first(rank):
    from gloo_for_nccl import instead_of_nccl

    import kolovod

    kv = instead_of_nccl()
    kolovod.init()
    with pytest.raises(InternalError) as caught:
        kv.join() if rank == 1 else kv.allreduce(torch.ones(3))
    kolovod.shutdown()
    return str(caught.value)


def test_a_rank_that_joins_before_the_gpus_are_connected(of_two_ranks):
    for text in of_two_ranks["joins_first"]:
        assert "let every rank do an operation on its GPU before any of them joins" in text


def adds_adasum(rank):
    from gloo_for_nccl import instead_of_nccl

    import kolovod

    kv = instead_of_nccl()
    kolovod.init()
    tensor = torch.tensor([1.0, 0.0]) if rank == 0 else torch.tensor([0.0, 1.0])
    fresh = kv.allreduce(tensor, "a", Adasum).tolist()
    kv.allreduce_async_(tensor, "b", Adasum).wait()
    kolovod.shutdown()
    return fresh, tensor.tolist()


def test_adasum_is_the_native_engines(of_two_ranks):
    assert of_two_ranks["adds_adasum"] == [([1, 1], [1, 1])] * 2


def shares_a_gpu(rank):
    from gloo_for_nccl import OverGloo, instead_of_nccl

    import kolovod

    kv = instead_of_nccl()
    OverGloo.identity = lambda _: "fake GPU"
    kolovod.init()
    with pytest.raises(InternalError) as caught:
        kv.allreduce(torch.ones(3))
    kolovod.shutdown()
    return str(caught.value)


def test_two_ranks_with_one_gpu_are_named(of_two_ranks):
    for text in of_two_ranks["shares_a_gpu"]:
        assert "ranks 0 and 1 both use the GPU 'fake GPU'" in text
        assert "leave KOLOVOD_BACKEND unset" in text


@pytest.mark.parametrize("name", ["int16", "int8", "uint8", "int64", "bool", "float32"])
def test_arithmetic_around_nccl_is_that_of_the_other_backends(name):
    """Factors, averages and clamping, of values that NumPy can tell."""
    from kolovod import _native
    from kolovod.backends.gpu_arithmetic import GpuReduction
    from kolovod.backends.host_arithmetic import HostReduction
    from kolovod.core.ops import Op

    draw = np.random.default_rng(7)
    low, high = (0, 2) if name == "bool" else (-100, 100)
    inputs = [draw.integers(low, high, 50).astype(name) for _ in range(3)]
    code = _native.DTYPES[name]
    for op, pre, post in ((Op.Sum, 1.0, 1.0), (Op.Average, 1.0, 1.0), (Op.Average, 2.5, 90.0)):
        if name == "bool" and op is Op.Average:
            continue
        call = (code, op, pre, post, len(inputs))
        theirs, ours = HostReduction(*call), GpuReduction(*call)
        combine = np.maximum if name == "bool" else np.add
        stored = [values.view("uint8") if name == "bool" else values for values in inputs]
        wanted = theirs.finished(combine.reduce([theirs.prepared(v) for v in stored]))
        found = [ours.prepared(torch.from_numpy(values)).numpy() for values in inputs]
        result = ours.finished(torch.from_numpy(combine.reduce(found))).numpy()
        np.testing.assert_allclose(result, wanted.view(result.dtype), rtol=1e-6)
