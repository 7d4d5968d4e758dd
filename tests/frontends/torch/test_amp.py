"""torch.amp: autocast to bfloat16, and to float16 with a GradScaler; and models that are narrow."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from forked import run_torch_ranks as run_ranks  # noqa: E402
from torch import nn  # noqa: E402
from torch_loopback import run  # noqa: E402

import horovod.torch as hvd  # noqa: E402
from kolovod.torch import DistributedOptimizer  # noqa: E402

STEPS = 5
OVERFLOWS = {1: 0, 3: 1}  # in these steps, on these ranks


def new_model():
    draw = torch.Generator().manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) / 4)
    return model


def batch(step, rank):
    draw = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, 6, generator=draw)
    return x, x.sum(1, keepdim=True)


def train(model, optimizer, ranks, dtype, scaler, clips=False):
    """Returns the scales after each step. Several ``ranks``: as one process in their place."""
    scales = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in ranks:
            x, y = batch(step, rank)
            with torch.autocast("cpu", dtype):
                loss = nn.functional.mse_loss(model(x), y)
            if scaler.is_enabled() and OVERFLOWS.get(step) == rank:
                loss = loss * 1e38 * 1e38
            scaler.scale(loss).backward()
        if len(ranks) > 1:
            for parameter in model.parameters():
                parameter.grad /= len(ranks)
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def scaler_for(dtype):
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=dtype == torch.float16)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def of_one_process(size, dtype, clips):
    model = new_model()
    return model, train(model, sgd(model), range(size), dtype, scaler_for(dtype), clips)


def assert_same(model, wanted):
    for mine, theirs in zip(model.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shard_state", [False, True])
def test_autocast(shard_state, dtype, clips, size):
    """Where one rank overflows, all skip the step, and their scales stay equal."""
    wanted, scales = of_one_process(size, dtype, clips)
    if dtype == torch.float16:
        overflows = sum(rank < size for rank in OVERFLOWS.values())
        assert scales[-1] == 2.0 ** (10 - overflows)

    def work(kv, rank):
        model = new_model()
        optimizer = DistributedOptimizer(
            sgd(model), model.named_parameters(), collectives=kv, shard_state=shard_state
        )
        assert train(model, optimizer, [rank], dtype, scaler_for(dtype), clips) == scales
        assert_same(model, wanted)

    run(size, work)


def test_float16_under_autocast_overflows_where_the_loss_is_large():
    """By its own range, not made infinite by hand; on rank 1 only."""

    def work(kv, rank):
        model = new_model()
        before = [parameter.clone() for parameter in model.parameters()]
        optimizer = DistributedOptimizer(sgd(model), model.named_parameters(), collectives=kv)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        x, y = batch(0, rank)
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        scaler.scale((out.float() - y * (1e6 if rank else 1)).square().mean()).backward()
        assert not all(bool(p.grad.isfinite().all()) for p in model.parameters())
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**7
        assert all(map(torch.equal, before, model.parameters()))

    run(2, work)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_narrow_parameters(dtype, size):
    """Gradients of 16 bits are added up in float32 and rounded once."""

    def gradients(rank):
        model = new_model().to(dtype)
        x, y = (part.to(dtype) for part in batch(0, rank))
        nn.functional.mse_loss(model(x), y).backward()
        return [parameter.grad for parameter in model.parameters()]

    all_ranks = zip(*map(gradients, range(size)), strict=True)
    wanted = [sum(grad.float() for grad in grads).div(size).to(dtype) for grads in all_ranks]

    def work(kv, rank):
        model = new_model().to(dtype)
        optimizer = DistributedOptimizer(sgd(model), model.named_parameters(), collectives=kv)
        for _ in range(2):
            for parameter, grad in zip(model.parameters(), gradients(rank), strict=True):
                parameter.grad = None
                (parameter * grad).sum().backward()
            optimizer.synchronize()
            for parameter, grad in zip(model.parameters(), wanted, strict=True):
                assert parameter.grad.dtype == dtype
                torch.testing.assert_close(parameter.grad, grad)
            optimizer.zero_grad()

    run(size, work)


def through_horovod(rank):
    torch.set_num_threads(1)
    hvd.init()
    found = []
    for dtype in (torch.bfloat16, torch.float16):
        for clips in (False, True):
            wanted, scales = of_one_process(2, dtype, clips)
            model = new_model()
            optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
            found.append(train(model, optimizer, [rank], dtype, scaler_for(dtype), clips))
            assert found[-1] == scales
            assert_same(model, wanted)
    return found


def test_through_horovod_in_real_processes():
    first, second = run_ranks(2, through_horovod)
    assert first == second
