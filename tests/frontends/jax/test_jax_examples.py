"""The JAX examples, shortened, as a user starts them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from forked import QUICKLY_COMPILED
from frameworks import is_installed

pytestmark = [
    pytest.mark.skipif(not is_installed(module), reason=f"{module} is not installed")
    for module in ("jax", "optax")
] + [pytest.mark.timeout(150)]
EXAMPLES = Path(__file__).parents[3] / "examples"
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
