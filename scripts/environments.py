"""Environments with one wheel in them, what is run there, and tables of that.

Nothing of it knows what is run: matrix.py has the tests of frameworks, clients.py real clients.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NO_TESTS, TIMED_OUT = 5, 124  # pytest's exit code, and that of timeout(1)
GRACE_S = 10  # for what is told to end before it is killed


def why_not_run(newest_python: tuple[int, int]) -> str:
    """Return, for a table, that this Python is newer than there are packages for; else ""."""
    if sys.version_info[:2] <= newest_python:
        return ""
    newest = ".".join(map(str, newest_python))
    return f"not run: needs Python {newest} or older, this is {platform.python_version()}"


def installed(
    folder: Path,
    wheel: Path,
    requirements: Iterable[str],
    *,
    extras: str = "",
    pip: str = "",
    without_dependencies: Iterable[str] = (),
) -> str:
    """Return the interpreter of an environment with the wheel and what else is wanted.

    ``folder`` gets a folder ``venv``, which is made once; ``extras`` are those of the wheel, with
    brackets; ``pip`` is the requirement of an installer, where the newest does not do. What is to
    be ``without_dependencies`` has such as nothing else can be installed beside.
    """
    venv = folder / "venv"
    python = str(venv / "bin" / "python")
    if not venv.exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    install = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    if pip:
        subprocess.run([*install, pip], check=True)
    subprocess.run([*install, f"{wheel}{extras}", *requirements], check=True)
    alone = [str(wheel), *without_dependencies]
    subprocess.run([*install, "--force-reinstall", "--no-deps", *alone], check=True)
    return python


def output_of(
    *command: str | Path, cwd: Path | None = None, variables: Mapping[str, str] | None = None
) -> str:
    """Return what ``command`` has written. Raises CalledProcessError, with all of it."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env={**os.environ, **(variables or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    return done.stdout


def logged(
    command: Sequence[str],
    log: Path,
    *,
    timeout_s: float,
    cwd: Path = ROOT,
    variables: Mapping[str, str] | None = None,
) -> int:
    """Run a command to its end, with all that it prints in ``log``; return its exit code.

    What takes longer is killed with all processes of its group, gets TIMED_OUT, and the log says
    so.
    """
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with (
        log.open("w") as file,
        subprocess.Popen(
            command,
            cwd=cwd,
            env={**environ, **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:  # what comes after is run all the same
            file.write(f"\nended after {timeout_s} s\n")
            return TIMED_OUT
        finally:
            if process.poll() is None:  # also when the user has had enough
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it with its group: launchers end their ranks when they are told to end."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)


def counted(
    python: str,
    folder: Path,
    number: int,
    arguments: Iterable[str],
    *,
    timeout_s: float,
    cwd: Path = ROOT,
    variables: Mapping[str, str] | None = None,
) -> dict[str, int]:
    """Run pytest, and say how many tests passed, were skipped, and failed.

    The log and the report are in ``folder``, as log0.txt and report0.xml for ``number`` 0.
    """
    report = folder / f"report{number}.xml"
    report.unlink(missing_ok=True)
    log = folder / f"log{number}.txt"
    command = [python, "-m", "pytest", f"--junitxml={report}", "-rs", *arguments]
    code = logged(command, log, timeout_s=timeout_s, cwd=cwd, variables=variables)
    if code == NO_TESTS:
        return {"passed": 0, "skipped": 0, "failed": 0}
    if code != 0:
        print(log.read_text()[-6000:])
    if not report.exists():
        return {"passed": 0, "skipped": 0, "failed": 1}
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    totals = [
        {key: int(suite.get(key, 0)) for key in ("tests", "skipped", "failures", "errors")}
        for suite in suites
    ]
    tests, skipped, failures, errors = (sum(t[key] for t in totals) for key in totals[0])
    failed = failures + errors
    passed = tests - skipped - failed
    if code != 0:  # a crash at the end, say, which the report does not have
        failed = max(failed, 1)
    return {"passed": passed, "skipped": skipped, "failed": failed}


def versions(python: str, packages: Iterable[str]) -> str:
    """Return the versions of the interpreter, and of the packages that are there."""
    code = (
        "import importlib.metadata as m, platform, sys\n"
        "said = ['Python ' + platform.python_version()]\n"
        "for name in sys.argv[1:]:\n"
        "    try: said.append(f'{name} {m.version(name)}')\n"
        "    except m.PackageNotFoundError: pass\n"
        "print(', '.join(said))"
    )
    return output(python, "-c", code, *packages).strip()


def output(*command: str) -> str:
    """Return what a command prints."""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def commit_and_date() -> dict[str, str]:
    """Return the commit and the date of what is run now, for two columns of a table."""
    return {
        "commit": output("git", "-C", str(ROOT), "describe", "--always").strip(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def machine() -> str:
    """Return where this is run."""
    linux = platform.release().split("-")[0]
    return f"{platform.system()} {linux}, {os.cpu_count()} cores."


def line(name: str, outcome: Mapping[str, object], columns: Iterable[str]) -> str:
    """Return a row of a table."""
    cells = (str(outcome.get(column, "")).replace("|", "\\|") for column in columns)
    return f"| {' | '.join([name, *cells])} |"


def header(first: str, columns: Sequence[str]) -> list[str]:
    """Return a table's first two lines. ``first``: the title of the column with the names."""
    return [f"| {first} | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]


def table(
    path: Path,
    head: Iterable[str],
    first: str,
    columns: Sequence[str],
    names: Iterable[str],
    outcomes: Mapping[str, Mapping[str, object]],
) -> str:
    """Return all rows that were run now, or are in ``path`` from before, in the order of ``names``.

    Above them are ``head`` and the machine.
    """
    before = path.read_text().splitlines() if path.exists() else []
    rows = {name: row for name in names for row in before if row.startswith(f"| {name} |")}
    rows |= {name: line(name, outcome, columns) for name, outcome in outcomes.items()}
    lines = [rows[name] for name in names if name in rows]
    return "\n".join([*head, f"{machine()}\n", *header(first, columns), *lines]) + "\n"
