"""Optimizers' steps as timelines, kolovod top and metrics see them: all of PyTorch's."""

from __future__ import annotations

import time
import weakref

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402

import kolovod.torch  # noqa: E402, F401 - registers itself
from kolovod.core import spans  # noqa: E402


@pytest.fixture(name="seen")
def made_seen():
    reader = spans.log.open()
    yield lambda: [span for span in reader.take() if span[0] == spans.OPTIMIZER_STEP]
    reader.close()


def made(kind=torch.optim.SGD, **options):
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    return kind([weight], lr=0.1, **options)


class Wrapper(torch.optim.Optimizer):
    """As Lookahead and others are: it steps by another one."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure=None):
        self.inner.step(closure)
        self.inner.step()


class Failing(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("this step fails")


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_each_step_is_one(seen, kind):
    optimizer = made(kind)
    for _ in range(3):
        optimizer.step()
    assert len(seen()) == 3


def test_a_step_within_a_step_is_none(seen):
    optimizer = Wrapper(made())
    optimizer.step()
    optimizer.step()
    assert len(seen()) == 2


def test_a_step_that_has_failed_hides_no_other(seen):
    failing, other = made(Failing), made()
    with pytest.raises(RuntimeError, match="this step fails"):
        failing.step()
    other.step()
    other.step()
    assert len(seen()) == 2


def test_a_script_may_drop_its_tensors_after_a_step_that_has_failed(seen):
    failing, other, tensor = made(Failing), made(), torch.ones(3)
    reference = weakref.ref(tensor)
    with pytest.raises(RuntimeError, match="this step fails"):
        failing.step()
    other.step()  # which looks whether it is within the one that has failed
    del tensor
    assert reference() is None


@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_is_none_of_the_step(seen, by_name):
    optimizer, ends = made(), []

    def closure():
        time.sleep(0.01)
        ends.append(time.monotonic_ns())
        return torch.tensor(4.0)

    loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    ((_, _, start, end, _),) = seen()
    assert loss == 4.0
    assert ends[0] <= start < end


def test_a_closure_that_is_called_several_times(seen):
    optimizer, ends = made(torch.optim.LBFGS, max_iter=3), []
    weight = optimizer.param_groups[0]["params"][0]

    def closure():
        optimizer.zero_grad()
        loss = (weight * weight).sum()
        loss.backward()
        ends.append(time.monotonic_ns())
        return loss

    optimizer.step(closure)
    ((_, _, start, _, _),) = seen()
    assert len(ends) > 1
    assert ends[-1] <= start


def test_a_trial_is_no_step(seen):
    optimizer = made()
    optimizer._kolovod_is_trial = True
    optimizer.step()
    assert seen() == []


def test_nobody_reads():
    optimizer = made()
    optimizer.step()
    reader = spans.log.open()
    optimizer.step()
    reader.close()
    optimizer.step()
    assert [span[0] for span in reader.take()] == [spans.OPTIMIZER_STEP]
