"""What verbs and training steps take, beside plain PyTorch and DDP over gloo, in turns: GPU check.

The nets are those of bench/models.py, on a GPU with inputs that give it work. Several ranks share
the one GPU: with one rank each, steps would be faster, also the plain ones.
"""

from __future__ import annotations

import socket
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from gpu_ranks import Findings, on_ranks, timed_ms

ROUNDS = 3
STEPS = {"plain": 5, "kolovod": 5, "ddp": 2}
"""Steps a round, by way. DDP's go through gloo."""
SIZES = {"4 B": 1, "64 KiB": 1 << 14, "1 MiB": 1 << 18, "64 MiB": 1 << 24}  # float32 elements


class World(NamedTuple):
    """Ranks whose steps are measured."""

    ranks: int
    backend: str
    ways: tuple[str, ...]


WORLDS = {
    "staged, 1 rank that sends all the same": World(1, "native", ("plain", "kolovod")),
    "staged, 2 ranks share the GPU": World(2, "native", ("plain", "kolovod", "ddp")),
    "NCCL, 1 rank that sends all the same": World(1, "nccl", ("plain", "kolovod")),
}


def part_times(device: str) -> Findings:
    """Return medians, of the slower rank."""
    found = Findings()
    for label, world in WORLDS.items():
        if world.backend == "nccl" and device != "cuda":
            continue
        call = (world.ranks, measure, device, device, world.ways)
        by_rank = found.tried(label, partial(on_ranks, *call, backend=world.backend, timeout_s=38))
        if by_rank is not None:
            found.figures[label] = slowest(by_rank)
    return found


def slowest(by_rank: Sequence[Any]) -> Any:
    """Return the same tree of figures, with the largest of all ranks' in each place."""
    first = by_rank[0]
    if isinstance(first, dict):
        return {key: slowest([each[key] for each in by_rank]) for key in first}
    return max(by_rank)


def measure(kv: Any, device: str, ways: Sequence[str]) -> dict[str, Any]:
    """Return milliseconds for a step by net and way, for a verb by size and place; memory in GB."""
    import torch

    if kv.size() == 1:  # else nothing would be sent
        from kolovod.gradients.spec import ReduceSpec

        spec: Any = ReduceSpec
        spec.has_others = lambda self, world, *, without_world: True
    if "ddp" in ways:
        join_gloo(kv)
    found: dict[str, Any] = {"steps_ms": {}, "allreduce_ms": {}}
    for name, make in nets(device).items():
        steps = {way: training_step(kv, way, make, device) for way in ways}
        found["steps_ms"][name] = in_turns(kv, steps, device)
        print(name, found["steps_ms"][name], flush=True)  # in the log, if there is no end
        del steps
    for label, count in SIZES.items():
        times = 50 if count < 1 << 18 else 5
        found["allreduce_ms"][label] = {
            place: verb_ms(kv, count, place, times, device) for place in ("cpu", device)
        }
    if device == "cuda":
        found["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
        memory: Any = torch.cuda.memory
        stats = memory.host_memory_stats() if hasattr(memory, "host_memory_stats") else {}
        found["pinned_gb"] = round(stats.get("allocated_bytes.current", 0) / 1e9, 2)
    return found


def join_gloo(kv: Any) -> None:
    """Make a process group over gloo, of the same ranks."""
    import torch.distributed as dist

    port = None
    if kv.rank() == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
    port = kv.broadcast_object(port, 0)
    method = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=method, rank=kv.rank(), world_size=kv.size())


Net = Callable[[], tuple[Any, Any]]
"""Makes a net and its input, on the device."""


def nets(device: str) -> dict[str, Net]:
    """ResNet-50, a transformer of 86 M parameters, and one of 500 small tensors."""
    import torch
    from models import Mlp, Transformer, resnet50

    def small() -> tuple[Any, Any]:
        return Mlp().to(device), torch.randn(32, 44, device=device)

    def pictures() -> tuple[Any, Any]:
        inputs = torch.randn(32, 3, 224, 224, device=device)
        layout = torch.channels_last
        net: Any = resnet50().to(device)
        return net.to(memory_format=layout), inputs.contiguous(memory_format=layout)

    def text() -> tuple[Any, Any]:
        net = Transformer(width=768, layers=12, heads=12, positions=512).to(device)
        return net, torch.randint(0, 1024, (8, 512), device=device)

    return (
        {"resnet50": pictures, "transformer": text, "small": small}
        if device == "cuda"
        else {"small": small}
    )


def training_step(kv: Any, way: str, make: Net, device: str) -> Callable[[], None]:
    """One step in bfloat16, with the optimizer of this way."""
    import torch

    torch.manual_seed(1)
    net, inputs = make()
    run = net
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
    if way == "kolovod":
        optimizer = kv.DistributedOptimizer(optimizer, net.named_parameters())
    elif way == "ddp":
        run = torch.nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = run(inputs).float().square().mean()
        loss.backward()
        optimizer.step()

    return step


def in_turns(kv: Any, steps: dict[str, Callable[[], None]], device: str) -> dict[str, float]:
    """Return the median of each way; the first round warms up."""
    times: dict[str, list[float]] = {way: [] for way in steps}
    for turn in range(ROUNDS + 1):
        for way, step in steps.items():
            kv.barrier()
            taken = timed_ms(step, STEPS[way], device)
            if turn:
                times[way].append(taken)
    return {way: round(statistics.median(each), 2) for way, each in times.items()}


def verb_ms(kv: Any, count: int, place: str, times: int, device: str) -> float:
    """Return the median of a blocking allreduce in place of ``count`` elements."""
    import torch

    values = torch.ones(count, device=place)

    def work() -> None:
        kv.allreduce_(values, f"{place}.{count}")

    taken = [timed_ms(work, times, device) for _ in range(ROUNDS + 1)]
    return round(statistics.median(taken[1:]), 4)
