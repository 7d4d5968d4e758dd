"""One rank's part in bench/slow_links.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zlib
from argparse import Namespace
from dataclasses import asdict, dataclass
from typing import Any

import machine
import torch
import torch.distributed as dist
from models import Transformer
from text_model import LEARNING_RATE, Texts, char_transformer, loss_of
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import kolovod.torch as kv
from kolovod.gradients.compression import by_setting

LOCAL_STEPS = 20
"""Between two synchronisations of DiLoCo."""
DELAY = 9
"""Steps after which what was sent is applied."""
OUTER: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


@dataclass(frozen=True)
class Plan:
    """What ranks train."""

    way: str
    """``kolovod COMPRESSION`` (as ``--compression`` has it), ``alone``, ``ddp``, ``ddp fp16`` or
    ``ddp powersgd RANK``."""
    seed: int
    steps: int
    """At most."""
    texts: int
    """Of a rank's batch."""
    evaluate_every: int
    until: float = 0.0
    """The validation loss at which to stop."""


def digest(model: torch.nn.Module) -> int:
    """Return a digest of the parameters' bits."""
    parts = (p.detach().numpy().tobytes() for p in model.parameters())
    return zlib.crc32(b"".join(parts))


def start(plan: Plan) -> Transformer:
    """Return the same model on all ranks."""
    torch.set_num_threads(1)
    torch.manual_seed(plan.seed)
    return char_transformer()


def train(rank: int, plan: Plan, store: str) -> dict[str, Any]:
    """Return each ``(step, seconds of training so far, validation loss)``, and the bytes sent.

    ``store``: a file in which DDP's ranks find each other.
    """
    model = start(plan)
    adamw = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    run: torch.nn.Module = model
    optimizer: Any = adamw
    kind, *more = plan.way.split()
    if kind == "kolovod":
        kv.init()
        codec = by_setting(more[0])
        optimizer = kv.DistributedOptimizer(adamw, model.named_parameters(), compression=codec)
    elif kind == "ddp":
        run = _ddp(model, rank, more, store)
    texts = Texts()
    before = machine.sent_bytes()
    seen = []
    seconds = 0.0
    for step in range(1, plan.steps + 1):
        begin = time.monotonic()
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(run, texts.batch(plan.seed, rank, step, plan.texts)))
        optimizer.step()
        seconds += time.monotonic() - begin
        if step % plan.evaluate_every == 0 or step == plan.steps:
            seen.append((step, seconds, texts.validation_loss(model)))
            if seen[-1][2] <= plan.until:
                break
    found = {"seen": seen, "sent": machine.sent_bytes() - before, "digest": digest(model)}
    if kind == "kolovod":
        kv.shutdown()
    elif kind == "ddp":
        dist.destroy_process_group()
    return found


def _ddp(model: torch.nn.Module, rank: int, more: list[str], store: str) -> DDP:
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    size = int(os.environ["KOLOVOD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    ddp = DDP(model)
    if more[:1] == ["fp16"]:
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif more[:1] == ["powersgd"]:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=int(more[1]), start_powerSGD_iter=10
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return ddp


class _Stopwatch:
    """Adds up the time between its hooks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def start(self, *arguments: Any) -> None:
        self._began = time.monotonic()

    def stop(self, *arguments: Any) -> None:
        self.seconds += time.monotonic() - self._began


def diloco(rank: int, plan: Plan, warm_up: int, fragments: int) -> dict[str, Any]:
    """Take ``warm_up`` synchronous steps, then DiLoCo; ``plan.way`` is the codec of what is sent.

    ``utilization``: the share of the time that DiLoCo's hooks of the optimizer do not take, from
    its second exchange on. ``step_s``: a step's mean time meanwhile; ``alone_s``: without any
    communication, before and after.
    """
    model = start(plan)
    kv.init()
    codec = getattr(kv.Compression, plan.way)
    adamw = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    texts = Texts()

    def step(number: int) -> None:
        adamw.zero_grad()
        torch.autograd.backward(loss_of(model, texts.batch(plan.seed, rank, number, plan.texts)))
        adamw.step()

    alone_s = [_without_communication(model, texts, plan, rank)]
    hooks = _Stopwatch()
    adamw.register_step_pre_hook(hooks.start)
    adamw.register_step_post_hook(hooks.start)
    trained = kv.DiLoCo(
        model,
        adamw,
        torch.optim.SGD(model.parameters(), **OUTER),
        LOCAL_STEPS,
        fragments=fragments,
        fragment_sync_delay=DELAY,
        local_share=0.2,
        warm_up_steps=warm_up,
        compression=codec,
    )
    adamw.register_step_pre_hook(hooks.stop)
    adamw.register_step_post_hook(hooks.stop)
    for number in range(1, warm_up + LOCAL_STEPS + 1):
        step(number)
    kv.barrier()
    hooks.seconds = 0.0
    before, begin = machine.sent_bytes(), time.monotonic()
    for number in range(warm_up + LOCAL_STEPS + 1, plan.steps + 1):
        step(number)
    elapsed_s = time.monotonic() - begin
    utilization = 1 - hooks.seconds / elapsed_s
    step_s = elapsed_s / (plan.steps - warm_up - LOCAL_STEPS)
    trained.synchronize()
    sent = machine.sent_bytes() - before
    loss = texts.validation_loss(model)
    trained.close()
    found = {
        "loss": loss, "sent": sent, "digest": digest(model), "utilization": utilization,
        "step_s": step_s,
    }  # fmt: skip
    alone_s.append(_without_communication(model, texts, plan, rank))
    kv.shutdown()
    rounds = (plan.steps - warm_up) // LOCAL_STEPS - 1
    return {**found, "alone_s": sum(alone_s) / 2, "rounds": rounds}


def _without_communication(
    model: torch.nn.Module, texts: Texts, plan: Plan, rank: int, steps: int = 40
) -> float:
    """Return mean seconds of a step of a copy that all ranks take at the same time."""
    other = char_transformer()
    other.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(other.parameters(), lr=LEARNING_RATE)
    kv.barrier()
    begin = time.monotonic()
    for number in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(other, texts.batch(plan.seed, rank, number, plan.texts)))
        optimizer.step()
    kv.barrier()
    return (time.monotonic() - begin) / steps


def torchft(rank: int, plan: Plan, python: str, lighthouse: str, fragments: int) -> dict[str, Any]:
    """Train by torchft's DiLoCo, in bench/slow_links_torchft.py and its own environment."""
    program = str(machine.BENCH / "slow_links_torchft.py")
    options = {
        **asdict(plan), "rank": rank, "size": int(os.environ["KOLOVOD_SIZE"]),
        "lighthouse": lighthouse, "fragments": fragments, "outer": OUTER,
        "sync_every": LOCAL_STEPS, "delay": DELAY,
    }  # fmt: skip
    done = subprocess.run(
        [python, program, json.dumps(options)], capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def digits(rank: int, codec: str, seed: int) -> float:
    """Return the accuracy that examples/torch_digits.py reaches."""
    sys.path.insert(0, str(machine.ROOT / "examples"))
    import torch_digits  # type: ignore[import-not-found]

    kv.init()
    torch.set_num_threads(1)
    options = Namespace(
        epochs=15, batch_size=16, lr=0.02, momentum=0.9, warmup_epochs=3, seed=seed,
        compression=codec,
    )  # fmt: skip
    data, test = torch_digits.load_data(seed)
    accuracy: float = torch_digits.train(options, kv.size(), data, test).accuracy
    kv.shutdown()
    return accuracy
