"""torch.distributed's group with tensors on a GPU, two ranks on it: the GPU check.

``init_process_group("kolovod")``: every verb beside the same in host memory, streams, futures, DDP
and FSDP2 beside DDP and FSDP2 over host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from gpu_ranks import TICK_CYCLES, Findings, busy, cuda, on_ranks, said

if TYPE_CHECKING:
    import torch

DTYPES = ("uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
MOVED_ONLY = ("complex64", "float8_e4m3fn")
STEPS = 5
TOLERANCE = 2e-5


def part_groups(device: str) -> Findings:
    """Check the group on two ranks."""
    found = Findings()
    call = 2, in_a_group, device, device
    by_rank = found.tried("two ranks", lambda: on_ranks(*call, timeout_s=34))
    for rank, (figures, wrong) in enumerate(by_rank or ()):
        found.figures[f"rank {rank}"] = figures
        found.checked(f"rank {rank}", wrong)
    return found


def in_a_group(kv: Any, device: str) -> tuple[dict[str, Any], list[str]]:
    """Figures, and what was wrong on this rank."""
    import torch.distributed as dist

    dist.init_process_group("kolovod")
    figures: dict[str, Any] = {}
    wrong: list[str] = []
    checks: list[Callable[[str], list[str]]] = [same_as_in_host_memory, futures, trains]
    if device == "cuda":
        checks.append(streams)
    for check in checks:
        try:
            texts = check(device)
        except Exception as error:
            wrong.append(f"{check.__name__}: {said(error)}")
            break  # the ranks may not be level any more
        figures[check.__name__] = "right" if not texts else f"{len(texts)} wrong"
        wrong += [f"{check.__name__}: {text}" for text in texts]
    dist.destroy_process_group()
    return figures, wrong


def same_as_in_host_memory(device: str) -> list[str]:
    """Check each verb in each dtype."""
    import torch

    wrong = []
    for name in (*DTYPES, *MOVED_ONLY):
        dtype = getattr(torch, name)
        far, near = (list(results(dtype, where)) for where in (device, "cpu"))
        for (verb, mine), (_, wanted) in zip(far, near, strict=True):
            if mine.device.type != device:
                wrong.append(f"{verb} of {name}: the result is on {mine.device}")
            if not torch.equal(_comparable(mine.cpu()), _comparable(wanted)):
                wrong.append(f"{verb} of {name}")
    return wrong


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.contiguous().view(torch.uint8)


def results(dtype: torch.dtype, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Return what the verbs make of this rank's numbers, by name."""
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    draw = torch.Generator().manual_seed(7 + rank)

    def numbers(*shape: int) -> torch.Tensor:
        drawn = torch.randint(0, 9, shape, generator=draw)
        return drawn.to(torch.float32).to(dtype).to(device)

    if dtype not in (torch.complex64, getattr(torch, "float8_e4m3fn", None)):
        for label, op in (("sum", dist.ReduceOp.SUM), ("max", dist.ReduceOp.MAX)):
            tensor = numbers(4, 3)
            dist.all_reduce(tensor, op)
            yield f"all_reduce, {label}", tensor
        tensor = numbers(3, 4).t()
        dist.all_reduce(tensor)
        yield "all_reduce of what is not contiguous", tensor
        part = numbers(5)
        dist.reduce_scatter_tensor(part, numbers(5 * size))
        yield "reduce_scatter", part
        tensor = numbers(6)
        dist.reduce(tensor, 1)
        if rank == 1:
            yield "reduce", tensor
    tensor = numbers(7)
    dist.broadcast(tensor, 1)
    yield "broadcast", tensor
    whole = numbers(2 * size, 3)
    dist.all_gather_into_tensor(whole, numbers(2, 3))
    yield "all_gather_into_tensor", whole
    parts = [numbers(4) for _ in range(size)]
    dist.all_gather(parts, numbers(4))
    yield "all_gather", torch.cat(parts)
    received = numbers(2 * size)
    dist.all_to_all_single(received, numbers(2 * size))
    yield "all_to_all_single", received
    message = numbers(9)
    if rank == 0:
        dist.send(message, 1)
    else:
        dist.recv(message, 0)
        yield "recv", message


def futures(device: str) -> list[str]:
    """Check works that are waited for late, in another order, or by a future."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    tensors = [torch.full((n,), rank + 1.0, device=device) for n in range(1, 6)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    works[-1].wait()
    wrong = [f"work {i}" for i, each in enumerate(tensors) if not bool((each == 3.0).all())]
    tensor = torch.full((1000,), rank + 1.0, device=device)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    halved = future.then(lambda done: done.value()[0] / 2).wait()
    return wrong if bool((halved == 1.5).all()) else [*wrong, "a future's callback"]


def streams(device: str) -> list[str]:
    """Check a producer that is late, and a consumer on another stream."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    producer, consumer = cuda().Stream(), cuda().Stream()
    tensor, gathered = torch.zeros(1 << 20, device="cuda"), torch.empty(2 << 20, device="cuda")
    cuda().synchronize()
    with cuda().stream(producer):
        busy(TICK_CYCLES)
        tensor.fill_(rank + 1.0)
        work = dist.all_reduce(tensor, async_op=True)
        other = dist.all_gather_into_tensor(gathered, tensor, async_op=True)
    with cuda().stream(consumer):
        work.wait()
        is_sum = bool((tensor == 3.0).all())
        other.wait()
        is_gathered = bool((gathered == 3.0).all())
    wrong = [] if is_sum else ["all_reduce after a late producer"]
    return wrong if is_gathered else [*wrong, "all_gather after an all_reduce of its input"]


def trains(device: str) -> list[str]:
    """DDP and FSDP2 on the device as in host memory, and equal on both ranks."""
    import torch
    import torch.distributed as dist

    wrong = []
    for wrap in (ddp, fsdp):
        mine, wanted = trained(wrap, device), trained(wrap, "cpu")
        worst = max((a - b).abs().max().item() for a, b in zip(mine, wanted, strict=True))
        if not worst < TOLERANCE:
            wrong.append(f"{wrap.__name__}: weights differ by {worst:.1e} from host memory's")
        flat = torch.cat([each.reshape(-1) for each in mine])
        both = [torch.empty_like(flat) for _ in range(2)]
        dist.all_gather(both, flat)
        if not torch.equal(*both):
            wrong.append(f"{wrap.__name__}: the ranks' weights differ")
    return wrong


def ddp(net: Any) -> Any:
    """Wrap ``net`` in DDP, in several buckets."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(net, bucket_cap_mb=0.05)


def fsdp(net: Any) -> Any:
    """Shard ``net``, each layer by itself."""
    from torch.distributed.fsdp import fully_shard

    for layer in (net[0], net[2]):
        fully_shard(layer)
    return fully_shard(net)


def trained(wrap: Callable[[Any], Any], device: str) -> list[torch.Tensor]:
    """Return the weights after some steps, in host memory."""
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(1)
    net: Any = nn.Sequential(nn.Linear(16, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh())
    net = wrap(net.to(device))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        net(torch.randn(8, 16, generator=draw).to(device)).square().mean().backward()
        optimizer.step()
    values = [value for _, value in sorted(net.state_dict().items())]
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in values]
    return [each.detach().cpu() for each in whole]
