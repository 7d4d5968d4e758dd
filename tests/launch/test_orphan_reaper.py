"""Which processes are a job's, and which are sent its signals."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess

import pytest

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
