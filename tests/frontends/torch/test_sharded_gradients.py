"""Gradients in parts: what a script does with them before the step is done, or is an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizing import wrapped
from sharding import assert_equal, values
from torch_loopback import run

from kolovod.errors import InvalidArgumentError

STEPS = 4

Change = Callable[[torch.nn.Module, torch.optim.Optimizer, int], bool | None]
"""Between backward and step; returns False where the step is left out."""


def made(verbs: Any, *, shards: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 1100), torch.nn.Linear(1100, 3), torch.nn.Conv2d(3, 3, 1)
    ).to(memory_format=torch.channels_last)
    drawn = torch.Generator().manual_seed(3)  # ranks are threads: the global one is all ranks'
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=drawn) * 0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    return model, wrapped(model, verbs, optimizer=optimizer, shard_state=shards)


def backward(model: Any, rank: int, step: int) -> None:
    dtype = model[0].weight.dtype
    rows = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)
    model[2](model[1](model[0](rows)).view(6, 3, 1, 1)).square().mean().backward()


def taken_away(model: Any, optimizer: Any, step: int) -> None:
    if step == 2:
        model[0].weight.grad = None


def replaced(model: Any, optimizer: Any, step: int) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1 * step) + parameter.detach()


def replaced_and_added_to(model: Any, optimizer: Any, step: int) -> None:
    model[0].weight.grad = torch.full_like(model[0].weight, 0.5)
    backward(model, 0, step)


def zeroed_by_the_module(model: Any, optimizer: Any, step: int) -> bool:
    if step == 1:
        model.zero_grad()
    return step != 1


def made_zeros_by_the_module(model: Any, optimizer: Any, step: int) -> None:
    if step == 2:
        model.zero_grad(set_to_none=False)


def zeroed_with_a_second_backward(model: Any, optimizer: Any, step: int) -> None:
    if step % 2:
        model.zero_grad()
    backward(model, 1, step)


def looked_at(model: Any, optimizer: Any, step: int) -> None:
    for parameter in model.parameters():
        grad = parameter.grad
        assert grad is not None
        assert grad.shape == parameter.shape
        assert (grad.dtype, grad.device) == (parameter.dtype, parameter.device)
        assert "in parts" in repr(grad) or type(grad) is torch.Tensor
        copy.deepcopy(parameter)
        copy.deepcopy(grad)


@pytest.mark.parametrize(
    "change",
    [
        taken_away,
        replaced,
        replaced_and_added_to,
        zeroed_by_the_module,
        made_zeros_by_the_module,
        zeroed_with_a_second_backward,
        looked_at,
    ],
)
def test_what_a_script_does_with_gradients(change: Change) -> None:
    def work(verbs: Any, rank: int) -> Any:
        found = []
        for shards in (False, True):
            model, optimizer = made(verbs, shards=shards)
            for step in range(STEPS):
                if change is not zeroed_by_the_module:  # else the step that is left out is added to
                    optimizer.zero_grad()
                elif step != 2:
                    model.zero_grad()
                backward(model, rank, step)
                if change(model, optimizer, step) is not False:
                    optimizer.step()
            found.append(values(model))
            assert all(p.grad is None for p in model.parameters()) or not shards
        for one, other in zip(found[1], found[0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
        return found[1]

    first, second = run(2, work)
    assert_equal(first, second)


@pytest.mark.parametrize(
    "use",
    [
        lambda p: torch.nn.utils.get_total_norm([each.grad for each in p]),
        lambda p: torch.nn.utils.clip_grads_with_norm_(p, 1.0, torch.tensor(2.0)),
        lambda p: p[0].grad.mul_(0.5),
        lambda p: 2 * p[0].grad,
        lambda p: p[0].grad.norm(),
        lambda p: p[0].grad.data,
        lambda p: torch.cat([each.grad.view(-1) for each in p]),
        lambda p: p[0].grad.numpy(),
        lambda p: p[0].grad.tolist(),
        lambda p: p[0].grad.copy_(torch.zeros(())),
        lambda p: torch._foreach_mul_([each.grad for each in p], 2.0),
    ],
)
def test_who_computes_with_a_gradient_in_parts_is_told(use: Callable[[Any], Any]) -> None:
    def work(verbs: Any, rank: int) -> None:
        model, optimizer = made(verbs, shards=True)
        backward(model, rank, 0)
        with pytest.raises(
            InvalidArgumentError, match=r"'0.weight' .* in parts .* clip_grad_norm_"
        ):
            use(list(model.parameters()))
        optimizer.step()

    run(2, work)


def test_a_model_that_gets_another_dtype() -> None:
    def work(verbs: Any, rank: int) -> None:
        model, optimizer = made(verbs, shards=True)
        backward(model, rank, 0)
        optimizer.step()
        model.double()
        with pytest.raises(
            InvalidArgumentError, match=r"is torch.float64 on cpu now, and was torch.fl"
        ):
            backward(model, rank, 1)
        del optimizer

    run(2, work)
