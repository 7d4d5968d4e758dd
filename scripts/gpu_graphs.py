"""CUDA graphs, torch.compile and PyTorch's detector of races, beside verbs: GPU check."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from gpu_ranks import KEPT_TEXT, TICK_CYCLES, Findings, busy, cuda, on_ranks
from gpu_training import train, wrapping


def part_graphs(device: str) -> Findings:
    """A capture beside what is on its way, staged and over NCCL; a compiled net."""
    found = Findings()
    for backend in ("native", "nccl"):
        by_rank = found.noted(
            f"captures, {backend}",
            partial(on_ranks, 2, captures, device, backend=backend, timeout_s=22),
        )
        for rank, each in enumerate(by_rank or ()):
            wrong = [f"{label}: {text}" for label, text in each.items() if text != "right"]
            found.checked(f"captures, {backend}, rank {rank}", wrong)
    by_rank = found.noted("torch.compile", lambda: on_ranks(2, compiles, device, timeout_s=24))
    if by_rank is not None and by_rank != [True, True]:
        found.problems.append("torch.compile: the ranks' weights differ")
    return found


def captures(kv: Any) -> dict[str, str]:
    """Return what has become of each capture: "right", or what was said."""
    import torch

    found: dict[str, str] = {}
    static = torch.ones(1 << 20, device="cuda")
    kv.allreduce(static)
    big = torch.ones(1 << 24, device="cuda")
    handle = kv.allreduce_async(big, "big")
    found["beside an asynchronous verb"] = captured(static)
    handle.wait()
    net = torch.nn.Linear(2048, 2048).cuda()
    plain = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = kv.DistributedOptimizer(plain, net.named_parameters())
    x = torch.ones(64, 2048, device="cuda")
    for turn in range(3):
        optimizer.zero_grad()
        busy(TICK_CYCLES // 16)  # the copies come late: a thread waits for them meanwhile
        net(x).sum().backward()
        if turn == 2:
            found["while buckets are copied"] = captured(static)
        optimizer.step()
    return found


def captured(static: Any) -> str:
    """Capture a product and replay it."""
    graph = cuda().CUDAGraph()
    try:
        with cuda().graph(graph):
            out = static * 2
        graph.replay()
        return "right" if bool((out == 2).all()) else "wrong values"
    except Exception as error:
        text = f"{type(error).__name__}: {str(error)[:KEPT_TEXT]}"
    cuda().synchronize()
    return text


def compiles(kv: Any) -> bool:
    """Train a compiled net with different data on each rank: whether the weights are alike.

    Its backward is one node, as with every backend; this one needs no compiler.
    """
    import torch
    from torch import nn

    torch.manual_seed(1)
    first = nn.Linear(64, 64)
    net = nn.Sequential(first, nn.ReLU(), nn.Linear(64, 4)).cuda()
    run: Callable[[Any], Any] = torch.compile(net, backend="aot_eager")
    plain = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = kv.DistributedOptimizer(plain, net.named_parameters())
    draw = torch.Generator("cuda").manual_seed(kv.rank())
    data = torch.randn(16, 64, device="cuda", generator=draw)
    for _ in range(4):
        optimizer.zero_grad()
        run(data).square().mean().backward()
        optimizer.step()
    both = kv.allgather(first.weight.detach()[None])
    return torch.equal(both[0], both[1])


def part_sanitized(device: str) -> Findings:
    """PyTorch's own detector of races between streams, over verbs and an optimizer."""
    found = Findings()
    env = {"TORCH_CUDA_SANITIZER": "1"}
    wrong = found.tried("two ranks", lambda: on_ranks(2, races, device, env=env, timeout_s=24))
    for rank, each in enumerate(wrong or ()):
        found.figures[f"rank {rank}"] = "no race" if not each else "wrong values"
        found.checked(f"rank {rank}", each)
    return found


def races(kv: Any) -> list[str]:
    """Verbs on two streams, and training; the detector raises where a race is."""
    import torch

    rank, side = kv.rank(), cuda().Stream()
    wrong = []
    for i in range(3):
        x = torch.full((1000,), float(rank), device="cuda")
        result = kv.allreduce_async(x, f"a{i}", kv.Sum).wait()
        if not (result == 1).all():
            wrong.append(f"sum {i}: {result[:3].tolist()}, not 1")
        with cuda().stream(side):
            side.wait_stream(cuda().default_stream())
            kv.allgather(x)
        cuda().current_stream().wait_stream(side)
    train({}, "cuda", slice(rank, None, 2), wrapping(kv, {}), steps=3)
    return wrong
