"""bench/front_ends.py measures and checks what it says, shortened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from frameworks import is_installed

SCRIPT = Path(__file__).parents[1] / "bench" / "front_ends.py"


@pytest.mark.timeout(150)
@pytest.mark.parametrize("framework", ["jax", "tensorflow", "torch"])
def test_a_short_run(tmp_path, framework):
    """Each way is measured, and Kolovod and the framework's own come to the same weights."""
    if not is_installed(framework):
        pytest.skip(f"{framework} is not installed")
    if framework == "jax" and not hasattr(pytest.importorskip("jax"), "shard_map"):
        pytest.skip("this JAX has no jax.shard_map, which its own way is written with")
    options = ["--frameworks", framework, "--models", "mid", "--rounds", "1", "--steps", "2"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options, "--quick", "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "front_ends-quick.json").read_text())[framework]
    assert all(found["ms"][f"mid/{way}"]["samples"] == 2 for way in ("alone", "own", "kolovod"))
    assert found["distance"]["mid/kolovod"] < 1e-3
    assert found["distance"]["mid/alone"] > 1e-2  # so that the check could fail
