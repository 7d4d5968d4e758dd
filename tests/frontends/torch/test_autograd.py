"""The gradients of the verbs: every rank's loss counts, weighted unlike the others'."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch_loopback import run  # noqa: E402

from kolovod.core.ops import Average, Max, Sum  # noqa: E402
from kolovod.errors import InvalidArgumentError  # noqa: E402


@pytest.mark.parametrize("name", [None, "named"])
@pytest.mark.parametrize(("op", "factor"), [(Sum, 3.0), (Average, 1.0)])
def test_gradient_of_allreduce(op, factor, name):
    """Rank r's loss is (r + 1) * sum(op(x)); the derivative of all losses added up is 1 + 2 + 3."""

    def work(kv, rank):
        x = torch.full((2, 2), float(rank), requires_grad=True)
        y = kv.allreduce(x, name, op, 0.5, 4.0)
        assert y.tolist() == [[factor * 2.0] * 2] * 2
        ((rank + 1) * y.sum()).backward()
        assert x.grad.tolist() == [[2.0 * factor * 2] * 2] * 2

    run(3, work)


def test_gradient_of_grouped_allreduce():
    def work(kv, rank):
        x = torch.ones(2, requires_grad=True)
        z = torch.ones(3)
        a, b = kv.grouped_allreduce([x, z], op=Sum)
        assert b.tolist() == [2, 2, 2]
        (a.sum() * (rank + 1)).backward()
        assert x.grad.tolist() == [3, 3]

    run(2, work)


def test_gradient_of_broadcast_goes_to_the_root():
    def work(kv, rank):
        x = torch.full((2,), float(rank), requires_grad=True)
        y = kv.broadcast(x, 1)
        assert y.tolist() == [1, 1]
        (y.sum() * (rank + 1)).backward()
        return x.grad.tolist()

    assert run(3, work) == [[0, 0], [6, 6], [0, 0]]


def test_gradient_of_allgather_is_the_own_part():
    def work(kv, rank):
        x = torch.full((rank + 1, 2), 1.0, requires_grad=True)
        y = kv.allgather(x, "rows")
        weights = torch.arange(12.0).reshape(6, 2)
        (y * weights * (rank + 1)).sum().backward()
        start = rank * (rank + 1) // 2
        assert torch.equal(x.grad, 6 * weights[start : start + rank + 1])

    run(3, work)


def test_gradient_of_grouped_allgather():
    def work(kv, rank):
        x = torch.ones(rank + 1, requires_grad=True)
        z = torch.ones(2, 2, requires_grad=True)
        a, b = kv.grouped_allgather([x, z], "pair")
        ((a * torch.arange(6.0)).sum() * (rank + 1) + b.sum()).backward()
        start = rank * (rank + 1) // 2
        assert torch.equal(x.grad, 6 * torch.arange(6.0)[start : start + rank + 1])
        assert z.grad.tolist() == [[3, 3]] * 2

    run(3, work)


def test_gradient_of_alltoall_goes_back_where_the_rows_came_from():
    """Rank r sends d + 1 rows to rank d, and keeps two; rank d's loss weighs them by d + 1."""

    def work(kv, rank):
        x = torch.ones(8, 2, requires_grad=True)
        y, received = kv.alltoall(x, [1, 2, 3], "rows")
        assert received == [rank + 1] * 3
        ((rank + 1) * y).sum().backward()
        weights = torch.tensor([1.0, 2, 2, 3, 3, 3, 0, 0])
        assert torch.equal(x.grad, weights[:, None].expand(8, 2))

    run(3, work)


@pytest.mark.parametrize(("op", "factor"), [(Sum, 1.0), (Average, 1 / 3)])
def test_gradient_of_reducescatter(op, factor):
    def work(kv, rank):
        x = torch.ones(4, 2, requires_grad=True)  # rank 0 gets two rows, the others one
        y = kv.reducescatter(x, "rows", op, 0.5, 4.0)
        assert torch.equal(y, torch.full((2 - (rank > 0), 2), 6 * factor))
        ((rank + 1) * y).sum().backward()
        wanted = 2 * factor * torch.tensor([1.0, 1, 2, 3])
        torch.testing.assert_close(x.grad, wanted[:, None].expand(4, 2))

    run(3, work)


def test_max_has_no_gradient():
    def work(kv, rank):
        scattered = kv.reducescatter(torch.ones(2, requires_grad=True), op=Max)
        with pytest.raises(InvalidArgumentError, match="reducescatter with op Max has no gradient"):
            scattered.sum().backward()
        y = kv.allreduce(torch.ones(2, requires_grad=True), op=Max)
        with pytest.raises(InvalidArgumentError, match="Max has no gradient"):
            y.sum().backward()

    run(2, work)
