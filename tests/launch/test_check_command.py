"""``kolovod check`` as a command: what it is given, and how it ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from launched import run

WORLD = "import kolovod; kolovod.init()\n"


def check(*arguments: str, **variables: str) -> tuple[int, str, str]:
    done = run("check", *arguments, **variables)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no COMMAND to check, for example: kolovod check -- python train.py"),
        (("--steps", "0", "--", "true"), "'0': expected a whole number of at least 1"),
        (("--timeout", "never", "--", "true"), "'never': expected seconds, above 0"),
        (("--json", "/no/such/folder/a", "--", "true"), "there is no such folder"),
        (("-np", "1", "--", "true"), "-np 1: ranks are compared with each other"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], message: str) -> None:
    code, _, said = check(*arguments)
    assert code == 2
    assert message in said


def test_no_such_command() -> None:
    assert check("--", "no-such-command")[::2] == (
        127,
        "kolovod: command not found: no-such-command\n",
    )


def test_what_is_no_python() -> None:
    code, report, _ = check("--", "true")
    assert code == 0
    assert "cannot tell  world           nothing was seen of ranks 0 and 1" in report


def test_a_script_that_fails(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    script = f"{WORLD}if kolovod.rank() == 1:\n    raise ValueError('no such file')"
    code, report, _ = check("--json", str(file), "--", sys.executable, "-c", script)
    assert code == 3
    assert (
        "PROBLEM      script          the script has failed on rank 1, with exit code 1" in report
    )
    assert "ValueError: no such file" in report
    [finding] = json.loads(file.read_text())["findings"]
    assert finding["line"] == "<string>:3"


@pytest.mark.slow
def test_too_little_time() -> None:
    script = f"{WORLD}import time; time.sleep(60)"
    code, report, _ = check("--timeout", "15", "--", sys.executable, "-c", script)
    assert code == 124
    assert "ok           world           all 2 ranks are in one world" in report
    assert "ranks 0 and 1 had not come so far within the time" in report


def test_one_rank_has_left() -> None:
    script = (
        f"{WORLD}import numpy\n"
        "print('rank', kolovod.rank(), flush=True)\n"
        "kolovod.allreduce(numpy.ones(2))\n"
        "if kolovod.rank() == 1:\n    raise SystemExit\n"
        "kolovod.allreduce(numpy.ones(2), 'second')"
    )
    arguments = ("-np", "3", "--show-output", "--", sys.executable, "-c", script)
    code, report, _ = check(*arguments)
    assert code == 1
    assert "[2]<stdout>:rank 2\n" in report
    assert "PROBLEM      steps           rank 1 ended while rank" in report
