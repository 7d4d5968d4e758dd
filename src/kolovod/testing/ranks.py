"""Real processes as ranks, for tests: each calls a function, and the results come back."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from kolovod.errors import InvalidArgumentError
from kolovod.launch.spawn import Ended, Job, JobOptions, Outcome

__all__ = ["RankFailed", "run_ranks"]

_CHILD = "from kolovod.testing import ranks; raise SystemExit(ranks.main_of_rank())"


class RankFailed(Exception):
    """A rank raised, was killed, exited by itself, or did not finish in time."""

    def __init__(self, message: str, rank: int, exit_code: int, traceback_text: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code
        """As a shell counts: 128 plus the signal's number."""
        self.traceback_text = traceback_text
        """The exception's, or the last lines of the rank's standard error where there was none."""

    def __reduce__(self) -> tuple[type[RankFailed], tuple[str, int, int, str]]:
        """Keep the fields when it is sent to another process."""
        return type(self), (str(self), self.rank, self.exit_code, self.traceback_text)


def run_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    keep_going: bool = False,
    hosts: Sequence[str] = (),
    output_dir: Path | None = None,
    executable: str = "",
) -> list[Any]:
    """Call ``fn(rank, *args)`` in ``n`` new processes; return the results by rank.

    The processes are ranks of one job: ``kolovod.init()`` in ``fn`` forms their world. ``fn``,
    ``args`` and the results travel by cloudpickle. ``env``: further variables for all ranks.
    ``hosts``: the host of each rank, if not all the same; they run here all the same, but those of
    different hosts communicate over TCP. ``output_dir``: also write each rank's output there, to
    rank.N/stdout and stderr. ``executable``: another Python than this one.

    When a rank fails, the others are ended, and the first failure is raised as RankFailed; so it is
    after ``timeout_s``, with the Python stacks of the ranks that were late. With ``keep_going`` the
    others go on, and the result of a rank that failed is its RankFailed (all failed: it is raised).
    No process is left behind in any case.
    """
    if n < 1:
        raise InvalidArgumentError(f"run_ranks({n}): need at least one rank")
    python = executable or sys.executable
    payload = cloudpickle.dumps((fn, args))
    if hosts and len(hosts) != n:
        raise InvalidArgumentError(f"run_ranks: {len(hosts)} hosts for {n} ranks; give each one")
    # By reference, a function of a test module is found only with the caller's search path.
    header = pickle.dumps([path for path in sys.path if isinstance(path, str)])
    options = JobOptions(
        environment=env or {},
        keep_going=keep_going,
        hosts=hosts,
        output_dir=output_dir,
        stdout=sys.stdout,
        stderr=sys.stderr,
    )
    with _memory_files(n, header + payload) as (source, results):
        with Job(n, options) as job:
            job.start(
                lambda rank: [python, "-c", _CHILD, str(source), str(results[rank])],
                lambda rank: (source, results[rank]),
            )
            outcome = job.wait(timeout_s)
        records = [_read_record(fd) for fd in results]
    return _judge(job, outcome, records, timeout_s, keep_going)


@contextlib.contextmanager
def _memory_files(n: int, content: bytes) -> Iterator[tuple[int, list[int]]]:
    """Anonymous files: one with ``content`` for all ranks, one for the result of each."""
    fds: list[int] = []
    try:
        for _ in range(n + 1):
            fds.append(os.memfd_create("kolovod-ranks"))
        _write_all(fds[0], content)
        yield fds[0], fds[1:]
    finally:
        for fd in fds:
            os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _read_all(fd: int) -> bytes:
    # By position: the ranks share the open file, and so its offset.
    size = os.fstat(fd).st_size
    data = bytearray()
    while len(data) < size:
        data += os.pread(fd, size - len(data), len(data))
    return bytes(data)


def _read_record(fd: int) -> dict[str, Any] | None:
    """What a rank wrote at its end; None if it never came to that."""
    data = _read_all(fd)
    try:
        record: dict[str, Any] = pickle.loads(data)
    except (EOFError, pickle.UnpicklingError):
        return None  # it was killed before, or while, it wrote
    return record


def _judge(
    job: Job,
    outcome: Outcome,
    records: list[dict[str, Any] | None],
    timeout_s: float,
    keep_going: bool,
) -> list[Any]:
    if outcome.late:
        ranks = ", ".join(map(str, outcome.late))
        stacks = "\n".join(f"rank {r}:\n{job.tail(r, 'stderr')}" for r in outcome.late)
        message = f"rank {ranks} did not finish within {timeout_s:g} s\n{stacks}"
        raise RankFailed(message, outcome.late[0], 124, stacks)
    failures: dict[int, RankFailed] = {}
    order: dict[int, tuple[bool, bool, float]] = {}
    for position, end in enumerate(outcome.ended):
        record = records[end.rank]
        if end.code == 0 and record is not None and "result" in record:
            continue
        failures[end.rank] = _failure(job, end, record)
        # The cause comes before its effects. Last: ranks that were told to end; before them, those
        # that ended as if all was well; and where the clock is no help, the order of the ends.
        raised = record is not None and "traceback" in record  # and was told while it left
        told = end.code < 0 and outcome.first_failure is not end and not keep_going and not raised
        moment = -1.0 if record is None else record["time"]
        order[end.rank] = (told, end.code == 0, moment + position * 1e-9)
    if failures and not (keep_going and len(failures) < len(records)):
        raise failures[min(failures, key=order.__getitem__)]
    return [
        failures[rank] if rank in failures else (record or {})["result"]
        for rank, record in enumerate(records)
    ]


def _failure(job: Job, end: Ended, record: dict[str, Any] | None) -> RankFailed:
    if record is not None and "traceback" in record:
        text: str = record["traceback"]
        return RankFailed(f"rank {end.rank} raised\n{text}", end.rank, end.exit_code, text)
    text = job.tail(end.rank, "stderr")
    early = " before the function returned" if end.code == 0 else ""
    message = f"rank {end.rank} {end.cause}{early}\n{text}"
    return RankFailed(message, end.rank, end.exit_code, text)


def main_of_rank() -> int:
    """In the new process: call the function, write the result or the traceback."""
    faulthandler.enable()
    source, result = map(int, sys.argv[1:])
    stream = io.BytesIO(_read_all(source))
    sys.path[:] = pickle.load(stream)
    record: dict[str, Any]
    code = 0
    try:
        fn, args = pickle.load(stream)
        record = {"result": fn(int(os.environ["KOLOVOD_RANK"]), *args)}
        packed = cloudpickle.dumps({**record, "time": time.monotonic()})
    except Exception as error:
        sys.last_value = error  # so that leaving the world says why
        record = {"traceback": traceback.format_exc(), "time": time.monotonic()}
        packed = pickle.dumps(record)
        code = 1
    _write_all(result, packed)
    return code
