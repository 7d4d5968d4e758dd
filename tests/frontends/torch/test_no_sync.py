"""Accumulating gradients with ``no_sync``: nothing is sent, and nothing is lost."""

from __future__ import annotations

import contextlib

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from optimizing import Net, inputs, wrapped  # noqa: E402
from torch_loopback import run  # noqa: E402

from kolovod.core.ops import Adasum, Sum  # noqa: E402


def loop(net, optimizer, ranks, held, backward=lambda loss: loss.backward()):
    """Steps of 1 to 3 backward passes, of which the last is outside; ``held`` is the context."""
    for step in range(4):
        optimizer.zero_grad()
        passes = 1 + step % 3
        for i in range(passes):
            for rank in ranks:
                loss = net(inputs(rank + i), use_b=(rank + i) % 2 == 0) / len(ranks)
                if i == passes - 1:
                    backward(loss)
                else:
                    with held():
                        backward(loss)
        optimizer.step()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_as_in_one_process(size, momentum):
    def sgd(net):
        return torch.optim.SGD(net.parameters(), lr=0.1, momentum=momentum)

    plain = Net()
    loop(plain, sgd(plain), range(size), torch.enable_grad)

    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv, optimizer=sgd(net))
        loop(net, optimizer, [rank], optimizer.no_sync)
        torch.testing.assert_close(net.a, plain.a)
        torch.testing.assert_close(net.b, plain.b)

    run(size, work)


def test_nothing_is_sent_and_no_pass_is_counted():
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv, op=Sum, backward_passes_per_step=2)
        optimizer.step()  # from now on, hooks send

        def operations():
            return kv.world().engine.stats()["operations"]

        before = operations()
        with optimizer.no_sync():
            for _ in range(3):
                net(inputs(rank)).backward()
            with optimizer.no_sync():
                net(inputs(rank)).backward()
            torch.nn.utils.clip_grad_value_(net.parameters(), 100.0)
        assert operations() == before
        net(inputs(rank)).backward()
        assert operations() == before
        net(inputs(rank)).backward()
        assert optimizer._kolovod_reducer.settled
        optimizer.step()
        assert net.a.grad.tolist() == [6 * 3.0] * 3

    run(2, work)


def test_step_averages_also_what_was_accumulated_last():
    """Within the context or after it, with nothing accumulated outside."""

    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv)
        for within in (True, False, True):
            optimizer.zero_grad()
            with optimizer.no_sync():
                net(inputs(rank)).backward()
                if within:
                    optimizer.step()
            if not within:
                optimizer.step()
            assert net.a.grad.tolist() == [1.5] * 3
        assert net.a.tolist() == [1 - 4.5] * 3
        optimizer.zero_grad()
        net(inputs(rank)).backward()
        torch.nn.utils.clip_grad_value_(net.parameters(), 1.0)
        with optimizer.no_sync():
            net(inputs(rank)).backward()
        optimizer.step()  # 1 was averaged already, and that is no reason not to average
        assert net.a.grad.tolist() == [2.5] * 3

    run(2, work)


def test_gradients_thrown_away_and_errors_within():
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv)
        for throw_away in (optimizer.zero_grad, net.zero_grad):
            with optimizer.no_sync():
                net(inputs(rank)).backward()
                throw_away()
                net(inputs(rank)).backward()
            throw_away()
            with contextlib.suppress(KeyError), optimizer.no_sync():
                net(inputs(rank)).backward()
                raise KeyError
            net(inputs(rank)).backward()
            optimizer.step()
            assert net.a.grad.tolist() == [3.0] * 3
            optimizer.zero_grad()

    run(2, work)


def test_a_parameter_added_or_thawed_within():
    def work(kv, rank):
        net = Net()
        net.b.requires_grad_(False)
        extra = torch.nn.Parameter(torch.ones(3))
        optimizer = wrapped(net, kv)
        with optimizer.no_sync():
            optimizer.add_param_group({"params": [extra]})
            net.b.requires_grad_(True)
            optimizer.zero_grad()
            (net(inputs(rank)) + (extra * inputs(rank)).sum()).backward()
        (net(inputs(rank)) + (extra * inputs(rank)).sum()).backward()
        optimizer.step()
        assert [p.grad.tolist() for p in (net.a, net.b, extra)] == [[3.0] * 3] * 3

    run(2, work)


def test_sparse_gradients():
    def work(kv, rank):
        net = torch.nn.Embedding(4, 2, sparse=True)
        torch.nn.init.zeros_(net.weight)
        optimizer = wrapped(net, kv, op=Sum)
        for _ in range(2):
            optimizer.zero_grad()
            with optimizer.no_sync():
                net(torch.tensor([0, rank])).sum().backward()
            net(torch.tensor([3])).sum().backward()
            optimizer.step()
        assert net.weight[:, 0].tolist() == [-6.0, -2.0, 0.0, -4.0]

    run(2, work)


def test_with_grad_scaler():
    """One rank's overflow within the context makes all ranks skip the step."""

    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv, op=Sum)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            optimizer.zero_grad()
            with optimizer.no_sync():
                factor = float("inf") if (step, rank) == (1, 1) else 1.0
                scaler.scale(net(inputs(rank)) * factor).backward()
            scaler.scale(net(inputs(rank))).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 4.0
        assert net.a.tolist() == [1 - 2 * 6.0] * 3

    run(2, work)


def test_adasum_sends_nothing_during_backward_anyway():
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv, op=Adasum)
        with optimizer.no_sync():
            net(inputs(0)).backward()
        net(inputs(0)).backward()
        optimizer.step()
        assert net.a.tolist() == pytest.approx([1 - 2.0] * 3)  # equal steps do not add up

    run(2, work)


def test_hooks_are_the_same_within_and_without():
    """So that it costs nothing where it is not used."""

    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv)
        hooks = dict(net.a._post_accumulate_grad_hooks)
        with optimizer.no_sync():
            assert dict(net.a._post_accumulate_grad_hooks) == hooks

    run(2, work)
