"""``kolovod check`` of scripts that have one mistake each, and of one that has none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from checked_scripts import CASES, Case

QUICK = ("good", "one rank waits")  # of all others the facts are compared in test_compare.py, too
DEADLINE_S = 110


class Checked(NamedTuple):
    """How it went."""

    code: int
    report: str
    findings: list[dict[str, Any]]

    def verdicts(self, verdict: str) -> dict[str, str]:
        return {f["check"]: f["found"] for f in self.findings if f["verdict"] == verdict}


def check(folder: Path, script: str, *flags: str, **variables: str) -> Checked:
    (folder / "train.py").write_text(script)
    arguments = ["--json", "found.json", *flags, "--", sys.executable, "train.py"]
    done = subprocess.run(
        [sys.executable, "-m", "kolovod", "check", *arguments],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.stderr == "", done.stderr
    found = json.loads((folder / "found.json").read_text())
    assert found["exit_code"] == done.returncode
    return Checked(done.returncode, done.stdout, found["findings"])


def judge(checked: Checked, case: Case) -> None:
    """What was to be found, and no other problem."""
    problems = {name for name, text in case.expected.items() if text.startswith("PROBLEM")}
    assert set(checked.verdicts("PROBLEM")) == problems, checked.report
    assert checked.code == bool(problems)
    for name, text in case.expected.items():
        verdict, _, part = text.partition(": ")
        assert part in checked.verdicts(verdict)[name], checked.report
    if case.line:
        first = next(f for f in checked.findings if f["check"] == next(iter(case.expected)))
        file, _, number = first["line"].partition(":")
        assert file == "train.py"
        assert case.line in case.script.splitlines()[int(number) - 1]


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_one_mistake(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    checked = check(tmp_path, case.script, KOLOVOD_LATE_FAILURE_S="4", KOLOVOD_LATE_REPORT_S="1")
    judge(checked, case)
    if name == "good":
        assert not checked.verdicts("hint"), checked.report
        assert not checked.verdicts("cannot tell"), checked.report
