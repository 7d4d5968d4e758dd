"""Optimizers whose state is in parts on the ranks: as without parts, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from optimizing import Net, inputs, wrapped
from sharding import (
    OPTIMIZERS,
    STEPS,
    Model,
    assert_close,
    assert_equal,
    assert_states_equal,
    batch,
    train,
    values,
)
from test_growing import growing
from torch_loopback import run

import kolovod.torch as kv
from kolovod.errors import InvalidArgumentError
from kolovod.torch.pieces import Part


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_as_without_shards(kind):
    def work(verbs, rank):
        found = []
        for shard_state in (False, True):
            model = Model()
            groups = [
                {"params": list(model.wide.parameters()), "weight_decay": 0.02},
                {"params": [p for n, p in model.named_parameters() if not n.startswith("wide")]},
            ]
            optimizer = OPTIMIZERS[kind](groups)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            wrapped(model, verbs, optimizer=optimizer, shard_state=shard_state)
            for step in range(STEPS):
                train(model, optimizer, rank, [step])
                schedule.step()
            assert (model.wide.weight.grad is None) == shard_state
            found.append((values(model), optimizer.state_dict(), model, optimizer))
        (plain, state, *_), (ours, gathered, model, optimizer) = found
        if kind == "fused":  # PyTorch's kernel rounds the elements behind the last vector otherwise
            assert_close(ours, plain)
            assert_states_equal(gathered, state, torch.allclose)
        else:
            assert_equal(ours, plain)
            assert_states_equal(gathered, state)
        kept = sum(
            value.numel()
            for entries in optimizer.state.values()
            for value in entries.values()
            if isinstance(value, torch.Tensor) and value.dim()
        )
        whole = sum(
            value.numel()
            for entries in state["state"].values()
            for value in entries.values()
            if isinstance(value, torch.Tensor) and value.dim()
        )
        assert abs(kept - whole / 2) <= whole * 0.01 + 20
        return ours

    first, second = run(2, work)
    assert_equal(first, second)


def test_a_state_goes_on_with_other_numbers_of_ranks():
    def train_on(size, shard_state, state, steps):
        def work(verbs, rank):
            model = Model()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            wrapped(model, verbs, optimizer=optimizer, shard_state=shard_state)
            if state is not None:
                model.load_state_dict(state[0])
                optimizer.load_state_dict(copy.deepcopy(state[1]))
            # The same gradients on all ranks, so that their number changes nothing.
            train(model, optimizer, 1, steps)
            whole = optimizer.state_dict()
            assert_states_equal(optimizer.state_dict(), whole)
            return model.state_dict(), whole

        return run(size, work)[0]

    wanted = train_on(1, False, None, range(6))
    state = train_on(2, True, None, range(2))
    state = train_on(4, True, state, range(2, 3))
    state = train_on(1, True, state, range(3, 4))
    state = train_on(2, False, state, range(4, 5))
    found = train_on(2, True, state, range(5, 6))
    assert_states_equal(found[1], wanted[1])
    assert_equal(found[0].values(), wanted[0].values())


def test_who_looks_at_the_state_of_a_parameter_changes_nothing():
    def work(verbs, rank):
        found = []
        for looks in (False, True):
            net = Net()
            optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
            wrapped(net, verbs, optimizer=optimizer, shard_state=True)
            for step in range(4):
                optimizer.zero_grad()
                (net(inputs(rank)) * (step + 1)).backward()
                optimizer.step()
                if looks:  # which makes an entry: the state is a defaultdict
                    assert not optimizer.state[net.a]
                    optimizer.state[net.b]["mine"] = step
            state = optimizer.state_dict()["state"]
            assert state[1].pop("mine", None) == (3 if looks else None)
            found.append((values(net), state))
        assert_equal(found[1][0], found[0][0])
        for place in (0, 1):
            assert_equal(found[1][1][place].values(), found[0][1][place].values())

    run(2, work)


def test_passes_that_are_settled_are_averaged_with_later_ones():
    def work(verbs, rank):
        found = []
        for shard_state in (False, True):
            net = Net()
            optimizer = wrapped(net, verbs, shard_state=shard_state, backward_passes_per_step=2)
            for _ in range(2):
                net(inputs(rank)).backward()
                torch.nn.utils.clip_grad_value_(net.parameters(), 100.0)
                net(inputs(rank + 1)).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(values(net))
        assert_equal(found[1], found[0])

    run(2, work)


def test_parameters_that_move_thaw_and_come_later():
    def work(verbs, rank):
        found = []
        for shard_state in (False, True):
            model = Model()
            model.small.weight.requires_grad_(False)
            later = torch.nn.Parameter(torch.ones(4))
            optimizer = torch.optim.AdamW(
                [p for n, p in model.named_parameters() if n != "never"], lr=0.01
            )
            names = [*model.named_parameters(), ("later", later)]
            kv.DistributedOptimizer(optimizer, names, collectives=verbs, shard_state=shard_state)
            train(model, optimizer, rank, range(2))
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
            train(model, optimizer, rank, range(2, 3))
            model.small.weight.requires_grad_(True)
            optimizer.add_param_group({"params": [later]})
            for step in range(3, 6):
                optimizer.zero_grad()
                (model(batch(step, rank), False) + later.sum() * rank).backward()
                optimizer.step()
            found.append(([*values(model), later.detach()], optimizer.state_dict()))
        assert_equal(found[1][0], found[0][0])
        assert_states_equal(found[1][1], found[0][1])

    run(2, work)


def test_the_first_ranks_state_for_all():
    def work(verbs, rank):
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        wrapped(model, verbs, optimizer=optimizer, shard_state=True)
        train(model, optimizer, rank, range(2))
        before = optimizer.state_dict()
        functions = kv.Functions(verbs)
        functions.broadcast_optimizer_state(optimizer, 0)
        assert_states_equal(optimizer.state_dict(), before)
        train(model, optimizer, rank, range(2, 4))
        return values(model)

    first, second = run(2, work)
    assert_equal(first, second)

    def plainly(verbs, rank):
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        wrapped(model, verbs, optimizer=optimizer)
        train(model, optimizer, rank)
        return values(model)

    assert_equal(first, run(2, plainly)[0])


def step(model, optimizer):
    model(batch(2, 1), False).backward()
    optimizer.step()


def test_another_world():
    """State in parts is not lost in silence."""

    def work(verbs, rank, enter):
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        wrapped(model, verbs, optimizer=optimizer, shard_state=True)
        train(model, optimizer, 1, range(1))  # alone
        enter("both")
        train(model, optimizer, 1, range(1, 2))
        state = copy.deepcopy(optimizer.state_dict())
        before = values(model)
        for name in ("again", "alone"):
            enter(name)
            with pytest.raises(InvalidArgumentError, match="load_state_dict"):
                step(model, optimizer)
            optimizer.zero_grad()
        assert_equal(values(model), before)
        enter("again")
        optimizer.load_state_dict(state)
        train(model, optimizer, 1, range(2, 3))
        state = copy.deepcopy(optimizer.state_dict())
        enter("alone")
        optimizer.load_state_dict(state)
        train(model, optimizer, 1, range(3, 4))
        return values(model)

    def alone(verbs, rank):
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        wrapped(model, verbs, optimizer=optimizer)
        train(model, optimizer, 1)
        return values(model)

    wanted = run(1, alone)[0]
    for found in growing(work):
        assert_equal(found, wanted)


class Attention(torch.nn.Module):
    """Uses parameters of modules that it does not call."""

    def __init__(self):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(32, 4, batch_first=True)
        self.table = torch.nn.Embedding(400, 32)
        self.memory = torch.nn.LSTM(32, 32, batch_first=True)
        drawn = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=drawn) * 0.2)

    def forward(self, numbers):
        x = self.table(numbers)
        x = self.memory(x)[0] + self.attention(x, x, x)[0]
        return torch.nn.functional.linear(x, self.table.weight)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_parameters_that_are_gathered_in_forward(is_compiled):
    def work(verbs, rank):
        found = []
        for shard_state in (False, True):
            model = Attention()
            optimizer = wrapped(
                model,
                verbs,
                optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
                shard_state=shard_state,
                groups=3,
            )
            if is_compiled:  # as far as waiting goes
                model.memory._compiled_call_impl = model.memory._call_impl
            waited = []
            if shard_state:
                optimizer.gather_in_forward(model)
                gathering = optimizer._kolovod_gathering
                model.table.register_forward_hook(
                    lambda *_, g=gathering, w=waited: w.append(len(g._pending))
                )
                with pytest.raises(InvalidArgumentError, match="before"):
                    optimizer.gather_in_forward(model)
            for step in range(4):
                numbers = torch.randint(
                    400, (2, 9), generator=torch.Generator().manual_seed(10 * step + rank)
                )
                optimizer.zero_grad()
                model(numbers).square().mean().backward()
                optimizer.step()
            if shard_state:
                assert not gathering.is_over
                parameters = sum(1 for _ in model.parameters())
                assert waited[0] == 0
                assert all(0 < w < parameters for w in waited[1:]) or is_compiled
                assert waited[1:] == [0] * 3 or not is_compiled
            found.append((model.state_dict(), optimizer.state_dict()))
            model.train(False)
            with pytest.raises(IndexError):
                model(torch.tensor([[400]]))
            assert not torch.overrides._get_current_function_mode_stack()
        assert_equal(found[1][0].values(), found[0][0].values())
        assert_states_equal(found[1][1], found[0][1])

    run(2, work)


def test_what_reads_parameters_between_steps_waits_for_them():
    def work(verbs, rank):
        net = Net()
        optimizer = wrapped(net, verbs, shard_state=True)
        optimizer.gather_in_forward(net)
        for step in range(1, 4):
            net(inputs(rank)).backward()
            optimizer.step()
            optimizer.wait_for_parameters()
            assert net.a.tolist() == [1.0 - 1.5 * step] * 3
        net(inputs(rank)).backward()
        optimizer.step()
        assert net.state_dict()["a"].tolist() == [-5.0] * 3
        with pytest.raises(InvalidArgumentError, match="model is a list"):
            wrapped(Net(), verbs, shard_state=True).gather_in_forward([])

    run(2, work)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("sizes", [[10], [3, 1, 4], [1], [5, 0, 9, 2]])
def test_parts_have_every_element_once(size, sizes):
    found = []
    for rank in range(size):
        part = Part(range(len(sizes)), sizes, rank, size)
        assert part.received == sum(sizes) // size + (rank < sum(sizes) % size)
        at = 0
        for piece in part.pieces:
            assert piece.at == at
            at += piece.end - piece.begin
            found += [(piece.index, element) for element in range(piece.begin, piece.end)]
    assert found == [(i, e) for i, length in enumerate(sizes) for e in range(length)]
