"""An exception on one rank while gradients are on their way: who hears what, and that all end."""

from __future__ import annotations

import re

import pytest
from frameworks import is_installed
from torch_launching import KOLOVOD, TORCHRUN, start

pytestmark = pytest.mark.skipif(not is_installed("torch"), reason="PyTorch is not installed")

COMMON = """
import os, signal, sys, threading
import torch

how, rank = sys.argv[1], int(os.environ["RANK"])
torch.manual_seed(0)
if rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # to hear of it

def fault(*_):
    if how == "raises" and rank == 1:
        raise ValueError("loss is nan\\nat step 17")

def train(step):
    try:
        step()
        print("trained", flush=True)
    except RuntimeError as error:
        print("told", type(error).__name__, getattr(error, "rank", None), error, flush=True)
        raise

def layers(count):
    return torch.nn.Sequential(*[torch.nn.Linear(300, 300) for _ in range(count)])
"""

# PyTorch does what is nested more than 60 deep in threads of autograd's own, which then stay.
OPTIMIZER = f"""{COMMON}
import kolovod.torch as kt

class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, depth):
        ctx.depth = depth
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.depth == 0:
            print("in a thread of autograd:", threading.current_thread().name, flush=True)
            fault()
            return grad, None
        with torch.enable_grad():
            y = torch.ones(3, requires_grad=True)
            Nested.apply(y, ctx.depth - 1).sum().backward()
        return grad, None

kt.init()
model = layers(8)
optimizer = kt.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
)

def step():
    middle = Nested.apply(model[:4](torch.ones(4, 300)), 70)
    model[4:](middle).sum().backward()
    optimizer.step()

train(step)
"""

DDP = f"""{COMMON}
import torch.distributed as dist

dist.init_process_group("kolovod")
model = torch.nn.parallel.DistributedDataParallel(layers(8), bucket_cap_mb=0.3)
model.module[3].register_full_backward_hook(fault)
train(lambda: model(torch.ones(4, 300, requires_grad=True)).sum().backward())
if how == "trains":
    dist.destroy_process_group()
"""


def check_raised(
    done, told=r"told InterruptedByRankError 1 rank 1 on host \S+ \(pid \d+\) aborted: "
):
    assert done.returncode == 1
    assert re.search(told + "ValueError: loss is nan[;\n]", done.stdout), done.stdout
    assert "ValueError: loss is nan\n" in done.stderr
    assert "nanobind" not in done.stderr
    assert "terminate called" not in done.stderr


@pytest.mark.slow
def test_the_optimizers_gradients_are_on_their_way_and_a_thread_of_autograd_lives(tmp_path):
    done = start(KOLOVOD, OPTIMIZER, tmp_path, "raises")
    assert done.stdout.count("in a thread of autograd: Dummy") == 2
    check_raised(done)
    assert re.search(r"the first to fail was rank 1 \(pid \d+\)", done.stderr)
    assert done.stderr.rstrip().endswith("ValueError: loss is nan\n  at step 17")


@pytest.mark.slow
def test_the_same_without_an_exception(tmp_path):
    done = start(KOLOVOD, OPTIMIZER, tmp_path, "trains")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("trained") == 2


@pytest.mark.slow
@pytest.mark.parametrize("by", ["ours", "torchrun"])
def test_gradients_of_ddp_are_on_their_way(by, tmp_path):
    done = start(KOLOVOD if by == "ours" else TORCHRUN, DDP, tmp_path, "raises")
    # c10d makes an error of its own of it.
    check_raised(done, r"told \w+ \w+ (?s:.){0,200}rank 1 on host \S+ \(pid \d+\) aborted: ")
    if by == "ours":
        assert re.search(r"the first to fail was rank 1 \(pid \d+\)", done.stderr)
