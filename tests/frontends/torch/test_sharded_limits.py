"""What optimizers whose state is in parts refuse, and ranks that differ."""

from __future__ import annotations

import copy

import pytest
import torch
from optimizing import Net, inputs, wrapped
from torch_loopback import run

import kolovod.torch as kv
from kolovod.errors import InvalidArgumentError, MismatchError


class Together(torch.optim.SGD):
    """Scales each step by the norm of all gradients together."""

    def step(self, closure=None):
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = torch.stack([p.grad.norm() for p in every]).norm()
        for parameter in every:
            parameter.grad.div_(total)
        return super().step(closure)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda p: torch.optim.LBFGS(p), "LBFGS .* step fails"),
        (lambda p: Together(p, lr=0.1), r"Together \(group 0\).*without the others its step is"),
    ],
)
def test_optimizers_that_step_with_several_parameters_at_once(make, text):
    def work(verbs, rank):
        net = Net()
        with pytest.raises(InvalidArgumentError, match=text):
            wrapped(net, verbs, optimizer=make(list(net.parameters())), shard_state=True)

    run(2, work)


def test_what_shards_are_refused_for():
    def work(verbs, rank):
        for options, text in [
            ({"compression": kv.Compression.fp16}, "Compression.none"),
            ({"op": kv.Adasum}, "Adasum"),
        ]:
            with pytest.raises(InvalidArgumentError, match=text):
                wrapped(Net(), verbs, shard_state=True, **options)
        net = Net()
        optimizer = wrapped(
            net, verbs, optimizer=torch.optim.AdamW(net.parameters()), shard_state=True
        )
        with pytest.raises(InvalidArgumentError, match="register_comm_hook"):
            optimizer.register_comm_hook(None, lambda state, bucket: None)
        with (
            pytest.raises(InvalidArgumentError, match="skip_synchronize"),
            optimizer.skip_synchronize(),
        ):
            pass
        copy.deepcopy(optimizer)
        net(inputs(rank)).backward()
        optimizer.step()
        with pytest.raises(InvalidArgumentError, match="copied or pickled"):
            copy.deepcopy(optimizer)
        layer = torch.nn.Embedding(4, 4, sparse=True)
        optimizer = wrapped(layer, verbs, shard_state=True)
        with pytest.raises(InvalidArgumentError, match="sparse_as_dense"):
            layer(torch.tensor([rank])).sum().backward()
        gaps = torch.nn.Parameter(torch.zeros(4, 6)[:, ::2])
        optimizer = kv.DistributedOptimizer(
            torch.optim.SGD([gaps], lr=0.1), collectives=verbs, shard_state=True
        )
        with pytest.raises(InvalidArgumentError, match="one block of memory"):
            gaps.sum().backward()

    run(2, work)


def test_sparse_gradients_as_dense_ones():
    def work(verbs, rank):
        layer = torch.nn.Embedding(4, 4, sparse=True)
        torch.nn.init.zeros_(layer.weight)
        optimizer = wrapped(layer, verbs, shard_state=True, sparse_as_dense=True)
        for _ in range(2):
            optimizer.zero_grad()
            layer(torch.tensor([rank])).sum().backward()
            optimizer.step()
        assert layer.weight[:, 0].tolist() == [-1, -1, 0, 0]

    run(2, work)


def test_ranks_whose_parameters_lie_in_another_order():
    def work(verbs, rank):
        layer = torch.nn.Conv2d(4, 6, 3)
        if rank:
            layer = layer.to(memory_format=torch.channels_last)
        optimizer = wrapped(layer, verbs, shard_state=True)
        with pytest.raises(MismatchError, match="strides of weight"):
            layer(torch.ones(1, 4, 5, 5)).sum().backward()
        del optimizer

    run(2, work)


def test_one_rank_with_shards_and_one_without():
    def work(verbs, rank):
        net = Net()
        optimizer = wrapped(net, verbs, shard_state=rank == 0)
        with pytest.raises(MismatchError):
            net(inputs(rank)).backward()
        del optimizer

    run(2, work)
