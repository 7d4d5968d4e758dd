"""PyTorch's clipping functions measure and scale what all ranks have averaged, not a rank's own."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from optimizing import Net, inputs, wrapped  # noqa: E402
from torch.nn.utils import clip_grad_norm_ as imported_by_name  # noqa: E402
from torch_loopback import run  # noqa: E402

from kolovod.core.ops import Adasum, Average, Sum  # noqa: E402
from kolovod.testing.loopback import loopback  # noqa: E402
from kolovod.torch import Compression, TorchCollectives, TorchFrontend, clipping  # noqa: E402

WAYS = {
    "norm": lambda net: torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0),
    "norm of a list": lambda net: torch.nn.utils.clip_grad_norm_([*net.parameters()], 1.0),
    "norm by another name": lambda net: torch.nn.utils.clip_grad.clip_grad_norm_(
        max_norm=1.0, parameters=net.parameters(), norm_type=float("inf")
    ),
    "norm imported by name": lambda net: imported_by_name(net.parameters(), 1.0),
    "norm of one": lambda net: torch.nn.utils.clip_grad_norm_(net.a, 1.0),
    "value": lambda net: torch.nn.utils.clip_grad_value_(net.parameters(), 0.4),
}


def of_one_process(clip, size, steps, op=Average, use_b=None, passes=1):
    """Parameters and what ``clip`` returned, when one process sees the inputs of all ranks."""
    net, returned = Net(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(passes):
            for rank in range(size):
                loss = net(inputs(rank), use_b=use_b is None or use_b(rank))
                (loss if op == Sum else loss / size).backward()
        returned.append(clip(net))
        optimizer.step()
    return net, returned


def assert_same(net, returned, wanted):
    torch.testing.assert_close(net.a, wanted[0].a)
    torch.testing.assert_close(net.b, wanted[0].b)
    torch.testing.assert_close(returned, wanted[1])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("way", WAYS)
def test_clipping_between_backward_and_step(way, size):
    clip = WAYS[way]
    wanted = of_one_process(clip, size, 3)

    def work(kv, rank):
        net, returned = Net(), []
        optimizer = wrapped(net, kv)
        for _ in range(3):
            optimizer.zero_grad()
            net(inputs(rank)).backward()
            returned.append(clip(net))
            optimizer.step()
        assert_same(net, returned, wanted)

    run(size, work)


@pytest.mark.parametrize("compression", [Compression.none, Compression.bf16])
def test_sums_and_parameters_that_a_rank_has_not_used(compression):
    def used(rank):
        return rank == 1

    wanted = of_one_process(WAYS["norm"], 2, 3, Sum, used)

    def work(kv, rank):
        net, returned = Net(), []
        optimizer = wrapped(net, kv, op=Sum, compression=compression)
        for _ in range(3):
            optimizer.zero_grad()
            net(inputs(rank), use_b=used(rank)).backward()
            returned.append(WAYS["norm"](net))
            optimizer.step()
        assert_same(net, returned, wanted)

    run(2, work)


def test_a_rank_without_a_batch_clips_what_the_others_have():
    """And may ask the others for something before it steps."""

    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv)
        for _ in range(2):
            optimizer.zero_grad()
            if rank == 0:
                net(inputs(1)).backward()
            norm = WAYS["norm"](net)
            assert kv.allreduce(norm).item() == pytest.approx(6**0.5)
            optimizer.step()
        assert net.a.tolist() == pytest.approx([1 - 2 / 6**0.5] * 3, abs=1e-5)

    run(2, work)


def test_clipping_on_one_rank_only_hangs_nobody():
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv)
        for _ in range(3):
            optimizer.zero_grad()
            net(inputs(rank)).backward()
            if rank == 0:
                WAYS["value"](net)
            optimizer.step()
        return net.a.tolist()

    first, second = run(2, work)
    assert first == pytest.approx([1 - 3 * 0.4] * 3)
    assert second == pytest.approx([1 - 3 * 1.5] * 3)


@pytest.mark.parametrize("every_pass", [False, True])
def test_several_passes(every_pass):
    """Clipped once, or (as loops do that clip before they ask whether to step) after each pass."""

    def loop(net, optimizer, ranks):
        for step in range(3):
            optimizer.zero_grad()
            passes = 1 if step == 2 else 2  # as at the end of an epoch
            for i in range(passes):
                for rank in ranks:
                    (net(inputs(rank + i)) / len(ranks)).backward()
                if every_pass or i == passes - 1:
                    torch.nn.utils.clip_grad_norm_(net.parameters(), 2.0)
            optimizer.step()

    plain = Net()
    loop(plain, torch.optim.SGD(plain.parameters(), lr=1.0), range(3))

    def work(kv, rank):
        net = Net()
        loop(net, wrapped(net, kv, backward_passes_per_step=2), [rank])
        torch.testing.assert_close(net.a, plain.a)

    run(3, work)


def test_sums_over_several_passes_are_summed_once():
    """A part that was summed already would be counted several times, so it is clipped as it is."""

    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv, op=Sum, backward_passes_per_step=2)
        for _ in range(2):
            net(inputs(rank)).backward()
            torch.nn.utils.clip_grad_value_(net.parameters(), 100.0)
        optimizer.step()
        assert net.a.grad.tolist() == [6.0] * 3

    run(2, work)


def test_within_skip_synchronize_gradients_are_the_ranks_own():
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv, backward_passes_per_step=2)  # so that nothing is sent
        net(inputs(rank)).backward()
        with optimizer.skip_synchronize():
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1e9)
            optimizer.step()
        assert norm.item() == pytest.approx(6**0.5 * (rank + 1))
        assert net.a.tolist() == [-rank] * 3

    run(2, work)


def test_synchronize_before_or_after_repeats_nothing():
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv, op=Sum)
        for before in (True, False):
            optimizer.zero_grad()
            net(inputs(rank)).backward()
            if before:
                optimizer.synchronize()
            torch.nn.utils.clip_grad_value_(net.parameters(), 2.0)
            if not before:
                optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
            assert net.a.grad.tolist() == [2.0] * 3

    run(2, work)


@pytest.mark.parametrize("op", [Average, Sum], ids=["average", "sum"])
@pytest.mark.parametrize("ranks", [(0,), (0, 1)], ids=["rank 0", "all ranks"])
def test_after_a_step_gradients_are_only_looked_at(ranks, op):
    """A norm that is logged after the step, maybe on one rank only, concerns nobody else."""

    def norm(net):
        return torch.nn.utils.clip_grad_norm_(net.parameters(), float("inf"))

    def work(kv, rank):
        net, norms = Net(), []
        optimizer = wrapped(net, kv, op=op)
        for _ in range(3):
            optimizer.zero_grad()
            net(inputs(rank)).backward()
            optimizer.step()
            if rank in ranks:
                norms += [norm(net), norm(net)]
        return net, norms

    plain, returned = of_one_process(norm, 2, 3, op)
    wanted = [value for value in returned for _ in range(2)]
    for rank, (net, norms) in enumerate(run(2, work)):
        assert_same(net, norms, (plain, wanted if rank in ranks else []))


def test_within_a_closure():
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv, op=Sum)

        def closure():
            optimizer.zero_grad()
            loss = net(inputs(rank))
            loss.backward()
            torch.nn.utils.clip_grad_value_(net.parameters(), 2.5)
            return loss

        optimizer.step(closure)
        assert net.a.tolist() == [1 - 2.5] * 3

    run(2, work)


def test_only_the_optimizers_of_the_clipped_parameters_are_waited_for():
    def work(kv, rank):
        nets = [Net() for _ in range(3)]
        optimizers = [wrapped(net, kv, op=Sum) for net in nets]
        sum(net(inputs(rank)) for net in nets).backward()
        assert all(optimizer._kolovod_reducer.settled for optimizer in optimizers)
        both = [*nets[2].parameters(), *nets[0].parameters()]
        torch.nn.utils.clip_grad_value_(both, 100.0)
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.step()
            assert net.a.grad.tolist() == [3.0] * 3

    run(2, work)


def test_within_a_process_set_and_with_adasum():
    with loopback(3, TorchFrontend()) as world:
        group = world.process_set([0, 2])
        group.included = lambda: True

        def work(kv):
            rank = kv.world().rank
            if rank == 1:
                return
            net, other = Net(), Net()
            verbs = TorchCollectives(kv.frontend, kv.world)
            optimizer = wrapped(net, verbs, process_set=group)
            net(inputs(rank)).backward()
            torch.nn.utils.clip_grad_value_(net.parameters(), 1.75)
            optimizer.step()
            assert net.a.tolist() == [1 - 1.75] * 3  # of an average of 2
            optimizer = wrapped(other, verbs, process_set=group, op=Adasum)
            other(inputs(rank)).backward()
            torch.nn.utils.clip_grad_value_(other.parameters(), 0.5)  # each its own
            optimizer.step()
            assert other.a.tolist() == pytest.approx([0.5] * 3)

        world.run(work)


def test_parameters_of_no_distributed_optimizer():
    def work(kv, rank):
        optimizer = wrapped(Net(), kv)
        net = Net()
        net(inputs(rank)).backward()
        WAYS["value"](net)
        assert net.a.grad.tolist() == pytest.approx([0.4] * 3)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`parameters` is an empty generator")  # newer ones
            torch.nn.utils.clip_grad_norm_((p for p in ()), 1.0)
        operations = kv.world().engine.stats()["operations"]
        del optimizer
        return operations

    assert run(2, work) == [0, 0]


def test_where_pytorch_has_no_wrapper_of_its_own_the_names_are_replaced(monkeypatch):
    """As in its first releases of 2.x."""
    clipping.install()  # else the first world would install it here, and it would go with the test
    called = []

    def clip_grad_norm_(parameters, max_norm):
        called.append(max_norm)

    for module in (torch.nn.utils, torch.nn.utils.clip_grad):
        monkeypatch.setattr(module, "clip_grad_norm_", clip_grad_norm_)
    clipping._install("clip_grad_norm_")

    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv)
        net(inputs(rank)).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 2.0)
        assert net.a.grad.tolist() == [1.5] * 3
        optimizer.step()

    run(2, work)
    assert called == [2.0, 2.0]


FRESH = """
import torch
from torch.nn.utils import clip_grad
import kolovod.torch as kv

def contents():
    return [cell.cell_contents for cell in clip_grad.clip_grad_norm_.__closure__ or ()]

before = contents()
kv.init()
net = torch.nn.Linear(2, 2)
optimizer = kv.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0))
assert contents() == before
"""


@pytest.mark.slow
def test_pytorch_is_left_alone_on_import_and_by_a_world_of_one():
    ended = subprocess.run(
        [sys.executable, "-c", FRESH], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
