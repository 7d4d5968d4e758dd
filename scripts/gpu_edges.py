"""Gradients after backward, memory that is taken away, ranks that are not alike: GPU check."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gpu_ranks import TICK_CYCLES, Findings, busy, on_ranks

COUNT = 1 << 20
STEPS = 201  # parameters on a GPU are compared in every hundredth


def part_edges(device: str) -> Findings:
    """Staged, two ranks."""
    found = Findings()
    for works in ((final_gradients, told), (memory_in_flight,)):
        labels = [work.__name__.replace("_", " ") for work in works]
        call = (2, each_of, device, works, device)
        by_rank = found.tried(" and ".join(labels), partial(on_ranks, *call, timeout_s=16))
        for rank, results in enumerate(by_rank or ()):
            for label, (figure, wrong) in zip(labels, results, strict=True):
                found.figures[f"{label}, rank {rank}"] = figure
                found.checked(f"{label}, rank {rank}", wrong)
    return found


Outcome = tuple[str, list[str]]
"""A figure, and what is wrong."""


def each_of(kv: Any, works: Sequence[Callable[..., Outcome]], device: str) -> list[Outcome]:
    """Do each of the works, and return what becomes of them, one after the other."""
    return [work(kv, device) for work in works]


def late(device: str) -> None:
    """Let the GPU come late to what follows."""
    if device == "cuda":
        busy(TICK_CYCLES // 20)


# gradients ----------------------------------------------------------------------------------------


def looked_at(parameter: Any) -> Any:
    """Return a copy of the gradient, as a script logs it."""
    return parameter.grad.clone()


def clamped(parameter: Any) -> Any:
    """Clipped by value, by way of ``data``."""
    parameter.grad.data.clamp_(max=1.25)
    return parameter.grad.clone()


def halved(parameter: Any) -> Any:
    """Another tensor takes its place."""
    parameter.grad = parameter.grad * 0.5
    return parameter.grad.clone()


def given_memory(parameter: Any) -> Any:
    """Return the same tensor with other memory."""
    parameter.grad.data = parameter.grad.data * 0.25
    return parameter.grad.clone()


def zeroed(parameter: Any) -> Any:
    """Thrown away."""
    parameter.grad.zero_()
    return parameter.grad.clone()


WANTED: dict[Callable[[Any], Any], float] = {
    looked_at: 1.5, clamped: 1.25, halved: 0.75, given_memory: 0.375, zeroed: 0.0,
}  # fmt: skip
"""What becomes of the average of 1 and 2."""


def final_gradients(kv: Any, device: str) -> Outcome:
    """Gradients are the average when ``backward()`` returns, and what a script makes of them."""
    import torch

    wrong = []
    for change, wanted in WANTED.items():
        weight = torch.nn.Parameter(torch.zeros(COUNT, device=device))
        plain = torch.optim.SGD([weight], lr=1.0)
        optimizer = kv.DistributedOptimizer(plain, [("weight", weight)])
        for turn in range(3):
            optimizer.zero_grad()
            late(device)
            loss: Any = (weight * (kv.rank() + 1.0)).sum()
            loss.backward()
            seen = change(weight)
            optimizer.step()
            if not bool((seen == wanted).all()):
                wrong.append(f"{change.__name__}, turn {turn}: {seen[:3].tolist()}, not {wanted}")
        if not bool((weight == -3 * wanted).all()):
            wrong.append(f"{change.__name__}: weights {weight[:3].tolist()}, not {-3 * wanted}")
    return f"{3 * len(WANTED)} passes", wrong


def told(kv: Any, device: str) -> Outcome:
    """Ranks whose parameters, or learning rates, differ are told so; those that do not are not."""
    texts = {
        label: warnings_of(partial(kept_alike, kv, device, label))
        for label in ("alike", "weights", "rates")
    }
    if kv.rank() != 0:
        return "rank 0 says it", []
    wrong = []
    if texts["alike"]:
        wrong.append(f"ranks that are alike are told: {texts['alike']}")
    for label, word in (("weights", "parameter 'weight'"), ("rates", "option 'lr'")):
        if word not in texts[label]:
            wrong.append(f"{label} that differ: {texts[label] or 'nothing was said'}")
    return " / ".join(texts.values())[:400], wrong


def kept_alike(kv: Any, device: str, label: str) -> None:
    """Train; after the first step rank 1 has something of its own."""
    import torch

    weight = torch.nn.Parameter(torch.zeros(1000, device=device))
    plain = torch.optim.SGD([weight], lr=0.1)
    optimizer = kv.DistributedOptimizer(plain, [("weight", weight)])
    for turn in range(STEPS):
        optimizer.zero_grad()
        loss: Any = weight.sum()
        loss.backward()
        optimizer.step()
        if turn == 0 and kv.rank() == 1:
            if label == "weights":
                weight.data[7] += 1.0
            elif label == "rates":
                optimizer.param_groups[0]["lr"] = 0.2


def warnings_of(work: Callable[[], None]) -> str:
    """Return what is written to stderr meanwhile."""
    with contextlib.redirect_stderr(io.StringIO()) as written:
        work()
    return " ".join(line for line in written.getvalue().splitlines() if "kolovod" in line)


# memory -------------------------------------------------------------------------------------------


def given_data(tensor: Any) -> None:
    """Other memory, by way of ``data``."""
    tensor.data = tensor.data.new_zeros(COUNT)


def resized(tensor: Any) -> None:
    """More memory, at another place."""
    with contextlib.suppress(RuntimeError):  # PyTorch leaves it with the new shape
        tensor.resize_(4 * COUNT)
        return
    tensor.set_(tensor.untyped_storage(), 0, (COUNT,))


def freed(tensor: Any) -> None:
    """No memory."""
    with contextlib.suppress(RuntimeError):
        tensor.untyped_storage().resize_(0)


def dropped(tensor: Any) -> None:
    """Nothing but the operation refers to it."""


CHANGES = (dropped, given_data, resized, freed)
"""The most dangerous last: an access to memory that is not there ends what a process has there."""


def memory_in_flight(kv: Any, device: str) -> Outcome:
    """A tensor loses its memory while an operation is on its way: its values, or an error."""
    import torch

    from kolovod.errors import KolovodError

    verbs: dict[str, Any] = {
        "allreduce_async_": lambda x, name: kv.allreduce_async_(x, name, kv.Sum),
        "allreduce_async": lambda x, name: kv.allreduce_async(x, name, kv.Sum),
        "broadcast_async_": lambda x, name: kv.broadcast_async_(x, 1, name),
        "allgather_async": lambda x, name: kv.allgather_async(x, name),
    }
    wrong: list[str] = []
    errors: set[str] = set()
    for change in CHANGES:
        for verb, start in verbs.items():
            label = f"{verb}, {change.__name__}"
            x: Any = torch.full((COUNT,), kv.rank() + 1.0, device=device)
            kv.barrier()
            late(device)
            handle = start(x, label)
            if kv.rank() == 0:
                change(x)
            del x
            poison = torch.full((4 * COUNT,), 9.0, device=device)
            try:
                seen = handle.wait().unique().tolist()
            except KolovodError as error:
                errors.add(f"{change.__name__}: {str(error)[:160]}")
                seen = None
            wanted = {"broadcast_async_": [2.0], "allgather_async": [1.0, 2.0]}.get(verb, [3.0])
            if seen is not None and seen != wanted:
                wrong.append(f"{label}: {seen}, not {wanted}")
            if not bool((poison == 9).all()):
                wrong.append(f"{label}: memory of another tensor was written")
    return f"{len(CHANGES) * len(verbs)} changes; errors: {sorted(errors)}", wrong
