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

import elastic_script
from launched import KOLOVOD

from kolovod import elastic
from kolovod.testing import replay

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
    kind: str, full: int, plan: list[int], folder: Path, *flags: str, **options: Any
) -> list[dict[str, Any]]:
    """What each process that came to the end says; and that all is as it must be.

    ``options``: see ``run``.
    """
    kills = ",".join(map(str, plan))
    done = run(*flags, script=(str(SCRIPT), kind, str(full), kills, str(folder)), **options)
    assert done.returncode == 0, done.stderr
    results = [json.loads(path.read_text()) for path in folder.iterdir()]
    assert sorted(result["slot"] for result in results) == list(range(full)), done.stderr
    slots = results[0]["slots"]
    for result in results:
        assert result["slots"] == slots
        assert result["log"] == results[0]["log"]
        assert result["result"] == results[0]["result"]
    everybody = (1 << full) - 1
    assert slots[0] == slots[-1] == everybody
    left_out = [everybody & ~bits for bits in slots]
    absent = [bits for bits, before in zip(left_out, [0, *left_out], strict=False) if bits > before]
    assert absent == [1 << slot for slot in plan]  # one at a time, and nobody else
    assert killed(done.stderr) == len(plan)
    if kind in elastic_script.KINDS:
        replay_of(kind, results[0]["log"], slots)
    return results


def killed(stderr: str) -> int:
    """How many processes the launcher saw killed.

    Between hosts the others may go on without one before that, since they do not hear of it.
    """
    return len(re.findall(r"was killed by signal 9.*; the others go on", stderr))


def replay_of(kind: str, state: dict[str, Any], slots: list[int]) -> None:
    """One process makes the same weights, after each step, from who took part."""
    log = elastic.MembershipLog()
    log.load_state_dict(state)
    assert [len(step.used) for step in log.steps] == [bits.bit_count() for bits in slots]
    assert all(step.sums for step in log.steps)
    model = elastic_script.KINDS[kind](0)
    replay(log, model.compute, model.apply, model.tensors, op=model.op)
