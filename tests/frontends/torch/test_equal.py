"""Training on several processes is the training that one process would have done, proven."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from forked import run_torch_ranks as run_ranks  # noqa: E402

BATCH = 12  # global; 12 = 1 * 12 = 2 * 6 = 3 * 4 = 4 * 3
STEPS = 25

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(
        p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3
    ),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


def conv_net(dtype, batch_norm, seed=0):
    """A small convolutional classifier of 8 x 8 images into 10 classes."""
    torch.manual_seed(seed)
    layers = [
        torch.nn.Conv2d(1, 8, 3, padding=1),
        *([torch.nn.BatchNorm2d(8)] if batch_norm else []),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=not batch_norm),
        *([torch.nn.BatchNorm2d(16)] if batch_norm else []),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * 4 * 4, 10),
    ]
    return torch.nn.Sequential(*layers).to(dtype)


def batches(dtype, rank, size, steps=STEPS):
    """The part of this rank in each global batch."""
    generator = torch.Generator().manual_seed(1)
    share = BATCH // size
    for _ in range(steps):
        images = torch.randn(BATCH, 1, 8, 8, generator=generator, dtype=torch.float64)
        labels = torch.randint(10, (BATCH,), generator=generator)
        part = slice(rank * share, (rank + 1) * share)
        yield images[part].to(dtype), labels[part]


def backward(net, images, labels):
    torch.nn.functional.cross_entropy(net(images), labels).backward()


def flat(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def train_alone(kind):
    torch.set_num_threads(1)
    net = conv_net(torch.float64, batch_norm=False)
    optimizer = OPTIMIZERS[kind](net.parameters())
    for images, labels in batches(torch.float64, 0, 1):
        optimizer.zero_grad()
        backward(net, images, labels)
        optimizer.step()
    return flat(net)


def train_distributed(rank, size):
    """Each optimizer in turn; the flat parameters by its name."""
    import kolovod.torch as kv

    torch.set_num_threads(1)
    kv.init()
    results = {}
    for kind, make in OPTIMIZERS.items():
        net = conv_net(torch.float64, batch_norm=False, seed=rank)
        kv.broadcast_parameters(net.state_dict())
        optimizer = kv.DistributedOptimizer(make(net.parameters()), net.named_parameters())
        kv.broadcast_optimizer_state(optimizer)
        for images, labels in batches(torch.float64, rank, size):
            optimizer.zero_grad()
            backward(net, images, labels)
            optimizer.step()
        results[kind] = flat(net)
        del optimizer
    return results


@pytest.mark.parametrize("size", [2, 3, 4])
def test_parameters_match_one_process_to_rounding_and_all_ranks_bitwise(size):
    by_rank = run_ranks(size, train_distributed, size, timeout_s=100)
    for kind in OPTIMIZERS:
        alone = train_alone(kind)
        moved = (alone - flat(conv_net(torch.float64, batch_norm=False))).abs().max()
        assert moved > 0.01, "the reference has not learnt anything"
        for results in by_rank:
            torch.testing.assert_close(results[kind], alone, rtol=1e-9, atol=1e-11)
            assert torch.equal(results[kind], by_rank[0][kind])


def train_wrongly(rank, size):
    """The two mistakes that averaging before the update avoids."""
    import kolovod.torch as kv

    torch.set_num_threads(1)
    kv.init()
    late = conv_net(torch.float64, batch_norm=False)
    optimizer = OPTIMIZERS["momentum"](late.parameters())
    for images, labels in batches(torch.float64, rank, size):
        optimizer.zero_grad()
        backward(late, images, labels)
        optimizer.step()  # momentum has taken the local gradient
        for name, parameter in late.named_parameters():
            kv.allreduce_(parameter.grad, name)
    updates = conv_net(torch.float64, batch_norm=False)
    optimizer = OPTIMIZERS["adam"](updates.parameters())
    for images, labels in batches(torch.float64, rank, size):
        optimizer.zero_grad()
        backward(updates, images, labels)
        optimizer.step()
        for name, parameter in updates.named_parameters():
            kv.allreduce_(parameter, name)  # the ranks stay equal, but each had its own moments
    return flat(late), flat(updates)


def test_averaging_after_the_update_diverges():
    (late, updates), (other_late, other_updates) = run_ranks(2, train_wrongly, 2)
    right = {kind: train_alone(kind) for kind in ("momentum", "adam")}
    assert (late - other_late).abs().max() > 1e-2, "ranks drift apart"
    assert (late - right["momentum"]).abs().max() > 1e-2
    assert torch.equal(updates, other_updates)
    assert (updates - right["adam"]).abs().max() > 1e-2, "averaged updates are not Adam's"


_kept: list[object] = []


def train_beside_ddp(rank, store, momentum):
    """30 steps of a net with batch norm in float32, by PyTorch's DDP over gloo and by us."""
    import torch.distributed as dist

    import kolovod.torch as kv

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    kv.init()
    by_ddp = conv_net(torch.float32, batch_norm=True)
    ours = conv_net(torch.float32, batch_norm=True)
    ddp = torch.nn.parallel.DistributedDataParallel(by_ddp)
    their_optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=momentum)
    our_optimizer = kv.DistributedOptimizer(
        torch.optim.SGD(ours.parameters(), lr=0.05, momentum=momentum), ours.named_parameters()
    )
    equal = []
    for images, labels in batches(torch.float32, rank, 2, steps=30):
        for net, optimizer in ((ddp, their_optimizer), (ours, our_optimizer)):
            optimizer.zero_grad()
            backward(net, images, labels)
            optimizer.step()
        equal.append(torch.equal(flat(by_ddp), flat(ours)))
    dist.destroy_process_group()
    # Freeing it, PyTorch 2.13 holds the GIL while it joins gloo's threads, which may wait for that.
    _kept.append(ddp)
    return equal, flat(ours)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_float32_weights_are_bitwise_those_of_ddp(tmp_path, momentum):
    (first, weights), (second, others) = run_ranks(
        2, train_beside_ddp, str(tmp_path / "store"), momentum
    )
    assert first == second == [True] * 30
    assert torch.equal(weights, others)
    assert (weights - flat(conv_net(torch.float32, batch_norm=True))).abs().max() > 0.01
