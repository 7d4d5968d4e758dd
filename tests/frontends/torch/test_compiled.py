"""Models that torch.compile has compiled. Ranks are processes: it compiles once for a process.

TorchInductor is not among the backends, since it takes the better part of a minute: what it adds to
aot_eager lies within the graphs, below autograd, where no gradient is accumulated.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from forked import run_torch_ranks  # noqa: E402
from torch import nn  # noqa: E402

import horovod.torch as hvd  # noqa: E402
import kolovod.torch as kvt  # noqa: E402

STEPS = 3


class Block(nn.Module):
    """With a branch on data, at which the graph breaks, and a layer that is seldom used."""

    def __init__(self):
        super().__init__()
        self.inner, self.seldom = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        x = torch.relu(self.inner(x))
        return self.seldom(x) if x.sum() > 28 else x


def new_model():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), Block(), nn.Linear(6, 1))


def batch(step, rank):
    draw = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, 5, generator=draw)
    return x, x.sum(1, keepdim=True)


def train(model, optimizer, ranks):
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in ranks:
            x, y = batch(step, rank)
            (nn.functional.mse_loss(model(x), y) / len(ranks)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def both_backends(rank):
    torch.set_num_threads(1)
    kvt.init()
    return [*compiled(rank, "eager"), *compiled(rank, "aot_eager")]


def compiled(rank, backend):
    """The names of the first parameter of each model that was compiled before it was wrapped."""
    plain = new_model()
    train(plain, sgd(plain), range(2))
    names = []
    for distribute in (kvt.DistributedOptimizer, hvd.DistributedOptimizer):
        for compile_first in (True, False):
            model = new_model()
            if rank == 1:
                with torch.no_grad():
                    model[0].weight.zero_()
            if compile_first:
                whole = torch.compile(model, backend=backend)
                optimizer = distribute(sgd(whole), whole.named_parameters())
                names += [name for name, _ in whole.named_parameters()][:1]
            else:
                optimizer = distribute(sgd(model), model.named_parameters())
                whole = torch.compile(model, backend=backend)
            kvt.broadcast_parameters(whole.state_dict())
            kvt.broadcast_optimizer_state(optimizer)
            train(whole, optimizer, [rank])
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
    return names


@pytest.mark.slow
def test_trains_as_one_process_would():
    for names in run_torch_ranks(2, both_backends, timeout_s=100):
        assert names == ["_orig_mod.0.weight"] * 4
