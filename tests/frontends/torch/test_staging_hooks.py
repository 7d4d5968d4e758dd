"""Sharded optimizers and communication hooks where gradients are on a GPU; the GPU is a fake."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import test_sharded  # noqa: E402
import torch_loopback  # noqa: E402
from fake_device import FakeDevice, FakeFrontend  # noqa: E402
from test_gradient_hooks import (  # noqa: E402, F401
    test_a_buffer_may_be_replaced,
    test_a_hook_that_averages,
    test_power_sgd,
    test_what_is_thrown_away_is_sent_again,
)
from test_sharded import (  # noqa: E402, F401
    test_a_state_goes_on_with_other_numbers_of_ranks,
    test_parameters_that_are_gathered_in_forward,
    test_parameters_that_move_thaw_and_come_later,
)
from test_sharded_clipping import test_clipping_uses_the_norm_of_all  # noqa: E402, F401

from kolovod.testing.loopback import loopback  # noqa: E402
from kolovod.torch import DistributedOptimizer, TorchCollectives  # noqa: E402


@pytest.fixture(autouse=True)
def on_device(monkeypatch):
    monkeypatch.setattr(torch_loopback, "TorchFrontend", FakeFrontend)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_as_without_shards(kind):
    test_sharded.test_as_without_shards(kind)


class Counting(FakeDevice):
    """Of one rank: the bytes that are copied to the host, and how often that is waited for.

    But for the marks by which ranks meet, which would be in host memory with a GPU.
    """

    def __init__(self):
        super().__init__()
        self.bytes = self.waits = 0

    def pack(self, tensors, host):
        self.bytes += host.nbytes if host.dtype != torch.uint8 else 0
        super().pack(tensors, host)

    def to_host(self, tensor):
        self.waits += tensor.dtype != torch.uint8
        return super().to_host(tensor)


def test_shards_copy_each_gradient_once_and_hooks_wait_for_none():
    def work(world, rank):
        device = Counting()
        kv = TorchCollectives(FakeFrontend(device), world)
        torch.manual_seed(1)
        net = torch.nn.Sequential(*[torch.nn.Linear(300, 300) for _ in range(3)])
        optimizer = DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1),
            net.named_parameters(),
            collectives=kv,
            shard_state=True,
        )
        for _ in range(3):
            optimizer.zero_grad()
            device.bytes = device.waits = 0
            net(torch.ones(4, 300)).square().mean().backward()
            seen = device.bytes, device.waits
            optimizer.step()
        return *seen, sum(parameter.nbytes for parameter in net.parameters())

    with loopback(2, FakeFrontend()) as made:
        for copied, waits, whole in made.run(lambda kv: work(kv.world, kv.world().rank)):
            assert (copied, waits) == (whole, 0)
