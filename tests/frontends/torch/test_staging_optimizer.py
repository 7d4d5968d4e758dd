"""DistributedOptimizer where gradients are on a GPU; the GPU is a fake (fake_device.py).

All that the tests of it on the CPU demand, and what is particular to copies that take their time.
"""

from __future__ import annotations

import threading
from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import test_optimizer_lifetime  # noqa: E402
import torch_loopback  # noqa: E402
from fake_device import FakeDevice, FakeFrontend, FakeStream  # noqa: E402
from optimizing import Net, inputs, wrapped  # noqa: E402
from test_optimizer import *  # noqa: E402, F403
from test_optimizer_gradients import *  # noqa: E402, F403
from test_optimizer_lifetime import (  # noqa: E402, F401
    test_a_model_that_is_all_frozen_at_first,
    test_a_new_optimizer_after_one_that_was_given_up_with_gradients_on_their_way,
    test_a_parameter_thawed_later_is_averaged,
    test_optimizers_of_an_earlier_world_go_on_beside_new_ones,
    test_several_optimizers_whose_backwards_reach_each_others_parameters,
)

from kolovod.errors import CollectiveAbortedError, RankLostError  # noqa: E402
from kolovod.gradients import stager  # noqa: E402
from kolovod.testing.loopback import loopback  # noqa: E402
from kolovod.torch import (  # noqa: E402
    Compression,
    DistributedOptimizer,
    TorchCollectives,
)


@pytest.fixture(autouse=True)
def on_device(monkeypatch):
    for module in (torch_loopback, test_optimizer_lifetime):
        monkeypatch.setattr(module, "TorchFrontend", FakeFrontend)


def trained(kv, rank):
    """An optimizer that has made its first step, so that hooks send from now on."""
    net = Net()
    optimizer = wrapped(net, kv)
    net(inputs(rank)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return net, optimizer


def on_ranks(device, size, work):
    with loopback(size, FakeFrontend(device)) as world:

        def on_rank(kv):
            rank = kv.world().rank
            return work(world, TorchCollectives(kv.frontend, kv.world), rank)

        return world.run(on_rank)


class Afterwards(torch.autograd.Function):
    """Calls ``then()`` in backward, after the gradients of all that was multiplied by ``x``."""

    @staticmethod
    def forward(ctx, x, then):
        ctx.then = then
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.then()
        return grad, None


def backward(net, rank, then):
    net(Afterwards.apply(inputs(rank).requires_grad_(), then)).backward()


def test_hooks_do_not_wait_for_the_copy():
    device, there = FakeDevice(), threading.Event()

    def work(world, kv, rank):
        net, optimizer = trained(kv, rank)
        kv.barrier()
        device.reached = there.wait

        def then():
            assert optimizer._kolovod_reducer.sending
            assert kv.world().engine.pending() == 0
            kv.barrier()
            there.set()

        backward(net, rank, then)
        assert net.a.grad.tolist() == [1.5] * 3

    before = device.packed_beside
    on_ranks(device, 2, work)
    assert device.packed_beside > before


def test_what_goes_wrong_with_the_copy_is_raised_by_backward():
    device = FakeDevice()

    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def work(world, kv, rank):
        net, _ = trained(kv, rank)
        kv.barrier()
        device.reached = broken
        with pytest.raises(RuntimeError, match="illegal memory access"):
            net(inputs(rank)).backward()

    on_ranks(device, 2, work)


def test_a_rank_that_is_lost_while_gradients_are_being_copied():
    device, there = FakeDevice(), threading.Event()
    met = threading.Barrier(2, timeout=60)  # a killed rank may end a barrier of ours

    def work(world, kv, rank):
        net, _ = trained(kv, rank)
        kv.barrier()
        met.wait()
        device.reached = there.wait
        if rank == 1:
            world.kill(1)
            return

        def then():
            with pytest.raises(CollectiveAbortedError):
                kv.barrier("of which rank 1 knows nothing")
            there.set()

        with pytest.raises(RankLostError) as caught:
            backward(net, rank, then)
        assert caught.value.rank == 1

    on_ranks(device, 2, work)


def test_an_optimizer_that_is_dropped_meanwhile_is_submitted_all_the_same():
    device, there = FakeDevice(), threading.Event()

    def work(world, kv, rank):
        net, optimizer = trained(kv, rank)
        kv.barrier()
        device.reached = there.wait
        reducer = optimizer._kolovod_reducer

        def then():
            kv.barrier()
            if rank == 1:
                (flight,) = reducer.in_flight.flights
                reducer.close()
                reducer.in_flight.discard()
                assert not flight.buffers.bucket.is_sent
            there.set()
            if rank == 0:
                assert len(reducer.arrived()) == 2
                assert net.a.grad.tolist() == [1.5] * 3
                reducer.close()

        backward(net, rank, then)
        kv.barrier()

    on_ranks(device, 2, work)


def late_gradients(kv, rank, is_sparse=False, **kwargs):
    """An optimizer whose gradients' values another stream has not made yet, and their bucket."""
    layer = torch.nn.Embedding(2, 2, sparse=is_sparse)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    optimizer = DistributedOptimizer(optimizer, layer.named_parameters(), collectives=kv, **kwargs)
    with optimizer.no_sync():
        layer(torch.tensor([0, 1])).sum().backward()
    grad = layer.weight.grad
    if not is_sparse:
        grad.data = grad.t()  # not dense row by row
    values = grad._values() if is_sparse else grad.data
    values.data.fill_(float("nan"))
    late = FakeStream()
    late.enqueue(partial(values.data.fill_, rank + 1.0))
    (bucket,) = optimizer._kolovod_reducer.buckets.all
    bucket.streams.add(late)
    return optimizer, bucket


@pytest.mark.parametrize(
    ("is_sparse", "kwargs"),
    [
        (False, {}),
        (False, {"compression": Compression.bf16}),
        (True, {}),
        (True, {"sparse_as_dense": True}),
    ],
)
def test_what_is_made_of_gradients_comes_after_the_streams_that_make_them(is_sparse, kwargs):
    def work(world, kv, rank):
        optimizer, _ = late_gradients(kv, rank, is_sparse, **kwargs)
        optimizer.synchronize()
        return optimizer._kolovod_reducer.parameters.tensors[0].grad.to_dense().tolist()

    assert on_ranks(FakeDevice(), 2, work) == [[[1.5, 1.5], [1.5, 1.5]]] * 2


def test_so_do_copies_of_gradients_that_are_not_staged():
    def work(world, kv, rank):
        optimizer, bucket = late_gradients(kv, rank)
        reducer = optimizer._kolovod_reducer
        kv.frontend.is_direct = lambda: True
        joined = []

        def launch(bucket, entries, items, later, near):
            joined.append(reducer.sender.device.join(near))

        reducer.sender._launch = launch
        reducer.sender.submit(bucket)
        return joined[0].tolist()

    assert on_ranks(FakeDevice(), 2, work) == [[r + 1.0] * 4 for r in range(2)]


def test_garbage_that_is_collected_while_the_thread_notes_the_number(monkeypatch):
    """It may be the optimizer that had submitted the bucket."""

    class Over(threading.Event):
        def set(self):
            super().set()
            queued.let_go()

    class Kept:
        def keep(self, *what):
            kept.append(what)

    kept, engine = [], object()
    monkeypatch.setattr(stager, "held_buffers", Kept())
    queued = stager.Queued((), lambda: 7, engine, "buffers")
    queued._over = Over()
    thread = threading.Thread(target=queued.run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert kept == [(engine, 7, "buffers")]
