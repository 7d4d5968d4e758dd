"""A training's timeline, as Horovod's users start it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from slow import slow_but

pytest.importorskip("torch", reason="PyTorch is not installed")

from forked import run_torch_ranks

from kolovod.observe.summary import read, summarize

TRAINING = """
import sys
import torch
import horovod.torch as hvd

assert not hasattr(torch.autograd.backward, "_kolovod_original")
hvd.init()
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
if len(sys.argv) > 1:
    hvd.start_timeline(sys.argv[1], mark_cycles=True)
    hvd.barrier()
for _ in range(8):
    optimizer.zero_grad()
    loss = model(torch.randn(16, 32)).pow(2).mean()
    loss.backward()
    optimizer.step()
    hvd.allreduce(loss.detach(), name="loss")
if len(sys.argv) > 1:
    hvd.barrier()
    hvd.stop_timeline()
patched = hasattr(torch.autograd.backward, "_kolovod_original")
"""


def horovodrun(*options: str) -> None:
    launcher = "from horovod.runner.launch import main; main()"
    command = [sys.executable, "-c", launcher, "-np", "2", *options]
    subprocess.run([*command, sys.executable, "-c", TRAINING], check=True, timeout=110)


def as_a_rank(rank: int, *arguments: str) -> object:
    """Whether ``backward`` is not PyTorch's own in the end."""
    sys.argv = ["-c", *arguments]
    scope: dict[str, object] = {}
    exec(TRAINING, scope)
    return scope["patched"]


@pytest.mark.parametrize("how", slow_but(("dynamic", "variable"), ("flag", "variable", "dynamic")))
def test_a_training(how: str, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    if how == "flag":
        horovodrun("--timeline-filename", str(path), "--timeline-mark-cycles")
    elif how == "variable":
        variables = {"HOROVOD_TIMELINE": str(path), "HOROVOD_TIMELINE_MARK_CYCLES": "1"}
        run_torch_ranks(2, as_a_rank, env=variables)
    else:
        run_torch_ranks(2, as_a_rank, str(path), env={"HOROVOD_TIMELINE": "DYNAMIC"})
    events = read(path)
    names = {event["name"] for event in events}
    assert names >= {"ALLREDUCE", "NEGOTIATE_ALLREDUCE", "CYCLE_START"}
    rows = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert "allreduce.loss" in rows
    for rank in range(2):
        mine = [event for event in events if event["pid"] == rank + 1 and event["ph"] == "X"]
        for name in ("backward", "wait for gradients", "optimizer step"):
            assert sum(event["name"] == name for event in mine) == 8, (rank, name)
        backward = [event for event in mine if event["name"] == "backward"]
        steps = [event for event in mine if event["name"] == "optimizer step"]
        for computed, used in zip(backward, steps, strict=True):
            assert computed["ts"] + computed["dur"] <= used["ts"]
    assert [rank.steps for rank in summarize(events).ranks] == [6, 6]


def test_without_a_timeline_backward_is_pytorchs_own() -> None:
    assert run_torch_ranks(2, as_a_rank) == [False, False]
