"""Tests one wheel with old and new versions of each framework, and keeps a table: `make matrix`.

    python scripts/matrix.py WHEEL                          all, into bench/results/matrix.md
    python scripts/matrix.py WHEEL --only mxnet-1.9.1 --no-table -- -k trainer

Each row has a virtual environment of its own, build/matrix/NAME/venv, which is made once. Rows that
are not run now keep what they had in the table. What follows "--" is pytest's. Exits with 1 if a
test failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import environments
from environments import ROOT

FOLDER = ROOT / "build" / "matrix"
TABLE = ROOT / "bench" / "results" / "matrix.md"
TIMEOUT_S = 1500


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
_TORCH = (
    "tests/frontends/torch",
    "tests/elastic/test_state_identity.py",
    "tests/horovod/test_horovod_*torch*.py",
    "tests/horovod/test_horovod_optimizer.py",
)
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
    "torch-2.6.0": Row(("torch==2.6.0", *_EXAMPLES), _TORCH, ("torch",), newest_python=(3, 13)),
    "torch-2.8.0": Row(
        ("torch==2.8.0", *_EXAMPLES),
        (*_TORCH, "tests/c10d/test_elastic_*.py", "tests/c10d/test_[aco]*.py"),
        ("torch",),
        newest_python=(3, 13),
    ),
    "torch-newest": Row(("torch", *_EXAMPLES), (*_TORCH, "tests/c10d"), ("torch",)),
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
        print(environments.line(name, outcome, COLUMNS), flush=True)
        failed |= outcome["failed"] != 0
        outcomes[name] = outcome
        if not options.no_table:
            TABLE.write_text(table(outcomes))
    return failed


def run(name: str, wheel: Path, further: list[str]) -> dict[str, Any]:
    """Make the environment of a row, and run its tests there."""
    row = ROWS[name]
    (FOLDER / name).mkdir(parents=True, exist_ok=True)
    if reason := environments.why_not_run(row.newest_python):
        return {"versions": reason, "passed": 0, "skipped": 0, "failed": 0}
    python = environments.installed(FOLDER / name, wheel, row.requirements, extras="[test]")
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
        "versions": environments.versions(python, PACKAGES),
        **totals,
        "seconds": round(time.monotonic() - started),
        **environments.commit_and_date(),
    }


def runs_of(row: Row) -> list[list[str]]:
    """Pytest's arguments, one list for each call."""
    found = [str(path.relative_to(ROOT)) for place in row.tests for path in ROOT.glob(place)]
    runs = [sorted(found)] if found else []
    if row.front_ends:
        of_table = " or ".join(f"processes and {front_end}" for front_end in row.front_ends)
        runs.append(["tests/core/test_conformance.py", "-k", of_table])
    return runs


def counted(python: str, name: str, number: int, arguments: list[str]) -> dict[str, int]:
    """Run pytest for a row, and say how many tests passed, were skipped, and failed."""
    return environments.counted(python, FOLDER / name, number, arguments, timeout_s=TIMEOUT_S)


COLUMNS = ("versions", "passed", "skipped", "failed", "seconds", "commit", "date")


def table(outcomes: dict[str, dict[str, Any]]) -> str:
    """Return all rows that have been run now, or were before."""
    head = [
        "# Versions of the frameworks\n",
        "By `make matrix` (`scripts/matrix.py`): one wheel, compiled against no framework, in an",
        "environment of its own for each row. `make matrix MATRIX_ARGS='--only NAME'` runs one row",
        "again. Run are the tests of the front end, and its part of the conformance table",
        "(`tests/core/test_conformance.py`) with 1, 2 and 3 ranks. What is skipped says why in its",
        "test: a framework that is not in that environment, or what a version lacks.\n",
    ]
    return environments.table(TABLE, head, "environment", COLUMNS, ROWS, outcomes)


if __name__ == "__main__":
    sys.exit(main())
