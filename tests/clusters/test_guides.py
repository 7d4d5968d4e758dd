"""The scripts of the guides for Ray and Spark run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT
from ray_cluster import NEEDS_RAY
from spark_session import NEEDS_SPARK, QUICK_JAVA

pytestmark = pytest.mark.slow

OF_ELASTIC = {"ray": ("num_workers=(2, 8)", "min_workers=2"), "spark": ("run_elastic(",)}
"""Parts of blocks whose function is another one, as the text says; test_ray has such jobs."""
TIMEOUT_S = 190  # below the tests' own limit, so that what it printed is shown


def run_guide(name: str, folder: Path, *before: str, **variables: str) -> str:
    """The page's blocks as one script, after the lines ``before``; what it prints."""
    page = (ROOT / "docs" / f"{name}.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    kept = [block for block in blocks if not any(mark in block for mark in OF_ELASTIC[name])]
    assert len(kept) == len(blocks) - len(OF_ELASTIC[name])
    script = folder / "guide.py"
    script.write_text("\n".join([*before, *kept]))
    ended = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, **variables},
        cwd=folder,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def results(shown: str) -> list[list[tuple[int, float]]]:
    """What was printed of the ranks' results."""
    lines = [line for line in shown.splitlines() if line.startswith("[(0, ")]
    return [
        [(int(rank), float(loss)) for rank, loss in re.findall(r"\((\d+), ([\d.e-]+)\)", line)]
        for line in lines
    ]


def check_results(found: list[tuple[int, float]]) -> None:
    """Two ranks have learnt a sum."""
    assert [rank for rank, _ in found] == [0, 1]
    assert all(loss < 0.02 for _, loss in found)


RAY = pytest.param("ray", marks=NEEDS_RAY)
SPARK = pytest.param("spark", marks=NEEDS_SPARK)


@pytest.mark.parametrize("name", [RAY])
def test_ray(name: str, tmp_path: Path) -> None:
    """By ``run``, by Tune, by Train and by Horovod's executor."""
    token = tmp_path / "token"
    token.write_text("0" * 64)
    shown = run_guide(
        name,
        tmp_path,
        "import ray",
        'ray.init(address="local", num_cpus=6, include_dashboard=False)',
        RAY_AUTH_TOKEN_PATH=str(token),
    )
    by_run, by_executor = results(shown)
    check_results(by_run)
    check_results(by_executor)
    assert "Trial status: 2 TERMINATED" in shown


@pytest.mark.parametrize("name", [SPARK])
def test_spark(name: str, tmp_path: Path) -> None:
    """By ``run``."""
    (found,) = results(run_guide(name, tmp_path, SPARK_LOCAL_IP="127.0.0.1", **QUICK_JAVA))
    check_results(found)
