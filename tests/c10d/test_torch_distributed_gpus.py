"""The torch.distributed backend with tensors on GPUs, which are staged; the GPU is a fake."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.distributed as dist  # noqa: E402
from fake_device import FakeFrontend  # noqa: E402
from forked import run_torch_ranks as run_ranks  # noqa: E402
from test_torch_distributed import (  # noqa: E402
    against_gloo,
    beyond_gloo,
    in_place_and_grouped,
    same_memory_without_waiting,
    sparse_beyond_gloo,
    works_and_futures,
)
from test_torch_distributed_training import ddp_both_ways, fsdp_both_ways  # noqa: E402
from waiting import until  # noqa: E402

from kolovod.c10d import staging  # noqa: E402


def on_gpus(rank, function, *arguments):
    """All tensors count as on a GPU for our group."""
    staging.frontend = FakeFrontend()
    return function(rank, *arguments)


def test_every_verb_equals_gloo():
    assert min(run_ranks(3, on_gpus, against_gloo)) > 300


def in_one_world_of_gpus(rank):
    dist.init_process_group("kolovod")
    sparse_beyond_gloo(rank)
    beyond_gloo(rank)
    in_place_and_grouped(rank)
    works_and_futures(rank)
    same_memory_without_waiting(rank)
    unwaited(rank)
    dist.destroy_process_group()
    return True


def unwaited(rank):
    """What nobody waits for is there soon all the same, as with NCCL."""
    tensor = torch.full((4,), rank + 1.0)
    dist.all_reduce(tensor, async_op=True)
    until(lambda: tensor.tolist() == [3.0] * 4, "the result")


def test_everything_else():
    assert all(run_ranks(2, on_gpus, in_one_world_of_gpus))


@pytest.mark.slow
def test_ddp_equals_gloo():
    assert all(run_ranks(2, on_gpus, ddp_both_ways, timeout_s=100))


def test_fsdp2_equals_gloo():
    assert all(run_ranks(2, on_gpus, fsdp_both_ways, (2,), timeout_s=100))
