"""Tests one wheel with old and new versions of each framework, and keeps a table: `make matrix`.

    python scripts/matrix.py WHEEL                          all, into bench/results/matrix.md
    python scripts/matrix.py WHEEL --only mxnet-1.9.1 --no-table -- -k trainer

Each row has a virtual environment of its own, build/matrix/NAME/venv, which is made once. Rows that
are not run now keep what they had in the table. What follows "--" is pytest's. Exits with 1 if a
test failed.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "matrix"
TABLE = ROOT / "bench" / "results" / "matrix.md"
TIMEOUT_S = 1500
NO_TESTS, TIMED_OUT = 5, 124  # pytest's exit code, and that of timeout(1)


class Row(NamedTuple):
    """An environment: what is installed beside the wheel, and what is run there."""

    requirements: tuple[str, ...]
    tests: tuple[str, ...]
    """Folders and files, as far as they are there."""
    front_ends: tuple[str, ...]
    """Of the conformance table."""
    newest_python: tuple[int, int] = (99, 0)
    """The last for which there are packages."""


_TENSORFLOW = ("tests/frontends/tensorflow", "tests/horovod/test_horovod_tf*.py")
_KERAS = ("tests/frontends/keras", "tests/horovod/test_horovod_keras*.py")
_EXAMPLES = ("scikit-learn", "rich")
_ON_JAX = ("optax", "flax", "equinox", *_EXAMPLES)
ROWS = {
    "tensorflow-2.15.1": Row(
        ("tensorflow-cpu==2.15.1", *_EXAMPLES),
        (*_TENSORFLOW, *_KERAS),
        ("tensorflow",),
        newest_python=(3, 11),
    ),
    "tensorflow-2.18.1": Row(
        ("tensorflow-cpu==2.18.1", *_EXAMPLES), _TENSORFLOW, ("tensorflow",), newest_python=(3, 12)
    ),
    "tensorflow-newest": Row(("tensorflow-cpu", *_EXAMPLES), _TENSORFLOW, ("tensorflow",)),
    "keras-2": Row(("tf-keras", *_EXAMPLES), _KERAS, ()),
    "keras-3": Row(("keras>=3", "tensorflow-cpu", "torch", "jax", *_EXAMPLES), _KERAS, ()),
    "jax-0.5.0": Row(
        ("jax==0.5.0", *_ON_JAX), ("tests/frontends/jax",), ("jax",), newest_python=(3, 13)
    ),
    "jax-newest": Row(("jax", *_ON_JAX), ("tests/frontends/jax",), ("jax",)),
    "mxnet-1.9.1": Row(
        ("mxnet==1.9.1", "numpy==1.23.5", "scikit-learn==1.3.2"),
        ("tests/frontends/mxnet",),
        ("mxnet",),
        newest_python=(3, 11),
    ),
}
PACKAGES = ("tensorflow", "tensorflow-cpu", "keras", "tf-keras", "jax", "optax", "flax", "equinox",
            "mxnet", "torch", "numpy")  # fmt: skip
"""Whose versions are told."""


def main() -> int:
    arguments = sys.argv[1:]
    further: list[str] = []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, further = arguments[:at], arguments[at + 1 :]
    parser = argparse.ArgumentParser()
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--only", action="append", choices=ROWS, help="may be given several times")
    parser.add_argument("--no-table", action="store_true", help="leave the table as it is")
    options = parser.parse_args(arguments)
    wheel = options.wheel.resolve(strict=True)
    failed = False
    outcomes = {}
    for name in options.only or ROWS:
        outcome = run(name, wheel, further)
        print(line(name, outcome), flush=True)
        failed |= outcome["failed"] != 0
        outcomes[name] = outcome
        if not options.no_table:
            TABLE.write_text(table(outcomes))
    return failed


def run(name: str, wheel: Path, further: list[str]) -> dict[str, Any]:
    """Make the environment of a row, and run its tests there."""
    row = ROWS[name]
    (FOLDER / name).mkdir(parents=True, exist_ok=True)
    if sys.version_info[:2] > row.newest_python:
        newest = ".".join(map(str, row.newest_python))
        reason = f"not run: needs Python {newest} or older, this is {platform.python_version()}"
        return {"versions": reason, "passed": 0, "skipped": 0, "failed": 0}
    python = installed(name, wheel)
    started = time.monotonic()
    counts = [
        counted(python, name, number, [*given, *further])  # the last -k is the one that counts
        for number, given in enumerate(runs_of(row))
    ]
    totals = {key: sum(count[key] for count in counts) for key in ("passed", "skipped", "failed")}
    if totals["passed"] + totals["failed"] == 0:
        print(f"{name}: no test was run, which proves nothing: see {FOLDER / name}")
        totals["failed"] = 1
    return {
        "versions": versions(python),
        **totals,
        "seconds": round(time.monotonic() - started),
        "commit": output("git", "-C", str(ROOT), "describe", "--always").strip(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def installed(name: str, wheel: Path) -> str:
    """The interpreter of an environment with the wheel and what the row needs."""
    venv = FOLDER / name / "venv"
    python = str(venv / "bin" / "python")
    if not venv.exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, f"{wheel}[test]", *ROWS[name].requirements], check=True)
    subprocess.run([*pip, "--force-reinstall", "--no-deps", str(wheel)], check=True)
    return python


def runs_of(row: Row) -> list[list[str]]:
    """Pytest's arguments, one list for each call."""
    found = [str(path.relative_to(ROOT)) for place in row.tests for path in ROOT.glob(place)]
    runs = [sorted(found)] if found else []
    if row.front_ends:
        of_table = " or ".join(f"processes and {front_end}" for front_end in row.front_ends)
        runs.append(["tests/test_conformance.py", "-k", of_table])
    return runs


def counted(python: str, name: str, number: int, arguments: list[str]) -> dict[str, int]:
    """Run pytest, and say how many tests passed, were skipped, and failed."""
    report = FOLDER / name / f"report{number}.xml"
    report.unlink(missing_ok=True)
    log = FOLDER / name / f"log{number}.txt"
    command = [python, "-m", "pytest", f"--junitxml={report}", "-rs", *arguments]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with log.open("w") as file:
        try:
            code = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:  # the other rows are run all the same
            code = TIMED_OUT
            file.write(f"\nended after {TIMEOUT_S} s\n")
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


def versions(python: str) -> str:
    """Of the interpreter, and of the packages that are there."""
    code = (
        "import importlib.metadata as m, platform, sys\n"
        "said = ['Python ' + platform.python_version()]\n"
        "for name in sys.argv[1:]:\n"
        "    try: said.append(f'{name} {m.version(name)}')\n"
        "    except m.PackageNotFoundError: pass\n"
        "print(', '.join(said))"
    )
    return output(python, "-c", code, *PACKAGES).strip()


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def line(name: str, outcome: dict[str, Any]) -> str:
    """A row of the table."""
    cells = [name, *(str(outcome.get(key, "")) for key in COLUMNS)]
    return f"| {' | '.join(cells)} |"


COLUMNS = ("versions", "passed", "skipped", "failed", "seconds", "commit", "date")


def table(outcomes: dict[str, dict[str, Any]]) -> str:
    """All rows that have been run now, or were before."""
    before = TABLE.read_text().splitlines() if TABLE.exists() else []
    rows = {name: row for name in ROWS for row in before if row.startswith(f"| {name} |")}
    rows |= {name: line(name, outcome) for name, outcome in outcomes.items()}
    lines = [rows[name] for name in ROWS if name in rows]
    head = [
        "# Versions of the frameworks\n",
        "By `make matrix` (`scripts/matrix.py`): one wheel, compiled against no framework, in an",
        "environment of its own for each row. `make matrix MATRIX_ARGS='--only NAME'` runs one row",
        "again. Run are the tests of the front end, and its part of the conformance table",
        "(`tests/test_conformance.py`) with 1, 2 and 3 ranks. What is skipped says why in its",
        "test: a framework that is not in that environment, or what a version lacks.\n",
        f"{platform.system()} {platform.release().split('-')[0]}, {os.cpu_count()} cores.\n",
        f"| environment | {' | '.join(COLUMNS)} |",
        f"|---|{'---|' * len(COLUMNS)}",
    ]
    return "\n".join([*head, *lines]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
