"""A model whose optimizer's state is in parts on the ranks, and what is compared of it."""

from __future__ import annotations

import torch

STEPS = 4


class Model(torch.nn.Module):
    """Large and small parameters, one that is laid out otherwise, and one that is rarely used."""

    def __init__(self):
        super().__init__()
        self.wide = torch.nn.Linear(40, 260)
        self.conv = torch.nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
        self.small = torch.nn.Linear(260, 7)
        self.rare = torch.nn.Parameter(torch.zeros(5))
        self.never = torch.nn.Parameter(torch.zeros(3, 2))
        self.long = torch.nn.Parameter(torch.zeros(11, dtype=torch.float64))
        self.scale = torch.nn.Parameter(torch.zeros(()))
        drawn = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                values = torch.randn(parameter.shape, generator=drawn, dtype=torch.float64)
                parameter.copy_(values.to(parameter.dtype) * 0.3)

    def forward(self, x, with_rare):
        y = self.small(torch.tanh(self.wide(x[:, :40])))
        image = self.conv(x[:, 40:].view(-1, 4, 5, 5)).square().mean()
        extra = self.rare.square().sum() if with_rare else 0.0
        y = y * self.scale
        return y.square().mean() + image + extra + (self.long.cos() * x[0, :11]).sum()


class Normed(torch.optim.Optimizer):
    """Steps by a parameter's momentum over its norm, where the group says so; else plainly."""

    def __init__(self, params, lr=0.05, normed=True, newest=0.5):
        super().__init__(params, {"lr": lr, "normed": normed, "newest": newest})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                moment = state.setdefault("exp_avg", torch.zeros_like(parameter))
                moment.lerp_(parameter.grad, group["newest"])
                if group["normed"]:
                    state["norm"] = moment.norm()  # one for all elements
                    moment = moment / (state["norm"] + 1e-6)
                parameter.sub_(group["lr"] * moment)


def batch(step, rank):
    return torch.randn(8, 140, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model, optimizer, rank, steps=range(STEPS), passes=1, before_step=None):
    for step in steps:
        optimizer.zero_grad()
        for each in range(passes):
            model(batch(step + 50 * each, rank), step % 2 == 1 and rank == 0).backward()
        if before_step is not None:
            before_step(model)
        optimizer.step()


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def assert_equal(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


def assert_close(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def assert_states_equal(ours, theirs, equal=torch.equal):
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for place, wanted in theirs["state"].items():
        found = ours["state"][place]
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            if isinstance(value, torch.Tensor):
                assert equal(found[key], value), (place, key)
                assert found[key].dtype == value.dtype
            else:
                assert found[key] == value


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
}
