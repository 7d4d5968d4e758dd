"""Jobs of ``kolovod run --elastic`` whose processes kill themselves (elastic_script.py)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launched import KOLOVOD

SCRIPT = Path(__file__).parent / "elastic_script.py"
DEADLINE_S = 100.0


def run(
    *flags: str,
    script: tuple[str, ...],
    deadline_s: float = DEADLINE_S,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    command = [*KOLOVOD, "run", "--elastic", *flags, "--", sys.executable, *script]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=deadline_s,
        env={**os.environ, **(env or {})},
    )


def train(
    kind: str, full: int, plan: list[int], *flags: str, **options: Any
) -> list[dict[str, Any]]:
    """What each process that came to the end says; and that all is as it must be.

    ``options``: see ``run``.
    """
    kills = ",".join(map(str, plan))
    done = run(*flags, script=(str(SCRIPT), kind, str(full), kills), **options)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in re.findall(r"\{.*\}", done.stdout)]
    assert sorted(result["slot"] for result in results) == list(range(full)), done.stderr
    log = results[0]["log"]
    for result in results:
        assert result["log"] == log
        assert result["result"] == results[0]["result"]
    everybody = (1 << full) - 1
    assert log[0] == log[-1] == everybody
    left_out = [everybody & ~bits for bits in log]
    absent = [bits for bits, before in zip(left_out, [0, *left_out], strict=False) if bits > before]
    assert absent == [1 << slot for slot in plan]  # one at a time, and nobody else
    assert done.stderr.count("was killed by signal 9") == 2 * len(plan)
    return results
