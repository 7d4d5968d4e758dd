"""A training of an elastic job, whose processes kill themselves as its arguments say.

Run by the launcher: ``elastic_script.py numpy 3 2,1,0 FOLDER`` is three ranks with NumPy of which,
whenever all three are there, the one in slot 2 ends, then that in 1, then that in 0. Each process
that comes to the end writes SLOT.json into the folder that is the last argument: which slots took
part in each step, as bits, and its MembershipLog with checksums of the weights. A test makes the
same model to replay that.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from kolovod import elastic
from kolovod.core.ops import Average, Sum
from kolovod.core.transaction import transaction
from kolovod.elastic.steps import Steps

STEPS_BETWEEN = 10
PAUSE_S = 0.004
COUNT = 5_000


class OfNumpy:
    """Weights whose bits depend on every step, and on the order in which ranks are added."""

    redo, join, op = "repeat", "at_commit", Sum

    def __init__(self, seed: int) -> None:
        self.weights = np.random.default_rng(seed).normal(size=COUNT).astype(np.float32)

    def values(self) -> dict[str, Any]:
        return {"model": self.weights}

    def tensors(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def compute(self, step: int, member: int) -> dict[str, Any]:
        draw = np.random.default_rng([step, member])
        noise = draw.normal(size=COUNT).astype(np.float32)
        return {"weights": noise + np.float32(0.1) * self.weights}

    def apply(self, gradients: dict[str, Any]) -> None:
        self.weights -= np.float32(0.1) * gradients["weights"]

    def distribute(self, slot: int) -> None:
        import kolovod.numpy as kv

        self.kv, self.bit = kv, float(1 << slot)

    def follow(self, state: Any) -> None:
        """Where others have come ranks have rank 0's array, as a new one."""
        self.weights = state.model

    def step(self, state: Any, member: int) -> int:
        mine = self.compute(state.step, member)["weights"]
        total, bits = elastic.exactly(
            lambda: self.kv.grouped_allreduce([mine, np.array(self.bit)], "step", self.kv.Sum),
            counts=True,
        )
        self.apply({"weights": total})
        return int(bits)


class OfTorch:
    """A model with buckets, momentum, and one more parameter that tells who takes part."""

    redo, join, op = "repeat", "at_commit", Sum
    width = 500

    def __init__(self, seed: int) -> None:
        import torch

        torch.set_num_threads(1)  # as the launcher has it, else bits differ
        torch.manual_seed(seed)
        self.torch = torch
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, self.width), torch.nn.Linear(self.width, 8)
        )
        self.bits = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.bit = 0.0
        everything = [*self.model.parameters(), self.bits]
        self.optimizer = torch.optim.SGD(everything, 0.01, momentum=0.9)

    def values(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def tensors(self) -> dict[str, Any]:
        return self.model.state_dict()

    def backward(self, step: int, member: int) -> None:
        self.optimizer.zero_grad()
        seed = self.torch.Generator().manual_seed(100 * step + member)
        self.loss(self.torch.randn(4, 8, generator=seed)).backward()

    def loss(self, rows: Any) -> Any:
        return 0.01 * self.model(rows).square().mean() + (self.bits * self.bit).sum()

    def compute(self, step: int, member: int) -> dict[str, Any]:
        self.backward(step, member)
        return {name: p.grad.clone() for name, p in self.model.named_parameters()}

    def apply(self, gradients: dict[str, Any]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.grad = gradients[name]
        self.optimizer.step()

    def distribute(self, slot: int) -> None:
        import kolovod.torch as kv

        self.bit = float(1 << slot)
        named = [*self.model.named_parameters(), ("bits", self.bits)]
        self.optimizer = kv.DistributedOptimizer(self.optimizer, named, op=kv.Sum)

    def follow(self, state: Any) -> None:
        """Modules are changed in place."""

    def step(self, state: Any, member: int) -> int:
        self.backward(state.step, member)
        self.optimizer.step()
        return int(self.bits.grad)


class Late(OfTorch):
    """Who joins is given the state while all compute a step; a mean, and two moments."""

    join, op = "during_step", Average
    width = 3000  # several pieces, of which some are larger than a message may be

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.optimizer = self.torch.optim.AdamW([*self.model.parameters(), self.bits], 0.01)

    def distribute(self, slot: int) -> None:
        import kolovod.torch as kv

        self.bit = float(1 << slot)
        named = [*self.model.named_parameters(), ("bits", self.bits)]
        self.optimizer = kv.DistributedOptimizer(self.optimizer, named)

    def step(self, state: Any, member: int) -> int:
        super().step(state, member)
        ongoing = transaction()
        assert isinstance(ongoing, Steps)
        ranks = len(set(ongoing.world.members) - ongoing.weightless)
        return round(float(self.bits.grad) * ranks)  # that of which it is the average


class OfShards(OfTorch):
    """A sharded optimizer, whose state is gathered and logged after each step.

    Gradients are multiples of a power of two, so that their sums are the same in any order.
    """

    width = 1300  # so that one parameter is a part by itself
    shards = True

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        for parameter in self.model.parameters():
            parameter.register_hook(lambda grad: (grad * 2.0**18).round() / 2.0**18)
        self.bits = self.torch.nn.Parameter(self.torch.zeros((), dtype=self.torch.float64))
        self.optimizer = self.made([*self.model.parameters()])

    def made(self, parameters: list[Any]) -> Any:
        """The first moment of what tells who takes part is the last sum of its gradients."""
        groups = [{"params": parameters}, {"params": [self.bits], "betas": (0, 0.9)}]
        return self.torch.optim.AdamW(groups, 0.01)

    def distribute(self, slot: int) -> None:
        import kolovod.torch as kv

        self.bit = float(1 << slot)
        named = [*self.model.named_parameters(), ("bits", self.bits)]
        options = {"op": kv.Sum, "shard_state": self.shards}
        self.optimizer = kv.DistributedOptimizer(self.optimizer, named, **options)

    def state(self) -> dict[int, Any]:
        found: dict[int, Any] = self.optimizer.state_dict()["state"]
        return found

    def tensors(self) -> dict[str, Any]:
        names = [name for name, _ in self.model.named_parameters()]
        state = {
            f"{name}.{key}": value
            for number, name in enumerate(names)
            for key, value in self.kept.get(number, {}).items()
        }
        return {**self.model.state_dict(), **state}

    kept: dict[int, Any] = {}  # noqa: RUF012  the state after the last step

    def apply(self, gradients: dict[str, Any]) -> None:
        super().apply(gradients)
        self.kept = self.state()

    def step(self, state: Any, member: int) -> int:
        self.backward(state.step, member)
        self.optimizer.step()
        self.kept = self.state()
        return int(self.kept[len(self.kept) - 1]["exp_avg"])


class OfWholes(OfShards):
    """An optimizer that needs whole tensors: each is one rank's."""

    def made(self, parameters: list[Any]) -> Any:
        from sharding import Normed

        bits = {"params": [self.bits], "normed": False, "newest": 1.0}
        return Normed([{"params": parameters}, bits], 0.01)


class RecomputedShards(OfShards):
    """Steps that are computed again from the last commit."""

    redo = "recompute"


class OfDdp(OfTorch):
    """DDP and a plain optimizer, by ``torch.distributed`` alone."""

    op = Average
    ddp: Any = None  # where steps are replayed

    def values(self) -> dict[str, Any]:
        return {"model": self.ddp, "optimizer": self.optimizer}

    def loss(self, rows: Any) -> Any:
        return super().loss(rows) if self.ddp is None else self.ddp(rows)

    def distribute(self, slot: int) -> None:
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        work = self

        class Whole(self.torch.nn.Module):  # type: ignore[name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.model, self.bits = work.model, work.bits

            def forward(self, rows: Any) -> Any:
                return OfTorch.loss(work, rows)

        dist.init_process_group("kolovod")
        self.dist, self.bit = dist, float(1 << slot)
        self.ddp = DistributedDataParallel(Whole())

    def step(self, state: Any, member: int) -> int:
        self.backward(state.step, member)
        self.optimizer.step()
        ongoing = transaction()
        assert isinstance(ongoing, Steps)
        bits = round(float(self.bits.grad) * ongoing.world.size)  # that of which it is the average
        elastic.exactly(self.check_group)
        return bits

    def check_group(self) -> None:
        """``torch.distributed`` knows the same ranks, and they communicate."""
        dist, counted = self.dist, self.torch.ones(1)
        dist.all_reduce(counted)
        assert dist.get_world_size() == dist.get_world_size(dist.group.WORLD) == int(counted)
        assert 0 <= dist.get_rank() < int(counted)


class Recomputed(OfTorch):
    """Has an operation in forward, and counts there: once for each step, however often it runs."""

    redo = "recompute"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.model.register_buffer("forwards", self.torch.zeros(1))

    def tensors(self) -> dict[str, Any]:
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def distribute(self, slot: int) -> None:
        import kolovod.torch as kv

        self.kv = kv
        super().distribute(slot)

    def step(self, state: Any, member: int) -> int:
        self.model.forwards += 1
        self.kv.allreduce(self.torch.zeros(1000), "forward")
        assert int(self.model.forwards) == state.step + 1
        return super().step(state, member)


def of_framework(kind: str) -> Any:
    from elastic_frameworks import KINDS as of_frameworks

    return of_frameworks[kind]()


KINDS: dict[str, Any] = {
    "numpy": OfNumpy,
    "torch": OfTorch,
    "late": Late,
    "shards": OfShards,
    "recomputed shards": RecomputedShards,
    "ddp": OfDdp,
    "recomputed": Recomputed,
}


def main() -> None:
    import kolovod

    kind, full, plan = sys.argv[1], int(sys.argv[2]), [int(s) for s in sys.argv[3].split(",") if s]
    slot = int(os.environ["KOLOVOD_SLOT"])
    kolovod.init()
    work = KINDS[kind](slot) if kind in KINDS else of_framework(kind)
    work.distribute(slot)  # what it has made before is rank 0's all the same
    log = elastic.MembershipLog(work.tensors)
    state = elastic.State(step=0, slots=[], since=0, kills=0, log=log, **work.values())
    longest_s, given = 0.0, 0

    @elastic.run(redo=work.redo, join=work.join)
    def train(state: Any) -> None:
        nonlocal longest_s, given
        while True:
            work.follow(state)
            state.since += 1
            if state.since == STEPS_BETWEEN:
                if state.kills == len(plan):
                    return
                state.kills += 1
            before_s = time.monotonic()
            state.slots.append(work.step(state, log.member))
            longest_s = max(longest_s, time.monotonic() - before_s)
            ongoing = transaction()
            given += isinstance(ongoing, Steps) and bool(ongoing.weightless)
            is_whole = state.slots[-1] == (1 << full) - 1
            if not is_whole:
                state.since = 0
            state.step += 1
            dies = state.since == STEPS_BETWEEN and plan[state.kills - 1] == slot
            state.commit()
            if dies:  # as the next step begins, in its middle, or after it
                delay_s = random.uniform(PAUSE_S / 2, 3 * PAUSE_S)
                threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
            # A process that imports a framework needs the cores to come.
            time.sleep(PAUSE_S if is_whole or kind == "numpy" else 0.2)

    train(state)
    facts = {
        "slot": slot,
        "slots": state.slots,
        "log": log.state_dict(),
        "result": None if kind in KINDS else work.result(state),
        "longest_s": longest_s,
        "given": given,
    }
    Path(sys.argv[4], f"{slot}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
