"""Jobs of torch.distributed as timelines see them: they have steps, and wait for gradients."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.distributed as dist  # noqa: E402
from forked import run_torch_ranks as run_ranks  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import kolovod.torch  # noqa: E402, F401 - registers the backend
from kolovod.core import spans  # noqa: E402

STEPS = 4


def observed(rank, way):
    """The spans of a rank that trains: name, start and end of each."""
    torch.manual_seed(0)
    dist.init_process_group("kolovod")
    model = nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 300), nn.Linear(300, 2))
    model = DistributedDataParallel(model) if way == "ddp" else fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    reader = spans.log.open()
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(16, 8, generator=draw)).square().mean().backward()
        optimizer.step()
    found = [(name, start, end) for name, _, start, end, _ in reader.take()]
    reader.close()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize(("way", "waits"), [("ddp", 0), ("fsdp", 1)])
def test_steps_and_waits_for_gradients(way, waits):
    """DDP makes its buckets anew after the first step; FSDP gathers parameters for each forward."""
    for found in run_ranks(2, observed, way):
        steps = [end for name, _, end in found if name == spans.OPTIMIZER_STEP]
        assert len(steps) == STEPS
        later = [span for span in found if span[1] > steps[1]]
        gradients = [(a, b) for name, a, b in later if name == spans.WAIT_FOR_GRADIENTS]
        assert len(gradients) >= STEPS - 2
        beside = [
            (start, end)
            for name, start, end in later
            if name == spans.WAIT and not any(a <= start and end <= b for a, b in gradients)
        ]
        assert len(beside) == waits * (STEPS - 2)


def trained_badly(rank, way, sees_to_it):
    """Rank 1 has a gradient that is not finite in its third pass, of four."""
    torch.manual_seed(0)
    dist.init_process_group("kolovod")
    model = nn.Sequential(nn.Linear(8, 300), nn.Linear(300, 2))
    model = DistributedDataParallel(model) if way == "ddp" else fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8)).square().mean()
        (loss * float("nan") if rank == 1 and step == 2 else loss).backward()
        if sees_to_it and step == 2:
            continue  # as a GradScaler does
        optimizer.step()
    dist.destroy_process_group()
    return True


@pytest.mark.parametrize(
    ("way", "sees_to_it"), [("ddp", False), ("fsdp", False), ("ddp", True)], ids=str
)
def test_whose_gradients_are_not_finite_is_said(way, sees_to_it, capfd):
    assert all(run_ranks(2, trained_badly, way, sees_to_it))
    said = capfd.readouterr().err
    expected = "gradients of rank 1 are not finite (inf or nan) in backward pass 3, before they are"
    assert said.count("gradients of rank 1 are not finite") == (not sees_to_it), said
    assert (expected in said) is not sees_to_it, said
    assert "gradients of rank 0" not in said
