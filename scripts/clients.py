"""Tries one wheel with programs that nobody here wrote, and keeps a table: `make clients`.

    python scripts/clients.py WHEEL                        all, into bench/results/clients.md
    python scripts/clients.py WHEEL --only fsdp2 --no-table

Each row (client_rows.py) trains by a client of Kolovod, or of Horovod, and does the same without
Kolovod: over gloo, or in one process. Compared are numbers, the weights above all. Packages come
from the index, into an environment of their own, build/clients/NAME/venv, which is made once; what
a run writes lies beside it. Rows that are not run now keep what they had in the table. Exits with 1
if a row failed, after the last lines of what it printed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import environments
from client_results import compared
from client_rows import ENVIRONMENTS, ROWS, Tests, Training
from environments import ROOT

FOLDER = ROOT / "build" / "clients"
TABLE = ROOT / "bench" / "results" / "clients.md"
PROGRAMS = ROOT / "scripts" / "clients"
TIMEOUT_S = 600
TESTS_TIMEOUT_S = 2400
TRIES = 3
GLOO_ABORTS = "terminate called without an active exception"
"""Processes over gloo have been seen to end so, once in some hundred runs: they may try again."""
LAST_LINES = 60


class Failed(Exception):
    """What went wrong, for the table, and what was printed, for the user."""

    def __init__(self, text: str, log: Path | None = None) -> None:
        super().__init__(text)
        self.log = log


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--only", action="append", choices=ROWS, help="may be given several times")
    parser.add_argument("--no-table", action="store_true", help="leave the table as it is")
    options = parser.parse_args()
    wheel = options.wheel.resolve(strict=True)
    outcomes: dict[str, dict[str, Any]] = {}
    pythons: dict[str, str] = {}
    for name in options.only or ROWS:
        outcomes[name] = run(name, wheel, pythons)
        print(environments.line(name, outcomes[name], COLUMNS), flush=True)
        if not options.no_table:
            TABLE.write_text(table(outcomes))
    return int(any(outcome["failed"] for outcome in outcomes.values()))


def run(name: str, wheel: Path, pythons: dict[str, str]) -> dict[str, Any]:
    """Make the environment of a row, and do what the row says.

    ``pythons`` are the interpreters of the environments that were made in this run.
    """
    row = ROWS[name]
    environment = ENVIRONMENTS[row.environment]
    if reason := environments.why_not_run(environment.newest_python):
        return {"versions": reason, "what ran": row.what, "failed": False}
    folder = FOLDER / row.environment / name
    folder.mkdir(parents=True, exist_ok=True)
    outcome: dict[str, Any] = {"what ran": row.what, "failed": False}
    outcome |= environments.commit_and_date()  # now, for it may have changed when all is through
    started = time.monotonic()
    try:
        if row.environment not in pythons:
            pythons[row.environment] = environments.installed(
                FOLDER / row.environment,
                wheel,
                environment.requirements,
                pip=environment.pip,
                without_dependencies=environment.without_dependencies,
            )
        python = pythons[row.environment]
        outcome["versions"] = environments.versions(python, (row.client, *environment.told))
        started = time.monotonic()
        if isinstance(row, Tests):
            outcome |= tested(row, python, folder)
        else:
            outcome |= trained(row, python, folder)
    except subprocess.CalledProcessError as error:
        outcome |= {"failed": True, "equal": f"**not installed: {error}**"}
    except Failed as error:
        outcome |= {"failed": True, "equal": f"**{error}**"}
        if error.log is not None:
            lines = error.log.read_text(errors="replace").splitlines()
            print(f"{name}: {error}. The last lines of {error.log}:")
            print("\n".join(lines[-LAST_LINES:]), flush=True)
    outcome["seconds"] = round(time.monotonic() - started)
    return outcome


def trained(row: Training, python: str, folder: Path) -> dict[str, Any]:
    """Run a row's two commands, and compare what they have written."""
    places = {"python": python, "here": str(PROGRAMS), "shared": str(folder / "shared")}
    if row.before:
        command(row.before, folder, "shared", places, row)
    command(row.ours, folder, "ours", places, row)
    command(row.theirs, folder, "theirs", places, row)
    found = compared(folder / "ours", folder / "theirs", row)
    cells = {"with Kolovod": found.ours, "reference": f"{row.reference}: {found.theirs}"}
    if found.problem:
        return {**cells, "equal": f"**{found.problem}**", "failed": True}
    return {**cells, "equal": found.equal}


def command(text: str, folder: Path, kind: str, places: dict[str, str], row: Training) -> None:
    """Run a command of a row, which writes into a folder that is empty at first."""
    out = folder / kind
    emptied(out)
    is_reference = kind == "theirs"
    filled = text.format(out=out, **places)
    log = folder / f"{kind}.log"
    for _ in range(TRIES if is_reference else 1):
        code = environments.logged(
            ["sh", "-ec", filled],
            log,
            timeout_s=TIMEOUT_S,
            cwd=out,
            variables=variables(places["python"], folder, is_reference),
        )
        if code == 0 or GLOO_ABORTS not in log.read_text(errors="replace"):
            break
    if code != 0:
        what = {"ours": "with Kolovod", "theirs": row.reference, "shared": "preparing"}[kind]
        raise Failed(f"{what}: ended with {code}", log)


def tested(row: Tests, python: str, folder: Path) -> dict[str, Any]:
    """Run a client's own tests, which its source distribution has."""
    source = unpacked(row.source, python, folder)
    cells: dict[str, Any] = {}
    failed = False
    chosen = {"with Kolovod": row.ours, "reference": row.theirs}
    for number, (cell, arguments) in enumerate(chosen.items()):
        counts = environments.counted(
            python,
            folder,
            number,
            arguments,
            timeout_s=TESTS_TIMEOUT_S,
            cwd=source,
            variables=variables(python, folder, is_reference=cell == "reference"),
        )
        cells[cell] = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        # What fails without us says nothing about us: the table has it.
        failed |= cell != "reference" and (counts["failed"] > 0 or counts["passed"] == 0)
    cells["reference"] = f"{row.reference}: {cells['reference']}"
    return {**cells, "equal": "**no**" if failed else "all pass", "failed": failed}


def unpacked(requirement: str, python: str, folder: Path) -> Path:
    """Return the folder of a source distribution, fetched from the index unless it is there."""
    target = folder / "source"
    if not target.exists():
        get = [python, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
        fetched = folder / "fetched"
        emptied(fetched)
        where = ["--dest", str(fetched), "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*get, *where, requirement], check=True)
        with tarfile.open(next(fetched.glob("*.tar.gz"))) as archive:
            archive.extractall(fetched / "unpacked", filter="data")
        (fetched / "unpacked").rename(target)
    return next(path for path in target.iterdir() if path.is_dir())


def emptied(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def variables(python: str, folder: Path, is_reference: bool) -> dict[str, str]:
    """Return variables: the environment's programs first, nothing fetched, nothing left behind.

    In a reference torch does not load Kolovod, though it is installed.
    """
    cache = str(folder.parent / "cache")
    found = {
        "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": cache,
        "TORCH_EXTENSIONS_DIR": cache,
        "XDG_CACHE_HOME": cache,
    }
    return found | ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"} if is_reference else {})


COLUMNS = (
    "versions", "what ran", "with Kolovod", "reference", "equal", "seconds", "commit", "date"
)  # fmt: skip


def table(outcomes: dict[str, dict[str, Any]]) -> str:
    """Return all rows that have been run now, or were before."""
    head = [
        "# Real clients\n",
        "By `make clients` (`scripts/clients.py`): programs as users of each client write them",
        "(`scripts/clients/`), the client unmodified, as the package index has it. The reference",
        "is the same program without Kolovod. Numbers that are not the same on all ranks, or not",
        "equal to the reference's, make a row fail; *equal* says how closely they agree: the",
        "largest difference in an array, relative to its largest value, or to a hundredth of the",
        "largest weight if that is more.",
        "`make clients CLIENTS_ARGS='--only NAME'` runs one row again.\n",
    ]
    return environments.table(TABLE, head, "client", COLUMNS, ROWS, outcomes)


if __name__ == "__main__":
    sys.exit(main())
