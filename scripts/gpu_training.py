"""Training on two ranks that share a GPU, beside one rank with all data, by value: GPU check."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gpu_ranks import Findings, cuda, on_ranks, said

if TYPE_CHECKING:
    import torch

Way = Mapping[str, Any]
Wrap = Callable[[Any, Any], Any]
"""Makes the optimizer that is used of one of PyTorch's, and the net."""

TOLERANCE = 2e-5
OF_ADAM = 2e-4  # it divides by the gradients' size, also where that is nothing but rounding errors
BATCH = 16
WAYS: dict[str, Way] = {
    "sgd": {},
    "adam fused": {"optimizer": "fused", "tolerance": OF_ADAM},
    "channels_last": {"channels_last": True},
    "zeroed in place": {"set_to_none": False},
    "two passes": {"passes": 2},
    "clipped": {"clip": True},
    "bf16 sent": {"compression": "bf16", "tolerance": 2e-3},
    "scaler, one rank overflows": {"scaler": True},
    "sparse embedding": {"sparse": True},
    "shard_state": {"shard": True, "optimizer": "adam", "tolerance": OF_ADAM},
    "two streams": {"streams": True},
    "adasum": {"op": "Adasum", "same_data": True},
}


def part_training(device: str) -> Findings:
    """Train with gradients staged in host memory."""
    return compared(device, "native")


def part_nccl_training(device: str) -> Findings:
    """Train over NCCL, with two ranks on the GPU."""
    return compared(device, "nccl")


def compared(device: str, backend: str) -> Findings:
    """Train in all ways on two ranks, and compare the weights with one rank's."""
    found = Findings()
    by_rank = found.tried(
        "two ranks", lambda: on_ranks(2, train_ways, device, device, backend=backend, timeout_s=36)
    )
    if by_rank is None:
        return found
    ways, others = zip(*by_rank, strict=True)
    for name, way in WAYS.items():
        results = [each.get(name, "not run, since a way before it failed") for each in ways]
        texts = [text for text in results if isinstance(text, str)]
        if texts:
            found.checked(name, sorted(set(texts)))
        else:
            judge(found, name, way, results, device)
    for rank, wrong in enumerate(others):
        found.checked(f"rank {rank}", wrong)
    return found


def judge(found: Findings, name: str, way: Way, results: list[Any], device: str) -> None:
    """Ranks have the same bits, and the weights of one rank that has all data."""
    import torch

    first, second = results
    if not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
        found.problems.append(f"{name}: the ranks' weights differ")
    if way.get("scaler"):  # whose step was left out, on all ranks
        if not all(weights.isfinite().all() for weights in first):
            found.problems.append(f"{name}: weights that are not finite")
        found.figures[name] = "finite"
        return
    wanted = train(way, device, slice(None), lambda optimizer, net: optimizer)
    worst = max((a - b).abs().max().item() for a, b in zip(first, wanted, strict=True))
    found.figures[name] = f"{worst:.1e} from one rank"
    if not worst < way.get("tolerance", TOLERANCE):
        found.problems.append(f"{name}: weights differ from one rank's by {worst:.1e}")


def train_ways(kv: Any, device: str) -> tuple[dict[str, Any], list[str]]:
    """Return the weights by way, or what was raised; and what else was wrong on this rank."""
    results: dict[str, Any] = {}
    rank, size = kv.rank(), kv.size()
    for name, way in WAYS.items():
        rows = slice(None) if way.get("same_data") else slice(rank, None, size)
        try:
            results[name] = train(way, device, rows, wrapping(kv, way), is_last=rank == size - 1)
        except Exception as error:
            results[name] = said(error)
            return results, []  # the ranks may not be level any more
    wrong: list[str] = []
    for check in (synchronizes_batch_norm, adds_sparse_gradients, keeps_state_in_place):
        try:
            wrong += check(kv, device)
        except Exception as error:
            return results, [*wrong, f"{check.__name__}: {said(error)}"]
    return results, wrong


def wrapping(kv: Any, way: Way) -> Wrap:
    """Kolovod's optimizer, in this way."""

    def wrap(optimizer: Any, net: Any) -> Any:
        return kv.DistributedOptimizer(
            optimizer,
            net.named_parameters(),
            getattr(kv.Compression, way.get("compression", "none")),
            way.get("passes", 1),
            op=getattr(kv, way.get("op", "Average")),
            shard_state=way.get("shard", False),
        )

    return wrap


def make_net(way: Way, device: str) -> Any:
    """Return the same weights on every rank."""
    import torch
    from torch import nn

    torch.manual_seed(1)
    layers: list[nn.Module]
    if way.get("sparse"):
        layers = [nn.Embedding(50, 16, sparse=True), nn.Flatten(), nn.Linear(16 * 8, 4)]
    else:
        layers = [
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.Flatten(),
            nn.Linear(8 * 64, 32), nn.ReLU(), nn.Linear(32, 4),
        ]  # fmt: skip
    net: Any = nn.Sequential(*layers).to(device)
    return net.to(memory_format=torch.channels_last) if way.get("channels_last") else net


def make_data(way: Way, device: str) -> torch.Tensor:
    """Return all ranks' samples."""
    import torch

    draw = torch.Generator().manual_seed(3)
    if way.get("sparse"):
        return torch.randint(0, 50, (BATCH, 8), generator=draw).to(device)
    data = torch.randn(BATCH, 3, 8, 8, generator=draw).to(device)
    if way.get("channels_last"):
        data = data.contiguous(memory_format=torch.channels_last)
    return data


def make_optimizer(way: Way, net: Any) -> Any:
    """Return PyTorch's own optimizer."""
    import torch

    kind = way.get("optimizer", "sgd")
    if kind == "sgd":
        momentum = 0.0 if way.get("sparse") else 0.9
        return torch.optim.SGD(net.parameters(), lr=0.05, momentum=momentum)
    return torch.optim.Adam(net.parameters(), lr=0.01, fused=kind == "fused")


def train(
    way: Way, device: str, rows: slice, wrap: Wrap, *, is_last: bool = True, steps: int = 5
) -> list[torch.Tensor]:
    """Return the weights after some steps with these rows of the data, in host memory.

    ``is_last``: whether it is this rank whose loss overflows, where one does.
    """
    import torch

    torch.backends.cudnn.allow_tf32 = False  # else other batches would have other roundings
    net, data = make_net(way, device), make_data(way, device)
    optimizer = wrap(make_optimizer(way, net), net)
    scaler = torch.amp.GradScaler(device, init_scale=256.0) if way.get("scaler") else None
    passes = way.get("passes", 1)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=way.get("set_to_none", True))
        for part in range(passes):
            batch = data[rows][part::passes]
            loss = forward(way, net, batch, device).square().mean() / passes
            if scaler is not None and step == 2 and is_last:
                loss = loss * float("inf")
            (loss if scaler is None else scaler.scale(loss)).backward()
        if way.get("clip"):
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return [parameter.detach().cpu() for parameter in net.parameters()]


def forward(way: Way, net: Any, batch: torch.Tensor, device: str) -> Any:
    """Return what the net makes of a batch; half of it on another stream, where the way says so."""
    import torch

    if not way.get("streams") or device != "cuda":
        return net(batch)
    side = cuda().Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        hidden = net[:4](batch)
    torch.cuda.current_stream().wait_stream(side)
    hidden.record_stream(torch.cuda.current_stream())
    return net[4:](hidden)


def synchronizes_batch_norm(kv: Any, device: str) -> list[str]:
    """Statistics are those of all ranks' rows."""
    import torch

    rank, size = kv.rank(), kv.size()
    rows = torch.arange(24.0 * size, device=device).view(6 * size, 4)
    ours = kv.SyncBatchNorm(4).to(device)(rows[rank::size])
    wanted = torch.nn.BatchNorm1d(4).to(device)(rows)[rank::size]
    is_good = torch.allclose(ours, wanted, rtol=1e-4, atol=1e-4)
    return [] if is_good else ["SyncBatchNorm is not BatchNorm1d of all rows"]


def adds_sparse_gradients(kv: Any, device: str) -> list[str]:
    """Check the rows of an embedding that one rank uses, or both."""
    import torch

    layer = torch.nn.Embedding(4, 2, sparse=True).to(device)
    with torch.no_grad():
        layer.weight.zero_()
    plain = torch.optim.SGD(layer.parameters(), lr=1.0)
    optimizer = kv.DistributedOptimizer(plain, layer.named_parameters())
    for _ in range(2):
        optimizer.zero_grad()
        layer(torch.tensor([kv.rank(), 2], device=device)).sum().backward()
        optimizer.step()
    column = layer.weight[:, 0].tolist()
    return [] if column == [-1, -1, -2, 0] else [f"sparse gradients: {column}"]


def keeps_state_in_place(kv: Any, device: str) -> list[str]:
    """``broadcast_optimizer_state`` leaves the state on its device."""
    import torch

    net = torch.nn.Linear(3, 1).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1 * (kv.rank() + 1))
    if kv.rank() == 0:
        net(torch.ones(2, 3, device=device)).sum().backward()
        optimizer.step()
    kv.broadcast_parameters(net.state_dict())
    kv.broadcast_optimizer_state(optimizer)
    states = list(optimizer.state.values())
    wrong = [] if optimizer.param_groups[0]["lr"] == 0.1 else ["the learning rate is not rank 0's"]
    if len(states) != 2 or any(each["exp_avg"].device.type != device for each in states):
        wrong.append(f"broadcast_optimizer_state: {len(states)} states, not 2 on {device}")
    return wrong
