"""Rows of the exchange (exchanges.py) by optimizers of PyTorch, on ranks that are threads."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import exchanges
import numpy as np
import torch
from compressors import ByTurns, SignsWithFeedback
from exchanges import CLIP, RATE, Entries, Replay, Row, Step, Taken, check, own_gradients, start
from fake_device import FakeFrontend

from kolovod.core import ops
from kolovod.core.objects import Objects
from kolovod.testing.loopback import loopback
from kolovod.torch import (
    Compression,
    DistributedOptimizer,
    Functions,
    TorchCollectives,
    TorchFrontend,
    verbs,
)
from kolovod.torch.in_parts import InParts

LIMIT_S = 30.0


def run(row: Row) -> None:
    """Train, and compare each step of each rank."""
    frontend = FakeFrontend if row.staged else TorchFrontend
    with ExitStack() as stack:
        worlds = [
            stack.enter_context(loopback(len(hosts), frontend(), hosts=hosts))
            for hosts in row.worlds
        ]
        largest = max(worlds, key=lambda world: world.size)

        def on_rank(kv: Any) -> list[list[Taken]]:
            rank, now = kv.world().rank, [0]
            verbs = TorchCollectives(kv.frontend, lambda: worlds[now[0]].ranks[rank])
            trained = Trained(row, rank, verbs)

            def enter(number: int) -> None:
                now[0] = number
                if trained.optimizer is not None:  # as kolovod.init() has it done
                    trained.optimizer._kolovod_reducer.enter_world()

            return trained.all(enter)

        results = largest.run(on_rank, timeout_s=LIMIT_S)
    wanted = Replay(row).all()
    for rank, found in enumerate(results):
        check(row, rank, found, wanted)


def on_processes(rank: int, rows: list[Row]) -> list[list[list[Taken]]]:
    """What this rank, a process, comes to in each row."""
    torch.set_num_threads(1)
    return [
        Trained(row, rank, verbs.collectives).all(exchanges.entering(row, rank)) for row in rows
    ]


class Trained:
    """One rank's model and optimizer."""

    def __init__(self, row: Row, rank: int, verbs: TorchCollectives) -> None:
        """``verbs``: those of the world of the moment."""
        self.row, self.rank, self.verbs = row, rank, verbs
        self.saved: Any = None
        self.parameters: list[torch.nn.Parameter] = []
        for spec, values in zip(row.parameters, start(row), strict=True):
            tensor = torch.from_numpy(values).to(getattr(torch, spec.dtype))
            if tensor.dim() == 4:
                tensor = tensor.contiguous(memory_format=torch.channels_last)
            self.parameters.append(torch.nn.Parameter(tensor))
        self.optimizer: Any = None
        self.compressor: Any = None

    def all(self, enter: Callable[[int], None]) -> list[list[Taken]]:
        """By world and step; nothing in worlds that this rank is not in."""
        found: list[list[Taken]] = []
        for world, hosts in enumerate(self.row.worlds):
            found.append([])
            if self.rank >= len(hosts):
                continue
            enter(world)
            if self.optimizer is None:
                self.wrap()
            if world:
                self.begin_equal(len(hosts))
            for number, step in enumerate(self.row.steps):
                if self.row.resumed and step is self.row.steps[-1]:
                    self.resume()
                found[-1].append(self.step(world, number, step))
            self.saved = copy.deepcopy(self.optimizer.state_dict())
        return found

    def wrap(self) -> None:
        row = self.row
        sgd = torch.optim.SGD(self.parameters, RATE, momentum=row.momentum)
        self.compressor = {
            "signs": lambda: SignsWithFeedback(_tensor),
            "by turns": ByTurns,
        }.get(row.compression, lambda: getattr(Compression, row.compression))()
        groups: Any = row.groups
        if isinstance(groups, tuple):
            groups = [[self.parameters[index] for index in group] for group in groups]
        self.optimizer = DistributedOptimizer(
            sgd, [(str(i), p) for i, p in enumerate(self.parameters)], self.compressor,
            row.passes, getattr(ops, row.op), gradient_predivide_factor=row.predivide,
            groups=groups, sparse_as_dense=row.as_dense, shard_state=row.sharded,
            collectives=self.verbs,
        )  # fmt: skip

    def begin_equal(self, size: int) -> None:
        """As scripts do where ranks are new: parameters and state of rank 0."""
        if size > 1:
            functions = Functions(self.verbs)
            functions.broadcast_parameters({str(i): p.data for i, p in enumerate(self.parameters)})
            if not self.row.sharded:
                functions.broadcast_optimizer_state(self.optimizer)
                return
            self.saved = Objects(self.verbs.world).broadcast_object(self.saved)
        if self.row.sharded:  # parts end with their world
            self.optimizer.load_state_dict(copy.deepcopy(self.saved))

    def resume(self) -> None:
        """As a script that goes on from a checkpoint."""
        state = self.optimizer.state_dict()
        compressors = getattr(self.compressor, "state_dict", dict)()
        self.wrap()
        self.optimizer.load_state_dict(state)
        if compressors:
            self.compressor.load_state_dict(compressors)

    def step(self, world: int, number: int, step: Step) -> Taken:
        """One, in the way that it names."""
        optimizer, passes = self.optimizer, self.backwards(world, number, step)
        optimizer.zero_grad()
        seen: list[Any] = []
        watch = optimizer.register_step_pre_hook(lambda *_: seen.extend(self.gradients()))
        if step.way == "closure":

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = torch.zeros(())
                for backward in passes:
                    loss = backward()
                return loss

            optimizer.step(closure)
            seen = self.gradients()
        else:
            self.before_step(world, number, step, passes)
            if step.way == "synchronize":
                optimizer.synchronize()
                for group in ([p.grad for p in self.parameters if p.grad is not None],):
                    for grad in group:
                        grad.mul_(2)
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                if step.way == "clip":
                    try:
                        torch.nn.utils.clip_grad_value_(self.parameters, CLIP)
                    except RuntimeError:  # PyTorch's own, where there is no gradient at all
                        if any(p.grad is not None for p in self.parameters):
                            raise
                optimizer.step()
        watch.remove()
        weights = [_array(p.detach()) for p in self.parameters]
        return Taken(
            None if self.row.sharded and len(self.row.worlds[world]) > 1 else seen, weights
        )

    def before_step(
        self, world: int, number: int, step: Step, passes: list[Callable[[], Any]]
    ) -> None:
        """All backward passes, and those that do not count."""
        if step.way in ("zeroed", "set to none"):
            for backward in self.backwards(world, number, step, first=100):
                backward()
            if step.way == "zeroed":
                self.optimizer.zero_grad()
            else:  # as model.zero_grad() does
                for parameter in self.parameters:
                    parameter.grad = None
        held = self.optimizer.no_sync() if step.way == "held back" else contextlib.nullcontext()
        with held:
            passes[0]()
        for backward in passes[1:]:
            backward()

    def backwards(
        self, world: int, number: int, step: Step, first: int = 0
    ) -> list[Callable[[], Any]]:
        """Backward passes whose gradients are those of the row; each returns its loss."""
        passes = own_gradients(self.row, world, number, step, self.rank, first=first)

        def backward(grads: list[Any]) -> torch.Tensor:
            terms = []
            for parameter, grad in zip(self.parameters, grads, strict=True):
                if isinstance(grad, Entries):
                    looked_up = torch.nn.functional.embedding(
                        torch.from_numpy(grad.indices), parameter, sparse=True
                    )
                    terms.append((looked_up * torch.from_numpy(grad.values)).sum().double())
                elif grad is not None:
                    factor = torch.from_numpy(grad).to(parameter.dtype)
                    terms.append((parameter * factor).sum().double())
            if not terms:
                return torch.zeros((), dtype=torch.float64)
            loss = torch.stack(terms).sum()
            loss.backward()
            return loss.detach()

        return [lambda grads=grads: backward(grads) for grads in passes]

    def gradients(self) -> list[Any]:
        """As the optimizer finds them."""
        grads = [p.grad for p in self.parameters]
        return [None if g is None or isinstance(g, InParts) else _array(g) for g in grads]


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    wide = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    return wide.detach().numpy().copy()


def _tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
