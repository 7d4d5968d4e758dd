"""One optimizer in worlds of different sizes, one after the other."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from growing import RATE, STEPS, batch, check, replayed, start, worlds_of

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from forked import run_torch_ranks  # noqa: E402
from optimizing import Net, inputs, wrapped  # noqa: E402

from kolovod.core.ops import Adasum  # noqa: E402
from kolovod.errors import InvalidArgumentError, NotInitializedError  # noqa: E402
from kolovod.testing.loopback import loopback  # noqa: E402
from kolovod.torch import Compression, TorchCollectives, TorchFrontend  # noqa: E402


def hooks_of(net):
    return [len(p._post_accumulate_grad_hooks or ()) for p in net.parameters()]


def growing(work):
    """``work(verbs, rank, enter)``; ``enter(world)``: "alone", "both", "again" or "none"."""
    with loopback(2, TorchFrontend()) as both, loopback(2, TorchFrontend()) as again:

        def on_rank(kv):
            rank = kv.world().rank
            with loopback(1, TorchFrontend()) as alone:
                worlds = {
                    "alone": alone.ranks[0],
                    "both": both.ranks[rank],
                    "again": again.ranks[rank],
                }
                now = ["alone"]

                def world():
                    if now[0] == "none":
                        raise NotInitializedError("there is no world")
                    return worlds[now[0]]

                def enter(name):
                    now[0] = name

                return work(TorchCollectives(kv.frontend, world), rank, enter)

        return both.run(on_rank)


@pytest.mark.parametrize("shards", [False, True])
def test_a_parameter_that_is_frozen_while_the_world_grows(shards):
    """And thaws there: its gradient is averaged like others."""

    def work(kv, rank, enter):
        net = Net()
        optimizer = wrapped(net, kv, lr=1.0, shard_state=shards)
        net.b.requires_grad_(False)
        enter("both")
        for frozen in (True, False):
            optimizer.zero_grad()
            net(inputs(rank)).backward()
            optimizer.step()
            assert net.b.tolist() == [1.0 if frozen else -0.5] * 3
            net.b.requires_grad_(True)
        assert net.a.tolist() == [-2.0] * 3
        net.b.requires_grad_(False)
        enter("alone")
        optimizer.step()
        assert not net.b.requires_grad

    growing(work)


def test_another_optimizer_is_given_up_while_its_parameters_are_frozen():
    """The first one averages them again when they thaw."""

    def work(kv, rank, enter):
        net = Net()
        enter("both")
        first = wrapped(net, kv, lr=1.0)
        second = wrapped(net, kv, lr=1.0)
        net.b.requires_grad_(False)
        del second
        gc.collect()
        net.b.requires_grad_(True)
        net(inputs(rank)).backward()
        first.step()
        assert net.b.tolist() == net.a.tolist() == [-0.5] * 3

    growing(work)


@pytest.mark.parametrize("compression", [Compression.none, Compression.bf16])
@pytest.mark.parametrize("passes", [1, 2])
def test_an_optimizer_follows_the_world(compression, passes):
    def work(kv, rank, enter):
        net = Net()
        options = {"compression": compression, "backward_passes_per_step": passes}
        optimizer = wrapped(net, kv, lr=0.0, **options)

        def grads():
            for _ in range(3):
                optimizer.zero_grad()
                for _ in range(passes):
                    net(inputs(rank)).backward()
                optimizer.step()
                yield net.a.grad[0].item() / passes

        own = [rank + 1.0] * 3
        assert list(grads()) == own
        assert hooks_of(net) == [0, 0]
        enter("both")
        assert list(grads()) == [1.5] * 3
        assert hooks_of(net) == [1, 1]
        enter("alone")
        assert list(grads()) == own
        assert hooks_of(net) == [0, 0]
        enter("both")
        assert list(grads()) == [1.5] * 3
        enter("none")  # nothing of ours is in the way of a script's end
        optimizer.zero_grad(set_to_none=True)

    growing(work)


def test_gradients_clipped_in_a_world_that_has_grown():
    def work(kv, rank, enter):
        net = Net()
        optimizer = wrapped(net, kv, lr=0.0)
        enter("both")
        for _ in range(2):
            net(inputs(rank)).backward()
            optimizer.step()
            net(inputs(rank)).backward()
            torch.nn.utils.clip_grad_value_(net.parameters(), 10.0)
            assert net.a.grad[0].item() in (1.5, 1.5 + 1.5)
            optimizer.step()
            optimizer.zero_grad()

    growing(work)


def test_steps_combined_in_a_world_that_has_grown():
    def work(kv, rank, enter):
        net = Net()
        optimizer = wrapped(net, kv, op=Adasum)
        net(inputs(rank)).backward()
        optimizer.step()
        alone = net.a[0].item()
        assert alone == -rank
        enter("both")
        with torch.no_grad():
            net.a.fill_(1.0)
        optimizer.zero_grad()
        net(inputs(rank)).backward()
        optimizer.step()
        return net.a[0].item()

    first, second = growing(work)
    assert first == second


def test_a_world_of_one_goes_on_after_its_end():
    def work(kv, rank, enter):
        net = Net()
        optimizer = wrapped(net, kv)
        enter("none")
        net(inputs(rank)).backward()
        optimizer.step()
        assert net.a[0].item() == -rank
        with pytest.raises(NotInitializedError):
            wrapped(net, kv)

    growing(work)


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
