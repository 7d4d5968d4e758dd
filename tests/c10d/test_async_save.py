"""``torch.distributed.checkpoint.async_save`` beside a training, in a group of its own."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from forked import run_torch_ranks as run_ranks  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import kolovod.torch  # noqa: E402, F401 - registers the backend


def save_while_training(rank, folder):
    dist.init_process_group("kolovod")
    of_checkpoints = dist.new_group()
    model = DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for epoch in range(3):
        weights = {name: t.clone() for name, t in model.module.state_dict().items()}
        saving = dcp.async_save(
            {"model": model.module.state_dict()},
            checkpoint_id=f"{folder}/{epoch}",
            process_group=of_checkpoints,
        )
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.ones(4, 16) * (rank + 1)).square().mean().backward()
            optimizer.step()
        saving.result()
        read = {"model": torch.nn.Linear(16, 16).state_dict()}
        dcp.load(read, checkpoint_id=f"{folder}/{epoch}")
        for name, tensor in weights.items():
            assert torch.equal(read["model"][name], tensor)
    dist.destroy_process_group()
    return True


def test_a_checkpoint_is_written_while_the_model_is_trained(tmp_path):
    assert run_ranks(2, save_while_training, str(tmp_path)) == [True, True]
