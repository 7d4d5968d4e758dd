"""Which jobs run on this host, by ``kolovod ps``."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from launched import ready_job, run
from waiting import until

from kolovod.launch import orphan_reaper
from kolovod.launch.orphan_reaper import MARK_NAME
from kolovod.launch.ps_command import format_jobs
from kolovod.launch.running_jobs import RunningJob, RunningRank, running_jobs

SCRIPT = """
import subprocess, sys, time
import kolovod
kolovod.init()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
# At once: torchrun runs it unbuffered, by several ranks into one pipe.
print("ready\\n", end="", flush=True)
time.sleep(60)
"""
SCRIPT += f"# {secrets.token_hex(8)}\n"  # so that it is not another one's, who runs this test, too
DEADLINE_S = 60.0


@contextmanager
def job(*flags: str) -> Iterator[None]:
    """One of two ranks that sleep, each with a child."""
    with ready_job(*flags, "--", sys.executable, "-c", SCRIPT):
        yield


def mine(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The job among ``found`` whose ranks have this test's script."""
    ours = [each for each in found if SCRIPT in each["ranks"][0]["command"]]
    assert len(ours) == 1, found
    return ours[0]


@pytest.mark.parametrize("flags", [(), ("--elastic",)], ids=["plain", "elastic"])
def test_a_job_and_its_ranks(flags: tuple[str, ...]) -> None:
    with job(*flags):
        done = run("ps", "--json")
        assert done.returncode == 0, done.stderr
        found = mine(json.loads(done.stdout))
        assert (found["size"], found["hosts"], found["is_elastic"]) == (2, 1, bool(flags))
        assert [each["rank"] for each in found["ranks"]] == [0, 1]
        assert found["processes"] >= 4  # with the ranks' children, which are no ranks
        assert found["memory_bytes"] > 1 << 20
        stopped = found["ranks"][1]["pid"]
        os.kill(stopped, signal.SIGSTOP)
        try:
            until(lambda: orphan_reaper.is_stopped(stopped))
            text = run("ps", "--ranks").stdout
        finally:
            os.kill(stopped, signal.SIGCONT)
        (line,) = [line for line in text.splitlines() if line.startswith(found["name"])]
        assert ("elastic" in line) == bool(flags)
        assert f"pid {stopped}" in text
        assert any(f"pid {stopped}" in each and "stopped" in each for each in text.splitlines())
    ranks = [each.command for each in running_jobs() for each in each.ranks]
    assert not any(SCRIPT in command for command in ranks)


@pytest.mark.slow
def test_ranks_that_another_launcher_starts(tmp_path: Path) -> None:
    """Known by what they show; before they call ``init`` nobody knows them."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    # Not marked, as our tests are, by which what they leave is found.
    environ = {name: value for name, value in os.environ.items() if name != MARK_NAME}
    with subprocess.Popen(
        [*command, "--master-port", "0", str(script)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ,
    ) as launcher:  # fmt: skip
        try:
            assert launcher.stdout is not None
            for _ in range(2):
                assert "ready" in launcher.stdout.readline()
            done = run("ps", "--json")
            found = [each for each in json.loads(done.stdout)
                     if str(script) in each["ranks"][0]["command"]]  # fmt: skip
            assert [each["size"] for each in found] == [2], done.stdout
            (job,) = found
            assert [each["rank"] for each in job["ranks"]] == [0, 1]
            assert (job["hosts"], job["is_elastic"], job["processes"]) == (1, False, 2)
            until(
                lambda: "<module>" in run("stacks", job["name"], "--rank", "1").stdout,
                "the rank has answered in time",
            )
        finally:
            launcher.send_signal(signal.SIGTERM)
            launcher.wait(DEADLINE_S)


def process(
    proc: Path, pid: int, parent: int, stat: str = "S", uid: int = 0, **environment: str
) -> None:
    folder = proc / str(pid)
    folder.mkdir()
    ids = "\t".join([str(uid)] * 4)
    (folder / "status").write_text(f"Name:\ta\nUid:\t{ids}\nGid:\t{ids}\n")
    words = [f"{name}={value}" for name, value in environment.items()]
    (folder / "environ").write_text("\0".join(words) + "\0")
    (folder / "cmdline").write_text("python\0train.py\0")
    fields = [stat, str(parent), *["0"] * 9, "150", "50", *["0"] * 6, "1000", "0", "256"]
    (folder / "stat").write_text(f"{pid} (a) b) {' '.join(fields)} 0 0\n")


def test_what_proc_says(tmp_path: Path) -> None:
    (tmp_path / "uptime").write_text("110.0 200.0\n")
    given = {"KOLOVOD_SIZE": "8", "KOLOVOD_CROSS_SIZE": "2"}
    first = {"KOLOVOD_JOB": "0123456789", "KOLOVOD_RANK": "4", **given}
    process(tmp_path, 10, 1, KOLOVOD_JOB="0123456789")  # an agent
    process(tmp_path, 11, 10, **first)
    process(tmp_path, 12, 11, **first)  # what a rank has started
    process(tmp_path, 13, 10, "T", **{**first, "KOLOVOD_RANK": "3"})
    process(tmp_path, 14, 1, PATH="/bin")
    process(tmp_path, 15, 1, KOLOVOD_JOB="ffff", KOLOVOD_RANK="no number")
    (tmp_path / "16").mkdir()  # has ended meanwhile
    process(tmp_path, 17, 1, **{**first, "KOLOVOD_JOB": "eeee"})
    (tmp_path / "17" / "cmdline").unlink()  # ends just now
    process(tmp_path, 18, 10, **{**first, "KOLOVOD_RANK": "5"})
    (tmp_path / "18" / "cmdline").unlink()
    (found,) = running_jobs(tmp_path)
    assert (found.name, found.size, found.hosts, found.processes) == ("01234567", 8, 2, 5)
    assert [(each.rank, each.pid, each.state) for each in found.ranks] == [
        (3, 13, "T"),
        (4, 11, "S"),
    ]
    ticks = os.sysconf("SC_CLK_TCK")
    assert found.cpu_s == pytest.approx(5 * 200 / ticks)
    assert found.ranks[0].age_s == pytest.approx(110 - 1000 / ticks)


def test_a_job_is_one_users(tmp_path: Path) -> None:
    """Anybody may mark a process as somebody else's job, and give it any name."""
    (tmp_path / "uptime").write_text("110.0 200.0\n")
    given = {"KOLOVOD_JOB": "0123456789", "KOLOVOD_SIZE": "1", "KOLOVOD_RANK": "0"}
    process(tmp_path, 10, 1, uid=7, **given)
    process(tmp_path, 11, 10, uid=8, **{**given, "KOLOVOD_RANK": "1"})
    process(tmp_path, 12, 1, uid=9, **{**given, "KOLOVOD_JOB": "\x1b]0;owned\a"})
    process(tmp_path, 13, 1, uid=9, **{**given, "KOLOVOD_RANK": "9" * 5_000})
    process(tmp_path, 14, 1, uid=9, **{**given, "KOLOVOD_RANK": "\u0664"})
    found = {(job.uid, job.name): len(job.ranks) for job in running_jobs(tmp_path)}
    assert found == {(7, "01234567"): 1, (8, "01234567"): 1, (9, r"\x1b]0;owne"): 1}
    assert [job.uid for job in running_jobs(tmp_path, uid=8)] == [8]
    changing = tmp_path / "10" / "status"
    changing.write_text("Uid:\t7\t0\t7\t0\nGid:\t7\t7\t7\t7\n")  # a program of root's that it runs
    assert {job.uid for job in running_jobs(tmp_path)} == {8, 9}


def test_the_table_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("a\x1b]0;owned\a", "b\nc", "\x9b31m", "\u202eevil")
    job = RunningJob("ab", 1, 1, False, [RunningRank(0, 7, command, 1.0, "R")], uid=4_000_000)
    head, line = format_jobs([job], with_ranks=False).splitlines()
    assert head.split()[:2] == ["JOB", "USER"]
    assert line.split()[:2] == ["ab", "4000000"]
    assert line.isprintable()
    assert line.endswith(r"'a\x1b]0;owned\x07' 'b c' '\x9b31m' '\u202eevil'")


def test_the_table() -> None:
    ranks = [RunningRank(0, 7, ("python", "a b.py"), 3725.0, "R")]
    jobs = [RunningJob("abcdef01", 4, 2, False, ranks, 3, 7450.0, 3 << 29)]
    assert format_jobs(jobs, with_ranks=True).splitlines() == [
        "JOB       RANKS  HERE  HOSTS  SINCE    CPU    MEMORY   COMMAND",
        "abcdef01  4      1     2      1:02:05  200 %  1.5 GiB  python 'a b.py'",
        "  rank 0  pid 7  1:02:05",
    ]


def test_where_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "uptime").write_text("1 1\n")
    assert running_jobs(tmp_path) == []
