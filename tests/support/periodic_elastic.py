"""LocalSGD and DiLoCo of PyTorch in elastic jobs, and the same in one process, bit for bit.

What a process computes follows from its number and the step. ``Replay`` makes the steps of all
processes again, given whose part was in each exchange and who came when.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from compressors import ByTurns

import kolovod.torch as kv

Members = tuple[int, ...]
CASES: dict[str, dict[str, Any]] = {
    "local sgd": {"sync_every": 4, "warm_up_steps": 2},
    "diloco": {"sync_every": 4},
    "warmed up": {"sync_every": 4, "warm_up_steps": 3},
    # Several fragments are on their way at a time.
    "fragments": {"sync_every": 6, "fragments": 3, "fragment_sync_delay": 3},
    "late": {"sync_every": 4, "fragment_sync_delay": 2, "local_share": 0.25},
    "a state": {"sync_every": 4, "fragment_sync_delay": 2, "compression": ByTurns},
}


def model_of(seed: int) -> Any:
    torch.set_num_threads(1)  # as the launcher has it, else bits differ
    drawn = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 40), torch.nn.BatchNorm1d(40), torch.nn.Tanh(), torch.nn.Linear(40, 30),
        torch.nn.Linear(30, 2),
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.4, 0.4, generator=drawn)
    return model


def optimizers_of(model: Any) -> tuple[Any, Any]:
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    return inner, outer


def compute(model: Any, member: int, step: int) -> None:
    """The gradients of a process in a step, from 1."""
    drawn = torch.Generator().manual_seed(1000 * step + member)
    model.zero_grad()
    model(torch.randn(8, 6, generator=drawn)).square().mean().backward()


def begin(case: str, seed: int, verbs: Any = None) -> tuple[Any, Any, Any]:
    """The model, the inner optimizer and the way, as a script has them; ``verbs``: of tests."""
    model = model_of(seed)
    inner, outer = optimizers_of(model)
    options = CASES[case] | ({} if verbs is None else {"verbs": verbs})
    if "compression" in options:
        options["compression"] = options["compression"]()
    if case == "local sgd":
        return model, inner, kv.LocalSGD(model, inner, **options)
    return model, inner, kv.DiLoCo(model, inner, outer, **options)


def sums(model: Any, way: Any = None) -> list[int]:
    """Checksums of what a process has, and of what it has in common with the others."""
    common = getattr(way, "_common", ())
    tensors = [*model.state_dict().values(), *common]
    return [zlib.crc32(t.detach().contiguous().numpy().tobytes()) for t in tensors]


def mean(values: Sequence[Any]) -> Any:
    """As ranks of one host add up: in their order."""
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total / len(values)


class Replay:
    """All processes of a job in one."""

    def __init__(self, case: str, seed: int, members: Members, log: Sequence[Members]) -> None:
        """``seed``: of the model of rank 0. ``log``: who was in each exchange."""
        self.log = list(log)
        self.every = CASES[case]["sync_every"]
        self.warm = CASES[case].get("warm_up_steps", 0)
        self.delay = CASES[case].get("fragment_sync_delay", 0)
        self.share = CASES[case].get("local_share", 0.5 if self.delay else 0.0)
        self.is_local = case == "local sgd"
        self.by_turns, self.turn = "compression" in CASES[case], 0
        self.models = {member: model_of(seed) for member in members}
        self.inner = {m: optimizers_of(model)[0] for m, model in self.models.items()}
        self.common = model_of(seed)
        self.outer = optimizers_of(self.common)[1]
        count, number = len(list(self.common.parameters())), CASES[case].get("fragments", 1)
        self.fragments = [range(count)[f::number] for f in range(number)]
        self.pending: dict[int, tuple[int, dict[int, list[Any]]]] = {}
        self.equal_after: dict[int, int] = {}  # steps, by fragment
        self.steps = 0

    def parameters(self, member: int) -> list[Any]:
        return [p.data for p in self.models[member].parameters()]

    def buffers(self, member: int) -> list[Any]:
        return [b for b in self.models[member].buffers() if b.is_floating_point()]

    def step(self) -> None:
        """One of each process, and what is exchanged after it."""
        self.steps += 1
        for member, model in self.models.items():
            compute(model, member, self.steps)
        if self.steps <= self.warm:
            who = self.exchanged()
            for p in zip(*(self.models[m].parameters() for m in who), strict=True):
                gradient = mean([each.grad for each in p])
                for each in p:
                    each.grad = gradient.clone()
        for optimizer in self.inner.values():
            optimizer.step()
        since = self.steps - self.warm
        if self.is_local:
            if since >= 0 and since % self.every == 0:
                self.average()
            return
        if since == 0:
            first = next(iter(self.models))
            for mine, other in zip(self.common.parameters(), self.parameters(first), strict=True):
                mine.data.copy_(other)
        for f in range(len(self.fragments)):
            turn = (f + 1) * self.every // len(self.fragments)
            if since >= turn and (since - turn) % self.every == 0:
                self.send(f)
        for f in [f for f, (due, _) in self.pending.items() if due <= self.steps]:
            self.apply(f, self.pending[f][1], self.share)

    def exchanged(self) -> Members:
        """Whose part is in the next exchange; others are gone."""
        who = self.log.pop(0)
        for member in set(self.models) - set(who):
            del self.models[member], self.inner[member]
        return who

    def average(self) -> None:
        who = self.exchanged()
        for of in (self.parameters, self.buffers):
            for each in zip(*(of(member) for member in who), strict=True):
                result = mean(each)
                for tensor in each:
                    tensor.copy_(result)

    def send(self, f: int) -> None:
        common = [p.data for p in self.common.parameters()]
        sent = {}
        factor = self.turn % 3 + 1 if self.by_turns else 1
        self.turn += 1
        for member in self.models:
            own = self.parameters(member)
            sent[member] = [(common[place] - own[place]) * factor for place in self.fragments[f]]
            if f == len(self.fragments) - 1:
                sent[member] += [buffer.clone() for buffer in self.buffers(member)]
        self.pending[f] = self.steps + self.delay, sent

    def apply(self, f: int, sent: dict[int, list[Any]], share: float) -> None:
        self.pending.pop(f)
        if not share:
            self.equal_after[f] = self.steps
        who = self.log.pop(0)
        means = [mean(each) for each in zip(*(sent[member] for member in who), strict=True)]
        for member in set(self.models) - set(who) - self.joined_since(sent):
            del self.models[member], self.inner[member]
        places = self.fragments[f]
        self.outer.zero_grad(set_to_none=True)
        common = list(self.common.parameters())
        for place, gradient in zip(places, means[: len(places)], strict=True):
            common[place].grad = gradient
        self.outer.step()
        for member in self.models:
            for buffer, value in zip(
                self.buffers(member) if means[len(places) :] else [],
                means[len(places) :],
                strict=True,
            ):
                buffer.copy_(value)
            for place in places:
                own = self.parameters(member)[place]
                before = own.clone()
                own.copy_(common[place].data)
                if share:
                    own.lerp_(before, share)

    def joined_since(self, sent: dict[int, Any]) -> set[int]:
        """Who has come since a fragment was sent."""
        return set(self.models) - set(sent)

    def synchronize(self) -> None:
        """At the end: one exchange of all that has changed."""
        if self.is_local:
            self.average()
            return
        before = set(self.pending)
        changed = {
            f for f in range(len(self.fragments)) if self.equal_after.get(f, 0) != self.steps
        }
        for f in changed - before:
            self.send(f)
        if self.pending:
            self.log[:1] = self.log[:1] * len(self.pending)  # they are one step
        for f in [*sorted(before), *sorted(changed - before)]:
            self.apply(f, self.pending[f][1], 0.0)

    def join(self, members: Members) -> None:
        """These are in the world from now on; who comes is a copy of the first."""
        first = members[0]
        for member in members:
            if member in self.models:
                continue
            self.models[member] = model_of(0)
            self.models[member].load_state_dict(self.models[first].state_dict())
            self.inner[member] = optimizers_of(self.models[member])[0]
            self.inner[member].load_state_dict(copy.deepcopy(self.inner[first].state_dict()))

    def sums(self, member: int) -> list[int]:
        common = [] if self.is_local else [p.data for p in self.common.parameters()]
        tensors = [*self.models[member].state_dict().values(), *common]
        return [zlib.crc32(t.detach().contiguous().numpy().tobytes()) for t in tensors]
