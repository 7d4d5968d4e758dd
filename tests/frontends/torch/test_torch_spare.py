"""Memory for results in elastic jobs: used again in the next step, never while others hold it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from exact_steps import Survivors  # noqa: E402
from forked import run_torch_ranks as run_ranks  # noqa: E402

import kolovod.torch as kv  # noqa: E402
from kolovod.core.transaction import use_transaction  # noqa: E402
from kolovod.core.world import current  # noqa: E402
from kolovod.elastic.steps import Steps  # noqa: E402
from kolovod.torch.spare import Spare  # noqa: E402


def test_left_over_memory_is_taken_once() -> None:
    spare = Spare()
    gradient = torch.ones(3, 4)
    spare.keep(7, gradient)
    address = gradient.data_ptr()
    del gradient
    assert spare.take(8, torch.ones(3, 4)).data_ptr() != address
    assert spare.take(7, torch.ones(3, 4)).data_ptr() == address
    assert spare.take(7, torch.ones(3, 4)).data_ptr() != address


@pytest.mark.parametrize("like", [torch.ones(4, 3), torch.ones(3, 4, dtype=torch.float64)])
def test_it_fits_or_is_given_back(like: torch.Tensor) -> None:
    spare = Spare()
    spare.keep(0, torch.ones(3, 4))
    taken = spare.take(0, like)
    assert (taken.shape, taken.dtype) == (like.shape, like.dtype)
    assert not spare._by_index


def test_memory_that_others_hold_is_theirs() -> None:
    spare = Spare()
    whole = torch.ones(6)
    spare.keep(0, whole[:3])
    spare.keep(1, whole.data)
    held = torch.ones(3)
    seen = held.view(3, 1)
    spare.keep(2, held.data)
    spare.keep(3, torch.ones(3, 4).t())
    assert not spare._by_index
    assert seen.sum() == 3


def train(rank: int) -> tuple[list[list[float]], int, float]:
    """Gradients of six steps, the number of places that they were at, and one that was held."""
    kv.init()
    use_transaction(Steps(Survivors([0, 1]), current))
    weight = torch.nn.Parameter(torch.zeros(1000))
    optimizer = kv.DistributedOptimizer(torch.optim.SGD([weight], 1.0), [("w", weight)])
    found, places, held = [], set(), None
    for step in range(6):
        optimizer.zero_grad(set_to_none=False)
        (weight.sum() * (rank + 1 + step)).backward()
        local = weight.grad.detach() if step == 2 else None
        held = local if local is not None else held
        optimizer.step()
        places.add(weight.grad.data_ptr())
        found.append(weight.grad[:2].tolist())
    assert held is not None
    return found, len(places), float(held.sum())


def test_steps_use_two_places_by_turns_and_leave_those_that_a_script_holds() -> None:
    for rank, (found, places, held) in enumerate(run_ranks(2, train)):
        assert found == [[1.5 + step] * 2 for step in range(6)]
        assert places in (2, 3)  # the third after the one that is held
        # It was this step's average; zero_grad and the next backward of the script wrote there.
        assert held == 1000 * (rank + 4)
