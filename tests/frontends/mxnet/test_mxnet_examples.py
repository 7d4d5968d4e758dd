"""The example, shortened, as a user starts it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from frameworks import is_installed

pytestmark = pytest.mark.skipif(
    not (is_installed("mxnet") and is_installed("sklearn")),
    reason="MXNet or scikit-learn is not installed",
)

EXAMPLE = Path(__file__).parents[3] / "examples" / "mxnet_digits.py"


def test_digits():
    command = [sys.executable, "-m", "kolovod", "run", "-np", "2", "--", sys.executable]
    done = subprocess.run(
        [*command, str(EXAMPLE), "--epochs", "3", "--warmup-epochs", "0", "--compare"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"(\d) process.*: accuracy (\d+\.\d+)%", done.stdout)
    assert [processes for processes, _ in found] == ["2", "1"]  # rank 0 alone reports
    assert all(float(accuracy) > 80 for _, accuracy in found)
