"""``kolovod run --backend mpi`` becomes ``mpirun``. What its ranks find out is in launchers.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from kolovod.notices import report_to_stderr
from kolovod.rendezvous.rank_environment import thread_limits, usable_cores

__all__ = ["mpi_command", "run_by_mpi"]

_EXIT_NOT_FOUND = 127


def run_by_mpi(
    size: int,
    command: Sequence[str],
    variables: Mapping[str, str],
    further: Sequence[str] = (),
) -> int:
    """Replace this process by ``mpirun``; return only if there is none (127)."""
    mpirun = _find_mpirun()
    if mpirun is not None:
        _become_mpirun(mpirun, size, command, variables, further)
    report_to_stderr(
        "backend mpi needs mpirun, and there is none on PATH or beside this Python: "
        "pip install 'kolovod[mpi]', or install Open MPI or MPICH"
    )
    return _EXIT_NOT_FOUND


def _become_mpirun(
    mpirun: str,
    size: int,
    command: Sequence[str],
    variables: Mapping[str, str],
    further: Sequence[str],
) -> NoReturn:
    environment = {**os.environ, **variables}
    environment.update(thread_limits(environment, size, usable_cores()))
    environment["KOLOVOD_BACKEND"] = "mpi"
    environment.setdefault("PYTHONUNBUFFERED", "1")
    is_open_mpi = _is_open_mpi(mpirun)
    arguments = mpi_command(mpirun, is_open_mpi, size, command, variables, os.geteuid(), further)
    sys.stdout.flush()
    os.execve(mpirun, arguments, environment)


def mpi_command(
    mpirun: str,
    is_open_mpi: bool,
    size: int,
    command: Sequence[str],
    variables: Mapping[str, str],
    uid: int,
    further: Sequence[str] = (),
) -> list[str]:
    """Return the command line of ``mpirun`` for ``size`` ranks on this host. Decides, does nothing.

    Open MPI refuses more ranks than cores, and the superuser, unless told otherwise. ``further``
    are the user's own arguments.
    """
    arguments = [mpirun]
    if is_open_mpi:
        arguments += ["--oversubscribe", "--tag-output"]
        if not {"--bind-to", "-bind-to"} & set(further):
            arguments += ["--bind-to", "none"]
        if uid == 0:
            arguments.append("--allow-run-as-root")
        for name in sorted({*variables, "KOLOVOD_BACKEND", "PYTHONUNBUFFERED"}):
            arguments += ["-x", name]
    else:
        arguments.append("-prepend-rank")
    return [*arguments, *further, "-np", str(size), *command]


def _find_mpirun() -> str | None:
    beside = Path(sys.executable).parent
    return shutil.which("mpirun", path=f"{beside}{os.pathsep}{os.environ.get('PATH', os.defpath)}")


def _is_open_mpi(mpirun: str) -> bool:
    version = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, timeout=30, check=False
    )
    return "Open MPI" in version.stdout or "OpenRTE" in version.stdout
