"""Tensors on a GPU: training steps beside plain PyTorch, and verbs: ``python bench/gpu.py``.

Each way of running is a gang of processes of its own. Where it communicates, the same model trains
without Kolovod in the same processes, in turns; what Kolovod costs is the difference of the
medians. Several ranks share the one GPU. Writes bench/results/gpu.md.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import machine
import report
import torch
from report import number, quantile, table
from torch import nn

from kolovod.testing import RankFailed, run_ranks

WAYS = (
    ("staged, 1 rank", 1, "native"),
    ("staged, 2 ranks share the GPU", 2, "native"),
    ("NCCL, 1 rank", 1, "nccl"),
)
SIZES = {"4 B": 1, "64 KiB": 1 << 14, "1 MiB": 1 << 18, "64 MiB": 1 << 24}  # float32 elements
MODELS = ("transformer", "small")
ROUND_STEPS = 10


def make_model(name: str) -> nn.Module:
    """``transformer``: 25 M parameters; ``small``: 500 tensors of 4 KiB."""
    if name == "transformer":
        layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
    return nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(500)))


def make_step(name: str, is_wrapped: bool) -> Callable[[], None]:
    """One training step, with Kolovod's optimizer or PyTorch's."""
    import kolovod.torch as kv

    torch.manual_seed(1)
    model = make_model(name).cuda()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if is_wrapped:
        optimizer = kv.DistributedOptimizer(optimizer, model.named_parameters())
    shape = (16, 128, 512) if name == "transformer" else (64, 32)
    inputs = torch.randn(shape, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step


def timed(work: Callable[[], Any], times: int) -> float:
    """Milliseconds for one of ``times`` calls, until the GPU has done them."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3 / times


def measure(rank: int, rounds: int) -> dict[str, Any]:
    """What one rank finds: medians in ms, by model and by verb."""
    import kolovod.torch as kv

    kv.init()
    torch.cuda.set_device(0)
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "steps": {}, "verbs": {}}
    for name in MODELS:
        ways = {False: make_step(name, False), True: make_step(name, True)}
        samples: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(rounds + 1):
            for is_wrapped, step in ways.items():
                kv.barrier()
                taken = timed(step, ROUND_STEPS)
                if turn > 0:  # the first one warms up
                    samples[is_wrapped].append(taken)
        found["steps"][name] = [quantile(samples[way], 0.5) for way in (False, True)]
    for label, count in SIZES.items():
        medians = []
        for device in ("cpu", "cuda"):
            values = torch.ones(count, device=device)
            times = 200 if count < 1 << 18 else 20
            work = partial(kv.allreduce_, values, f"{device}.{label}")
            rounds_taken = [timed(work, times) for _ in range(rounds + 1)]
            medians.append(quantile(rounds_taken[1:], 0.5))
        found["verbs"][label] = medians
    kv.shutdown()
    return found


def page(results: dict[str, list[dict[str, Any]] | str], rounds: int) -> str:
    """The figures as Markdown."""
    steps, verbs, failures, gpus = [], [], [], set()
    for way, found in results.items():
        if isinstance(found, str):
            failures.append(f"{way} failed: {found}")
            continue
        gpus.add(found[0]["gpu"])
        for name in MODELS:
            plain, ours = (max(r["steps"][name][i] for r in found) for i in (0, 1))
            cost = f"{(ours / plain - 1) * 100:+.1f}%"
            steps.append([name, way, number(plain), number(ours), cost])
        for label in SIZES:
            cpu, gpu = (max(r["verbs"][label][i] for r in found) for i in (0, 1))
            verbs.append([label, way, number(cpu * 1e3), number(gpu * 1e3)])
    lines = [
        "# Tensors on a GPU",
        f"`{machine.command_line()}`, {datetime.date.today().isoformat()}, "
        f"{', '.join(sorted(gpus)) or 'no figures'}, {machine.cores()} cores, PyTorch "
        f"{torch.__version__}. Medians of {rounds} rounds, of the slower rank.",
        "A training step, in ms. With one rank there is nobody to communicate with.",
        table(["model", "way", "plain PyTorch", "Kolovod", "cost"], steps),
        "A blocking allreduce in place, in us.",
        table(["size", "way", "host memory", "GPU"], verbs),
        *failures,
    ]
    return "\n\n".join(lines) + "\n"


def main() -> int:
    """Run all ways; the exit status says whether all could be measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    rounds = parser.parse_args().rounds
    if not torch.cuda.is_available():
        print(
            f"bench/gpu.py: there is no GPU here that PyTorch {torch.__version__} can use; run "
            "'bash scripts/gpu_check.sh' on a machine with one",
            file=sys.stderr,
        )
        return 1
    results: dict[str, list[dict[str, Any]] | str] = {}
    for way, ranks, backend in WAYS:
        print(f"{way} ...", flush=True)
        env = {"KOLOVOD_BACKEND": backend}
        try:
            results[way] = run_ranks(ranks, measure, rounds, env=env, timeout_s=400)
        except RankFailed as error:
            results[way] = str(error).strip().splitlines()[-1]
    text = page(results, rounds)
    print(text)
    (report.RESULTS / "gpu.md").write_text(text)
    return int(any(isinstance(found, str) for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
