"""What users do besides: elastic jobs, other front ends, and who has no CUDA context: GPU check."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_ranks import KEPT_TEXT, Findings, cuda, patience

JOB_LIMIT_S = 27
CODE_LIMIT_S = 17
STEPS = 60
ELASTIC = """
import os, signal, sys, torch
import kolovod.torch as kv
from kolovod import elastic
kv.init()
device, been = sys.argv[1:]
if device == "cuda":
    torch.cuda.set_device(0)
torch.manual_seed(1)
net = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.Linear(1024, 8)).to(device)
optimizer = kv.DistributedOptimizer(torch.optim.Adam(net.parameters()), net.named_parameters())
state = elastic.State(model=net, optimizer=optimizer, step=0)

@elastic.run
def train(state):
    while state.step < 60:
        optimizer.zero_grad()
        net(torch.randn(32, 256, device=device)).square().mean().backward()
        if state.step == 20 and kv.rank() == 1 and not os.path.exists(been):
            open(been, "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        state.step += 1
        state.commit()

train(state)
every = kv.allgather(net[0].weight.detach()[None].contiguous())
is_alike = all(torch.equal(every[0], each) for each in every)
print("DONE", state.step, kv.size(), is_alike, flush=True)
"""


def part_elastic(device: str) -> Findings:
    """A rank of three is killed in backward: all steps are done, and all have the same weights."""
    found = Findings()
    with tempfile.TemporaryDirectory() as temporary:
        job, been = Path(temporary) / "job.py", Path(temporary) / "been"
        job.write_text(ELASTIC)
        command = [sys.executable, "-m", "kolovod", "run", "--elastic", "-np", "3", "--",
                   sys.executable, str(job), device, str(been)]  # fmt: skip
        start = time.perf_counter()
        done = found.tried("the job", lambda: said_by(command, JOB_LIMIT_S * patience(device)))
        seconds = round(time.perf_counter() - start, 1)
        was_killed = been.exists()
    if done is None:
        return found
    code, text = done
    ends = [line.split("DONE ")[1] for line in text.splitlines() if "DONE " in line]
    found.figures = {"seconds": seconds, "ends": ends}
    if code != 0 or not was_killed:
        found.problems.append(f"ended with {code}, killed: {was_killed}: {text[-KEPT_TEXT:]}")
    if not ends or any(end.split()[::2] != [str(STEPS), "True"] for end in ends):
        found.problems.append(f"steps, ranks, weights alike: {ends}, not {STEPS} ... True")
    return found


def said_by(command: list[str], limit_s: float) -> tuple[int, str]:
    """Return exit code and output. Raises subprocess.TimeoutExpired."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit_s
    )
    return done.returncode, done.stdout


GROUP = (
    "import socket, torch, torch.distributed as dist; s = socket.create_server(('127.0.0.1', 0)); "
    "port = s.getsockname()[1]; s.close(); dist.init_process_group('kolovod', "
    "init_method=f'tcp://127.0.0.1:{port}', rank=0, world_size=1); "
)
CODES = {
    "jax, eager": (
        "import jax, jax.numpy as jnp, kolovod.jax as kv; kv.init(); "
        "print('GOT', kv.allreduce(jnp.ones(3)).tolist())"
    ),
    "jax, in jit": (
        "import jax, jax.numpy as jnp, kolovod.jax as kv; kv.init(); "
        "print('GOT', jax.jit(lambda x: kv.allreduce(x))(jnp.ones(3)).tolist())"
    ),
    "torch.distributed": (
        f"{GROUP}x = torch.ones(3, device=DEVICE); dist.all_reduce(x); print('GOT', x.tolist())"
    ),
    "DDP": (
        f"{GROUP}net = torch.nn.Linear(3, 1, bias=False).to(DEVICE); "
        "model = torch.nn.parallel.DistributedDataParallel(net); "
        "model(torch.ones(2, 3, device=DEVICE)).sum().backward(); "
        "print('GOT', (net.weight.grad[0] / 2).tolist())"
    ),
    "float8": (
        "import torch, kolovod.torch as kv; kv.init(); x = torch.ones(3, device=DEVICE); "
        "print('GOT', kv.broadcast(x.to(torch.float8_e4m3fn), 0).float().tolist())"
    ),
    "complex64": (
        "import torch, kolovod.torch as kv; kv.init(); "
        "x = torch.ones(3, device=DEVICE, dtype=torch.complex64); "
        "print('GOT', kv.allreduce(x).real.tolist())"
    ),
}
"""Each prints three ones: GOT [1.0, 1.0, 1.0]. Or it ends with an error that says why not."""


def part_front_ends(device: str) -> Findings:
    """What arrays on the GPU come to in other front ends: the right values, or an error's text."""
    found = Findings()
    with ThreadPoolExecutor(len(CODES) if device == "cuda" else 1) as pool:
        answers = pool.map(lambda code: outcome(code, device), CODES.values())
        for label, (is_good, text) in zip(CODES, answers, strict=True):
            found.figures[label] = text
            if not is_good:
                found.problems.append(f"{label}: {text}")
    return found


def outcome(code: str, device: str) -> tuple[bool, str]:
    """Return whether values are right, or a Kolovod error says why there are none; and which."""
    variables = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"DEVICE = {device!r}\n{code}"],
            env=variables, capture_output=True, text=True, timeout=CODE_LIMIT_S * patience(device),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False, f"no end after {CODE_LIMIT_S * patience(device)} s"
    if done.returncode == 0:
        values = [line for line in done.stdout.splitlines() if line.startswith("GOT ")]
        return values == ["GOT [1.0, 1.0, 1.0]"], ", ".join(values) or "no values"
    lines = [line for line in done.stderr.splitlines() if line.strip()] or [""]
    errors = [line for line in lines if line.startswith("kolovod.errors.")]
    is_told = bool(errors) and done.returncode == 1
    return is_told, (errors or lines)[-1][-KEPT_TEXT:]


def part_context(device: str) -> Findings:
    """No CUDA context before a tensor is on a GPU: by import, ``init``, verbs, an optimizer."""
    from kolovod.testing import run_ranks

    found = Findings()
    by_rank = found.tried(
        "two ranks", lambda: run_ranks(2, begins, device, timeout_s=20 * patience(device))
    )
    for rank, wrong in enumerate(by_rank or ()):
        found.figures[f"rank {rank}"] = "none before the user's" if not wrong else "wrong"
        found.checked(f"rank {rank}", wrong)
    return found


def begins(rank: int, device: str) -> list[str]:
    """Work in host memory; then Horovod's verbs on the device."""
    import torch

    import horovod.torch as hvd
    import kolovod.torch as kv

    wrong: list[str] = []

    def look(when: str) -> None:
        if cuda().is_initialized():
            wrong.append(f"a CUDA context after {when}")

    look("import")
    kv.init()
    look("init")
    x = torch.full((3,), float(rank), requires_grad=True)
    total: Any = kv.allreduce(x)
    total.sum().backward()
    kv.allreduce_(torch.ones(4, 4)[:, ::2], op=kv.Sum)
    kv.allgather_async(torch.ones(rank)).wait()
    kv.alltoall(torch.ones(2))
    kv.reducescatter(torch.ones(2))
    look("verbs")
    net = torch.nn.Linear(3, 1)
    plain = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer = kv.DistributedOptimizer(plain, net.named_parameters())
    kv.broadcast_parameters(net.state_dict())
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    kv.broadcast_optimizer_state(optimizer)
    kv.join()
    look("an optimizer")
    return [*wrong, *horovods(hvd, torch, device)]


def horovods(hvd: Any, torch: Any, device: str) -> list[str]:
    """``alltoall`` has its splits where they were given; ``join(device)``, ``cuda_built``."""
    if device == "cuda":
        torch.cuda.set_device(0)
    x, splits = torch.ones(2, device=device), torch.tensor([1, 1], device=device)
    result, received = hvd.alltoall(x, splits=splits)
    places = [each.device.type for each in (result, received)]
    wrong = [] if places == [device] * 2 else [f"alltoall: results on {places}"]
    if (place := hvd.alltoall(x, splits=splits.cpu())[1].device.type) != "cpu":
        wrong.append(f"alltoall with splits in host memory has them on {place}")
    if device == "cuda" and not hvd.cuda_built():
        wrong.append("cuda_built() is False")
    if (last := hvd.join(device=0) if device == "cuda" else hvd.join()) not in (0, 1):
        wrong.append(f"join: {last}")
    hvd.shutdown()
    return wrong
