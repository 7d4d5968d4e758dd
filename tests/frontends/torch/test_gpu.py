"""On a real GPU; scripts/gpu_check.py looks at the same where there is no pytest.

Elsewhere fakes stand in: test_staging_verbs.py, test_staging_optimizer.py, test_nccl.py.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from tensors import TENSORS, TorchTensors  # noqa: E402
from torch_loopback import run  # noqa: E402
from worlds import FULL, check, lines  # noqa: E402

from kolovod.core.ops import Adasum, Sum  # noqa: E402
from kolovod.testing import run_ranks  # noqa: E402

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no GPU here (docs/gpu.md)"
)

LONG = 1_000_000_000  # cycles: about half a second


class TensorsOnGpu(TorchTensors):
    """How the conformance table makes and reads tensors on the GPU."""

    def make(self, values, dtype, dense=True):
        tensor = super().make(values, dtype).cuda()
        if dense or tensor.ndim == 0:
            return tensor
        return torch.stack([tensor, tensor], dim=-1)[..., 0]

    def read(self, tensor):
        assert tensor.is_cuda
        return super().read(tensor.cpu())


def check_all(kv):
    TENSORS["gpu"] = TensorsOnGpu()
    for line in lines(FULL["torch"], "torch"):
        check(kv, "gpu", line, FULL["torch"])


# staged -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_conformance_staged(size):
    run(size, lambda kv, rank: check_all(kv), timeout_s=100)


def test_ranks_whose_tensors_are_on_different_devices():
    def work(kv, rank):
        device = "cuda" if rank else "cpu"
        result = kv.allreduce(torch.full((2,), rank, device=device), "x", Sum)
        assert (result.device.type, result.tolist()) == (device, [1, 1])

    run(2, work)


def test_gradients_of_verbs():
    def work(kv, rank):
        x = torch.ones(2, device="cuda", requires_grad=True)
        kv.allreduce(x, op=Sum).sum().backward()
        assert x.grad.is_cuda
        assert x.grad.tolist() == [2, 2]
        x.grad = None
        kv.allgather(x).sum().backward()
        assert x.grad.tolist() == [2, 2]

    run(2, work)


def test_a_verb_comes_after_its_producer_and_before_its_consumer():
    def work(kv, rank):
        producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
        x = torch.zeros(1 << 20, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(producer):
            torch.cuda._sleep(LONG)
            x.fill_(rank + 1.0)
            handle = kv.allreduce_async(x, "fresh", Sum)
            kv.allreduce_(x, "in place", Sum)
        with torch.cuda.stream(consumer):
            assert (handle.wait() == 3).all()  # copied back on this stream
        with torch.cuda.stream(producer):
            assert (x == 3).all()

    run(2, work)


def test_a_verb_waits_for_its_own_stream_only():
    def work(kv, rank):
        busy, side = torch.cuda.Stream(), torch.cuda.Stream()
        x = torch.ones(8, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(busy):
            torch.cuda._sleep(8 * LONG)
            over = torch.cuda.Event()
            over.record()
        with torch.cuda.stream(side):
            assert kv.allreduce(x, op=Sum).tolist() == [2] * 8
        assert not over.query()

    run(2, work)


def test_pinned_memory_is_not_used_again_too_early():
    """Many results are brought back while the stream is busy, from memory that has been let go."""

    def work(kv, rank):
        tensors = [torch.full((1 << 16,), float(i), device="cuda") for i in range(64)]
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        handles = [kv.allreduce_async(tensor, f"t{i}", Sum) for i, tensor in enumerate(tensors)]
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LONG)
            results = [handle.wait() for handle in handles]
        stream.synchronize()
        for i, result in enumerate(results):
            assert (result == 2.0 * i).all()

    run(2, work)


# the optimizer ------------------------------------------------------------------------------------


class Slow(torch.autograd.Function):
    """The identity, whose backward keeps the GPU busy."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        torch.cuda._sleep(LONG)
        return grad


def model_and_data():
    torch.manual_seed(1)
    layers = [torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.BatchNorm1d(512)]
    net = torch.nn.Sequential(*layers, torch.nn.Linear(512, 512), torch.nn.Linear(512, 8)).cuda()
    return net.eval(), torch.randn(32, 64, device="cuda")  # in eval the batch is not normalised


def trained(wrap, rows, steps=4, **options):
    """The model's weights, on the CPU."""
    net, x = model_and_data()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    optimizer = wrap(optimizer, net, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        net(x[rows]).square().mean().backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in net.parameters()]


def assert_close(ours, theirs, tolerance=1e-5):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_two_ranks_train_as_one(compression):
    from kolovod.torch import Compression, DistributedOptimizer

    way = getattr(Compression, compression)

    def work(kv, rank):
        def wrap(optimizer, net):
            names = net.named_parameters()
            return DistributedOptimizer(optimizer, names, way, collectives=kv)

        return trained(wrap, slice(rank, None, 2))

    first, second = run(2, work)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    wanted = trained(lambda optimizer, net: optimizer, slice(None))
    assert_close(first, wanted, 1e-5 if compression == "none" else 1e-2)


def test_an_adasum_optimizer():
    from kolovod.torch import DistributedOptimizer

    def work(kv, rank):
        def wrap(optimizer, net):
            names = net.named_parameters()
            return DistributedOptimizer(optimizer, names, op=Adasum, collectives=kv)

        return trained(wrap, slice(None))  # equal steps are averaged

    wanted = trained(lambda optimizer, net: optimizer, slice(None))
    assert_close(run(2, work)[0], wanted)


def test_backward_does_not_wait_for_the_gpu():
    from kolovod.torch import DistributedOptimizer

    def work(kv, rank):
        net = torch.nn.Linear(512, 512).cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(optimizer, net.named_parameters(), collectives=kv)
        x = torch.ones(4, 512, device="cuda")
        for turn in range(3):
            optimizer.zero_grad()
            loss = Slow.apply(net(x)).sum()
            torch.cuda.synchronize()
            loss.backward()
            over = torch.cuda.Event()
            over.record()
            assert turn == 0 or not over.query()
            optimizer.step()

    run(2, work)


def test_sync_batch_norm_and_sparse_gradients():
    from kolovod.torch import DistributedOptimizer, SyncBatchNorm

    def work(kv, rank):
        net = SyncBatchNorm(4, verbs=kv).cuda()
        rows = torch.arange(24, dtype=torch.float32, device="cuda").view(6, 4)
        got = net(rows[rank::2])
        wanted = torch.nn.BatchNorm1d(4).cuda()(rows)[rank::2]
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
        layer = torch.nn.Embedding(4, 2, sparse=True).cuda()
        with torch.no_grad():
            layer.weight.zero_()
        other = torch.optim.SGD(layer.parameters(), lr=1.0)
        other = DistributedOptimizer(other, layer.named_parameters(), collectives=kv)
        for _ in range(2):
            other.zero_grad()
            layer(torch.tensor([rank, 2], device="cuda")).sum().backward()
            other.step()
        assert layer.weight[:, 0].tolist() == [-1, -1, -2, 0]

    run(2, work)


def test_broadcast_optimizer_state_stays_where_it_is():
    from kolovod.torch.functions import Functions

    def work(kv, rank):
        net = torch.nn.Linear(3, 1).cuda()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1 * (rank + 1))
        if rank == 0:
            net(torch.ones(2, 3, device="cuda")).sum().backward()
            optimizer.step()
        Functions(kv).broadcast_parameters(net.state_dict())
        Functions(kv).broadcast_optimizer_state(optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.1
        assert all(state["exp_avg"].is_cuda for state in optimizer.state.values())
        assert len(optimizer.state) == 2

    run(2, work)


# processes ----------------------------------------------------------------------------------------


def begins(rank):
    """Nothing touches CUDA before the user picks a device; then verbs, Horovod's among them."""
    import horovod.torch as hvd
    import kolovod.torch as kv

    kv.init()
    kv.allreduce(torch.ones(2))
    was = torch.cuda.is_initialized()
    torch.cuda.set_device(0)
    splits = torch.tensor([1, 1], device="cuda")
    result, received = hvd.alltoall(torch.ones(2, device="cuda"), splits=splits)
    assert result.is_cuda
    assert received.is_cuda
    assert not hvd.alltoall(torch.ones(2, device="cuda"), splits=splits.cpu())[1].is_cuda
    assert hvd.cuda_built()
    assert hvd.join(device=0) in (0, 1)
    hvd.shutdown()
    return was


def test_no_context_before_a_device_is_picked():
    assert run_ranks(2, begins) == [False, False]


def over_nccl(rank):
    import kolovod.torch as kv
    from kolovod.gradients.spec import ReduceSpec

    kv.init()
    assert not torch.cuda.is_initialized()
    check_all(kv.collectives)
    x = torch.zeros(1 << 20, device="cuda")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        x.fill_(5.0)
        kv.allreduce_(x, op=Sum)
        assert (x == 5).all()
    ones = torch.ones(3, device="cuda")
    assert kv.allreduce(ones, op=Adasum).tolist() == [1, 1, 1]
    assert kv.join() == 0

    def wrap(optimizer, net):
        return kv.DistributedOptimizer(optimizer, net.named_parameters())

    # In a world of one it sends nothing by itself.
    ReduceSpec.has_others = lambda self, world, *, without_world: True
    ours = trained(wrap, slice(None))
    kv.shutdown()
    kv.init()
    assert kv.allreduce(ones, op=Sum).tolist() == [1, 1, 1]
    kv.shutdown()
    return ours


def test_nccl_with_one_rank():
    (ours,) = run_ranks(1, over_nccl, env={"KOLOVOD_BACKEND": "nccl"}, timeout_s=110)
    assert_close(ours, trained(lambda optimizer, net: optimizer, slice(None)))


def shares(rank):
    import kolovod.torch as kv

    try:
        kv.init()
        kv.allreduce(torch.ones(2, device="cuda:0"))
    except Exception as error:
        return str(error)
    return "shared"


def test_nccl_says_when_two_ranks_share_a_gpu():
    for text in run_ranks(2, shares, env={"KOLOVOD_BACKEND": "nccl"}):
        assert "GPU" in text
        assert "leave KOLOVOD_BACKEND unset" in text
