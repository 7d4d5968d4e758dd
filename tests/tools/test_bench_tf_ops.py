"""bench/tf_ops.py measures and checks what it says, shortened."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from frameworks import is_installed
from paths import BENCH

pytestmark = pytest.mark.frameworks

SCRIPT = BENCH / "tf_ops.py"


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(150)
@pytest.mark.skipif(not is_installed("tensorflow"), reason="TensorFlow is not installed")
def test_a_short_run(tmp_path):
    """Every verb is timed beside TensorFlow's own op, for one op and for several."""
    options = ["--quick", "--sizes", "2", "--ops", "4", "--iterations", "3"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options, "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "tf_ops-quick.json").read_text())
    verbs = ["sin", "allreduce", "broadcast", "allgather", "alltoall", "reducescatter"]
    assert [(row["ops"], row["verb"]) for row in found["rows"]] == [
        (count, verb) for count in (1, 4) for verb in verbs
    ]
    assert all(row["us"]["samples"] == 3 and row["us"]["min"] > 0 for row in found["rows"])
    assert "tf_ops.py --quick" in found["command"]
