"""kolovod.launch.mpirun: ranks that an MPI library starts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from slow import slow_but

from kolovod.launch import mpirun
from kolovod.launch.mpirun import mpi_command

pytestmark = pytest.mark.frameworks


def test_the_command_line_of_mpirun() -> None:
    command = mpi_command("/bin/mpirun", True, 2, ["python", "t.py"], {"A": "b"}, uid=1000)
    assert command[-4:] == ["-np", "2", "python", "t.py"]
    assert "--allow-run-as-root" not in command
    assert command[command.index("-x") + 1] == "A"
    assert "--allow-run-as-root" in mpi_command("m", True, 2, ["t"], {}, uid=0)
    assert mpi_command("m", False, 3, ["t"], {}, uid=0) == ["m", "-prepend-rank", "-np", "3", "t"]


def test_arguments_of_the_users_own_come_before_the_command() -> None:
    assert "none" in mpi_command("m", True, 2, ["t"], {}, 1000, ["--quiet"])
    command = mpi_command("m", True, 2, ["t"], {}, 1000, ["--bind-to", "core"])
    assert command[-5:] == ["--bind-to", "core", "-np", "2", "t"]
    assert "none" not in command


@pytest.mark.parametrize(
    "flag", [["--timestamps"], ["--output-dir", "d"], ["--keep-going"], ["--label-hosts", "a:1"]]
)
def test_what_mpirun_does_itself_is_refused(flag: list[str]) -> None:
    command = [sys.executable, "-m", "kolovod", "run", "-np", "1", "--backend", "mpi", *flag]
    done = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"{flag[0]} with backend mpi" in done.stderr


@pytest.mark.parametrize("flag", [["--elastic"], ["--min-np", "1"]], ids="".join)
def test_elastic_jobs_are_refused(flag: list[str]) -> None:
    command = [sys.executable, "-m", "kolovod", "run", "-np", "1", "--backend", "mpi", *flag]
    done = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "an elastic job with backend mpi: MPI cannot go on without a rank" in done.stderr


def test_ranks_of_an_elastic_job_refuse_it_too() -> None:
    """They may have it from their environment."""
    ours = {"KOLOVOD_RANK": "0", "KOLOVOD_SIZE": "2", "KOLOVOD_MIN_NP": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "import kolovod, kolovod.elastic; kolovod.init()"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **ours, "KOLOVOD_STORE_HOST": "127.0.0.1", "KOLOVOD_BACKEND": "mpi"},
    )
    assert "SettingError: an elastic job with backend mpi" in done.stderr


def test_without_mpirun_the_backend_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mpirun, "_find_mpirun", lambda: None)
    assert mpirun.run_by_mpi(2, ["true"], {}) == 127
    assert "pip install 'kolovod[mpi]'" in capsys.readouterr().err


def _has_mpi() -> bool:
    if mpirun._find_mpirun() is None:
        return False
    probe = [sys.executable, "-c", "from mpi4py import MPI"]
    return subprocess.run(probe, capture_output=True, timeout=60).returncode == 0


@pytest.mark.skipif(not _has_mpi(), reason="needs mpirun, and mpi4py for it: the extra mpi")
@pytest.mark.parametrize("backend", slow_but(("native",), ("mpi", "native")))
def test_ranks_that_mpi_started_form_worlds(backend: str) -> None:
    code = """
import numpy, kolovod
for attempt in range(2):  # the second one meets at the same store
    kolovod.init()
    total = kolovod.allreduce(numpy.array([kolovod.rank() + 1.0]), op=kolovod.Sum)
    facts = (kolovod.rank(), kolovod.size(), kolovod.local_rank(), kolovod.local_size())
    backend = kolovod.core.world.current().settings.backend
    print("rank {} {} {} {} of {} {}\\n".format(*facts, backend, total[0]), end="", flush=True)
    kolovod.shutdown()
"""
    command = [sys.executable, "-m", "kolovod", "run", "--backend", "mpi", "-np", "2", "--"]
    script = ["env", f"KOLOVOD_BACKEND={backend}", sys.executable, "-c", code]
    done = subprocess.run(
        [*command, *script], capture_output=True, text=True, timeout=60, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert done.stdout.count(f"rank {rank} 2 {rank} 2 of {backend} 3.0") == 2
