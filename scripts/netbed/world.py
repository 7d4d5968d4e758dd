"""Ranks on the hosts of a bed, started by hand: what a launcher would do, without one."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

import kolovod
from kolovod.net.channel import new_secret
from kolovod.rendezvous.rank_environment import RankEnvironment, local_and_cross
from netbed.bed import Bed
from netbed.namespaces import HERE

__all__ = ["Ended", "Job", "World"]

_SOURCES = str(Path(kolovod.__file__).parent.parent)


@dataclass(frozen=True)
class Ended:
    """A rank that raised, was killed or exited by itself."""

    exit_code: int
    """Minus the signal's number, if one ended it."""
    text: str
    """The traceback, or what it wrote to its standard error."""


class Job:
    """What a launcher gives its ranks: places, a secret and a rendezvous server; a context manager.

    ``hosts``: of each rank. ``store_on``: the host with the rendezvous server, else that of rank 0.
    """

    def __init__(self, bed: Bed, hosts: Sequence[str], store_on: str = "") -> None:
        self.bed = bed
        self.hosts = tuple(hosts)
        self.secret = new_secret()
        self._store_on = store_on or hosts[0]
        self.server = ""
        """Where it listens, while the job runs."""

    def __enter__(self) -> Job:
        address = self.bed.address(self._store_on)
        self._process = self.bed.popen(
            self._store_on,
            [sys.executable, str(HERE / "rendezvous.py"), str(len(self.hosts)), address],
            env={**os.environ, "PYTHONPATH": _SOURCES, "KOLOVOD_SECRET": self.secret},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.server = self._process.stdout.readline().strip()
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.communicate()

    def environment(self, rank: int, secret: str = "") -> dict[str, str]:
        """Return the variables of one rank; ``secret``: another than the job's."""
        numbers = local_and_cross(self.hosts, rank)
        place = RankEnvironment(
            rank,
            len(self.hosts),
            *numbers,
            host=self.hosts[rank],
            rendezvous=self.server,
            secret=secret or self.secret,
        )
        return {"PYTHONPATH": _SOURCES, "OMP_NUM_THREADS": "1", **place.variables()}


class World:
    """Calls ``fn(rank, *args)`` in a process per rank, on ``hosts[rank]``; a context manager.

    ``kolovod.init()`` in ``fn`` forms their world. ``env``: further variables. ``secrets``: of
    single ranks, instead of the job's. Leaving it ends all processes.
    """

    def __init__(
        self,
        bed: Bed,
        hosts: Sequence[str],
        fn: Callable[..., Any],
        *args: Any,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[int, str] | None = None,
    ) -> None:
        self.bed = bed
        self.job = Job(bed, hosts)
        self.ranks: list[subprocess.Popen[str]] = []
        self.folder = Path(tempfile.mkdtemp(prefix="world-", dir=bed.folder))
        self._work = (fn, args)
        self._secrets = dict(secrets or {})
        self._env = dict(env or {})
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> World:
        try:
            self._start()
        except BaseException:
            self._cleanup.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._cleanup.close()

    def _start(self) -> None:
        # Pickled by reference, a function of a test module is found only with its search path.
        header = cloudpickle.dumps([path for path in sys.path if isinstance(path, str)])
        work = self.folder / "work"
        work.write_bytes(header + cloudpickle.dumps(self._work))
        self._cleanup.enter_context(self.job)
        for rank, host in enumerate(self.job.hosts):
            place = self.job.environment(rank, self._secrets.get(rank, ""))
            command = [str(HERE / "rank.py"), str(work), str(self._file(rank, "result"))]
            with self._file(rank, "stderr").open("w") as stderr:
                process = self.bed.popen(
                    host,
                    [sys.executable, *command],
                    env={**os.environ, **place, **self._env},
                    stderr=stderr,
                )
            self.ranks.append(process)
            self._cleanup.callback(process.wait)
            self._cleanup.callback(process.kill)

    def stderr(self, rank: int) -> str:
        """Return what a rank has written to its standard error so far."""
        return self._file(rank, "stderr").read_text(errors="replace")

    def _file(self, rank: int, what: str) -> Path:
        return self.folder / f"rank{rank}.{what}"

    def results(self, timeout_s: float) -> list[Any]:
        """Return, by rank, what ``fn`` returned, or an Ended, when all have ended.

        TimeoutError, with the standard error of those that have not, after ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        late = []
        for rank, process in enumerate(self.ranks):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                late.append(rank)
        if late:
            said = "\n".join(f"rank {rank}:\n{self.stderr(rank)}" for rank in late)
            raise TimeoutError(f"rank {late} did not end within {timeout_s:g} s\n{said}")
        return [self._result(rank) for rank in range(len(self.ranks))]

    def _result(self, rank: int) -> Any:
        path, code = self._file(rank, "result"), self.ranks[rank].returncode
        record = pickle.loads(path.read_bytes()) if path.exists() else {}
        if "result" in record and code == 0:
            return record["result"]
        return Ended(code, record.get("traceback") or self.stderr(rank))
