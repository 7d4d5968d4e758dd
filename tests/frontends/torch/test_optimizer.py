"""DistributedOptimizer on ranks that are threads: which gradients a step uses."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from optimizing import Net, inputs, wrapped  # noqa: E402
from torch_loopback import run  # noqa: E402

from kolovod.core.ops import Sum  # noqa: E402
from kolovod.errors import InvalidArgumentError  # noqa: E402
from kolovod.torch import Compression, DistributedOptimizer  # noqa: E402


def test_step_uses_the_average_gradient():
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv)
        for step in range(1, 4):
            optimizer.zero_grad()
            net(inputs(rank)).backward()
            optimizer.step()
            assert net.a.tolist() == [1 - 2.0 * step] * 3
            assert net.a.grad.tolist() == [2.0] * 3

    run(3, work)


def test_op_sum():
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv, op=Sum)
        net(inputs(rank)).backward()
        optimizer.step()
        assert net.a.grad.tolist() == [6.0] * 3

    run(3, work)


@pytest.mark.parametrize("compression", [Compression.fp16, Compression.bf16])
def test_compression_rounds_what_travels(compression):
    narrow = {Compression.fp16: torch.float16, Compression.bf16: torch.bfloat16}[compression]

    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv, compression=compression)
        x = torch.tensor([1 / 3, 1000.1, 2.0**-10]) * (rank + 1)
        net(x).backward()
        optimizer.step()
        sent = [torch.tensor([1 / 3, 1000.1, 2.0**-10]) * (r + 1) for r in range(2)]
        total = sum(values.to(narrow).float() for values in sent)
        assert net.a.grad.dtype is torch.float32
        assert torch.equal(net.a.grad, (total / 2).to(narrow).float())

    run(2, work)


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


def test_step_before_all_passes_are_done_sends_what_there_is():
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv, backward_passes_per_step=3)
        net(inputs(rank)).backward()
        optimizer.step()
        assert net.a.grad.tolist() == [1.5] * 3

    run(2, work)


def test_one_backward_too_many_is_an_error_that_says_what_to_do():
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv)
        net(inputs(rank)).backward()
        with pytest.raises(InvalidArgumentError, match="backward_passes_per_step=2"):
            net(inputs(rank)).backward()
        optimizer.zero_grad()
        net(inputs(rank)).backward()
        optimizer.step()
        assert net.a.grad.tolist() == [1.5] * 3

    run(2, work)


def test_a_parameter_unused_on_some_ranks_counts_as_zeros_there():
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv)
        for _ in range(3):
            optimizer.zero_grad()
            net(inputs(rank), use_b=rank == 1).backward()
            optimizer.step()
            assert net.a.grad.tolist() == [2.0] * 3
            assert net.b.grad.tolist() == pytest.approx([2 / 3] * 3)

    run(3, work)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_parameter_unused_on_all_ranks_keeps_no_gradient_and_stays(momentum):
    """As with one process: zeros would move it by weight decay and momentum."""

    def work(kv, rank):
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=momentum, weight_decay=0.5)
        optimizer = DistributedOptimizer(optimizer, net.named_parameters(), collectives=kv)
        net(inputs(rank), use_b=False).backward()
        optimizer.step()
        assert net.b.grad is None
        assert net.b.tolist() == [1, 1, 1]

    run(2, work)


def test_a_rank_without_a_batch_joins_with_zeros():
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv)
        if rank == 0:
            net(inputs(1)).backward()
        optimizer.step()
        assert net.a.tolist() == [0, 0, 0]

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


def test_synchronize_then_clip_then_step_reduces_once():
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv, op=Sum)
        net(inputs(rank)).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_value_(net.parameters(), 0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
        assert net.a.tolist() == [0.5] * 3

        optimizer.zero_grad()
        net(inputs(rank)).backward()
        optimizer.synchronize()
        net.a.grad.mul_(2)
        with optimizer.skip_synchronize():
            optimizer.step()
        assert net.a.tolist() == [0.5 - 6] * 3

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


def test_gradients_in_another_memory_order():
    def work(kv, rank):
        weight = torch.nn.Parameter(
            torch.ones(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)
        )
        optimizer = DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), collectives=kv)
        scale = torch.arange(24.0).reshape(2, 3, 2, 2)
        for _ in range(2):
            optimizer.zero_grad()
            (weight * scale * (rank + 1)).sum().backward()
            assert not weight.grad.is_contiguous()
            optimizer.step()
            assert torch.equal(weight.grad, scale * 1.5)

    run(2, work)
