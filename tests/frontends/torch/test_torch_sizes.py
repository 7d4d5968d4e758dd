"""PyTorch's optimizers in worlds that grow and shrink, each of them one object all along."""

from __future__ import annotations

import numpy as np
import pytest
from growing import MOMENTUM, RATE, STEPS, batch, check, replayed, start, worlds_of

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from forked import run_torch_ranks  # noqa: E402

from kolovod.errors import InvalidArgumentError  # noqa: E402

WAYS = {
    "plain": ({}, 1, 1e-12),
    "groups": ({"groups": 1}, 1, 1e-12),
    "passes": ({"backward_passes_per_step": 2}, 2, 1e-12),
    "bf16": ({}, 1, 0.05),
}


def linear(seed=0):
    """The model of ``growing``; other weights on ranks that have yet to be told."""
    net = torch.nn.Linear(3, 2, dtype=torch.float64)
    with torch.no_grad():
        net.weight.copy_(torch.from_numpy(start()[0].T + seed))
        net.bias.copy_(torch.from_numpy(start()[1] - seed))
    return net


def weights(net):
    return [net.weight.detach().numpy().T.copy(), net.bias.detach().numpy().copy()]


def backward(net, phase, row, launched_as):
    inputs, targets = map(torch.from_numpy, batch(phase, row, launched_as))
    torch.nn.functional.mse_loss(net(inputs), targets).backward()


def test_optimizers_in_worlds_that_grow_and_shrink():
    def work(launched_as):
        import kolovod.torch as kv

        kv.init(comm=[launched_as])  # all are made in a world of one
        trained = {}
        for way, (options, passes, _) in WAYS.items():
            net = linear(launched_as)
            sgd = torch.optim.SGD(net.parameters(), RATE, MOMENTUM)
            if way == "bf16":
                options = {"compression": kv.Compression.bf16}
            optimizer = kv.DistributedOptimizer(sgd, net.named_parameters(), **options)
            trained[way] = net, optimizer, passes, []
        kv.shutdown()
        for phase in worlds_of(kv, launched_as):
            for net, optimizer, passes, found in trained.values():
                kv.broadcast_parameters(net.state_dict())
                kv.broadcast_optimizer_state(optimizer)
                for step in range(STEPS):
                    for row in range(step * passes, (step + 1) * passes):
                        backward(net, phase, row, launched_as)
                    if step:
                        torch.nn.utils.clip_grad_norm_(net.parameters(), 1e9)
                    optimizer.step()
                    optimizer.zero_grad()
                found += [None] * (phase - len(found)) + [weights(net)]
        return {way: found for way, (*_, found) in trained.items()}

    results = run_torch_ranks(3, work, timeout_s=100)
    for way, (_, passes, rtol) in WAYS.items():
        check([each[way] for each in results], replayed(passes=passes), rtol=rtol)


def test_adasum_in_worlds_of_one_two_and_four():
    """Equal steps count once: so it is SGD by one process. Those of three ranks are refused."""
    worlds = ([0], [0, 1], [0], [0, 1, 2], [0, 1, 2, 3])

    def work(launched_as):
        import kolovod.torch as kv

        kv.init(comm=[launched_as])
        net = linear(launched_as)
        sgd = torch.optim.SGD(net.parameters(), RATE)
        optimizer = kv.DistributedOptimizer(sgd, net.named_parameters(), op=kv.Adasum)
        kv.shutdown()
        found = [None] * len(worlds)
        for phase in worlds_of(kv, launched_as, worlds):
            kv.broadcast_parameters(net.state_dict())
            if len(worlds[phase]) == 3:
                before = weights(net)
                backward(net, phase, 0, 0)
                with pytest.raises(InvalidArgumentError, match="3 ranks are not a power of two"):
                    optimizer.step()
                for mine, earlier in zip(weights(net), before, strict=True):
                    np.testing.assert_array_equal(mine, earlier)
                optimizer.zero_grad()
            else:
                for step in range(STEPS):
                    backward(net, phase, step, 0)
                    optimizer.step()
                    optimizer.zero_grad()
            found[phase] = weights(net)
        return found

    results = run_torch_ranks(4, work, timeout_s=100)
    ones = [[] if len(members) == 3 else [0] for members in worlds]  # one process, and its pause
    check(results, replayed(ones, momentum=0.0), worlds)
