"""Optimizers with sharded state beside PyTorch's and beside unsharded ones: ``bench/sharded.py``.

Two ranks on this machine, one compute thread each, AdamW on a model of bench/models.py; ``muon``:
Muon on the transformer's matrices, all else being frozen. By turns, one step each, in the same
processes, with a barrier before each:

- ``plain``: ``DistributedOptimizer(AdamW)``
- ``shards``: the same with ``shard_state=True``
- ``ddp``: DDP over gloo with AdamW
- ``zero``: DDP over gloo with ``ZeroRedundancyOptimizer(AdamW)``
- ``zero, ours``: DDP over Kolovod's process group with it

A step is forward, backward and ``step()``; ``step()`` alone is told beside it. Each takes
max(end) - min(start) over the ranks; medians. Data are fresh in each step, the same for all ways,
and at the end parameters are compared: ``shards`` must be equal to ``plain`` bit for bit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import machine
import report
import torch
import torch.distributed as dist
from models import MODELS
from report import number, table, times
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

import kolovod
import kolovod.torch as kv

RANKS = 2
WAYS = ("plain", "shards", "ddp", "zero", "zero, ours")
GOAL = 1.3
NAMES = (*MODELS, "muon")


def built(name: str) -> torch.nn.Module:
    """Return the model of a row."""
    torch.manual_seed(7)
    model = MODELS["transformer" if name == "muon" else name][0]()
    if name == "muon":
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.requires_grad_(True)
    return model


class Way:
    """One model and its optimizer."""

    def __init__(self, way: str, name: str, groups: dict[str, Any]) -> None:
        self.model = built(name)
        self._run: Any = self.model
        kind: Any = torch.optim.Muon if name == "muon" else torch.optim.AdamW
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if way in ("plain", "shards"):
            self.optimizer = kv.DistributedOptimizer(
                kind(parameters, lr=1e-3),
                self.model.named_parameters(),
                shard_state=way == "shards",
            )
            return
        group = groups["kolovod" if way == "zero, ours" else "gloo"]
        # Batch statistics are left alone, as Kolovod does: all then send the same.
        self._run = DDP(self.model, process_group=group, broadcast_buffers=False)
        if way == "ddp":
            self.optimizer = kind(parameters, lr=1e-3)
        else:
            self.optimizer = ZeroRedundancyOptimizer(parameters, kind, process_group=group, lr=1e-3)

    def step(self, inputs: Any, target: Any) -> tuple[int, int, int]:
        """Return clock readings (ns): before, when gradients are made, and after."""
        begin = time.monotonic_ns()
        self.optimizer.zero_grad()
        torch.autograd.backward(torch.nn.functional.cross_entropy(self._run(inputs), target))
        middle = time.monotonic_ns()
        self.optimizer.step()
        return begin, middle, time.monotonic_ns()


def work(name: str, steps: int, warmup: int, path: str) -> dict[str, Any]:
    """Be one rank: return clock readings by way, and the digest of the parameters."""
    torch.set_num_threads(1)
    kv.init()
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=kv.rank(), world_size=kv.size()
    )
    groups = {"gloo": dist.group.WORLD, "kolovod": dist.new_group(backend="kolovod")}
    ways = {way: Way(way, name, groups) for way in WAYS}
    draw = torch.Generator().manual_seed(1000 + kv.rank())
    readings: dict[str, list[tuple[int, int, int]]] = {way: [] for way in WAYS}
    for step in range(warmup + steps):
        inputs, target = MODELS["transformer" if name == "muon" else name][1](draw)
        for way in WAYS[step % len(WAYS) :] + WAYS[: step % len(WAYS)]:
            kv.barrier()
            reading = ways[way].step(inputs, target)
            if step >= warmup:
                readings[way].append(reading)
    plain = [p.detach() for p in ways["plain"].model.parameters()]
    unequal = {
        way: sum(
            int((ours != theirs).sum())
            for ours, theirs in zip(ways[way].model.parameters(), plain, strict=True)
        )
        for way in WAYS
    }
    kept = {
        way: sum(
            value.numel() * value.element_size()
            for entries in getattr(ways[way].optimizer, "optim", ways[way].optimizer).state.values()
            for value in entries.values()
            if isinstance(value, torch.Tensor)
        )
        for way in WAYS
    }
    count = sum(p.numel() for p in plain)
    dist.destroy_process_group()
    return {"readings": readings, "unequal": unequal, "kept": kept, "parameters": count}


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return medians in ms by way."""
    with tempfile.TemporaryDirectory() as folder:
        args = (name, options.steps, options.warmup, str(Path(folder) / "store"))
        answers = kolovod.run(work, args=args, np=RANKS)
    found: dict[str, Any] = {"model": name, "parameters": answers[0]["parameters"]}
    found["unequal"] = {w: sum(a["unequal"][w] for a in answers) for w in WAYS}
    found["kept"] = {w: max(a["kept"][w] for a in answers) for w in WAYS}
    for way in WAYS:
        rounds = list(zip(*(answer["readings"][way] for answer in answers), strict=True))
        whole = [(max(r[2] for r in ranks) - min(r[0] for r in ranks)) / 1e6 for ranks in rounds]
        update = [(max(r[2] for r in ranks) - max(r[1] for r in ranks)) / 1e6 for ranks in rounds]
        found[way] = {
            "step_ms": statistics.median(whole),
            "update_ms": statistics.median(update),
        }
    return found


def make(results: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    """Return the Markdown of a run."""
    rows = []
    for found in results:
        ours = found["shards"]
        for way in WAYS:
            rows.append(
                [f"{found['model']} ({found['parameters'] / 1e6:.1f} M), {way}",
                 number(found[way]["step_ms"]), number(found[way]["update_ms"]),
                 times(found[way]["step_ms"] / ours["step_ms"]),
                 times(found[way]["update_ms"] / ours["update_ms"]),
                 number(found["kept"][way] / 1e6), f"{found['unequal'][way]:,}"]
            )  # fmt: skip
    head = ["model, way", "step ms", "of it step() ms", "step / shards", "step() / shards",
            "state MB a rank", "elements other than plain's"]  # fmt: skip
    goals = ", ".join(
        f"{found['model']} {found['zero']['step_ms'] / found['shards']['step_ms']:.2f} and "
        f"{found['plain']['step_ms'] / found['shards']['step_ms']:.2f}"
        for found in results
    )
    return "\n".join(
        [
            "# Sharded optimizers\n",
            f"`{machine.command_line()}`: {report.machine_line(facts)}, load average "
            f"{facts['loadavg']:.1f} at the start. {RANKS} ranks of one compute thread each; "
            "milliseconds, medians. How it was measured: the head of bench/sharded.py.\n",
            table(head, rows),
            f"Faster than ZeroRedundancyOptimizer (wanted: {GOAL:g} times) and than without shards "
            f"(wanted: never slower): {goals}.\n",
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure, write, and say whether sharded parameters were equal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(NAMES), help=f"of {','.join(NAMES)}")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--output", type=Path, default=report.RESULTS, metavar="FOLDER")
    options = parser.parse_args(arguments)
    unknown = set(options.models.split(",")) - set(NAMES)
    if unknown:
        parser.error(f"unknown models {sorted(unknown)}: choose from {','.join(NAMES)}")
    facts = {**machine.facts(), **machine.load()}
    results = [measure(name, options) for name in options.models.split(",")]
    markdown = make(results, facts)
    result = {"command": machine.command_line(), "machine": facts, "models": results}
    report.write("sharded", result, markdown, options.output)
    print(f"\n{markdown}")
    return 1 if any(found["unequal"]["shards"] for found in results) else 0


if __name__ == "__main__":
    sys.exit(main())
