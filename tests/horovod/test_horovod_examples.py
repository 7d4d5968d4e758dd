"""The scripts of examples/horovod, started by horovodrun, by kolovod run, and alone."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "horovod"
HOROVODRUN = [sys.executable, "-m", "horovod.runner.launch"]
KOLOVOD = [sys.executable, "-m", "kolovod", "run"]


def run(launcher, size, script, *arguments):
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    if size > 1:
        command = [*launcher, "-np", str(size), *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("size", "options"), [(1, []), (2, ["--fp16-allreduce"]), (2, ["--use-adasum"])]
)
def test_mnist(size, options):
    out = run(HOROVODRUN, size, "mnist.py", "--images", "1500", *options)
    (accuracy,) = re.findall(r"epoch 1: .* accuracy ([\d.]+)%", out)
    assert float(accuracy) > 80


def test_synthetic_benchmark():
    out = run(HOROVODRUN, 2, "synthetic_benchmark.py", "--num-iters", "1", "--image-size", "32")
    assert re.search(r"Total img/sec on 2 rank\(s\): [\d.,]+", out)


@pytest.mark.parametrize("launcher", [HOROVODRUN, KOLOVOD])
def test_accumulation(launcher):
    losses = re.findall(r"loss ([\d.]+)", run(launcher, 2, "accumulation.py"))
    assert len(losses) == 4
    assert float(losses[-1]) < float(losses[0])


def test_process_sets():
    assert "slopes by rank: [2.0, -3.0, 2.0]" in run(HOROVODRUN, 3, "process_sets.py")


@pytest.mark.parametrize("size", [1, 3])
def test_uneven_data(size):
    assert f"epoch 1: rank {size - 1} was the last" in run(KOLOVOD, size, "uneven_join.py")


def test_hyperparameters():
    assert "the same rate: True" in run(HOROVODRUN, 3, "hyperparameters.py")
