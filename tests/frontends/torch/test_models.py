"""Kinds of models and scripts, trained by several ranks: as one process with all their data would.

Ranks are threads, so whatever PyTorch keeps per process is shared; see test_compiled.py for those.
"""

from __future__ import annotations

import copy
import io
import pickle

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_loopback import run  # noqa: E402

from kolovod.torch import DistributedOptimizer  # noqa: E402

SIZES = [1, 2, 3, 4]
STEPS, BATCH = 3, 4


def batch(step, rank):
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 7, (BATCH,), generator=draw)


class Tied(nn.Module):
    """A language model of one word whose embedding is the decoder, too; parts are rarely used."""

    def __init__(self, how="plain"):
        super().__init__()
        draw = torch.Generator().manual_seed(5)
        self.embed = nn.Embedding(7, 6)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.never, self.rarely = nn.Linear(6, 6), nn.Linear(6, 6)
        self.decode = nn.Linear(6, 7, bias=False)
        self.decode.weight = self.embed.weight
        self.how = how
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw) / 3)

    def block(self, x, step, rank):
        x = torch.tanh(self.second(torch.relu(self.first(x))))
        return x + self.rarely(x) if (step + rank) % 3 == 0 else x

    def forward(self, words, step, rank):
        x = self.embed(words)
        if self.how == "plain":
            x = self.block(x, step, rank)
        else:
            reentrant = self.how == "reentrant"
            x = checkpoint(self.block, x, step, rank, use_reentrant=reentrant)
        return nn.functional.cross_entropy(self.decode(x), (words + 1) % 7)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def train(model, optimizer, ranks, steps=range(STEPS), after=lambda: None):
    for step in steps:
        optimizer.zero_grad()
        for rank in ranks:
            (model(batch(step, rank), step, rank) / len(ranks)).backward()
        optimizer.step()
        after()
    return model


def distributed(model, kv, optimizer=None, **kwargs):
    optimizer = optimizer or adam(model)
    return DistributedOptimizer(optimizer, model.named_parameters(), collectives=kv, **kwargs)


def of_one_process(size, steps=STEPS):
    model = Tied()
    return train(model, adam(model), range(size), range(steps))


def assert_same(model, wanted):
    pairs = zip(model.named_parameters(), wanted.parameters(), strict=True)
    for (name, mine), theirs in pairs:
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=2e-5, msg=name)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("how", ["plain", "reentrant", "not reentrant"])
def test_shared_and_unused_parameters_and_activation_checkpointing(how, size):
    """A parameter that no rank uses stays, though weight decay would move it; see ``Tied``."""
    wanted = of_one_process(size)

    def work(kv, rank):
        model = Tied(how)
        train(model, distributed(model, kv), [rank])
        assert_same(model, wanted)
        assert model.decode.weight is model.embed.weight
        assert torch.equal(model.never.weight, Tied().never.weight)

    run(size, work)


def test_reentrant_checkpoints_that_share_a_parameter():
    """Its gradient comes in parts, each by a backward of its own."""

    def loss(weight, x, reentrant):
        y = checkpoint(lambda x: x * weight, x, use_reentrant=reentrant)
        return checkpoint(lambda x: x * weight, y, use_reentrant=reentrant).sum()

    def work(kv, rank):
        weight = nn.Parameter(torch.full((2,), 3.0))
        optimizer = torch.optim.SGD([weight], lr=0.0)
        optimizer = DistributedOptimizer(optimizer, [("weight", weight)], collectives=kv)
        x = torch.full((2,), rank + 1.0, requires_grad=True)
        for _ in range(2):
            for reentrant in (True, False):
                optimizer.zero_grad()
                loss(weight, x, reentrant).backward()
                assert weight.grad.tolist() == [9.0] * 2
                optimizer.step()
            optimizer.zero_grad()
            with optimizer.no_sync():
                loss(weight, x, True).backward()
            optimizer.step()
            assert weight.grad.tolist() == [9.0] * 2

    run(2, work)


# Copies and saved states --------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_of_a_model_trains_with_an_optimizer_of_its_own(how):
    """Hooks stay with the original, and those of the one do not disturb the other."""
    wanted, longer = of_one_process(2), of_one_process(2, STEPS + 1)

    def copied(model):
        if how == "deepcopy":
            return copy.deepcopy(model)
        if how == "pickle":
            return pickle.loads(pickle.dumps(model))
        file = io.BytesIO()
        torch.save(model, file)
        return torch.load(io.BytesIO(file.getvalue()), weights_only=False)

    def work(kv, rank):
        model = Tied()
        optimizer = distributed(model, kv)
        optimizer.step()  # the ranks have agreed, so that hooks send
        model.zero_grad()
        other = copied(model)
        assert not other.first.weight._post_accumulate_grad_hooks
        assert other.decode.weight is other.embed.weight
        other(batch(0, rank), 0, rank).backward()  # of no concern to the first optimizer
        own = other.first.weight.grad.clone()
        train(model, optimizer, [rank])
        assert_same(model, wanted)
        assert torch.equal(other.first.weight.grad, own)

        second = distributed(other, kv)
        train(other, second, [rank])
        assert_same(other, wanted)
        train(model, optimizer, [rank], [STEPS])
        assert_same(model, longer)
        train(other, second, [rank], [STEPS])
        assert_same(other, longer)

    run(2, work)


def test_a_deepcopy_while_gradients_are_on_their_way():
    """As for a moving average of the weights, which is copied and averaged between steps."""
    wanted = of_one_process(2)

    def work(kv, rank):
        model = Tied()
        optimizer = distributed(model, kv)
        average = torch.optim.swa_utils.AveragedModel(model)
        for step in range(STEPS):
            optimizer.zero_grad()
            model(batch(step, rank), step, rank).backward()
            copy.deepcopy(model)
            optimizer.step()
            average.update_parameters(model)
        assert_same(model, wanted)
        return average.module.first.weight

    first, second = run(2, work)
    assert torch.equal(first, second)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("how", ["state_dict", "pickle"])
def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_ended(how, size):
    """The model, the wrapped optimizer and its scheduler are saved in the middle."""

    def scheduler_of(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    plain = Tied()
    whole = adam(plain)
    train(plain, whole, range(size), range(4), scheduler_of(whole).step)

    def work(kv, rank):
        model = Tied()
        optimizer = distributed(model, kv)
        scheduler = scheduler_of(optimizer)
        train(model, optimizer, [rank], range(2), scheduler.step)
        if how == "pickle":
            file = io.BytesIO()
            torch.save((model, optimizer, scheduler), file)
            file = io.BytesIO(file.getvalue())
            model, optimizer, scheduler = torch.load(file, weights_only=False)
            assert type(optimizer) is torch.optim.AdamW
            assert scheduler.optimizer is optimizer
            assert distributed(model, kv, optimizer) is optimizer
        else:
            states = pickle.loads(
                pickle.dumps([part.state_dict() for part in (model, optimizer, scheduler)])
            )
            model = Tied()
            optimizer = distributed(model, kv)
            scheduler = scheduler_of(optimizer)
            for part, state in zip((model, optimizer, scheduler), states, strict=True):
                part.load_state_dict(state)
        train(model, optimizer, [rank], range(2, 4), scheduler.step)
        assert_same(model, plain)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 / 16)

    run(size, work)


SCHEDULERS = {
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=5),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=2),
            torch.optim.lr_scheduler.CosineAnnealingLR(o, 3),
        ],
        [2],
    ),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
}


@pytest.mark.parametrize("label", SCHEDULERS)
def test_several_optimizers_with_schedulers(label):
    """Two parts of one model, in two optimizers of different classes."""

    def optimizers_of(model, wrap):
        sgd = torch.optim.SGD([*model.first.parameters(), *model.second.parameters()], lr=0.1)
        rest = [*model.embed.parameters(), *model.rarely.parameters(), *model.never.parameters()]
        return [wrap(sgd), wrap(torch.optim.Adam(rest, lr=0.1))]

    def loop(model, optimizers, ranks):
        schedulers = [SCHEDULERS[label](optimizer) for optimizer in optimizers]
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for rank in ranks:
                (model(batch(step, rank), step, rank) / len(ranks)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            for optimizer in reversed(optimizers):
                optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
        return [optimizer.param_groups[0]["lr"] for optimizer in optimizers]

    plain = Tied()
    rates = loop(plain, optimizers_of(plain, lambda one: one), range(3))

    def work(kv, rank):
        model = Tied()
        assert (
            loop(model, optimizers_of(model, lambda o: distributed(model, kv, o)), [rank]) == rates
        )
        assert_same(model, plain)

    run(3, work)
