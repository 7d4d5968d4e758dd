"""Which processes are a job's, and which are sent its signals."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from waiting import until

from kolovod.launch import orphan_reaper


def test_a_number_that_another_process_has_got_is_not_signalled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the look at all processes and the signal to one of them."""
    mark = secrets.token_hex(8)
    environ = {**os.environ, orphan_reaper.MARK_NAME: mark}
    with (
        subprocess.Popen(["sleep", "60"], env=environ) as ours,
        subprocess.Popen(["sleep", "60"], start_new_session=True) as another,
    ):
        try:
            assert orphan_reaper.job_processes(mark) == {ours.pid}
            assert orphan_reaper.job_processes("", {another.pid}) == {another.pid}
            monkeypatch.setattr(orphan_reaper, "job_processes", lambda *_: {ours.pid, another.pid})
            assert orphan_reaper.kill_job(mark, (), signal.SIGKILL) == 2
            assert ours.wait(20) == -signal.SIGKILL
            assert another.poll() is None
            assert orphan_reaper.kill_job(mark, {another.pid}, signal.SIGKILL) == 2
            assert another.wait(20) == -signal.SIGKILL
        finally:
            for process in (ours, another):
                process.kill()


def test_a_process_is_seen_while_it_executes_another_program(tmp_path: Path) -> None:
    """In execve(2) it has no environment for a moment: 3 % of the looks at such a process."""
    again = tmp_path / "again"
    again.write_text(f"#!/bin/sh\nexec {again}\n")
    again.chmod(0o755)
    mark = secrets.token_hex(8)
    environ = {**os.environ, orphan_reaper.MARK_NAME: mark}
    with ExitStack() as stack:
        started = [stack.enter_context(subprocess.Popen([again], env=environ)) for _ in range(3)]
        for process in started:
            stack.callback(process.kill)
        pids = {process.pid for process in started}
        for _ in range(200):
            assert orphan_reaper.job_processes(mark) == pids


def test_a_process_without_an_environment_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: float) -> None:
        raise AssertionError("it was waited for")

    with subprocess.Popen(["/bin/sleep", "60"], env={}) as bare:
        try:
            until(lambda: b"sleep" in Path(f"/proc/{bare.pid}/cmdline").read_bytes())
            monkeypatch.setattr(orphan_reaper.time, "sleep", fail)
            assert orphan_reaper._environment(bare.pid, time.monotonic() + 60) == [b""]
        finally:
            bare.kill()
