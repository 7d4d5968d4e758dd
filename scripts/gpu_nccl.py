"""NCCL under Kolovod on a real GPU, with one rank and with several that share it: GPU check."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from typing import Any

from gpu_ranks import (
    TICK_CYCLES,
    Findings,
    busy,
    cuda,
    hosts_apart,
    on_ranks,
    said,
    share_the_gpu,
)
from gpu_streams import keeps_results
from gpu_training import TOLERANCE, train
from gpu_verbs import BRIEF, FULL, compare

NCCL = {"KOLOVOD_BACKEND": "nccl"}


# one rank -----------------------------------------------------------------------------------------


def part_nccl(device: str) -> Findings:
    """One rank, as on a machine with a GPU for each; and what two with one GPU are told."""
    found = Findings()
    compare(found, "verbs", 1, device, False, FULL, "nccl", timeout_s=18)
    one = found.tried(
        "one rank", lambda: on_ranks(1, over_nccl, device, device, backend="nccl", timeout_s=18)
    )
    if one is not None:
        weights, wrong = one[0]
        found.checked("one rank", wrong)
        wanted = train({}, device, slice(None), lambda optimizer, net: optimizer)
        worst = max((a - b).abs().max().item() for a, b in zip(weights, wanted, strict=True))
        found.figures["training"] = f"{worst:.1e} from plain PyTorch"
        if not worst < TOLERANCE:
            found.problems.append(f"training differs from plain PyTorch's by {worst:.1e}")
    found.tried("two ranks, one GPU", lambda: refused(found))
    return found


def over_nccl(kv: Any, device: str) -> tuple[list[Any], list[str]]:
    """Streams, Adasum, the optimizer, and a second world, in a world of one."""
    import torch

    from kolovod.gradients.spec import ReduceSpec

    x = torch.zeros(1 << 20, device=device)
    side = cuda().Stream()
    torch.cuda.synchronize()
    wrong = []
    with torch.cuda.stream(side):
        busy(TICK_CYCLES)
        x.fill_(5.0)
        kv.allreduce_(x, op=kv.Sum)
        if not (x == 5).all():
            wrong.append("a verb has not waited for its stream")
    ones = torch.ones(3, device=device)
    if (total := kv.allreduce(ones, op=kv.Adasum).tolist()) != [1, 1, 1]:
        wrong.append(f"Adasum: {total}")
    if (last := kv.join()) != 0:
        wrong.append(f"join: {last}")
    # In a world of one it sends nothing by itself.
    vars_of_spec: Any = ReduceSpec
    vars_of_spec.has_others = lambda self, world, *, without_world: True

    def wrap(optimizer: Any, net: Any) -> Any:
        return kv.DistributedOptimizer(optimizer, net.named_parameters())

    weights = train({}, device, slice(None), wrap)
    kv.shutdown()
    kv.init()
    if (total := kv.allreduce(ones, op=kv.Sum).tolist()) != [1, 1, 1]:
        wrong.append(f"in a second world: {total}")
    return weights, wrong


def refused(found: Findings) -> None:
    """Check that two ranks that have one GPU are told so, and the way out."""
    from kolovod.testing import run_ranks

    for rank, text in enumerate(run_ranks(2, shares, env=NCCL, timeout_s=18)):
        found.figures[f"two ranks, one GPU: rank {rank} is told"] = text
        if "GPU" not in text or "leave KOLOVOD_BACKEND unset" not in text:
            found.problems.append(f"rank {rank} of two with one GPU is told: {text}")


def shares(rank: int) -> str:
    """Return what a rank that shares its GPU is told."""
    import torch

    import kolovod.torch as kv

    try:
        kv.init()
        kv.allreduce(torch.ones(2, device="cuda:0"))
    except Exception as error:
        return str(error)
    return "nothing"


# several ranks ------------------------------------------------------------------------------------

PLAIN_LIMIT_S = 12
PLAIN = """
import os, sys, time, torch, torch.distributed as dist
rank, port = map(int, sys.argv[1:])
torch.cuda.set_device(0)
start = time.perf_counter()
dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
x = torch.full((1000,), rank + 1.0, device="cuda")
dist.all_reduce(x)
assert (x == 3).all(), x
torch.cuda.synchronize()
first = time.perf_counter() - start
start = time.perf_counter()
for _ in range(20):
    dist.all_reduce(x)
torch.cuda.synchronize()
print(f"RANK {first:.2f} {(time.perf_counter() - start) * 50:.3f}", flush=True)
os._exit(0)
"""


def part_nccl_shared(device: str) -> Findings:
    """Whether NCCL itself takes two ranks of one GPU; then every verb of ours on them."""
    found = Findings()
    for label, apart in (("the same host", False), ("NCCL_HOSTID of each rank", True)):
        found.figures[label] = plain_nccl(apart)
    if not found.figures["NCCL_HOSTID of each rank"].startswith("accepted"):
        found.problems.append("NCCL refuses two ranks on one GPU, so ours were not tried on it")
        return found
    found.noted(
        "ours, by rank",
        lambda: on_ranks(2, connects, device, backend="nccl", timeout_s=18),
    )
    compare(found, "verbs", 2, device, False, BRIEF, "nccl", timeout_s=28)
    return found


def plain_nccl(is_apart: bool) -> str:
    """Return what plain PyTorch over NCCL says of two ranks on one GPU."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PLAIN, str(rank), str(port)],
            env={**os.environ, **(hosts_apart(rank) if is_apart else {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    deadline = time.monotonic() + PLAIN_LIMIT_S
    texts = []
    for process in ranks:
        try:
            texts.append(process.communicate(timeout=max(0.1, deadline - time.monotonic()))[0])
        except subprocess.TimeoutExpired:
            for rank in ranks:
                rank.kill()
            texts.append(f"no end after {PLAIN_LIMIT_S} s")
    lines = [line for text in texts for line in text.splitlines() if line.startswith("RANK ")]
    if len(lines) == 2:
        _, first, each = lines[0].split()
        return f"accepted: {first} s to connect, {each} ms for an allreduce of 4 KB"
    told = [line for text in texts for line in text.splitlines() if line.strip()]
    named = [line for line in told if "Duplicate GPU" in line or "Error" in line] or told[-1:]
    return f"refused: {named[-1].strip()[-300:] if named else 'without a word'}"


def connects(kv: Any) -> dict[str, Any]:
    """Return how long the first operation takes, a later one; if NCCL can be asked for errors."""
    import torch

    from kolovod.backends import nccl_errors

    asked = "cannot be asked for"
    of_group = nccl_errors.of_group

    def asking(group: Any) -> Any:
        nonlocal asked
        errors = of_group(group)
        asked = asked if errors is None else errors.found() or "asked for: none"
        return errors

    vars(nccl_errors)["of_group"] = asking
    x = torch.full((1000,), kv.rank() + 1.0, device="cuda")
    start = time.perf_counter()
    total = kv.allreduce(x, op=kv.Sum)
    if not (total == 3).all():
        raise AssertionError(f"{total[:3].tolist()}, not 3")
    first = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(20):
        kv.allreduce_(x, op=kv.Max)
    each = (time.perf_counter() - start) * 50
    return {"connect_s": round(first, 2), "allreduce_ms": round(each, 2), "errors": asked}


# faults -------------------------------------------------------------------------------------------


def part_nccl_faults(device: str) -> Findings:
    """Results used late, sets that overlap, a shutdown at once, a rank that is killed."""
    found = Findings()
    for label, ranks, work in (
        ("results that are used late", 2, late_results),
        ("sets that overlap", 3, overlapping_sets),
    ):
        by_rank = found.tried(
            label, partial(on_ranks, ranks, work, device, backend="nccl", timeout_s=18)
        )
        for rank, wrong in enumerate(by_rank or ()):
            found.figures[f"{label}, rank {rank}"] = f"{len(wrong)} wrong"
            found.checked(f"{label}, rank {rank}", wrong)
    from kolovod.testing import RankFailed, run_ranks

    found.tried("shutdown at once", lambda: run_ranks(2, leaves_early, env=NCCL, timeout_s=18))
    by_rank = found.tried(
        "a rank is killed",
        lambda: run_ranks(2, survives, env=NCCL, timeout_s=18, keep_going=True),
    )
    if by_rank is not None:
        survivor = by_rank[0]
        if isinstance(survivor, RankFailed):
            found.problems.append(f"a rank is killed: {said(survivor)}")
        else:
            found.figures["a rank is killed"] = survivor
            if survivor["named"] != 1:
                found.problems.append(f"the lost rank is named {survivor['named']}, not 1")
            if not survivor["gpu_works"]:
                found.problems.append("the GPU gives wrong sums after a rank is lost")
    return found


def late_results(kv: Any) -> list[str]:
    """See gpu_streams.keeps_results."""
    return keeps_results(kv)


def overlapping_sets(kv: Any) -> list[str]:
    """Three ranks, and a set of two: each rank uses the two communicators in another order."""
    import torch

    rank = kv.rank()
    pair = kv.add_process_set([0, 1])
    kv.allreduce(torch.ones(1, device="cuda"))
    if rank < 2:
        kv.allreduce(torch.ones(1, device="cuda"), process_set=pair)
    wrong: list[str] = []

    def many(process_set: Any, label: str, wanted: float) -> None:
        try:
            for i in range(15):
                x = torch.full((1 << 16,), 1.0 + rank, device="cuda")
                total = kv.allreduce(x, f"{label}{i}", kv.Sum, process_set=process_set)
                if not (total == wanted).all():
                    wrong.append(f"{label} {i}: {total[:3].tolist()}, not {wanted}")
        except Exception as error:  # else this thread would end without a word
            wrong.append(f"{label}: {said(error)}")

    threads = [threading.Thread(target=many, args=(None, "world", 6.0))]
    if rank < 2:
        threads.insert(rank, threading.Thread(target=many, args=(pair, "pair", 3.0)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def leaves_early(rank: int) -> None:
    """Leave as soon as the result is here: the other rank must have its own."""
    share_the_gpu(rank)
    import torch

    import kolovod.torch as kv

    for turn in range(3):
        kv.init()
        torch.cuda.set_device(0)
        x = torch.full((1 << 24,), 1.0 + rank, device="cuda")
        kv.broadcast_(x, 0)
        kv.shutdown()
        if not (x == 1).all():
            raise AssertionError(f"turn {turn}: the root's values did not all come")


def survives(rank: int) -> dict[str, Any]:
    """Rank 1 is killed while an operation is on its way; rank 0 names it, and forms a new world."""
    share_the_gpu(rank)
    import torch

    import kolovod.torch as kv
    from kolovod.errors import RankLostError

    kv.init()
    torch.cuda.set_device(0)
    x = torch.ones(1 << 22, device="cuda")
    kv.allreduce_(x)
    if rank == 1:
        kv.allreduce_async(x, "last")
        time.sleep(0.02)  # so that it is on its way, perhaps
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.perf_counter()
    named = None
    try:
        for i in range(1000):
            kv.allreduce_(x, f"more {i}" if i else "last")
    except RankLostError as error:
        named = error.rank
    after_s = time.perf_counter() - start
    kv.shutdown()
    start = time.perf_counter()
    kv.init(comm=[0])
    total = kv.allreduce(torch.ones(3, device="cuda"), op=kv.Sum).tolist()
    if total != [1, 1, 1]:
        raise AssertionError(f"in the next world the sum is {total}")
    works = torch.ones(1 << 20, device="cuda").sum().item() == 1 << 20
    kv.shutdown()
    next_s = time.perf_counter() - start
    return {
        "named": named,
        "after_s": round(after_s, 2),
        "next_world_s": round(next_s, 2),
        "gpu_works": works,
    }
