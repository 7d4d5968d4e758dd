"""That verbs keep to streams, and memory to its owner, on two ranks that share a GPU: GPU check.

Streams are kept busy so that whoever does not wait, or waits for the wrong one, has wrong values.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

from gpu_ranks import TICK_CYCLES, Findings, busy, cuda, on_ranks, said

ROUNDS = 250


def part_streams(device: str) -> Findings:
    """Chosen cases, then producers and consumers on streams drawn at random."""
    found = Findings()
    for label, work in (("chosen", chosen_cases), ("drawn", drawn_cases)):
        by_rank = found.tried(label, partial(on_ranks, 2, work, device, timeout_s=26))
        for rank, each in enumerate(by_rank or ()):
            found.figures[f"{label}, rank {rank}"] = {"checked": each["checked"]}
            found.checked(f"{label}, rank {rank}", each["wrong"])
    return found


CASES = (
    "comes_after_its_producer", "waits_for_its_own_stream_only", "keeps_pinned_memory",
    "keeps_results", "hooks_do_not_wait",
)  # fmt: skip


def chosen_cases(kv: Any) -> dict[str, Any]:
    """One rank's part of each case, to the first one that raises: the ranks differ then."""
    wrong: list[str] = []
    checked = 0
    for name in CASES:
        checked += 1
        try:
            texts = globals()[name](kv)
        except Exception as error:
            wrong.append(f"{name}: {said(error)}")
            break
        wrong += [f"{name}: {text}" for text in texts]
    return {"checked": checked, "wrong": wrong}


def comes_after_its_producer(kv: Any) -> list[str]:
    """A verb takes what its stream comes to late, and its consumer's stream comes after it."""
    import torch

    producer, consumer = cuda().Stream(), cuda().Stream()
    x = torch.zeros(1 << 20, device="cuda")
    cuda().synchronize()
    with cuda().stream(producer):
        busy(TICK_CYCLES)
        x.fill_(kv.rank() + 1.0)
        handle = kv.allreduce_async(x, "fresh", kv.Sum)
        kv.allreduce_(x, "in place", kv.Sum)
    with cuda().stream(consumer):
        is_fresh = bool((handle.wait() == 3).all())
    with cuda().stream(producer):
        is_in_place = bool((x == 3).all())
    wrong = [] if is_fresh else ["the asynchronous verb's result is not the sum"]
    return wrong if is_in_place else [*wrong, "the result in place is not the sum"]


def waits_for_its_own_stream_only(kv: Any) -> list[str]:
    """Another stream's work is not over when a verb returns."""
    import torch

    other, side = cuda().Stream(), cuda().Stream()
    x = torch.ones(8, device="cuda")
    cuda().synchronize()
    with cuda().stream(other):
        busy(4 * TICK_CYCLES)
        over = cuda().Event()
        over.record()
    with cuda().stream(side):
        values = kv.allreduce(x, op=kv.Sum).tolist()
    wrong = ["it has waited for a stream that is not its own"] if over.query() else []
    return wrong if values == [2.0] * 8 else [*wrong, f"{values}, not 2"]


def keeps_pinned_memory(kv: Any) -> list[str]:
    """Many results are brought back while the stream is busy, from memory that has been let go."""
    import torch

    tensors = [torch.full((1 << 16,), float(i), device="cuda") for i in range(64)]
    stream = cuda().Stream()
    cuda().synchronize()
    handles = [kv.allreduce_async(tensor, f"t{i}", kv.Sum) for i, tensor in enumerate(tensors)]
    with cuda().stream(stream):
        busy(TICK_CYCLES)
        results = [handle.wait() for handle in handles]
    stream.synchronize()
    return [f"result {i}" for i, each in enumerate(results) if not (each == 2.0 * i).all()]


def keeps_results(kv: Any) -> list[str]:
    """A result whose consumer comes late is not given to others before, when it is let go."""
    import torch

    wrong, count = [], 1 << 20
    for turn in range(12):
        values = [1000.0 * turn + 10 * i for i in range(4)]
        inputs = [torch.full((count,), each + kv.rank(), device="cuda") for each in values]
        handles = [kv.allgather_async(x, f"{turn}.{i}") for i, x in enumerate(inputs)]
        seen = []
        for handle in handles:
            result = handle.wait()
            busy(TICK_CYCLES // 25)  # the consumer comes late
            rows = result.view(2, count)
            seen.append(torch.stack([rows.amin(1), rows.amax(1)]))
            del result, rows  # and its memory may be handed out again at once
        for value, each in zip(values, seen, strict=True):
            if each.tolist() != [[value, value + 1]] * 2:
                wrong.append(f"turn {turn}: {each.tolist()}, not {[value, value + 1]}")
    return wrong


def hooks_do_not_wait(kv: Any) -> list[str]:
    """The optimizer's hooks return while the GPU still computes; ``backward`` waits at its end."""
    import torch

    class Slow(torch.autograd.Function):
        """The identity, whose backward keeps the GPU busy."""

        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            busy(TICK_CYCLES)
            return gradients[0]

    net = torch.nn.Linear(512, 512).cuda()
    plain = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = kv.DistributedOptimizer(plain, net.named_parameters())
    were_over = []

    def after_the_optimizers(parameter: Any) -> None:
        now = cuda().Event()
        now.record()
        were_over.append(now.query())

    for parameter in net.parameters():
        register: Any = parameter.register_post_accumulate_grad_hook
        register(after_the_optimizers)
    x = torch.ones(4, 512, device="cuda")
    wrong = []
    for turn in range(3):
        optimizer.zero_grad()
        were_over.clear()
        loss = Slow.apply(net(x)).sum()  # type: ignore[no-untyped-call]
        cuda().synchronize()
        loss.backward()
        seen: Any = net.weight.grad
        if len(were_over) != 2 or (turn and any(were_over)):
            wrong.append(f"backward {turn}: hooks have returned after the GPU was done")
        if not (seen == 4).all():
            wrong.append(f"backward {turn}: {seen.flatten()[:3].tolist()}, not 4")
        optimizer.step()
    return wrong


def drawn_cases(kv: Any) -> dict[str, Any]:
    """Producers and consumers on streams drawn at random; memory is poisoned and freed early.

    All ranks draw sizes, streams and ways alike, and each its own delays.
    """
    import torch

    plan, mine = random.Random(7), random.Random(1000 + kv.rank())
    streams = [cuda().current_stream(), cuda().Stream(), cuda().Stream()]
    checks: list[tuple[int, Any]] = []
    pending: list[tuple[Any, ...]] = []

    def finish(turn: int, handle: Any, consumer: Any, tensor: Any, is_in_place: bool) -> None:
        with cuda().stream(consumer):
            result = handle.wait()
            if is_in_place:
                tensor.record_stream(consumer)
            busy(mine.randrange(1, 2_000_000))
            checks.append((turn, (result == 2.0 * turn + 1).all()))

    for turn in range(ROUNDS):
        count = plan.choice([1, 257, 1 << 14, 1 << 20])
        producer, consumer = plan.choice(streams), plan.choice(streams)
        is_in_place, is_overwritten = plan.random() < 0.5, plan.random() < 0.5
        with cuda().stream(producer):
            x = torch.full((count,), float("nan"), device="cuda")
            busy(mine.randrange(1, 4_000_000))
            x.fill_(turn + kv.rank())
            start = kv.allreduce_async_ if is_in_place else kv.allreduce_async
            handle = start(x, f"t{turn}", kv.Sum)
            if is_overwritten and not is_in_place:
                x.fill_(float("nan"))  # the copy has been taken
        pending.append((turn, handle, consumer, x, is_in_place))
        del x
        while len(pending) > plan.randrange(0, 5):
            finish(*pending.pop(0))
        with cuda().stream(producer):
            torch.full((count,), float("nan"), device="cuda")  # who has freed memory writes to it
    while pending:
        finish(*pending.pop(0))
    wrong = [f"turn {turn}" for turn, is_good in checks if not is_good.item()]
    return {"checked": len(checks), "wrong": wrong}
