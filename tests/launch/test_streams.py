"""Standard streams of commands that are closed, full, or read by nobody (launch/streams.py)."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from launched import DEADLINE_S, KOLOVOD
from slow import slow_but

pytestmark = pytest.mark.environments

HOROVODRUN = [sys.executable, "-c", "from horovod.runner.launch import main; main()"]
LONG = "print('x' * 100_000)"  # more than a pipe holds
FULL = "kolovod: standard output is incomplete: [Errno 28] No space left on device"

PRINTING = {
    "explain": [*KOLOVOD, "explain"],
    "help": [*KOLOVOD, "run", "--help"],
    "version": [*KOLOVOD, "--version"],
    "ps": [*KOLOVOD, "ps"],
    "ps-json": [*KOLOVOD, "ps", "--json"],
    "doctor": [*KOLOVOD, "doctor"],
    "manifest": [*KOLOVOD, "manifest", "--name", "a", "--image", "b", "-np", "2", "true"],
    "check-build": [*HOROVODRUN, "--check-build"],
    "horovodrun-help": [*HOROVODRUN, "--help"],
}
RUNNING = {
    "run": [*KOLOVOD, "run", "-np", "2"],
    "merged": [*KOLOVOD, "run", "-np", "2", "--merge-output"],
    "elastic": [*KOLOVOD, "run", "--elastic", "-np", "2"],
    "horovodrun": [*HOROVODRUN, "-np", "2"],
}
BUFFERING = ("", "1")
"""Values of PYTHONUNBUFFERED; Python takes the first for none."""


class Case(NamedTuple):
    """A command under one way of buffering."""

    name: str
    unbuffered: str

    def __str__(self) -> str:
        return f"{self.name}-{'unbuffered' if self.unbuffered else 'buffered'}"


def cases(names: dict[str, list[str]], *quick: str) -> list[object]:
    """For ``parametrize``: each command in each way, those that are not ``quick`` marked slow."""
    every = [Case(name, unbuffered) for name in names for unbuffered in BUFFERING]
    return slow_but([case for case in every if case.name in quick], every)


def shell(command: list[str], streams: str, unbuffered: str) -> tuple[int, str]:
    """Run a command with redirections of the shell: its exit code, and its standard error."""
    done = subprocess.run(
        ["bash", "-c", f"{shlex.join(command)} {streams}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    return done.returncode, done.stderr


def without_reader(command: list[str], unbuffered: str) -> tuple[int, str]:
    """The same with a pipe as standard output that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            command,
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            timeout=DEADLINE_S,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    finally:
        os.close(write)
    return done.returncode, done.stderr


@pytest.mark.parametrize("case", cases(PRINTING, "explain", "version", "check-build"), ids=str)
def test_what_prints_ends_with_its_reader(case: Case) -> None:
    code, said = without_reader(PRINTING[case.name], case.unbuffered)
    assert (code, said) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("case", cases(PRINTING, "ps", "help"), ids=str)
def test_a_full_disk_is_said_by_what_prints(case: Case) -> None:
    code, said = shell(PRINTING[case.name], ">/dev/full", case.unbuffered)
    assert (code, said) == (1, FULL + "\n")


@pytest.mark.parametrize("case", cases(PRINTING, "ps-json"), ids=str)
def test_closed_streams_are_the_null_device(case: Case) -> None:
    command = PRINTING[case.name]
    assert shell(command, ">&-", case.unbuffered) == (0, "")
    assert shell(command, "<&- >&- 2>&-", case.unbuffered) == (0, "")


@pytest.mark.parametrize("case", cases(RUNNING, "run"), ids=str)
def test_ranks_outlive_the_reader(case: Case, tmp_path: Path) -> None:
    code = f"{LONG}; {LONG}; open({str(tmp_path)!r} + f'/{{__import__(\"os\").getpid()}}', 'w')"
    command = [*RUNNING[case.name], sys.executable, "-c", code]
    ended, said = without_reader(command, case.unbuffered)
    assert ended == 0, said
    assert len(os.listdir(tmp_path)) == 2
    assert "incomplete" not in said


@pytest.mark.parametrize("case", cases(RUNNING, "elastic"), ids=str)
def test_a_full_disk_is_said_once_and_the_code_is_the_jobs(case: Case) -> None:
    command = [*RUNNING[case.name], sys.executable, "-c", f"{LONG}; {LONG}"]
    code, said = shell(command, ">/dev/full", case.unbuffered)
    assert code == 0
    assert said.count(f"{FULL}; the job goes on without it\n") == 1
    assert said.count("incomplete") == 1


@pytest.mark.parametrize("case", cases(RUNNING, "run"), ids=str)
def test_a_failed_rank_is_the_exit_code_whatever_happens_to_the_streams(case: Case) -> None:
    command = [*RUNNING[case.name], sys.executable, "-c", f"{LONG}; raise SystemExit(3)"]
    expected = 1 if case.name == "horovodrun" else 3
    for streams in (">/dev/full", ">/dev/full 2>/dev/full", "<&- >&- 2>&-"):
        assert shell(command, streams, case.unbuffered)[0] == expected


def test_a_wrong_command_line_keeps_its_code() -> None:
    assert shell([*KOLOVOD, "nothing"], ">/dev/full 2>/dev/full", "")[0] == 2
    assert shell([*KOLOVOD, "run"], ">&- 2>&-", "")[0] == 2


def test_no_rank_inherits_a_closed_stream() -> None:
    """A socket or a file that a rank opens must not get the number of standard output."""
    code = "import os; raise SystemExit(0 if os.open('/', os.O_RDONLY) > 2 else 4)"
    command = [*KOLOVOD, "run", "-np", "1", sys.executable, "-c", code]
    assert shell(command, "<&- >&- 2>&-", "")[0] == 0


def test_a_descriptor_that_is_not_ready_is_waited_for(tmp_path: Path) -> None:
    """As another process of the same terminal or pipe may leave it: O_NONBLOCK is of the file."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    command = [*KOLOVOD, "run", "-np", "1", "-q", "--", sys.executable, "-c", f"{LONG}; {LONG}"]
    with subprocess.Popen(command, stdout=write) as process:
        os.close(write)
        with open(read, "rb") as pipe:
            text = pipe.read()
    assert process.returncode == 0
    assert text.count(b"x") == 200_000


def test_what_an_encoding_lacks_is_replaced() -> None:
    code = "import sys; sys.stdout.buffer.write('caf\\u00e9\\n'.encode())"
    done = subprocess.run(
        [*KOLOVOD, "run", "-np", "1", "-q", "--", sys.executable, "-c", code],
        capture_output=True,
        timeout=DEADLINE_S,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0
    assert done.stdout == b"[0]<stdout>:caf?\n"


@pytest.mark.parametrize(
    "command",
    [
        [*KOLOVOD, "run", "-np", "2", "true"],
        [str(Path(sys.executable).with_name("kolovod")), "--version"],
        [str(Path(sys.executable).with_name("horovodrun")), "-np", "2", "true"],
    ],
    ids=["module", "kolovod", "horovodrun"],
)
def test_ctrl_c_while_a_command_is_loaded_ends_it_in_silence(
    command: list[str], tmp_path: Path
) -> None:
    done = _interrupted_in("argparse", command, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_ctrl_c_while_a_script_is_loaded_is_pythons_own(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import kolovod.numpy\n")
    script = [sys.executable, str(tmp_path / "train.py"), "-m", "kolovod"]
    done = _interrupted_in("numpy", script, tmp_path)
    assert done.stderr.endswith("KeyboardInterrupt\n")


def _interrupted_in(
    module: str, command: list[str], folder: Path
) -> subprocess.CompletedProcess[str]:
    (folder / f"{module}.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment
    )
