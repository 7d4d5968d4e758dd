"""DistributedOptimizer on ranks that are threads: which gradients a step uses."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from optimizing import Net, inputs, wrapped  # noqa: E402
from torch_loopback import run  # noqa: E402

from kolovod.torch import Compression  # noqa: E402


@pytest.mark.parametrize("compression", [Compression.none, Compression.fp16])
def test_backward_passes_per_step_sums_locally_and_sends_once(compression):
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv, compression=compression, backward_passes_per_step=3)
        for step in range(1, 3):
            optimizer.zero_grad()
            for _ in range(3):
                net(inputs(rank)).backward()
            optimizer.step()
            assert net.a.grad.tolist() == [3 * 1.5] * 3
            assert net.a.tolist() == [1 - 4.5 * step] * 3
        optimizer.set_backward_passes_per_step(1)
        optimizer.zero_grad()
        net(inputs(rank)).backward()
        optimizer.step()
        assert net.a.grad.tolist() == [1.5] * 3

    run(2, work)


def test_frozen_parameters_are_left_alone_also_when_frozen_later():
    def work(kv, rank):
        net = Net()
        net.b.requires_grad_(False)
        optimizer = wrapped(net, kv)
        net(inputs(rank)).backward()
        optimizer.step()
        assert net.b.grad is None
        net.a.requires_grad_(False)
        optimizer.zero_grad()
        optimizer.step()
        assert net.a.grad is None

    run(2, work)


def test_skip_synchronize_steps_with_the_local_gradients():
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv, backward_passes_per_step=2)
        net(inputs(rank)).backward()
        with optimizer.skip_synchronize():
            optimizer.step()
        return net.a.tolist()

    assert run(2, work) == [[0.0] * 3, [-1.0] * 3]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_between_backward_and_step_drops_the_gradients(set_to_none):
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv)
        net(inputs(rank)).backward()
        optimizer.zero_grad(set_to_none=set_to_none)
        assert (net.a.grad is None) == set_to_none
        net(inputs(rank)).backward()
        optimizer.step()
        assert net.a.tolist() == [1 - 1.5] * 3

    run(2, work)
