"""Steps, backward passes and whole training steps within ``torch.compile``."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from forked import run_torch_ranks  # noqa: E402

import kolovod.torch as kv  # noqa: E402

STEPS = 3


def trained(shards: bool, compiled: str) -> list[Any]:
    """The parameters after some steps; ``compiled``: what is, "nothing" for one."""
    torch._dynamo.reset()
    drawn = torch.Generator().manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 40), torch.nn.ReLU(), torch.nn.Linear(40, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=drawn) * 0.3)
    optimizer = kv.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.02), model.named_parameters(), shard_state=shards
    )

    def step(rows: Any) -> None:
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        update()

    update = optimizer.step
    if compiled == "the update":
        update = torch.compile(optimizer.step, backend="aot_eager")
    elif compiled == "all":
        step = torch.compile(step, backend="aot_eager")
    with torch._dynamo.config.patch(compiled_autograd=compiled == "all"):
        for number in range(STEPS):
            seed = torch.Generator().manual_seed(10 * number + kv.rank())
            step(torch.randn(6, 8, generator=seed))
    return [parameter.detach().tolist() for parameter in model.parameters()]


def on_rank(rank: int, shards: bool) -> list[list[Any]]:
    torch.set_num_threads(1)
    kv.init()
    return [trained(shards, compiled) for compiled in ("nothing", "the update", "all")]


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="compilers of before crash on an optimizer's properties (seen with 2.6 to 2.8)",
)
@pytest.mark.timeout(200)
@pytest.mark.parametrize("shards", [False, True])
def test_compiled_steps(shards: bool) -> None:
    first, second = run_torch_ranks(2, on_rank, shards, timeout_s=150)
    assert first == second
    plain, *others = first
    for other in others:
        for one, two in zip(other, plain, strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(two), rtol=1e-5, atol=1e-6)
