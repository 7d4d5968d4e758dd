"""The examples, shortened, as a user starts them."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from forked import run_torch_ranks
from paths import EXAMPLES

pytest.importorskip("torch", reason="PyTorch is not installed")

KOLOVOD = [sys.executable, "-m", "kolovod", "run", "-np", "2", "--"]
TINY_TEXT = ["--steps", "40", "--report-every", "20", "--width", "32", "--layers", "1"]


def run(launcher, script, *arguments):
    """The output of an example that must end well."""
    done = subprocess.run(
        [*launcher, sys.executable, str(EXAMPLES / script), *arguments],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "COLUMNS": "120"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [[], ["--accumulate", "3"], ["--bf16", "--compression", "bf16"]],
    ids=["plain", "accumulate", "bf16"],
)
def test_text_learns(options):
    output = run(KOLOVOD, "torch_text.py", *TINY_TEXT, *options, "--lr", "0.01", "--sample", "20")
    bits = [float(found) for found in re.findall(r"(\d\.\d+) bits per character", output)]
    assert len(bits) == 2  # rank 0 alone reports
    assert bits[1] < bits[0] < 6.6  # 96 characters: log2 is 6.58
    assert bits[1] < 4.53  # what is possible without looking at the characters before


@pytest.mark.slow
def test_a_hook_of_ones_own_learns():
    found = re.findall(r"accuracy (\d\.\d+), (\d+\.\d)%", run(KOLOVOD, "torch_top_k_hook.py"))
    ((accuracy, percent),) = found
    assert float(accuracy) > 0.9
    assert float(percent) < 2.5  # an index and a value for each hundredth


def text_in_float64(rank):
    """The weights that the example comes to, and on rank 0 those of it alone."""
    import torch
    from rich.console import Console

    import kolovod.torch as kv

    torch.set_default_dtype(torch.float64)
    sys.path.insert(0, str(EXAMPLES))
    text = importlib.import_module("torch_text")
    sys.argv = ["torch_text.py", "--steps", "20", "--lr", "0.01", "--warmup", "5",
                "--layers", "1", "--width", "32", "--context", "16", "--batch-size", "8",
                "--accumulate", "2", "--characters", "50000"]  # fmt: skip
    arguments = text.parse_arguments()
    console = Console(quiet=True)
    kv.init()
    nets = [text.train(arguments, 2, console)]
    kv.shutdown()
    if rank == 0:
        kv.init(comm=[0])
        nets.append(text.train(arguments, 2, console))
    return [[parameter.detach().numpy() for parameter in net.parameters()] for net in nets]


def test_text_is_that_of_one_process():
    (together, alone), (on_rank_1,) = run_torch_ranks(2, text_in_float64)
    for mine, theirs, whole in zip(together, on_rank_1, alone, strict=True):
        assert mine.dtype == np.float64
        assert (mine == theirs).all()
        np.testing.assert_allclose(mine, whole, rtol=1e-8, atol=1e-8)


@pytest.mark.slow
def test_text_alone():
    output = run([], "torch_text.py", *TINY_TEXT)
    assert "1 process(es)" in output


@pytest.mark.slow
def test_digits():
    output = run(KOLOVOD, "torch_digits.py", "--epochs", "2", "--warmup-epochs", "0")
    accuracy = re.search(r"2 processes: accuracy (\d+\.\d+)%", output)
    assert accuracy is not None
    assert float(accuracy[1]) > 60
