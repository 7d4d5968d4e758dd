"""Who has no tensor on a GPU never makes a CUDA context, which would take memory on device 0."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from kolovod.testing import run_ranks  # noqa: E402


def works_on_the_cpu(rank):
    import torch

    def refuse():
        raise AssertionError("CUDA was touched before the user has picked a device")

    torch.cuda._lazy_init = refuse
    import horovod.torch as hvd
    import kolovod.torch as kv

    kv.init()
    x = torch.full((3,), float(rank), requires_grad=True)
    kv.allreduce(x).sum().backward()
    spread = torch.ones(4, 4)[:, ::2]
    kv.allreduce_(spread, op=kv.Sum)
    kv.allgather_async(torch.ones(rank)).wait()
    kv.alltoall(torch.ones(2))
    kv.reducescatter(torch.ones(2))
    hvd.alltoall(torch.ones(2), splits=torch.tensor([1, 1]))
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = kv.DistributedOptimizer(optimizer, model.named_parameters())
    kv.broadcast_parameters(model.state_dict())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    kv.broadcast_optimizer_state(optimizer)
    kv.join()
    kv.shutdown()
    return torch.cuda.is_initialized()


@pytest.mark.slow
def test_no_context():
    assert run_ranks(2, works_on_the_cpu) == [False, False]
