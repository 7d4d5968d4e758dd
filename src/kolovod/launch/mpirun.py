"""Ranks that an MPI library starts, and the place of such a rank.

``kolovod run --backend mpi`` becomes ``mpirun``. A rank that finds itself under ``mpirun`` (ours
or the user's own) learns its number from mpi4py; rank 0 runs the store, and MPI carries its address
and the job's secret to the others.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from kolovod.errors import BootstrapError
from kolovod.launch.auth import new_secret
from kolovod.launch.place import Place, local_and_cross, thread_limits, usable_cores
from kolovod.launch.spawn import report_to_stderr
from kolovod.launch.store import Store

__all__ = ["mpi_command", "place_from_mpi", "run_by_mpi"]

_EXIT_NOT_FOUND = 127


def run_by_mpi(
    size: int,
    command: Sequence[str],
    variables: Mapping[str, str],
    further: Sequence[str] = (),
) -> int:
    """Replace this process by ``mpirun``; returns only if there is none (127)."""
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
    """The command line of ``mpirun`` for ``size`` ranks on this host. Decides, does nothing.

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


def place_from_mpi() -> Place:
    """The place in MPI's world; all its ranks must call it, once per process.

    Raises BootstrapError if mpi4py is absent or the ranks are on several hosts.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise BootstrapError(
            f"this process is one of several that an MPI library started, but mpi4py cannot be "
            f"used ({error}): pip install 'kolovod[mpi]', or start it with 'kolovod run'"
        ) from error
    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    host = socket.gethostname()
    offer = None
    if rank == 0:
        secret = new_secret()
        store = Store(secret, size)
        store.start()
        atexit.register(store.close)
        offer = (store.address, secret)
    hosts: list[str] = world.allgather(host)
    address, secret = world.bcast(offer, root=0)
    if len(set(hosts)) > 1:
        raise BootstrapError(
            f"the ranks are on the hosts {', '.join(sorted(set(hosts)))}: this version forms a "
            "world on one host"
        )
    return Place(rank, size, *local_and_cross(hosts, rank), host, address, secret)
