"""SyncBatchNorm against one BatchNorm that sees the ranks' batches together."""

import copy

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402
from torch_loopback import run  # noqa: E402

from kolovod.errors import InvalidArgumentError  # noqa: E402
from kolovod.torch import SyncBatchNorm  # noqa: E402


def batches(rows, shape):
    """One per rank, far from zero, so that a variance made of squares would cancel."""
    draw = torch.Generator().manual_seed(4)
    return [100 + torch.randn(count, 3, *shape, generator=draw) for count in rows]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize(
    ("rows", "shape"), [((4, 4), ()), ((1, 5, 3), (6,)), ((2, 0, 3, 1), (2, 2))]
)
def test_equals_one_batch_norm_over_all_samples(rows, shape, momentum, affine):
    kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d)[len(shape)]
    whole = kind(3, momentum=momentum, affine=affine)
    if affine:
        with torch.no_grad():
            whole.weight.copy_(torch.tensor([1.0, -2, 0.5]))
            whole.bias.copy_(torch.tensor([0.0, 1, 2]))
    template = copy.deepcopy(whole)
    data = batches(rows, shape)
    joined = torch.cat(data).requires_grad_()
    for _ in range(2):
        result = whole(joined)
    (result * result.detach().roll(1, 0)).sum().backward()
    weights = result.detach().roll(1, 0)

    def work(kv, rank):
        module = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(template), verbs=kv)
        assert type(module) is SyncBatchNorm
        start = sum(rows[:rank])
        x = data[rank].clone().requires_grad_()
        for _ in range(2):
            mine = module(x)
        (mine * weights[start : start + rows[rank]]).sum().backward()
        close = {"atol": 2e-4, "rtol": 2e-4}
        torch.testing.assert_close(mine, result[start : start + rows[rank]], **close)
        torch.testing.assert_close(x.grad, joined.grad[start : start + rows[rank]], **close)
        torch.testing.assert_close(module.running_mean, whole.running_mean, **close)
        torch.testing.assert_close(module.running_var, whole.running_var, **close)
        assert module.num_batches_tracked == 2
        module.eval()
        torch.testing.assert_close(module(data[0]), copy.deepcopy(whole).eval()(data[0]), **close)
        return (module.weight.grad, module.bias.grad) if affine else None

    grads = run(len(rows), work)
    if affine:
        for i, parameter in enumerate((whole.weight, whole.bias)):
            total = sum(grad[i] for grad in grads)
            torch.testing.assert_close(total, parameter.grad, atol=2e-3, rtol=2e-4)


def test_half_precision_is_computed_in_float32():
    data = batches((3, 5), ())

    def work(kv, rank):
        module = SyncBatchNorm(3, verbs=kv)
        result = module(data[rank].to(torch.bfloat16))
        assert result.dtype == torch.bfloat16
        assert module.running_mean.dtype == torch.float32
        return result.float()

    result = torch.cat(run(2, work))
    wanted = nn.BatchNorm1d(3)(torch.cat(data).to(torch.bfloat16).float())
    torch.testing.assert_close(result, wanted, atol=2e-2, rtol=2e-2)


def test_a_whole_model_is_converted():
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Sequential(nn.BatchNorm2d(2)))
    model.eval()
    converted = SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    assert [type(m) for m in (model[1], model[2][0])] == [SyncBatchNorm] * 2
    assert not model[1].training
    assert set(model.state_dict()) == set(copy.deepcopy(model).state_dict())


def test_wrong_input():
    def work(kv, rank):
        module = SyncBatchNorm(3, verbs=kv)
        for x in (torch.ones(3), torch.ones(2, 4)):
            with pytest.raises(InvalidArgumentError, match="expected \\(samples, 3"):
                module(x)

    run(2, work)
