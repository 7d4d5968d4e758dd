"""DistributedOptimizer on ranks that are threads, each with its own model."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import warnings

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from optimizing import Net, inputs, run, wrapped  # noqa: E402

from kolovod.errors import (  # noqa: E402
    InvalidArgumentError,
    MismatchError,
    RankLostError,
)
from kolovod.ops import Max, Sum  # noqa: E402
from kolovod.testing.loopback import loopback  # noqa: E402
from kolovod.torch import (  # noqa: E402
    Compression,
    DistributedOptimizer,
    TorchCollectives,
    TorchFrontend,
)


def test_step_uses_the_average_gradient():
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv)
        for step in range(1, 4):
            optimizer.zero_grad()
            net(inputs(rank)).backward()
            optimizer.step()
            assert net.a.tolist() == [1 - 2.0 * step] * 3
            assert net.a.grad.tolist() == [2.0] * 3

    run(3, work)


def test_op_sum():
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv, op=Sum)
        net(inputs(rank)).backward()
        optimizer.step()
        assert net.a.grad.tolist() == [6.0] * 3

    run(3, work)


@pytest.mark.parametrize("compression", [Compression.fp16, Compression.bf16])
def test_compression_rounds_what_travels(compression):
    narrow = {Compression.fp16: torch.float16, Compression.bf16: torch.bfloat16}[compression]

    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv, compression=compression)
        x = torch.tensor([1 / 3, 1000.1, 2.0**-10]) * (rank + 1)
        net(x).backward()
        optimizer.step()
        sent = [torch.tensor([1 / 3, 1000.1, 2.0**-10]) * (r + 1) for r in range(2)]
        total = sum(values.to(narrow).float() for values in sent)
        assert net.a.grad.dtype is torch.float32
        assert torch.equal(net.a.grad, (total / 2).to(narrow).float())

    run(2, work)


@pytest.mark.parametrize("compression", [Compression.none, Compression.fp16])
def test_backward_passes_per_step_sums_locally_and_sends_once(compression):
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv, compression=compression, backward_passes_per_step=3)
        for step in range(1, 3):
            optimizer.zero_grad()
            for _ in range(3):
                net(inputs(rank)).backward()
            optimizer.step()
            assert net.a.grad.tolist() == [3 * 1.5] * 3
            assert net.a.tolist() == [1 - 4.5 * step] * 3
        optimizer.set_backward_passes_per_step(1)
        optimizer.zero_grad()
        net(inputs(rank)).backward()
        optimizer.step()
        assert net.a.grad.tolist() == [1.5] * 3

    run(2, work)


def test_step_before_all_passes_are_done_sends_what_there_is():
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv, backward_passes_per_step=3)
        net(inputs(rank)).backward()
        optimizer.step()
        assert net.a.grad.tolist() == [1.5] * 3

    run(2, work)


def test_one_backward_too_many_is_an_error_that_says_what_to_do():
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv)
        net(inputs(rank)).backward()
        with pytest.raises(InvalidArgumentError, match="backward_passes_per_step=2"):
            net(inputs(rank)).backward()
        optimizer.zero_grad()
        net(inputs(rank)).backward()
        optimizer.step()
        assert net.a.grad.tolist() == [1.5] * 3

    run(2, work)


def test_a_parameter_unused_on_some_ranks_counts_as_zeros_there():
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv)
        for _ in range(3):
            optimizer.zero_grad()
            net(inputs(rank), use_b=rank == 1).backward()
            optimizer.step()
            assert net.a.grad.tolist() == [2.0] * 3
            assert net.b.grad.tolist() == pytest.approx([2 / 3] * 3)

    run(3, work)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_parameter_unused_on_all_ranks_keeps_no_gradient_and_stays(momentum):
    """As with one process: zeros would move it by weight decay and momentum."""

    def work(kv, rank):
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=momentum, weight_decay=0.5)
        optimizer = DistributedOptimizer(optimizer, net.named_parameters(), collectives=kv)
        net(inputs(rank), use_b=False).backward()
        optimizer.step()
        assert net.b.grad is None
        assert net.b.tolist() == [1, 1, 1]

    run(2, work)


def test_a_rank_without_a_batch_joins_with_zeros():
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv)
        if rank == 0:
            net(inputs(1)).backward()
        optimizer.step()
        assert net.a.tolist() == [0, 0, 0]

    run(2, work)


def test_frozen_parameters_are_left_alone_also_when_frozen_later():
    def work(kv, rank):
        net = Net()
        net.b.requires_grad_(False)
        optimizer = wrapped(net, kv)
        net(inputs(rank)).backward()
        optimizer.step()
        assert net.b.grad is None
        net.a.requires_grad_(False)
        optimizer.zero_grad()
        optimizer.step()
        assert net.a.grad is None

    run(2, work)


def test_synchronize_then_clip_then_step_reduces_once():
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv, op=Sum)
        net(inputs(rank)).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_value_(net.parameters(), 0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
        assert net.a.tolist() == [0.5] * 3

        optimizer.zero_grad()
        net(inputs(rank)).backward()
        optimizer.synchronize()
        net.a.grad.mul_(2)
        with optimizer.skip_synchronize():
            optimizer.step()
        assert net.a.tolist() == [0.5 - 6] * 3

    run(2, work)


def test_skip_synchronize_steps_with_the_local_gradients():
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv, backward_passes_per_step=2)
        net(inputs(rank)).backward()
        with optimizer.skip_synchronize():
            optimizer.step()
        return net.a.tolist()

    assert run(2, work) == [[0.0] * 3, [-1.0] * 3]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_between_backward_and_step_drops_the_gradients(set_to_none):
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv)
        net(inputs(rank)).backward()
        optimizer.zero_grad(set_to_none=set_to_none)
        assert (net.a.grad is None) == set_to_none
        net(inputs(rank)).backward()
        optimizer.step()
        assert net.a.tolist() == [1 - 1.5] * 3

    run(2, work)


def test_gradients_in_another_memory_order():
    def work(kv, rank):
        weight = torch.nn.Parameter(
            torch.ones(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)
        )
        optimizer = DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), collectives=kv)
        scale = torch.arange(24.0).reshape(2, 3, 2, 2)
        for _ in range(2):
            optimizer.zero_grad()
            (weight * scale * (rank + 1)).sum().backward()
            assert not weight.grad.is_contiguous()
            optimizer.step()
            assert torch.equal(weight.grad, scale * 1.5)

    run(2, work)


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


def test_dropping_the_optimizer_frees_the_model_of_its_hooks():
    def work(kv, rank):
        net = Net()
        for _ in range(2):
            optimizer = wrapped(net, kv)
            optimizer.zero_grad()
            net(inputs(rank)).backward()
            optimizer.step()
            del optimizer
            gc.collect()
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
        sum(p.sum() for _, p in parameters).backward()
        with pytest.raises(MismatchError, match=r"rank 0 has 'only0'.*rank 1 has 'only1'"):
            optimizer.step()

    run(2, work)


def test_a_lost_rank_is_named_and_nothing_hangs():
    with loopback(2, TorchFrontend()) as world:

        def work(kv):
            rank = kv.world().rank
            net = Net()
            optimizer = wrapped(net, TorchCollectives(kv.frontend, kv.world))
            net(inputs(rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
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
    with loopback(2, TorchFrontend()) as old, loopback(1, TorchFrontend()) as new:
        worlds = [old.ranks[0], old.ranks[1]]

        def work(kv):
            rank = kv.world().rank
            net = Net()
            optimizer = wrapped(net, TorchCollectives(kv.frontend, lambda: worlds[rank]))
            if rank == 1:
                net(inputs(1)).backward()
                optimizer.step()
                old.kill(1)
                return
            net(inputs(1)).backward()
            optimizer.step()
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
    "op": (lambda kv, o: DistributedOptimizer(o, op=Max, collectives=kv), "Average or Sum"),
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
