"""DistributedOptimizer, gradients and join where not all ranks take part alike."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from forked import run_torch_ranks as run_ranks  # noqa: E402

import kolovod.torch as kv  # noqa: E402
from kolovod.errors import MismatchError  # noqa: E402


def of_halves(rank, kind):
    kv.init(process_sets=[[0, 1], [2]])
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    group = kv.add_process_set([0, 2])
    optimizer = kv.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        process_set=group,
        shard_state=kind == "shards",
    )
    if kind == "hook":
        optimizer.register_comm_hook(None, lambda _, bucket: bucket.average(bucket.buffer()))
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((1, 3), rank + step + 1.0)).sum().backward()
        optimizer.step()
    return model.weight.detach().numpy().copy()


def alone(inputs):
    """SGD on the mean of the gradients of ``inputs`` at each step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss = sum(model(torch.full((1, 3), value + step)).sum() for value in inputs)
        (loss / len(inputs)).backward()
        optimizer.step()
    return model.weight.detach().numpy()


@pytest.mark.parametrize("kind", ["plain", "shards", "hook"])
def test_an_optimizer_averages_within_its_set(kind):
    weights = run_ranks(3, of_halves, kind)
    for rank, inputs in ((0, [1.0, 3.0]), (1, [2.0]), (2, [1.0, 3.0])):
        assert weights[rank] == pytest.approx(alone(inputs), abs=1e-6)
    assert (weights[0] == weights[2]).all()


def another_model_in_a_set(rank):
    kv.init()
    group = kv.add_process_set([1, 2])
    model = torch.nn.Linear(3 if rank == 2 else 4, 1)
    optimizer = kv.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        process_set=group,
    )
    loss = model(torch.ones(1, model.in_features)).sum()
    if not group.included():
        loss.backward()
        optimizer.step()
        return ""
    with pytest.raises(MismatchError) as raised:
        loss.backward()
    return str(raised.value)


def test_who_has_another_model_is_named_by_its_rank_in_the_world():
    texts = run_ranks(3, another_model_in_a_set)
    for text in texts[1:]:
        assert "rank 1 has 'weight' (1, 4), rank 2 has 'weight' (1, 3)" in text


def gradients_in_a_set(rank):
    kv.init()
    group = kv.add_process_set([1, 2])
    if not group.included():
        return None
    place = group.rank()
    x = torch.full((2, 2), float(rank), requires_grad=True)
    gathered = kv.allgather(x, process_set=group)
    parts = kv.reducescatter(x, process_set=group)
    everywhere, _ = kv.alltoall(x, process_set=group)
    from_two = kv.broadcast(x, 2, process_set=group)
    mean = kv.allreduce(x, process_set=group)
    loss = gathered.sum() * 2 + parts.sum() * 4 + everywhere.sum() + from_two.sum() + mean.sum() * 3
    loss.backward()
    # allgather: 2 of both ranks; reducescatter: 4 / 2; alltoall 1; broadcast: 2 at its root; mean 3
    assert torch.equal(x.grad, torch.full((2, 2), 4.0 + 2 + 1 + 2 * place + 3))
    return gathered.shape[0]


def test_verbs_in_a_set_can_be_differentiated():
    assert run_ranks(3, gradients_in_a_set) == [None, 4, 4]


def uneven_epochs(rank):
    """Rank r trains on r + 2 batches per epoch, then joins; the last one has the best model."""
    kv.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = kv.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), named_parameters=model.named_parameters()
    )
    lasts = []
    for _ in range(2):
        for batch in range(rank + 2):
            optimizer.zero_grad()
            model(torch.full((4, 4), 0.1 * (batch + 1))).square().mean().backward()
            optimizer.step()
        lasts.append(kv.join())
        kv.broadcast_parameters(model.state_dict(), lasts[-1])
    return lasts, torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()


def test_training_on_uneven_data():
    results = run_ranks(3, uneven_epochs)
    for lasts, weights in results:
        assert lasts == [2, 2]
        assert (weights == results[0][1]).all()
