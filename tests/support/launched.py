"""Jobs of ``kolovod run``, as processes, for tests of how they begin and end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
from waiting import until

KOLOVOD = [sys.executable, "-m", "kolovod"]
DEADLINE_S = 90


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """``kolovod`` with these arguments, to its end."""
    return subprocess.run(
        [*KOLOVOD, *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, **variables},
    )


def launch_command(size: int, code: str, *flags: str) -> list[str]:
    """Starts ``code`` as each of ``size`` ranks; ``rank`` is its number there."""
    code = f"import os, sys, time, signal; rank = int(os.environ['KOLOVOD_RANK'])\n{code}"
    return [*KOLOVOD, "run", "-np", str(size), *flags, "--", sys.executable, "-c", code]


def run_code(
    size: int, code: str, *flags: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The same, to its end."""
    return run(*launch_command(size, code, *flags)[len(KOLOVOD) :], **variables)


@contextlib.contextmanager
def launcher(size: int, code: str, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """A running launcher; killed at the end if it is still there."""
    process = subprocess.Popen(
        launch_command(size, code, *flags),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


@contextlib.contextmanager
def ready_job(*arguments: str) -> Iterator[None]:
    """``kolovod run -np 2`` with these, from when both ranks have written "ready"; then ended."""
    with subprocess.Popen(
        [*KOLOVOD, "run", "-np", "2", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            for _ in range(2):
                assert "ready" in process.stdout.readline()
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(2 * DEADLINE_S)


def read_pids(process: subprocess.Popen[str], count: int) -> list[int]:
    """The numbers after "pid" in the next lines of the launcher's output."""
    assert process.stdout is not None
    pids: list[int] = []
    while len(pids) < count:
        line = process.stdout.readline()
        assert line, "the launcher ended"
        pids += [int(found) for found in re.findall(r"pid (\d+)", line)]
    return pids


def is_running(pid: int) -> bool:
    """Whether there is such a process, other than as a zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids: list[int]) -> None:
    processes: list[psutil.Process] = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))

    def alive() -> list[psutil.Process]:
        # Another process that has got the number is not meant: is_running() knows the difference.
        return [one for one in processes if one.is_running() and is_running(one.pid)]

    until(lambda: not alive(), f"the end of {processes}")
