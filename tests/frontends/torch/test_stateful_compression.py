"""A compressor with a state, whose payload is gathered: what the shape of compressors allows."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from compressors import SignsWithFeedback, expected  # noqa: E402
from optimizing import wrapped  # noqa: E402
from torch_loopback import run  # noqa: E402

STEPS = 4
SHAPES = {"large": (5, 7), "other": (9,), "small": (2,)}


def gradients(step, rank):
    draw = np.random.default_rng(10 * step + rank)
    return {name: draw.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


class Model(torch.nn.Module):
    """Parameters whose gradients are what is asked for."""

    def __init__(self):
        super().__init__()
        for name, shape in SHAPES.items():
            setattr(self, name, torch.nn.Parameter(torch.zeros(shape)))

    def backward(self, wanted):
        parameters = dict(self.named_parameters())
        terms = [(parameters[n] * torch.from_numpy(grad)).sum() for n, grad in wanted.items()]
        torch.stack(terms).sum().backward()


def averages(size, steps, without=()):
    """By name and step; ranks have zeros for what is named in ``without``."""
    found = {}
    for name in SHAPES:
        blank = name in without
        found[name] = expected(
            [
                [gradients(step, r)[name] * (not blank or r > 0) for r in range(size)]
                for step in steps
            ]
        )
    return found


def make(array):
    return torch.from_numpy(np.ascontiguousarray(array))


@pytest.mark.parametrize("size", [2, 3])
def test_signs_with_feedback(size):
    wanted = averages(size, range(STEPS))

    def work(kv, rank):
        model, compressor = Model(), SignsWithFeedback(make)
        optimizer = wrapped(model, kv, lr=0.0, compression=compressor)
        for step in range(STEPS):
            optimizer.zero_grad()
            model.backward(gradients(step, rank))
            if step:  # what is reduced and what is gathered, both from the hooks
                assert len(optimizer._kolovod_reducer.in_flight) == 2
            optimizer.step()
            for name, parameter in model.named_parameters():
                np.testing.assert_allclose(
                    parameter.grad.numpy(), wanted[name][step], rtol=1e-5, atol=1e-6
                )
        return sorted(compressor.state_dict())

    assert run(size, work) == [["large", "other"]] * size


def test_a_gradient_that_a_rank_lacks_is_compressed_as_zeros():
    wanted = averages(2, range(STEPS), without=["other"])

    def work(kv, rank):
        model = Model()
        optimizer = wrapped(model, kv, lr=0.0, compression=SignsWithFeedback(make))
        for step in range(STEPS):
            optimizer.zero_grad()
            mine = gradients(step, rank)
            model.backward({n: g for n, g in mine.items() if rank > 0 or n != "other"})
            optimizer.step()
            np.testing.assert_allclose(
                model.other.grad.numpy(), wanted["other"][step], rtol=1e-5, atol=1e-6
            )

    run(2, work)


def test_training_goes_on_from_a_state():
    wanted = averages(2, range(STEPS))["large"][-1]

    def work(kv, rank):
        state = {}
        for steps in (range(STEPS - 1), [STEPS - 1]):
            model, compressor = Model(), SignsWithFeedback(make)
            compressor.load_state_dict(state)
            optimizer = wrapped(model, kv, lr=0.0, compression=compressor)
            for step in steps:
                optimizer.zero_grad()
                model.backward(gradients(step, rank))
                optimizer.step()
            state = compressor.state_dict()
        np.testing.assert_allclose(model.large.grad.numpy(), wanted, rtol=1e-5, atol=1e-6)

    run(2, work)


def test_sums_and_sparse_gradients_beside_it():
    def work(kv, rank):
        layer = torch.nn.Embedding(4, 4, sparse=True)
        model = torch.nn.ModuleDict({"table": layer, "linear": torch.nn.Linear(4, 4, bias=False)})
        optimizer = wrapped(model, kv, lr=0.0, compression=SignsWithFeedback(make), op=1)
        for _ in range(2):
            optimizer.zero_grad()
            (model["table"](torch.tensor([rank])).sum() + model["linear"].weight.sum()).backward()
            optimizer.step()
            assert model["table"].weight.grad.to_dense()[:, 0].tolist() == [1, 1, 0, 0]
            np.testing.assert_allclose(model["linear"].weight.grad.numpy(), 2.0)

    run(2, work)
