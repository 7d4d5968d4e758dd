"""The examples, shortened, as a user starts them; and in float64, beside one process."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from frameworks import is_installed
from keras_jobs import prepared, runs, weights
from paths import EXAMPLES

pytestmark = pytest.mark.timeout(150)

SHORT = ["--layers", "1", "--width", "32", "--context", "16", "--characters", "50000"]


def run(script, *options, backend="torch", np=2):  # others are alike; each takes ten seconds
    """What ``np`` processes print."""
    for module in ("keras", backend):
        if not is_installed(module):
            pytest.skip(f"{module} is not installed")
    launcher = [sys.executable, "-m", "kolovod", "run", "-np", str(np), "--", sys.executable]
    done = subprocess.run(
        [*launcher, str(EXAMPLES / script), *options],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("sklearn"), reason="scikit-learn is not installed")
def test_digits():
    output = run("keras_digits.py", "--epochs", "2", "--warmup-epochs", "1")
    accuracy = re.search(r"2 processes, Keras on torch: accuracy (\d+\.\d+)%", output)
    assert accuracy is not None
    assert float(accuracy[1]) > 50


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("sklearn"), reason="scikit-learn is not installed")
def test_fit_is_that_of_one_process():
    found = []
    for size in (2, 1):
        output = run("integrations/keras_fit.py", np=size)
        read = r"losses (.*), accuracy (.*), (\d) files, sum of weights (\S+)"
        found += [re.search(rf"rank {rank} of {size}: {read}", output) for rank in range(size)]
    assert [text[3] for text in found] == ["3", "0", "3"]  # checkpoints are rank 0's
    losses = [float(loss) for loss in found[0][1].split(", ")]
    assert losses[-1] < losses[0] / 2
    assert len({text[1] for text in found}) == 1
    assert len({text[2] for text in found}) == 1
    assert found[0][4] == found[1][4]
    assert float(found[0][4]) == pytest.approx(float(found[2][4]), abs=1e-3)


def text_in_float64(rank):
    """The weights that the example comes to, and on rank 0 those of it alone."""
    _, kv = prepared("tensorflow")  # others compute parts of it in float32, whatever is set
    sys.path.insert(0, str(EXAMPLES))
    text = importlib.import_module("keras_text")
    steps = ["--steps", "30", "--report-every", "15", "--lr", "0.01", "--warmup", "5"]
    sys.argv = ["keras_text.py", *SHORT, *steps, "--batch-size", "8"]
    together = weights(text.train(text.parse_arguments(), 2))
    kv.shutdown()
    if rank == 1:
        return (together,)
    kv.init(comm=[0])
    return together, weights(text.train(text.parse_arguments(), 2))


@pytest.mark.slow
def test_text_is_that_of_one_process(capfd):
    (together, alone), (on_rank_1,) = runs("tensorflow")(text_in_float64)
    for mine, theirs, whole in zip(together, on_rank_1, alone, strict=True):
        assert mine.dtype == np.float64
        assert (mine == theirs).all()
        np.testing.assert_allclose(mine, whole, rtol=1e-8, atol=1e-8)
    output = capfd.readouterr().out
    assert "2 process(es), Keras on tensorflow" in output
    bits = [float(found) for found in re.findall(r"([\d.]+) bits per character", output)]
    assert len(bits) == 4  # rank 0 alone reports
    assert bits[1] < bits[0] < 6.6  # 96 characters: log2 is 6.58
