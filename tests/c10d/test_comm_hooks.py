"""PyTorch's own communication hooks of DDP over our backend: the sums that they have over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import run_torch_ranks as run_ranks
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import kolovod.torch as kv

STEPS, EXACT = 6, 2
"""PowerSGD sends EXACT steps as they are before it begins."""


def hook_of(kind: str, group: Any) -> tuple[Any, Any]:
    """State and hook."""
    if kind == "fp16":
        return group, default_hooks.fp16_compress_hook
    if kind == "allreduce":
        return group, default_hooks.allreduce_hook
    state = powerSGD_hook.PowerSGDState(
        process_group=group,
        matrix_approximation_rank=2,
        start_powerSGD_iter=EXACT,
        min_compression_rate=1.5,
    )
    if kind == "powersgd":
        return state, powerSGD_hook.powerSGD_hook
    return state, default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)


def gradients(
    kind: str, group: Any, rank: int, bucket_cap_mb: float | None = None
) -> list[torch.Tensor]:
    """Those of each step, of all parameters."""
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.Tanh(), torch.nn.Linear(300, 50))
    model = DDP(net, process_group=group, bucket_cap_mb=bucket_cap_mb)
    model.register_comm_hook(*hook_of(kind, group))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank))
        model(rows).square().mean().backward()
        found += [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
    return found


def compare(rank: int, kind: str, path: str) -> None:
    kv.init()
    store = dist.FileStore(path, kv.size())
    dist.init_process_group("kolovod", store=store, rank=rank, world_size=kv.size())
    gloo = dist.new_group(backend="gloo")
    expected = gradients(kind, gloo, rank)
    found = gradients(kind, dist.group.WORLD, rank)
    assert len(found) == len(expected) == 4 * STEPS
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    # Of several buckets: there gloo hangs, whose threads wait within PowerSGD's callbacks.
    assert len(gradients(kind, dist.group.WORLD, rank, 0.05)) == len(expected)
    exact = gradients("allreduce", dist.group.WORLD, rank)
    is_exact = [torch.equal(ours, plain) for ours, plain in zip(found, exact, strict=True)]
    assert all(is_exact) == (kind == "allreduce")  # the hook has done something
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["allreduce", "fp16", "powersgd", "fp16 and powersgd"])
def test_hooks_give_the_sums_of_gloo(kind: str, tmp_path: Path) -> None:
    run_ranks(2, compare, kind, str(tmp_path / "store"))
