"""The examples, shortened, as a user starts them; and in float64, beside one process."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys

import numpy as np
import pytest
from forked import run_mxnet_ranks
from frameworks import is_installed
from paths import EXAMPLES

pytestmark = pytest.mark.skipif(not is_installed("mxnet"), reason="MXNet is not installed")

SHORT = ["--layers", "1", "--width", "32", "--context", "16", "--characters", "50000"]


def run(script, *options):
    """What two processes print."""
    command = [sys.executable, "-m", "kolovod", "run", "-np", "2", "--", sys.executable]
    done = subprocess.run(
        [*command, str(EXAMPLES / script), *options],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not is_installed("sklearn"), reason="scikit-learn is not installed")
def test_digits():
    output = run("mxnet_digits.py", "--epochs", "3", "--warmup-epochs", "0", "--compare")
    found = re.findall(r"(\d) process.*: accuracy (\d+\.\d+)%", output)
    assert [processes for processes, _ in found] == ["2", "1"]  # rank 0 alone reports
    assert all(float(accuracy) > 80 for _, accuracy in found)


def test_text_learns():
    options = ["--steps", "40", "--report-every", "20", "--lr", "0.01", "--warmup", "5"]
    output = run("mxnet_text.py", *options, *SHORT, "--compression", "fp16")
    assert "2 process(es)" in output
    first, last = (float(bits) for bits in re.findall(r"([\d.]+) bits per character", output))
    assert last < first < 6.6  # 96 characters: log2 is 6.58


def text_in_float64(rank):
    """The weights that the example comes to, and on rank 0 those of it alone."""
    import kolovod.mxnet as kv

    sys.path.insert(0, str(EXAMPLES))
    text = importlib.import_module("mxnet_text")
    sys.argv = ["mxnet_text.py", *SHORT, "--steps", "4", "--batch-size", "8"]
    kv.init()
    nets = [text.train(text.parse_arguments(), 2, "float64")]
    kv.shutdown()
    if rank == 0:
        kv.init(comm=[0])
        nets.append(text.train(text.parse_arguments(), 2, "float64"))
    return [[value.data().asnumpy() for value in net.collect_params().values()] for net in nets]


def test_text_is_that_of_one_process():
    (together, alone), (on_rank_1,) = run_mxnet_ranks(2, text_in_float64, timeout_s=60)
    for mine, theirs, whole in zip(together, on_rank_1, alone, strict=True):
        assert mine.dtype == np.float64
        assert (mine == theirs).all()
        np.testing.assert_allclose(mine, whole, rtol=1e-8, atol=1e-8)
