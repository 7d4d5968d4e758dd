"""Rank 0 reads what the launcher could: from a terminal, a pipe or a file. The others do not."""

from __future__ import annotations

import re
import subprocess

import pytest
from launched import launch_command
from terminal import terminal

READS = """
import os, sys
print(f"rank {os.environ['KOLOVOD_RANK']} reads {sys.stdin.read()!r}", flush=True)
"""
ASKS = """
import kolovod.numpy as kv
kv.init()
factor = 5
if kv.rank() == 0:
    breakpoint()
    factor = int(input("factor? "))
print("they have", kv.broadcast_object(factor), flush=True)
"""


@pytest.fixture(autouse=True)
def no_debugger_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray names its own in the environment of a process that has started it."""
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)


def run(code: str, *flags: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        launch_command(2, code, *flags), input=given, capture_output=True, text=True, timeout=100
    )


def test_rank_0_reads_a_pipe_to_its_end() -> None:
    done = run(READS, given="one\ntwo\n")
    assert done.returncode == 0, done.stderr
    assert "[0]<stdout>:rank 0 reads 'one\\ntwo\\n'\n" in done.stdout
    assert "[1]<stdout>:rank 1 reads ''\n" in done.stdout


def test_where_the_launcher_has_none_there_is_nothing_to_read() -> None:
    command = launch_command(2, READS)
    done = subprocess.run(
        ["bash", "-c", 'exec "$@" <&-', "bash", *command],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("reads ''") == 2


def test_a_debugger_in_a_terminal() -> None:
    with terminal(launch_command(2, ASKS)) as shown:
        shown.read_until(lambda: shown.text.endswith("(Pdb) "))
        shown.type("p factor + 1\n")
        shown.read_until(lambda: shown.text.endswith("(Pdb) ") and "\n6\r\n" in shown.text)
        shown.type("c\n")
        shown.read_until(lambda: shown.text.endswith("factor? "))
        shown.type("7\n")
        assert shown.read_to_end() == 0
        assert shown.text.count("they have 7") == 2


@pytest.mark.parametrize("flags", [(), ("--elastic",)])
def test_a_breakpoint_elsewhere_says_where_one_can_be(flags: tuple[str, ...]) -> None:
    code = "import os\nif os.environ.get('KOLOVOD_RANK') != '0': breakpoint()\n"
    done = run(code, *flags)
    assert done.returncode == 1
    assert re.search(r"breakpoint\(\) on a? ?rank.* that has no terminal: only rank 0", done.stderr)
    assert "if kolovod.rank() == 0: breakpoint()" in done.stderr


def test_a_debugger_of_the_users_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")
    assert run("breakpoint()").returncode == 0
