"""Scripts that torch.distributed's or our launcher starts, as a user's would be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from paths import ROOT

import kolovod

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
KOLOVOD = [sys.executable, "-m", "kolovod", "run", "-np", "2", "--", sys.executable]


def entry_point(folder: Path) -> str:
    """A search path on which torch finds Kolovod's entry point, installed or not.

    Tests may run from the source folder: pyproject.toml's section is written there as an
    installation would write it.
    """
    text = (ROOT / "pyproject.toml").read_text()
    section = text.split('[project.entry-points."torch.backends"]\n')[1].split("\n\n")[0]
    info = folder / "kolovod_entry-1.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kolovod-entry\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[torch.backends]\n" + section.replace('"', "") + "\n")
    return f"{folder}{os.pathsep}{Path(kolovod.__file__).parents[1]}"


def start(
    command: list[str], script: str, folder: Path, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run ``script`` to its end by ``command``."""
    file = folder / "script.py"
    file.write_text(script)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": entry_point(folder)}
    return subprocess.run(
        [*command, str(file), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env={**environment, **variables},
    )
