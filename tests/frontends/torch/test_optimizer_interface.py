"""DistributedOptimizer as an optimizer of PyTorch: closures, schedulers, copies, arguments."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import threading
import warnings
import weakref
from functools import partial
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from optimizing import Net, inputs, wrapped  # noqa: E402
from torch_loopback import run  # noqa: E402
from waiting import DEADLINE_S, until  # noqa: E402

from kolovod.core.ops import Adasum, Max  # noqa: E402
from kolovod.errors import (  # noqa: E402
    InvalidArgumentError,
    MismatchError,
    RankLostError,
)
from kolovod.testing.loopback import loopback  # noqa: E402
from kolovod.torch import (  # noqa: E402
    DistributedOptimizer,
    TorchCollectives,
    TorchFrontend,
    wrapping,
)


def test_closure():
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv)

        def closure():
            optimizer.zero_grad()
            loss = net(inputs(rank))
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        assert loss.item() == 9.0  # 6 on rank 0, 12 on rank 1
        assert net.a.tolist() == [-0.5] * 3

    run(2, work)


def test_lbfgs_takes_the_same_path_on_all_ranks():
    def work(kv, rank):
        net = Net()
        target = torch.tensor([1.0, 2.0, 3.0]) * (rank + 1)
        optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, line_search_fn="strong_wolfe")
        optimizer = DistributedOptimizer(optimizer, net.named_parameters(), collectives=kv)

        def closure():
            optimizer.zero_grad()
            loss = (net.a - target).square().sum() + net.b.square().sum()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return net.a.tolist()

    first, second = run(2, work)
    assert first == second
    assert first == pytest.approx([1.5, 3.0, 4.5], abs=1e-4)


def test_scheduler_made_before_or_after_wrapping():
    def work(kv, rank):
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=8.0)
        before = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        optimizer = DistributedOptimizer(optimizer, net.named_parameters(), collectives=kv)
        after = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()", ...
            for step in range(3):
                optimizer.zero_grad()
                net(inputs(rank)).backward()
                optimizer.step()
                before.step()
                after.step()
                assert optimizer.param_groups[0]["lr"] == 8.0 / 4 ** (step + 1)
        assert net.a.tolist() == [1 - 1.5 * (8 + 2 + 0.5)] * 3

    run(2, work)


def test_it_stays_an_optimizer_of_its_class():
    def work(kv, rank):
        net = Net()
        plain = torch.optim.AdamW(net.parameters(), lr=0.5)
        optimizer = DistributedOptimizer(plain, net.named_parameters(), collectives=kv)
        assert isinstance(optimizer, torch.optim.AdamW)
        assert type(optimizer).__name__ == "AdamW"
        assert "lr: 0.5" in repr(optimizer)
        assert optimizer is plain
        calls = []
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
        optimizer.register_step_post_hook(lambda *_: calls.append("post"))
        net(inputs(rank)).backward()
        optimizer.step()
        assert calls == ["pre", "post"]
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
        net(inputs(rank)).backward()
        optimizer.step()
        assert calls == ["pre", "post"] * 2
        return net.a.tolist()

    first, second = run(2, work)
    assert first == second


def test_copies_and_pickles_are_plain():
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv, lr=0.25)
        for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert type(other) is torch.optim.SGD
            assert other.param_groups[0]["lr"] == 0.25
            other.param_groups[0]["params"][0].grad = torch.ones(3)
            other.step()
            assert other.param_groups[0]["params"][0].tolist() == [0.75] * 3

    run(2, work)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
@pytest.mark.parametrize("options", [{}, {"op": Adasum}], ids=str)
def test_a_copy_says_once_that_it_is_one(copied, options, monkeypatch):
    """But not in a world of one, nor where it is made distributed again."""
    world = SimpleNamespace(size=1)
    monkeypatch.setattr(wrapping, "current", lambda: world)

    def work(kv, rank):
        alone, again = (copied(wrapped(Net(), kv, **options)) for _ in range(2))
        return alone, DistributedOptimizer(again, collectives=kv)

    alone, again = run(2, work)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alone.step()
        world.size = 2
        with pytest.warns(UserWarning, match="this SGD is a copy of a DistributedOptimizer"):
            alone.step()
        alone.step()
        with again.skip_synchronize():
            again.step()


def test_the_class_of_a_distributed_optimizer_makes_one_that_says_it_is_none(monkeypatch):
    """Libraries make another optimizer of the class of the one that they were given."""
    monkeypatch.setattr(wrapping, "current", lambda: SimpleNamespace(size=2))

    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv)
        return type(optimizer)(net.parameters(), lr=0.5), type(optimizer)

    other, kind = run(2, work)[0]
    assert type(other) is torch.optim.SGD
    assert other.param_groups[0]["lr"] == 0.5
    with pytest.warns(UserWarning, match="this SGD is made of the class of a Distr") as caught:
        other.step()
    assert caught[0].filename == __file__

    class Derived(kind):
        pass

    assert isinstance(Derived.__new__(Derived), Derived)


class Wrapper(torch.optim.Optimizer):
    """Has the fields of another, as wrappers of libraries do, and keeps nothing else of it."""

    def __init__(self, optimizer):
        self.__class__ = type("Wrapper", (Wrapper, type(optimizer)), {})
        self.__dict__ = dict(optimizer.__dict__)


def test_who_takes_over_the_fields_of_an_optimizer_is_distributed():
    def work(kv, rank):
        net = Net()
        optimizer = Wrapper(wrapped(net, kv))
        gc.collect()
        net(inputs(rank)).backward()
        optimizer.step()
        return net.a.tolist()

    first, *others = run(2, work)
    assert others == [first]


def test_a_new_parameter_group_is_averaged_too():
    def work(kv, rank):
        net = Net()
        optimizer = torch.optim.SGD([net.a], lr=1.0)
        optimizer = DistributedOptimizer(optimizer, net.named_parameters(), collectives=kv)
        net(inputs(rank), use_b=False).backward()
        optimizer.step()
        optimizer.add_param_group({"params": [net.b], "lr": 0.5})
        optimizer.zero_grad()
        net(inputs(rank)).backward()
        optimizer.step()
        assert net.b.tolist() == [1 - 0.75] * 3

    run(2, work)


def one_step(net, kv, rank):
    """With an optimizer of which nothing is left but a weak reference.

    Its name is in no frame that goes on: PyTorch looks at callers' names, and what it looks at
    stays in the frame, also when the name is deleted.
    """
    optimizer = wrapped(net, kv)
    optimizer.zero_grad()
    net(inputs(rank)).backward()
    optimizer.step()
    return weakref.ref(optimizer)


def is_freed(reference):
    """Collects garbage first, but nothing is collected while another rank's thread does so."""
    gc.collect()
    return reference() is None


def test_dropping_the_optimizer_frees_the_model_of_its_hooks():
    def work(kv, rank):
        net = Net()
        for _ in range(2):
            until(partial(is_freed, one_step(net, kv, rank)), "the optimizer is freed")
        assert net.a.tolist() == [1 - 3.0] * 3
        net.zero_grad()
        net(inputs(rank)).backward()
        assert net.a.grad.tolist() == inputs(rank).tolist()

    run(2, work)


def test_ranks_with_different_parameters_are_told_at_the_first_step():
    def work(kv, rank):
        parameters = [("same", torch.nn.Parameter(torch.ones(2)))]
        parameters.append((f"only{rank}", torch.nn.Parameter(torch.ones(2))))
        optimizer = torch.optim.SGD([p for _, p in parameters], lr=1.0)
        optimizer = DistributedOptimizer(optimizer, parameters, collectives=kv)
        with pytest.raises(MismatchError, match=r"rank 0 has 'only0'.*rank 1 has 'only1'"):
            sum(p.sum() for _, p in parameters).backward()

    run(2, work)


def test_a_lost_rank_is_named_and_nothing_hangs():
    stepped = threading.Barrier(2, timeout=DEADLINE_S)  # both are through before one is lost
    with loopback(2, TorchFrontend()) as world:

        def work(kv):
            rank = kv.world().rank
            net = Net()
            optimizer = wrapped(net, TorchCollectives(kv.frontend, kv.world))
            net(inputs(rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            stepped.wait()
            if rank == 1:
                world.kill(1)
                return

            def next_step():
                net(inputs(rank)).backward()
                optimizer.step()

            with pytest.raises(RankLostError) as caught:
                next_step()
            assert caught.value.rank == 1

        world.run(work)


def test_survivors_go_on_in_a_new_world():
    """What was on its way in the old world is dropped, and the same optimizer steps in the new."""
    stepped = threading.Barrier(2, timeout=DEADLINE_S)
    with loopback(2, TorchFrontend()) as old, loopback(1, TorchFrontend()) as new:
        worlds = [old.ranks[0], old.ranks[1]]

        def work(kv):
            rank = kv.world().rank
            net = Net()
            optimizer = wrapped(net, TorchCollectives(kv.frontend, lambda: worlds[rank]))
            net(inputs(1)).backward()
            optimizer.step()
            stepped.wait()
            if rank == 1:
                old.kill(1)
                return
            optimizer.zero_grad()
            with contextlib.suppress(RankLostError):
                net(inputs(0)).backward()
            with pytest.raises(RankLostError):
                optimizer.synchronize()
            worlds[0] = new.ranks[0]
            optimizer.zero_grad()
            net(inputs(0)).backward()
            optimizer.step()
            assert net.a.tolist() == [1 - 2.0 - 1.0] * 3

        old.run(work)


def test_a_world_of_one_adds_nothing_to_backward():
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv)
        assert not net.a._post_accumulate_grad_hooks
        for _ in range(2):  # any number of passes
            net(inputs(rank)).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
        net(inputs(rank), use_b=False).backward()
        optimizer.step()
        assert net.a.tolist() == [1 - 3.0] * 3
        return kv.world().engine.stats()["operations"]

    assert run(1, work) == [0]


def parameter():
    return torch.nn.Parameter(torch.ones(2))


BAD = {
    "optimizer": (lambda kv, o: DistributedOptimizer(3, collectives=kv), "optimizer is a int"),
    "op": (lambda kv, o: DistributedOptimizer(o, op=Max, collectives=kv), "Average, Sum or Adasum"),
    "passes 0": (
        lambda kv, o: DistributedOptimizer(o, backward_passes_per_step=0, collectives=kv),
        "backward_passes_per_step is 0",
    ),
    "passes float": (
        lambda kv, o: DistributedOptimizer(o, backward_passes_per_step=1.5, collectives=kv),
        "backward_passes_per_step is 1.5",
    ),
    "compression": (
        lambda kv, o: DistributedOptimizer(o, compression="fp16", collectives=kv),
        "compression is 'fp16'.*Compression.none",
    ),
    "names without tuples": (
        lambda kv, o: DistributedOptimizer(o, [parameter()], collectives=kv),
        "a Parameter instead of",
    ),
    "names twice": (
        lambda kv, o: DistributedOptimizer(
            o, [("w", parameter()), ("w", parameter())], collectives=kv
        ),
        "two parameters named 'w'",
    ),
    "names missing": (
        lambda kv, o: DistributedOptimizer(o, [("w", parameter())], collectives=kv),
        r"lacks 1 parameter.*group 0 parameter 0 of shape \(2,\)",
    ),
    "twice": (
        lambda kv, o: DistributedOptimizer(DistributedOptimizer(o, collectives=kv), collectives=kv),
        "already distributed",
    ),
}


@pytest.mark.parametrize("label", BAD)
def test_arguments_that_cannot_work(label):
    call, text = BAD[label]

    def work(kv, rank):
        with pytest.raises(InvalidArgumentError, match=text):
            call(kv, torch.optim.SGD([parameter()], lr=1.0))

    run(1, work)
