"""DistributedOptimizer and what scripts do to gradients between backward and step."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from optimizing import Net, inputs, wrapped  # noqa: E402
from torch_loopback import run  # noqa: E402

from kolovod.core.ops import Sum  # noqa: E402
from kolovod.errors import InvalidArgumentError  # noqa: E402
from kolovod.torch import Compression, DistributedOptimizer  # noqa: E402


def one_step(net, optimizer, rank):
    optimizer.zero_grad()
    net(inputs(rank)).backward()
    optimizer.step()


def put_right(recover, optimizer, text):
    """By ``zero_grad``; or by ``step``, which once more says what is wrong."""
    if recover == optimizer.zero_grad:
        recover()
    else:
        with pytest.raises(InvalidArgumentError, match=text):
            recover()


# torch.amp.GradScaler -----------------------------------------------------------------------------


def amp_loop(how, optimizer, net, scaler, loss):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if how == "recipe":
        optimizer.synchronize()
    if how in ("recipe", "unscale"):
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 3.0)
    if how == "recipe":
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
    else:
        scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("how", ["plain", "unscale", "recipe"])
def test_grad_scaler(how, fused):
    """The same as with one process and the mean loss, also when one rank's loss overflows."""

    def work(kv, rank):
        distributed, plain = Net(), Net()
        optimizer = torch.optim.SGD(distributed.parameters(), lr=0.1, fused=fused)
        optimizer = DistributedOptimizer(
            optimizer, distributed.named_parameters(), collectives=kv, op=Sum
        )
        reference = torch.optim.SGD(plain.parameters(), lr=0.1, fused=fused)
        scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
        for step in range(4):
            losses = [plain(inputs(r), use_b=r == 0) for r in range(2)]
            own = distributed(inputs(rank), use_b=rank == 0)
            if step == 2:  # only there
                losses[1] = losses[1] * float("inf")
                own = own * float("inf") if rank == 1 else own
            reference.synchronize = lambda: None
            reference.skip_synchronize = optimizer.skip_synchronize
            amp_loop(how, optimizer, distributed, scalers[0], own)
            amp_loop(how, reference, plain, scalers[1], sum(losses))
            assert distributed.a.tolist() == plain.a.tolist()
            assert distributed.b.tolist() == plain.b.tolist()
            assert scalers[0].get_scale() == scalers[1].get_scale()
        assert scalers[0].get_scale() == 4.0

    run(2, work)


def test_reading_parameter_groups_averages_nothing():
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv)
        one_step(net, optimizer, rank)
        operations = kv.world().engine.stats()["operations"]
        assert optimizer.param_groups[0]["lr"] == 1.0
        optimizer.param_groups = [*optimizer.param_groups]
        assert kv.world().engine.stats()["operations"] == operations

    run(2, work)


@pytest.mark.parametrize("compression", [Compression.none, Compression.fp16])
def test_a_gradient_that_becomes_sparse_is_refused_by_name_and_can_be_zeroed(compression):
    def work(kv, rank):
        net = torch.nn.Embedding(5, 2, sparse=True)
        optimizer = wrapped(net, kv, compression=compression)
        net.weight.sum().backward()  # dense, and the ranks have agreed upon that
        optimizer.step()
        optimizer.zero_grad()
        text = r"gradient of 'weight'.*sparse=True"
        for recover in (optimizer.zero_grad, optimizer.step):
            with pytest.raises(InvalidArgumentError, match=text):
                net(torch.tensor([1])).sum().backward()
            put_right(recover, optimizer, text)
            optimizer.zero_grad()
            (net.weight.sum() * (rank + 1)).backward()
            optimizer.step()
            assert net.weight.grad.tolist() == [[1.5] * 2] * 5
            optimizer.zero_grad()

    run(2, work)
