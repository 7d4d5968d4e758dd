"""DistributedOptimizers that come and go, and parameters that thaw and freeze."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from forked import run_torch_ranks as run_ranks  # noqa: E402
from optimizing import Net, inputs, wrapped  # noqa: E402
from torch_loopback import run  # noqa: E402

import kolovod.torch as kvt  # noqa: E402
from kolovod.errors import InvalidArgumentError, MismatchError  # noqa: E402
from kolovod.testing.loopback import loopback  # noqa: E402
from kolovod.torch import DistributedOptimizer, TorchCollectives, TorchFrontend  # noqa: E402


def dropped_with_gradients_on_their_way(rank):
    torch.set_num_threads(1)
    kvt.init()
    net = torch.nn.Linear(1000, 1000)
    kvt.broadcast_parameters(net.state_dict())

    def new_optimizer():
        return kvt.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters()
        )

    for _ in range(3):
        optimizer = new_optimizer()
        for is_last in (False, True):
            net.zero_grad()
            net(torch.full((2, 1000), float(rank))).sum().backward()
            if not is_last:
                optimizer.step()
        del optimizer
        net.zero_grad()
        gc.collect()
        taken = [torch.full((1000, 1000), 7.0) for _ in range(4)]  # the memory of the gradients
        kvt.barrier()
        assert kvt.allreduce(torch.ones(1000), op=kvt.Sum).tolist() == [2.0] * 1000
        assert all(bool((tensor == 7).all()) for tensor in taken)
    kvt.shutdown()
    return net.bias[0].item(), net.weight[0, :3].tolist()


def test_dropping_an_optimizer_with_gradients_on_their_way():
    """As after an exception between backward and step."""
    first, second = run_ranks(2, dropped_with_gradients_on_their_way)
    assert first == second


@pytest.mark.parametrize("named", [True, False])
def test_several_optimizers_whose_backwards_reach_each_others_parameters(named):
    def work(kv, rank):
        def optimizer_of(net):
            names = net.named_parameters() if named else None
            optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
            return DistributedOptimizer(optimizer, names, collectives=kv)

        g, d = Net(), Net()
        g_optimizer, d_optimizer = optimizer_of(g), optimizer_of(d)
        for step in range(1, 4):
            d_optimizer.zero_grad()  # of the gradients that came with the generator's
            d(inputs(rank)).backward()
            d_optimizer.step()
            assert d.a.grad.tolist() == [1.5] * 3
            g_optimizer.zero_grad()
            (g(inputs(rank)) + d(inputs(rank))).backward()
            g_optimizer.step()
            assert g.a.tolist() == d.a.tolist() == [1 - 1.5 * step] * 3
            d.zero_grad()  # some scripts do that

    run(2, work)


def test_a_new_optimizer_after_one_that_was_given_up_with_gradients_on_their_way():
    def work(kv, rank):
        net = Net()
        given_up = []
        for _ in range(3):
            optimizer = wrapped(net, kv, lr=0.0)
            optimizer.step()
            given_up.append(optimizer)
            net.zero_grad()
            net(inputs(rank)).backward()
            optimizer._kolovod_reducer.close()
        optimizer = wrapped(net, kv)
        net.zero_grad()
        net(inputs(rank)).backward()
        optimizer.step()
        assert net.a.grad.tolist() == [1.5] * 3

    run(2, work)


def test_optimizers_of_an_earlier_world_go_on_beside_new_ones():
    """Ranks may have made different numbers of optimizers before they met."""
    with loopback(3, TorchFrontend()) as old, loopback(2, TorchFrontend()) as new:

        def work(kv):
            rank = kv.world().rank
            world = [kv.world()]
            verbs = TorchCollectives(kv.frontend, lambda: world[0])
            net = Net()
            optimizer = wrapped(net, verbs)
            unused = [wrapped(Net(), verbs) for _ in range(rank)]
            for _ in range(2):
                optimizer.zero_grad()
                net(inputs(rank)).backward()
                optimizer.step()
            net.zero_grad()
            net(inputs(rank)).backward()  # on its way when the world ends
            if rank == 2:
                return
            world[0] = new.ranks[rank]
            if rank == 1:  # whatever was on its way in the old world
                optimizer.zero_grad()
            other_net = Net()
            other = wrapped(other_net, verbs)
            for _ in range(2):
                for each, one in ((other_net, other), (net, optimizer)):
                    one.zero_grad()
                    each(inputs(rank)).backward()
                    one.step()
                    assert each.a.grad.tolist() == [1.5] * 3
            assert len(unused) == rank

        old.run(work)


@pytest.mark.parametrize("when", ["before zero_grad", "after zero_grad"])
def test_a_parameter_thawed_later_is_averaged(when):
    def work(kv, rank):
        net = Net()
        net.b.requires_grad_(False)
        optimizer = wrapped(net, kv)
        for step in range(4):
            if step == 1 and when == "before zero_grad":
                net.b.requires_grad_(True)
            optimizer.zero_grad()
            if step == 1:
                net.b.requires_grad_(True)
            net(inputs(rank)).backward()
            optimizer.step()
            assert net.b.tolist() == [1 - 1.5 * step] * 3
        net.b.requires_grad_(False)
        for _ in range(2):
            optimizer.zero_grad()
            net(inputs(rank)).backward()
            optimizer.step()
            assert net.b.grad is None
            assert net.b.tolist() == [1 - 1.5 * 3] * 3

    run(2, work)


def test_a_model_that_is_all_frozen_at_first():
    def work(kv, rank):
        net = Net().requires_grad_(False)
        optimizer = wrapped(net, kv)
        optimizer.step()
        net.requires_grad_(True)
        net(inputs(rank)).backward()
        optimizer.step()
        assert net.a.tolist() == [-0.5] * 3

    run(2, work)


def test_a_parameter_thawed_on_some_ranks_only():
    def work(kv, rank):
        net = Net()
        net.b.requires_grad_(False)
        optimizer = wrapped(net, kv)
        optimizer.step()
        if rank == 1:
            net.b.requires_grad_(True)
        for _ in range(2):
            optimizer.zero_grad()
            with pytest.raises(MismatchError, match=r"rank 0 has none, rank 1 has 'b' \(3,\)"):
                net(inputs(rank)).backward()
        net.b.requires_grad_(True)  # now on both
        optimizer.zero_grad()
        net(inputs(rank)).backward()
        optimizer.step()
        assert net.b.grad.tolist() == [1.5] * 3

    run(2, work)


def test_a_thawed_parameter_without_a_name():
    def work(kv, rank):
        net = Net()
        net.b.requires_grad_(False)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        optimizer = DistributedOptimizer(optimizer, [("a", net.a)], collectives=kv)
        optimizer.step()
        net.b.requires_grad_(True)
        optimizer.zero_grad()
        with pytest.raises(InvalidArgumentError, match=r"shape \(3,\) wants a gradient now, but"):
            net(inputs(rank)).backward()
        kv.barrier()

    run(2, work)


OPTIONS = [{}, {"op": kvt.Sum}, {"op": kvt.Adasum}, {"shard_state": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("names", [True, False])
def test_a_parameter_that_is_put_in_the_place_of_another(names, options):
    """As a densification does, or a script that makes a layer anew."""

    def work(kv, rank):
        net = Net()
        plain = torch.optim.SGD(net.parameters(), lr=1.0)
        named = net.named_parameters() if names else None
        optimizer = DistributedOptimizer(plain, named, collectives=kv, **options)
        for step in range(6):
            if step in (2, 4):
                net.a = torch.nn.Parameter(torch.ones(3))
                optimizer.param_groups[0]["params"][0] = net.a
            optimizer.zero_grad()
            before = net.a.detach().clone()
            net(torch.full((3,), 2.0 ** (2 * rank + step))).backward()
            optimizer.step()
            change = (before - net.a).tolist()
            assert change == kv.broadcast(torch.tensor(change), 0).tolist()
            mean = 2.0**step * 2.5
            if options.get("op") != kvt.Adasum:
                assert change == [mean * (2 if "op" in options else 1)] * 3

    run(2, work)


def test_one_that_only_one_rank_puts_in_is_an_error():
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv)
        optimizer.step()
        if rank:
            net.a = torch.nn.Parameter(torch.ones(3))
            optimizer.param_groups[0]["params"][0] = net.a
        optimizer.zero_grad()
        with pytest.raises(MismatchError, match=r"rank 0 has none, rank 1 has '0.0' \(3,\)"):
            net(inputs(rank)).backward()

    run(2, work)
