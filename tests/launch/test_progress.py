"""What ``kolovod.run`` says of a job while it runs, outside of notebooks."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from launched import wait_until_gone

import kolovod
from kolovod.launch.progress import Progress, notebook_line


def wait_for(path: Path) -> int:
    """Of a rank: say something, and go on when the file is there."""
    kolovod.init()
    print(f"rank {kolovod.rank()} waits\n", flush=True)
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return os.getpid()


def test_a_callback_follows_the_job(tmp_path: Path) -> None:
    go_on = tmp_path / "go on"
    seen: list[Progress] = []

    def look(progress: Progress) -> None:
        seen.append(progress)
        if len(progress.last_lines) == 2:
            go_on.touch()

    kolovod.run(wait_for, args=(go_on,), np=2, timeout_s=60, on_progress=look)
    assert go_on.exists()
    assert (seen[0].size, seen[0].running, seen[0].succeeded) == (2, (0, 1), ())
    assert (seen[-1].running, seen[-1].succeeded) == ((), (0, 1))
    assert seen[-1].last_lines == {0: "rank 0 waits", 1: "rank 1 waits"}
    times = [progress.elapsed_s for progress in seen]
    assert times == sorted(times)


def test_a_callback_that_raises_ends_the_job(tmp_path: Path) -> None:
    def note_pid() -> None:
        (tmp_path / str(os.getpid())).touch()
        time.sleep(60)

    def raise_when_both_run(progress: Progress) -> None:
        if len(list(tmp_path.iterdir())) == 2:
            raise RuntimeError("seen enough")

    with pytest.raises(RuntimeError, match="seen enough"):
        kolovod.run(note_pid, np=2, timeout_s=60, on_progress=raise_when_both_run)
    wait_until_gone([int(file.name) for file in tmp_path.iterdir()])


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (Progress(2, (0, 1), (), 0.2, {}), "2 of 2 ranks running, 0 s"),
        (Progress(2, (1,), (0,), 61.6, {0: "no"}), "1 of 2 ranks running, 62 s"),
        (
            Progress(2, (1,), (0,), 3, {0: "no", 1: "y" * 300}),
            "1 of 2 ranks running, 3 s; rank 1: " + "y" * 100,
        ),
        (Progress(2, (), (0, 1), 1.25, {0: "no"}), "2 ranks succeeded after 1.2 s"),
        (Progress(4, (), (0, 2), 3, {}), "ended after 3.0 s; without success: rank 1, 3"),
    ],
)
def test_a_job_in_one_line(progress: Progress, text: str) -> None:
    assert str(progress) == text


def test_there_is_no_line_outside_of_notebooks() -> None:
    assert notebook_line() is None
