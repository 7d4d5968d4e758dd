"""The JAX examples, shortened, as a user starts them."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from forked import QUICKLY_COMPILED, run_jax_ranks
from frameworks import is_installed
from paths import EXAMPLES

pytestmark = [
    pytest.mark.skipif(not is_installed(module), reason=f"{module} is not installed")
    for module in ("jax", "optax")
] + [pytest.mark.timeout(150)]
TWO = [sys.executable, "-m", "kolovod", "run", "-np", "2", "--"]


def run(launcher, script, *options):
    """What the script prints."""
    done = subprocess.run(
        [*launcher, sys.executable, str(EXAMPLES / script), *options],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **QUICKLY_COMPILED},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("sklearn"), reason="sklearn is not installed")
def test_digits():
    """Two processes learn, and as much as one with their batches."""
    output = run(TWO, "jax_digits.py", "--epochs", "2", "--warmup-epochs", "0", "--compare")
    accuracy = re.search(r"2 processes: accuracy (\d+\.\d+)%", output)
    assert accuracy is not None
    assert float(accuracy[1]) > 60
    difference = re.search(r"difference in accuracy: ([+-]\d+\.\d+) ", output)
    assert difference is not None
    assert abs(float(difference[1])) < 2


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [TWO, []], ids=["two processes", "one"])
def test_text(launcher):
    """It learns, with gradients of two passes, from two processes' windows or from one's."""
    options = ["--steps", "20", "--report-every", "10", "--lr", "0.003", "--warmup", "5",
               "--accumulate", "2", "--context", "32", "--layers", "1", "--width", "64",
               "--characters", "100000", "--compression", "bf16"]  # fmt: skip
    output = run(launcher, "jax_text.py", *options)
    assert f"{2 if launcher else 1} process(es)" in output
    first, last = (float(bits) for bits in re.findall(r"([\d.]+) bits per character", output))
    assert last < first < 6.5  # bits of a choice among all characters: 6.6


def text_in_float64(rank):
    """The weights that the example comes to, and on rank 0 those of it alone."""
    import jax

    import kolovod.jax as kv

    sys.path.insert(0, str(EXAMPLES))
    text = importlib.import_module("jax_text")
    sys.argv = ["jax_text.py", "--steps", "15", "--lr", "0.01", "--warmup", "5", "--layers", "1",
                "--width", "32", "--context", "16", "--batch-size", "8", "--accumulate", "2",
                "--characters", "50000"]  # fmt: skip
    arguments = text.parse_arguments()
    kv.init()
    params = [text.train(arguments, 2)]
    kv.shutdown()
    if rank == 0:
        kv.init(comm=[0])
        params.append(text.train(arguments, 2))
    return [list(map(np.asarray, jax.tree.leaves(each))) for each in params]


def digits_in_float64(rank):
    """The same of the other example."""
    import jax

    import kolovod.jax as kv

    sys.path.insert(0, str(EXAMPLES))
    digits = importlib.import_module("jax_digits")
    sys.argv = ["jax_digits.py", "--epochs", "1", "--warmup-epochs", "0", "--lr", "0.01"]
    arguments, params, evaluate = digits.parse_arguments(), [], digits.evaluate
    data, test = (
        part._replace(images=part.images[:320].astype(np.float64), labels=part.labels[:320])
        for part in digits.load_data(arguments.seed)
    )
    digits.evaluate = lambda last, images: params.append(last) or evaluate(last, images)
    kv.init()
    digits.train(arguments, 2, data, test)
    kv.shutdown()
    if rank == 0:
        kv.init(comm=[0])
        digits.train(arguments, 2, data, test)
    return [list(map(np.asarray, jax.tree.leaves(each))) for each in params]


@pytest.mark.slow
@pytest.mark.parametrize("work", [text_in_float64, digits_in_float64])
def test_two_processes_learn_what_one_does(work):
    if work is digits_in_float64 and not is_installed("sklearn"):
        pytest.skip("scikit-learn, whose digits they are, is not installed")
    (together, alone), (on_rank_1,) = run_jax_ranks(2, work)
    for mine, theirs, whole in zip(together, on_rank_1, alone, strict=True):
        assert mine.dtype == np.float64
        assert (mine == theirs).all()
        np.testing.assert_allclose(mine, whole, rtol=1e-8, atol=1e-8)
