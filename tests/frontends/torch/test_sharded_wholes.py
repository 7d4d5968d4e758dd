"""Sharded optimizers that need whole tensors: each is one rank's, and all is as without shards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from optimizing import wrapped
from sharding import Normed, assert_equal, assert_states_equal, values
from torch_loopback import run

import kolovod.torch as kv
from kolovod.errors import MismatchError
from kolovod.gradients.owners import Owners
from kolovod.torch.pieces import OwnedPart

STEPS = 3


class Matrices(torch.nn.Module):
    """Some of one shape, others alone with theirs, and one whose columns lie in a row."""

    def __init__(self, kind: str = "muon") -> None:
        super().__init__()
        sizes = [(16, 24), (24, 24), (24, 24), (24, 24), (24, 9)]
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(*size, bias=kind != "muon") for size in sizes
        )
        self.turned = torch.nn.Parameter(torch.empty(9, 5).t())
        drawn = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=drawn) * 0.2)
        for parameter in self.parameters():
            # So that sums are the same in any order.
            parameter.register_hook(lambda grad: (grad * 2.0**16).round() / 2.0**16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x @ self.turned.t()).square().mean()


def mixed(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    """Matrices by their norm, vectors by element, in one optimizer."""
    matrices = [p for p in parameters if p.dim() > 1]
    vectors = [p for p in parameters if p.dim() == 1]
    return Normed([{"params": matrices}, {"params": vectors, "normed": False}])


MAKERS = {
    "muon": lambda p: torch.optim.Muon(p, lr=0.02),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.02),
    "mixed": mixed,
}
needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="PyTorch has no Muon")
kinds = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=needs_muon if kind == "muon" else ()) for kind in MAKERS]
)


def made(kind: str, verbs: Any, **options: Any) -> tuple[Matrices, torch.optim.Optimizer]:
    model = Matrices(kind)
    optimizer = MAKERS[kind](list(model.parameters()))
    return model, wrapped(model, verbs, optimizer=optimizer, **options)


def train(model: Matrices, optimizer: torch.optim.Optimizer, rank: int, steps: Any) -> None:
    for step in steps:
        optimizer.zero_grad()
        seed = torch.Generator().manual_seed(100 * step + rank)
        model(torch.randn(4, 16, generator=seed)).backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()


def elements_of_state(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        value.numel()
        for entries in optimizer.state.values()
        for value in entries.values()
        if isinstance(value, torch.Tensor) and value.dim()
    )


@kinds
@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("groups", [None, 2])
def test_as_without_shards(kind: str, size: int, groups: int | None) -> None:
    def work(verbs: Any, rank: int) -> Any:
        found = []
        for shard_state in (False, True):
            model, optimizer = made(kind, verbs, shard_state=shard_state, groups=groups)
            train(model, optimizer, rank, range(STEPS))
            found.append((values(model), optimizer.state_dict(), elements_of_state(optimizer)))
        (plain, wanted, whole), (ours, gathered, kept) = found
        assert_equal(ours, plain)
        assert_states_equal(gathered, wanted)
        return ours, kept, whole

    results = run(size, work)
    for ours, _, _ in results[1:]:
        assert_equal(ours, results[0][0])
    assert sum(kept for _, kept, _ in results) == results[0][2]  # each part is on one rank
    assert max(kept for _, kept, _ in results) < results[0][2] * (0.7 if size == 2 else 0.5)


@kinds
def test_a_state_goes_on_with_other_numbers_of_ranks(kind: str) -> None:
    def train_on(size: int, shard_state: bool, state: Any, steps: Any) -> Any:
        def work(verbs: Any, rank: int) -> Any:
            model, optimizer = made(kind, verbs, shard_state=shard_state)
            if state is not None:
                model.load_state_dict(state[0])
                optimizer.load_state_dict(copy.deepcopy(state[1]))
            train(model, optimizer, 1, steps)  # the same gradients on all ranks
            return model.state_dict(), optimizer.state_dict()

        return run(size, work)[0]

    wanted = train_on(1, False, None, range(5))
    state = train_on(2, True, None, range(2))
    state = train_on(4, True, state, range(2, 3))
    state = train_on(1, True, state, range(3, 4))
    found = train_on(2, True, state, range(4, 5))
    assert_states_equal(found[1], wanted[1])
    assert_equal(found[0].values(), wanted[0].values())


def test_parameters_that_come_later() -> None:
    def work(verbs: Any, rank: int) -> None:
        found = []
        for shard_state in (False, True):
            model = Matrices("mixed")
            late = [*model.layers[2].parameters(), model.turned]
            early = [p for p in model.parameters() if not any(p is each for each in late)]
            model.layers[0].weight.requires_grad_(False)
            optimizer = wrapped(model, verbs, optimizer=Normed(early), shard_state=shard_state)
            train(model, optimizer, rank, range(2))
            optimizer.add_param_group({"params": late})
            model.layers[0].weight.requires_grad_(True)
            train(model, optimizer, rank, range(2, 4))
            found.append((values(model), optimizer.state_dict()))
        assert_equal(found[1][0], found[0][0])
        assert_states_equal(found[1][1], found[0][1])

    run(3, work)


def test_clipping_and_a_scaler_see_all_ranks() -> None:
    def work(verbs: Any, rank: int) -> Any:
        found = []
        for shard_state in (False, True):
            model, optimizer = made("mixed", verbs, shard_state=shard_state)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            norms = []
            for step in range(4):
                optimizer.zero_grad()
                seed = torch.Generator().manual_seed(10 * step + rank)
                loss = model(torch.randn(4, 16, generator=seed))
                is_bad = (rank, step) == (1, 2)
                scaler.scale(loss * (float("inf") if is_bad else 1.0)).backward()
                scaler.unscale_(optimizer)
                if step != 2:
                    norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01))
                scaler.step(optimizer)
                scaler.update()
            found.append((norms, values(model), scaler.get_scale()))
        (plain, wanted, scale), (ours, weights, its) = found
        assert scale == its == 4.0
        for one, other in zip([*ours, *weights], [*plain, *wanted], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        return weights

    first, second = run(2, work)
    assert_equal(first, second)


def test_ranks_with_another_kind_of_optimizer() -> None:
    def work(verbs: Any, rank: int) -> None:
        model = Matrices()
        make = torch.optim.SGD if rank else Normed
        optimizer = make(model.parameters(), lr=0.1)
        wrapped(model, verbs, optimizer=optimizer, shard_state=True)
        with pytest.raises(MismatchError, match="one rank steps with all of"):
            model(torch.ones(4, 16)).backward()

    run(2, work)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "elements", [[1] * 24, [5, 1, 9, 9, 2, 0, 7], [64, 16, 16, 48] * 6, [1000, 1, 1], [3]], ids=str
)
def test_each_tensor_has_one_owner_and_little_is_padding(size: int, elements: list[int]) -> None:
    by_index = dict(enumerate(elements))
    owners = Owners(size, by_index)
    had = [sum(e for i, e in by_index.items() if owners.rank_of[i] == r) for r in range(size)]
    least = max(max(elements), -(-sum(elements) // size))
    assert max(had) <= 4 / 3 * least
    order = list(reversed(by_index))
    groups = owners.together(order, 4)
    assert [index for group in groups for index in group] == order
    sent = sum(owners.travelling(group) for group in groups)
    assert sent <= sum(elements) / 0.75 + size * max(elements)
    for group in groups:
        sizes = [elements[index] for index in group]
        parts = [OwnedPart(group, sizes, owners, rank, size) for rank in range(size)]
        flats = [torch.full((elements[index],), float(index)) for index in parts[0].indices]
        rooms = parts[0].to_scatter(flats).split(parts[0].received or 1)
        for rank, part in enumerate(parts):
            for piece in part.pieces:
                mine = rooms[rank][piece.at : piece.at + piece.end] if piece.end else []
                assert all(value == piece.index for value in mine)
        assert sorted(piece.index for part in parts for piece in part.pieces) == sorted(group)


def test_more_tensors_get_the_same_owners_at_once_and_one_by_one() -> None:
    at_once, one_by_one = Owners(3, {0: 4, 1: 4}), Owners(3, {0: 4, 1: 4})
    more = {2: 1, 3: 9, 4: 2}
    at_once.add(more)
    for index, elements in more.items():
        one_by_one.add({index: elements})
    assert at_once.rank_of == one_by_one.rank_of


@needs_muon
def test_muon_beside_another_optimizer() -> None:
    """As Muon is used: matrices by it, all else by AdamW, each optimizer sharded."""

    def work(verbs: Any, rank: int) -> Any:
        found = []
        for shard_state in (False, True):
            model = Matrices("both")
            named = list(model.named_parameters())
            pair = []
            for make, wants in ((torch.optim.Muon, True), (torch.optim.AdamW, False)):
                own = [(name, p) for name, p in named if (p.dim() == 2) == wants]
                pair.append(
                    kv.DistributedOptimizer(
                        make([p for _, p in own], lr=0.02),
                        own,
                        collectives=verbs,
                        shard_state=shard_state,
                    )
                )
            for step in range(STEPS):
                seed = torch.Generator().manual_seed(10 * step + rank)
                for optimizer in pair:
                    optimizer.zero_grad()
                model(torch.randn(4, 16, generator=seed)).backward()
                for optimizer in pair:
                    optimizer.step()
            found.append(values(model))
        assert_equal(found[1], found[0])
        return found[1]

    first, second, third = run(3, work)
    assert_equal(first, second)
    assert_equal(first, third)
