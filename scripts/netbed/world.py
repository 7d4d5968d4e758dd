"""Ranks on the hosts of a bed, started by hand: what a launcher would do, without one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import kolovod
from kolovod.launch.auth import new_secret
from kolovod.launch.function import CHILD, RankFailed, packed_call, read_record
from kolovod.launch.place import Place, local_and_cross
from kolovod.launch.ranks import PAYLOAD_FD, RESULT_FD, memory_file, read_memory_file
from netbed.bed import Bed
from netbed.namespaces import HERE

__all__ = ["World"]


class World:
    """Calls ``fn(rank, *args)`` in a process per rank, on ``hosts[rank]``; a context manager.

    ``kolovod.init()`` in ``fn`` forms their world. ``env``: further variables. ``secrets``: of
    single ranks, instead of the job's. ``store_on``: the host with the rendezvous, else that of
    rank 0. Leaving it ends all processes.
    """

    def __init__(
        self,
        bed: Bed,
        hosts: Sequence[str],
        fn: Callable[..., Any],
        *args: Any,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[int, str] | None = None,
        store_on: str = "",
    ) -> None:
        self.bed = bed
        self.hosts = tuple(hosts)
        self.ranks: list[subprocess.Popen[str]] = []
        self.secret = new_secret()
        self._work = (fn, args)
        self._secrets = dict(secrets or {})
        self._store_on = store_on or hosts[0]
        self._env = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        self._env["PYTHONPATH"] = str(Path(kolovod.__file__).parent.parent)
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
        size = len(self.hosts)
        fn, args = self._work
        source, *self._results = (self._file(c) for c in (packed_call(fn, args), *[b""] * size))
        self.store = self._start_store(size)
        for rank, host in enumerate(self.hosts):
            secret = self._secrets.get(rank, self.secret)
            numbers = local_and_cross(self.hosts, rank)
            place = Place(rank, size, *numbers, host, self.store, secret)
            process = self.bed.popen(
                host,
                [sys.executable, "-c", CHILD],
                env={
                    **self._env,
                    **place.environment(),
                    PAYLOAD_FD: str(source),
                    RESULT_FD: str(self._results[rank]),
                },
                pass_fds=(source, self._results[rank]),
                stderr=(self.bed.folder / f"rank{rank}.stderr").open("w"),
            )
            self.ranks.append(process)
            self._cleanup.callback(process.wait)
            self._cleanup.callback(process.kill)

    def _file(self, content: bytes) -> int:
        fd = memory_file(content)
        self._cleanup.callback(os.close, fd)
        return fd

    def _start_store(self, size: int) -> str:
        address = self.bed.address(self._store_on)
        process = self.bed.popen(
            self._store_on,
            [sys.executable, str(HERE / "rendezvous.py"), str(size), address],
            env={**self._env, "KOLOVOD_SECRET": self.secret},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._cleanup.callback(process.communicate)
        self._cleanup.callback(process.kill)
        assert process.stdout is not None
        return str(process.stdout.readline().strip())

    def stderr(self, rank: int) -> str:
        """What a rank has written to its standard error so far."""
        return (self.bed.folder / f"rank{rank}.stderr").read_text(errors="replace")

    def results(self, timeout_s: float) -> list[Any]:
        """By rank what ``fn`` returned, or a RankFailed, when all have ended.

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
        record = read_record(read_memory_file(self._results[rank]))
        code = self.ranks[rank].returncode
        if record is not None and "result" in record and code == 0:
            return record["result"]
        text = self.stderr(rank) if record is None else record.get("traceback", "")
        host = self.hosts[rank]
        return RankFailed(f"rank {rank} on host {host}, {code}\n{text}", rank, code, text)
