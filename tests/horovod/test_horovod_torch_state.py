"""What Horovod's scripts find in a model and an optimizer before the first step."""

from __future__ import annotations

import copy
import io
import warnings

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from forked import run_torch_ranks as run_ranks  # noqa: E402
from torch import nn  # noqa: E402

import horovod.torch as hvd  # noqa: E402


def new_model():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    model[2].bias.requires_grad_(False)
    return model


def batch(rank):
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(rank))


def check_zeros(rank):
    """Of what wants a gradient and has none; the same on all ranks, and no step is taken."""
    model = new_model()
    start = copy.deepcopy(model.state_dict())
    kept = torch.full_like(model[0].bias, 7.0)
    model[0].bias.grad = kept
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, 0)
    first = model[0].weight.grad
    assert torch.equal(first, torch.zeros_like(model[0].weight))
    assert torch.equal(hvd.broadcast(first, 0), first)
    assert model[0].bias.grad is kept
    assert model[2].bias.grad is None
    assert not optimizer.state
    for name, value in model.state_dict().items():
        assert torch.equal(value, start[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(model, io.BytesIO())


def check_training(rank, size):
    """Gradients that are not zeroed before the first backward are those of one process."""
    model, alone = new_model(), new_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    hvd.broadcast_optimizer_state(optimizer, 0)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(2):
        if step:
            optimizer.zero_grad()
            plain.zero_grad()
        model(batch(rank)).sum().backward()
        optimizer.step()
        for each in range(size):
            (alone(batch(each)).sum() / size).backward()
        plain.step()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def check_changed(rank):
    """What a script has put into the zeros is added to, as it would be without us."""
    parameter = nn.Parameter(torch.ones(2))
    hvd.broadcast_optimizer_state(torch.optim.SGD([parameter], lr=1.0), 0)
    parameter.grad += 3.0
    (2 * parameter).sum().backward()
    assert parameter.grad.tolist() == [5.0, 5.0]


def check_sparse(rank, size):
    """The gradient of an embedding is sparse, whether or not we know of the embedding."""
    for kind, knows in ((torch.optim.SGD, 0), (torch.optim.SGD, 1), (torch.optim.SparseAdam, 0)):
        table = nn.Embedding(6, 2, sparse=True)
        nn.init.zeros_(table.weight)
        optimizer = hvd.DistributedOptimizer(kind(table.parameters(), lr=1.0))
        hvd.broadcast_optimizer_state(optimizer, 0, table if knows else None)
        assert table.weight.grad.is_sparse == (knows or kind is torch.optim.SparseAdam)
        assert not table.weight.grad.to_dense().any()
        for _ in range(2):
            table(torch.tensor([rank, 5])).sum().backward()
            assert table.weight.grad.is_sparse
            optimizer.step()
            optimizer.zero_grad()
        if kind is torch.optim.SGD:
            moved = [-2.0 / size] * size + [0.0] * (5 - size) + [-2.0]
            torch.testing.assert_close(table.weight[:, 0].tolist(), moved)


def check_resumed(rank):
    """Rank 0 has a state, which the others get; their zeros are what is left behind."""
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if rank else 0.5, momentum=0.9)
    if rank == 0:
        model(batch(0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert optimizer.param_groups[0]["lr"] == 0.5
    momentum = optimizer.state[model[0].weight]["momentum_buffer"]
    assert torch.equal(hvd.broadcast(momentum, 0), momentum)
    assert (model[0].weight.grad is None) == (rank == 0)


def check_names(rank, size):
    """By parameter, for each kind of optimizer; and without names given, the same everywhere."""
    for op in (hvd.Average, hvd.Adasum) if size != 3 else (hvd.Average,):
        model = new_model()
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
        sgd = torch.optim.SGD(groups, lr=0.1)
        spare = nn.Parameter(torch.ones(1))
        named = {**dict(model.named_parameters()), "spare": spare}
        optimizer = hvd.DistributedOptimizer(sgd, iter(named.items()), op=op)
        found = optimizer._parameter_names
        assert {name: id(p) for p, name in found.items()} == {n: id(p) for n, p in named.items()}
        assert list(found.values()) == sorted(named)
        unnamed = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1), op=op)
        names = [unnamed._parameter_names[p] for p in model.parameters()]
        assert len(set(names)) == 4
        assert hvd.allgather_object(names) == [names] * size
        assert not hasattr(copy.deepcopy(unnamed), "_parameter_names")


def all_checks(rank, size):
    torch.set_num_threads(1)
    hvd.init()
    check_zeros(rank)
    check_training(rank, size)
    check_changed(rank)
    check_sparse(rank, size)
    check_resumed(rank)
    check_names(rank, size)
    return True


@pytest.mark.parametrize("size", [1, 3])
def test_before_the_first_step(size):
    assert all(run_ranks(size, all_checks, size))
