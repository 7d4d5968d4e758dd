"""Ranks whose models, options or steps differ hear it at the first step in which they do."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch_loopback  # noqa: E402
from fake_device import FakeFrontend  # noqa: E402
from torch_loopback import run  # noqa: E402

from kolovod.core.ops import Sum  # noqa: E402
from kolovod.errors import MismatchError  # noqa: E402
from kolovod.gradients import sentinel  # noqa: E402
from kolovod.torch import DistributedOptimizer  # noqa: E402

STEPS = 24
_one_at_a_time = threading.Lock()


@pytest.fixture(autouse=True)
def _warns():
    yield
    sentinel.use(None)


def model_of(seed=0, large=False):
    width = 1500 if large else 4  # above 4 MiB, so that a part is looked at each time
    with _one_at_a_time:  # ranks are threads, which have one generator together
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, width // 2))


def train(kv, rank, change=None, seed=0, steps=STEPS, large=False, **options):
    """Train, with ``change(step, rank, model, optimizer)`` after each step."""
    model = model_of(seed, large)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    optimizer = DistributedOptimizer(optimizer, model.named_parameters(), collectives=kv, **options)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 3), rank + 1.0)).square().mean().backward()
        optimizer.step()
        if change is not None:
            change(step, rank, model, optimizer)


def said(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if "kolovod: " in line]


@pytest.mark.parametrize(
    "options", [{}, {"op": Sum}, {"shard_state": True}, {"backward_passes_per_step": 2}], ids=str
)
def test_ranks_that_are_alike_hear_nothing(options, capsys):
    def schedule(step, rank, model, optimizer):
        optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)

    run(3, lambda kv, rank: train(kv, rank, schedule, **options))
    assert said(capsys) == []


def test_a_model_that_was_not_broadcast(capsys):
    run(2, lambda kv, rank: train(kv, rank, seed=rank))
    (line,) = said(capsys)
    assert "in step 1 of SGD: parameter '0.bias' and 3 other(s)" in line
    assert "broadcast_parameters" in line


def decay(step, rank, model, optimizer):
    if step == 5 and rank == 1:
        optimizer.param_groups[0]["lr"] = 1e-7


def test_a_rate_that_one_rank_lowers(capsys):
    run(3, lambda kv, rank: train(kv, rank, decay))
    (line,) = said(capsys)  # that their parameters differ then is no news
    assert "in step 7 of SGD: option 'lr' of the parameters from '0.bias' on" in line
    assert "ranks 0, 2 have 0.01, rank 1 has 1e-07" in line


def test_a_rate_that_differs_where_no_backward_runs(capsys):
    def work(kv, rank):
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([parameter], lr=0.1 * (rank + 1))
        optimizer = DistributedOptimizer(optimizer, [("p", parameter)], collectives=kv)
        parameter.grad = torch.ones(3)
        optimizer.step()

    run(2, work)
    (line,) = said(capsys)
    assert "option 'lr' of the parameters from 'p' on: rank 0 has 0.1, rank 1 has 0.2" in line


def test_a_rate_that_is_set_between_backward_and_step_by_a_rank_without_a_batch(capsys):
    def work(kv, rank):
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        optimizer = DistributedOptimizer(optimizer, [("p", parameter)], collectives=kv)
        for step in range(4):
            optimizer.zero_grad()
            if rank == 0 or step < 2:
                parameter.sum().backward()
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            optimizer.step()

    run(2, work)
    assert said(capsys) == []


@pytest.mark.parametrize("large", [False, True])
def test_a_parameter_that_one_rank_changes(large, capsys):
    """A large model is looked at in parts: the last one's turn comes later."""

    def change(step, rank, model, optimizer):
        if step == 3 and rank == 2:
            with torch.no_grad():
                model[1].bias[-1] += 1

    run(3, lambda kv, rank: train(kv, rank, change, large=large, steps=24))
    (line,) = said(capsys)
    assert "parameter '1.bias': rank 2 has other values than ranks 0, 1" in line
    assert ("in step 11 of" in line) or large


def test_a_step_that_one_rank_takes_beside(capsys):
    def change(step, rank, model, optimizer):
        if step == 3 and rank == 1:
            with optimizer.skip_synchronize():
                optimizer.step()

    run(2, lambda kv, rank: train(kv, rank, change))
    (line,) = said(capsys)
    assert "rank 0 has taken 4 steps, rank 1 has taken 5 steps" in line


def test_as_an_error():
    sentinel.use("error")

    def work(kv, rank):
        with pytest.raises(MismatchError, match=r"option 'lr'.*KOLOVOD_SENTINEL=error"):
            train(kv, rank, decay)

    run(2, work)


def test_off(capsys):
    sentinel.use("off")
    run(2, lambda kv, rank: train(kv, rank, decay, seed=rank))
    assert said(capsys) == []


def test_a_gradient_that_is_not_finite_names_rank_step_and_parameter(capsys):
    def work(kv, rank):
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = DistributedOptimizer(optimizer, model.named_parameters(), collectives=kv)
        for step in range(8):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().mean().backward()
            if step == 2 and rank == 1:  # of its own; too late for the average
                model[0].bias.grad.fill_(float("nan"))
                optimizer.zero_grad()
            elif step == 2:
                optimizer.zero_grad()
            else:
                optimizer.step()
            if step == 4 and rank == 1:
                hook = model[1].bias.register_hook(lambda grad: grad * float("inf"))
            if step == 5 and rank == 1:
                hook.remove()

    run(3, work)
    lines = said(capsys)
    assert len(lines) == 1
    assert "gradients of rank 1 are not finite (inf or nan) in step 5" in lines[0]
    assert "of '1.bias'" in lines[0]


@pytest.mark.parametrize("skips", [False, True])
def test_what_has_come_from_a_gpu_is_told_of_in_the_next_step(capsys, monkeypatch, skips):
    monkeypatch.setattr(torch_loopback, "TorchFrontend", FakeFrontend)

    def work(kv, rank):
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = DistributedOptimizer(optimizer, model.named_parameters(), collectives=kv)
        for step in range(6):
            optimizer.zero_grad()
            hook = None
            if step == 3 and rank == 1:
                hook = model[1].bias.register_hook(lambda grad: grad * float("inf"))
            model(torch.ones(2, 3)).square().mean().backward()
            if hook is not None:
                hook.remove()
            if step == 3 and skips:
                optimizer.zero_grad()
            else:
                optimizer.step()

    run(3, work)
    lines = said(capsys)
    if skips:
        assert lines == []
        return
    (line,) = lines
    assert "gradients of rank 1 are not finite (inf or nan) in step 4" in line
    assert "of '1.bias'" in line


def test_a_step_that_a_grad_scaler_skips_is_no_news(capsys):
    def work(kv, rank):
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        optimizer = DistributedOptimizer(optimizer, [("p", parameter)], collectives=kv)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(4):
            optimizer.zero_grad()
            loss = parameter.sum() * (float("inf") if step == 1 and rank == 0 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert torch.isfinite(parameter).all()

    run(2, work)
    assert said(capsys) == []


def test_the_hash_where_a_gpu_computes_it_sees_every_element(monkeypatch):
    from kolovod.torch import sentinel as of_torch

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    tensors = [torch.arange(6.0).view(2, 3), torch.ones(4, dtype=torch.bfloat16)]
    before = of_torch._hash_on_device(tensors)
    assert of_torch._hash_on_device([t.clone() for t in tensors]) == before
    for tensor in tensors:
        changed = [t.clone() for t in tensors]
        changed[0 if tensor is tensors[0] else 1].view(-1)[-1] += 1
        assert of_torch._hash_on_device(changed) != before
