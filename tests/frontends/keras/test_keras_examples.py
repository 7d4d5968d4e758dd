"""The example, shortened, as a user starts it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from frameworks import is_installed

EXAMPLE = Path(__file__).parents[3] / "examples" / "keras_digits.py"


@pytest.mark.parametrize("backend", ["torch"])  # others are alike; each takes ten seconds
def test_digits(backend):
    for module in ("keras", "sklearn", backend):
        if not is_installed(module):
            pytest.skip(f"{module} is not installed")
    launcher = [sys.executable, "-m", "kolovod", "run", "-np", "2", "--", sys.executable]
    done = subprocess.run(
        [*launcher, str(EXAMPLE), "--epochs", "2", "--warmup-epochs", "1"],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert done.returncode == 0, done.stderr
    accuracy = re.search(rf"2 processes, Keras on {backend}: accuracy (\d+\.\d+)%", done.stdout)
    assert accuracy is not None
    assert float(accuracy[1]) > 50
