"""A training script without a mistake, and others that have one each, for ``kolovod check``."""

from __future__ import annotations

from typing import NamedTuple

GOOD = """
import os
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import kolovod.torch as kv

kv.init()
torch.manual_seed(1)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
sampler = DistributedSampler(data, kv.size(), kv.rank())
loader = DataLoader(data, batch_size=4, sampler=sampler)
torch.manual_seed(kv.rank())
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = kv.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
kv.broadcast_parameters(model.state_dict())
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    loss = kv.allreduce(loss.detach())
    if kv.rank() == 0:
        print(f"epoch {epoch} loss {loss:.4f}")
        torch.save(model.state_dict(), "model.pt")
"""
_OPTIMIZER = (
    "optimizer = kv.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())\n"
)
_BROADCAST = "kv.broadcast_parameters(model.state_dict())\n"
_STEP = "        optimizer.step()\n"
_END = """    loss = kv.allreduce(loss.detach())
    if kv.rank() == 0:
        print(f"epoch {epoch} loss {loss:.4f}")
        torch.save(model.state_dict(), "model.pt")
"""


class Case(NamedTuple):
    """What is changed in ``GOOD``, and what is to be found then."""

    changes: tuple[tuple[str, str], ...]
    expected: dict[str, str]
    """By check, "PROBLEM: part of the text" or "hint: ..."; there are no other problems."""
    line: str = ""
    """What stands in the line that the first expected finding names."""

    @property
    def script(self) -> str:
        """With the changes, each of which is possible in one place."""
        text = GOOD
        for old, new in self.changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        return text


CASES = {
    "good": Case((), {}),
    "sharded state": Case(
        (
            ("model.named_parameters())\n", "model.named_parameters(), shard_state=True)\n"),
            ("optim.SGD", "optim.AdamW"),
        ),
        {},
    ),
    "DiLoCo": Case(
        (
            (_OPTIMIZER, "outer = torch.optim.SGD(model.parameters(), lr=0.7)\n"),
            (
                "for epoch in",
                "diloco = kv.DiLoCo(model, optimizer, outer, sync_every=4)\nfor epoch in",
            ),
        ),
        {"weights": "cannot tell: DiLoCo lets ranks differ between exchanges"},
    ),
    "no broadcast": Case(
        ((_BROADCAST, ""),),
        {
            "initial-weights": "PROBLEM: before the first step 4 of 4 weights differ",
            "weights": "PROBLEM: after 10 steps 4 of 4 weights differ between ranks: they differed "
            "from the beginning",
        },
    ),
    "not wrapped": Case(
        ((_OPTIMIZER, ""),),
        {
            "optimizer": "PROBLEM: SGD steps with the gradients of its own rank only",
            "weights": "PROBLEM: after 10 steps 4 of 4 weights differ between ranks: an optimizer "
            "that is not wrapped has changed them",
        },
        "optimizer.step()",
    ),
    "not in the optimizer": Case(
        (
            ("torch.nn.Linear(8, 1))\n", "torch.nn.Linear(8, 1))\nkept = model[2].bias\n"),
            ("SGD(model.parameters()", "SGD([p for p in model.parameters() if p is not kept]"),
            (_STEP, f"{_STEP}        kept.data -= 0.1 * kept.grad\n"),
        ),
        {"weights": "PROBLEM: after 10 steps 1 of 4 weights differ between ranks: no optimizer"},
        "optimizer.step()",
    ),
    "gradients changed": Case(
        (
            (
                _STEP,
                "        optimizer.synchronize()\n"
                "        model[0].weight.grad *= 1 + kv.rank()\n"
                "        with optimizer.skip_synchronize():\n"
                "            optimizer.step()\n",
            ),
        ),
        {
            "gradients": "PROBLEM: in step 1 the gradients of 0.weight differ between ranks",
            "weights": "PROBLEM: their gradients differed",
        },
        "optimizer.step()",
    ),
    "weights changed": Case(
        ((_STEP, f"{_STEP}        model[0].weight.data *= 1 - 0.1 * kv.rank()\n"),),
        {"weights": "PROBLEM: something besides the optimizer has changed them"},
    ),
    "never initialized": Case(
        (
            ("import kolovod.torch as kv\n", ""),
            ("kv.init()\n", ""),
            ("kv.size(), kv.rank()", "1, 0"),
            ("torch.manual_seed(kv.rank())", "torch.manual_seed(1)"),
            (_OPTIMIZER, ""),
            (_BROADCAST, ""),
            (_END, ""),
        ),
        {
            "world": "PROBLEM: init() was called on no rank: 2 processes train, each by itself",
            "data": "PROBLEM: the DataLoader gave the same batches on all ranks",
        },
    ),
    "initialized on one rank": Case(
        (("kv.init()\n", "if os.environ['KOLOVOD_RANK'] == '0':\n    kv.init()\n"),),
        {"world": "PROBLEM: rank 1 used Kolovod without init()"},
        "sampler = DistributedSampler",
    ),
    "no sampler": Case(
        ((", sampler=sampler)", ")"),),
        {"data": "PROBLEM: the DataLoader gave the same batches on all ranks, in all 10 steps"},
        "for x, y in loader",
    ),
    "each rank shuffles all": Case(
        ((", sampler=sampler)", ", shuffle=True)"),),
        {"data": "hint: each rank draws from 64 samples by itself"},
    ),
    "no loader, the same data": Case(
        (("in loader:\n", "in zip(*(each.split(4) for each in data.tensors)):\n"),),
        {"data": "PROBLEM: the model was given the same inputs on all ranks"},
        "model(x)",
    ),
    "no set_epoch": Case(
        (("    sampler.set_epoch(epoch)\n", ""),),
        {"epochs": "PROBLEM: epochs 1 and 2 begin with the same 2 batches"},
        "for x, y in loader",
    ),
    "unequal batches": Case(
        ((", sampler=sampler)", ", sampler=range(kv.rank() * 24, 64))"),),
        {"batches": "PROBLEM: an epoch has other numbers of batches on other ranks"},
    ),
    "the same seed": Case(
        (
            ("torch.manual_seed(kv.rank())", "torch.manual_seed(1)"),
            ("torch.nn.ReLU()", "torch.nn.Dropout()"),
        ),
        {"random-numbers": "hint: before the first step all ranks have the same state of torch"},
    ),
    "learning rates": Case(
        (("lr=0.1", "lr=0.1 / (1 + kv.rank())"),),
        {
            "learning-rate": "PROBLEM: in step 1 ranks have different learning rates",
            "weights": "PROBLEM: their learning rates differed",
        },
    ),
    "all write": Case(
        (
            ("    if kv.rank() == 0:\n        print", "    if True:\n        print"),
            ('"model.pt")', 'open("model.pt", "wb"))\n        open("log", "a").close()'),
        ),
        {"files": "PROBLEM: ranks 0 and 1 write model.pt", "output": "hint: all ranks print 1"},
    ),
    "batch norm": Case(
        (("torch.nn.ReLU()", "torch.nn.BatchNorm1d(8)"),),
        {"batch-norm": "hint: each rank has running statistics of its own data"},
    ),
    "own metrics": Case(
        (("    loss = kv.allreduce(loss.detach())\n", ""),),
        {"metrics": "hint: only rank 0 prints numbers, and the script has combined none"},
    ),
    "no module": Case(
        (
            (
                "model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), "
                "torch.nn.Linear(8, 1))\n",
                "w = torch.nn.Parameter(torch.randn(4, 1))\n",
            ),
            ("SGD(model.parameters()", "SGD([w]"),
            ("named_parameters=model.named_parameters()", "named_parameters=[('w', w)]"),
            (_BROADCAST, ""),
            ("model(x)", "x @ w"),
            ("model.state_dict()", "w"),
        ),
        {
            "initial-weights": "PROBLEM: before the first step 1 of 1 weights differ",
            "weights": "PROBLEM: they differed from the beginning",
        },
    ),
    "one rank waits": Case(
        ((_STEP, f"{_STEP}        if kv.rank() == 0:\n            kv.allreduce(loss, 'mine')\n"),),
        {"steps": "PROBLEM: "},
    ),
}
