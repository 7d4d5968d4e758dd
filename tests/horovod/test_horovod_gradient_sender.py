"""``optimizer._allreduce_grad_async``, which code written for Horovod's internals looks for."""

import copy
import gc
import weakref

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from forked import run_torch_ranks as run_ranks  # noqa: E402

import horovod.torch as hvd  # noqa: E402

OPTIONS = {
    "plain": {},
    "sum": {"op": hvd.Sum},
    "fp16": {"compression": hvd.Compression.fp16},
    "predivide": {"gradient_predivide_factor": 2.0},
    "places for names": {"named_parameters": None},
}


def made(model=None, **options):
    model = model or torch.nn.Linear(3, 2)
    named = {"named_parameters": model.named_parameters(), **options}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, hvd.DistributedOptimizer(optimizer, **named)


def send_all(rank, size):
    hvd.init()
    for label, options in OPTIONS.items():
        model, optimizer = made(**options)
        compression = options.get("compression", hvd.Compression.none)
        model.weight.grad = torch.full((2, 3), rank + 1.0)
        # In another order on each rank: it is names that bring them together. One is missing.
        parameters = [model.weight, model.bias][:: 1 if rank % 2 else -1]
        pending = [(p, *optimizer._allreduce_grad_async(p)) for p in parameters]
        for parameter, handle, context in pending:
            result = compression.decompress(hvd.synchronize(handle), context)
            total = size * (size + 1) / 2 if parameter is model.weight else 0.0
            wanted = total if options.get("op") == hvd.Sum else total / size
            assert result.dtype == torch.float32, label
            torch.testing.assert_close(result, torch.full_like(parameter, wanted), msg=label)
    model, optimizer = made()
    model.weight.grad = torch.full((2, 3), rank + 1.0)
    handle, _ = optimizer._allreduce_grad_async(model.weight)
    assert hvd.synchronize(handle).data_ptr() == model.weight.grad.data_ptr()
    check_sparse(rank, size)
    check_errors(model, optimizer)
    return True


def check_sparse(rank, size):
    """Rank 0 touches row 0, rank 1 row 1, and so on."""
    for as_dense in (False, True):
        table = torch.nn.Embedding(4, 2, sparse=True)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=0.1), sparse_as_dense=as_dense
        )
        table(torch.tensor([rank])).sum().backward()
        if as_dense:
            handle, _ = optimizer._allreduce_grad_async(table.weight)
            wanted = (torch.arange(4) < size).float()[:, None].expand(4, 2) / size
            torch.testing.assert_close(hvd.synchronize(handle), wanted)
        else:
            with pytest.raises(ValueError, match=r"gradient of '0\.0' is sparse"):
                optimizer._allreduce_grad_async(table.weight)


def check_errors(model, optimizer):
    with pytest.raises(ValueError, match=r"a tensor of shape \(5,\) is no parameter"):
        optimizer._allreduce_grad_async(torch.zeros(5))
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(5))]})
    later = optimizer.param_groups[1]["params"][0]
    assert hvd.synchronize(optimizer._allreduce_grad_async(later)[0]).tolist() == [0.0] * 5
    assert not hasattr(copy.deepcopy(optimizer), "_allreduce_grad_async")
    adasum = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Adasum)
    assert not hasattr(adasum, "_allreduce_grad_async")  # which would have to step there


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_sent_one_by_one(size):
    assert all(run_ranks(size, send_all, size))


def send_encoded(rank):
    """Between hosts: but for biases, and what is excluded, as ``allreduce`` encodes it."""
    hvd.init()
    for exclude in ((), ("weight",)):
        compression = hvd.Compression.int4(exclude=exclude)
        model, optimizer = made(torch.nn.Linear(64, 96), compression=compression)
        drawn = torch.Generator().manual_seed(rank)
        own = [torch.randn(p.shape, generator=drawn) for p in (model.weight, model.bias)]
        for parameter, gradient in zip((model.weight, model.bias), own, strict=True):
            parameter.grad = gradient.clone()
            handle, context = optimizer._allreduce_grad_async(parameter)
            found = compression.decompress(hvd.synchronize(handle), context)
            exact = hvd.allreduce(gradient, name="exact")
            encoded = hvd.allreduce(gradient, name="encoded", compression=hvd.Compression.int4)
            is_encoded = parameter is model.weight and not exclude
            assert torch.equal(found, encoded if is_encoded else exact)
            assert torch.equal(found, exact) == (not is_encoded)
    hvd.shutdown()


def test_gradients_sent_in_four_bits():
    run_ranks(2, send_encoded, hosts=["a", "b"])


def test_an_optimizer_is_freed_without_the_collector():
    hvd.init()
    try:
        _, optimizer = made()
        alive = weakref.ref(optimizer)
        gc.disable()
        try:
            del optimizer
            assert alive() is None
        finally:
            gc.enable()
    finally:
        hvd.shutdown()


def test_passes_can_be_read():
    hvd.init()
    try:
        for options in ({}, {"op": hvd.Adasum}):
            _, optimizer = made(backward_passes_per_step=3, **options)
            assert optimizer.backward_passes_per_step == 3
            optimizer.set_backward_passes_per_step(2)
            assert optimizer.backward_passes_per_step == 2
            with pytest.raises(ValueError, match="backward_passes_per_step is 0"):
                optimizer.set_backward_passes_per_step(0)
    finally:
        hvd.shutdown()
