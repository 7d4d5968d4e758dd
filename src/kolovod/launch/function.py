"""A function as the ranks of a job: it goes to every rank, and what it returns comes back."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TextIO

import cloudpickle

from kolovod.errors import CommandArgumentError, JobOverError
from kolovod.launch.elastic_job import ElasticJob
from kolovod.launch.elastic_options import ElasticOptions
from kolovod.launch.job import Job, JobOptions, Outcome
from kolovod.launch.local import (
    PAYLOAD_FD,
    RESULT_FD,
    Ended,
    read_memory_file,
    write_memory_file,
)

__all__ = [
    "CHILD",
    "CallOptions",
    "RankFailed",
    "call_elastic",
    "call_on_ranks",
    "call_packed",
    "call_without_rank",
    "console",
    "end_world_by",
    "packed_call",
    "read_record",
    "record_of_call",
]

CHILD = "from kolovod.launch import function; raise SystemExit(function.main_of_rank())"


class RankFailed(Exception):
    """A rank raised, was killed, exited by itself, or did not finish in time.

    Where it raised, ``__cause__`` is its exception, if that could travel.
    """

    def __init__(self, message: str, rank: int, exit_code: int, traceback_text: str) -> None:
        super().__init__(message)
        self.rank = rank
        """The rank that failed."""
        self.exit_code = exit_code
        """As a shell counts: 128 plus the signal's number."""
        self.traceback_text = traceback_text
        """The exception's, or the last lines of the rank's standard error where there was none."""

    def __reduce__(self) -> tuple[type[RankFailed], tuple[str, int, int, str]]:
        """Keep the fields when it is sent to another process."""
        return type(self), (str(self), self.rank, self.exit_code, self.traceback_text)

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows: the rank's traceback, without how the launcher came to it."""
        return str(self).rstrip().splitlines()


@dataclass(frozen=True)
class CallOptions(JobOptions):
    """The options of a call: those of its job, whose payload is the call.

    What ranks print goes to this process's streams if it has no others; nowhere if it is ``quiet``.
    """

    timeout_s: float | None = None
    """The time that its ranks may take."""
    executable: str = ""
    """Another Python than this one."""


def call_on_ranks(
    n: int, fn: Callable[..., Any], args: Sequence[Any], options: CallOptions
) -> list[Any]:
    """Call ``fn(rank, *args)`` in ``n`` new processes; return the results by rank.

    See ``kolovod.run``, and ``kolovod.testing.run_ranks`` for ``timeout_s`` and ``keep_going``.
    """
    return call_packed(n, packed_call(fn, args), options)


def call_packed(n: int, payload: bytes, options: CallOptions) -> list[Any]:
    """Call on ranks, as ``call_on_ranks`` does, what ``packed_call`` has made."""
    if options.hosts and len(options.hosts) != n:
        raise CommandArgumentError(f"{len(options.hosts)} hosts for {n} ranks; give each one")
    python = options.executable or sys.executable
    job_options = replace(
        options,
        payload=payload,
        stdout=None if options.quiet else options.stdout or console(sys.stdout),
        stderr=None if options.quiet else options.stderr or console(sys.stderr),
    )
    with Job(n, job_options) as job:
        job.start(lambda rank: [python, "-c", CHILD])
        outcome = job.wait(options.timeout_s)
    return _judge(job, outcome, options)


def call_elastic(elastic: ElasticOptions, options: JobOptions, python: str = "") -> list[Any]:
    """Run the payload of ``options`` as an elastic job; return the results of its last ranks.

    They are in the order of ranks.

    A rank of those that has ended without a result is left out. Raises RankFailed for the rank that
    has failed last if the job failed, JobOverError if it could not go on without any that did.
    """
    with ElasticJob(elastic, options) as job:
        job.start([python or sys.executable, "-c", CHILD])
        code = job.wait()
        reason = job.stop_reason
        records = [read_record(result) or {} for result in job.outcome.results()]
        failed = [(end, read_record(end.result)) for end in job.outcome.failed]
        names = {end.rank: job.outcome.failed_as(end) for end, _ in failed}
        tails = {end.rank: job.tail(end, "stderr") for end, _ in failed}
    if code == 0:
        if unreadable := [record["unreadable"] for record in records if "unreadable" in record]:
            raise JobOverError(
                f"a rank has returned what cannot be read in this process ({unreadable[0]}): "
                "return what its modules can be imported for here, too"
            )
        return [record["result"] for record in records if "result" in record]
    why = f"the job has ended: {reason}\n" if reason else ""
    failed = [end for end in failed if end[1] is not None and "traceback" in end[1]] or failed
    if not failed:
        raise JobOverError(reason or f"the job has ended with exit code {code}")
    end, record = failed[-1]
    rank, name = names[end.rank]
    raise _failed(rank, f"{why}{name}", end, record, tails[end.rank])


def packed_call(
    fn: Callable[..., Any],
    args: Sequence[Any],
    dumps: Callable[[Any], bytes] = cloudpickle.dumps,
) -> bytes:
    """Return the payload with which ``CHILD`` calls ``fn(rank, *args)``.

    ``dumps``: where cloudpickle does not know all that may be in them.
    """
    # By reference, a function of a test module is found only with the caller's search path.
    header = pickle.dumps([path for path in sys.path if isinstance(path, str)])
    return header + dumps((fn, tuple(args)))


def call_without_rank(
    rank: int, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call ``fn`` without telling it its rank; ``packed_call`` is given this function then."""
    return fn(*args, **kwargs)


def console(stream: Any) -> TextIO | None:
    """Return ``stream``, to show what ranks print; None where it is none, as in some notebooks."""
    return stream if hasattr(stream, "write") else None


def read_record(data: bytes) -> dict[str, Any] | None:
    """Return the record that a rank wrote at its end; None if it never came to that.

    The record of a rank that has returned what cannot be had here says why: {"unreadable": text}.
    """
    try:
        record: dict[str, Any] = pickle.loads(data)
    except (EOFError, pickle.UnpicklingError):
        return None  # it was killed before, or while, it wrote
    except Exception as error:  # a module that is not here, or anything that its class raises
        return {"unreadable": f"{type(error).__name__}: {error}"}
    return record


def _judge(job: Job, outcome: Outcome, options: CallOptions) -> list[Any]:
    if outcome.late:
        ranks = ", ".join(map(str, outcome.late))
        stacks = "\n".join(f"rank {r}:\n{job.tail(r, 'stderr')}" for r in outcome.late)
        message = f"rank {ranks} did not finish within {options.timeout_s:g} s\n{stacks}"
        raise RankFailed(message, outcome.late[0], 124, stacks)
    records = {end.rank: read_record(end.result) for end in outcome.ended}
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
        is_first = outcome.first_failure is end
        told = end.code < 0 and not is_first and not options.keep_going and not raised
        moment = -1.0 if record is None else record.get("time", -1.0)
        order[end.rank] = (told, end.code == 0, moment + position * 1e-9)
    if failures and not (options.keep_going and len(failures) < job.size):
        raise failures[min(failures, key=order.__getitem__)]
    return [
        failures[rank] if rank in failures else (records[rank] or {})["result"]
        for rank in range(job.size)
    ]


def _failure(job: Job, end: Ended, record: dict[str, Any] | None) -> RankFailed:
    where = f" on host {end.host}" if end.host else ""
    return _failed(end.rank, f"rank {end.rank}{where}", end, record, job.tail(end.rank, "stderr"))


def _failed(
    rank: int, name: str, end: Ended, record: dict[str, Any] | None, tail: str
) -> RankFailed:
    if record is not None and "traceback" in record:
        text: str = record["traceback"]
        failed = RankFailed(f"{name} raised\n{text}", rank, end.exit_code, text)
        # One that needs what only the rank has, or asks for arguments, stays there.
        with contextlib.suppress(Exception):
            failed.__cause__ = pickle.loads(record["exception"])
        return failed
    if record is not None and "unreadable" in record and end.code == 0:
        text = (
            f"{name} has returned what cannot be read in this process ({record['unreadable']}): "
            "return what its modules can be imported for here, too\n"
        )
        return RankFailed(text, rank, end.exit_code, text)
    early = " before the function returned" if end.code == 0 else ""
    return RankFailed(f"{name} {end.cause}{early}\n{tail}", rank, end.exit_code, tail)


def main_of_rank() -> int:
    """Call the function in the new process, and write the result or the traceback."""
    faulthandler.enable()
    source, result = int(os.environ.pop(PAYLOAD_FD)), int(os.environ.pop(RESULT_FD))
    record, error = record_of_call(read_memory_file(source), keeps_path=False)
    write_memory_file(result, record)
    if error is None:
        return 0
    end_world_by(error)
    return 1


def record_of_call(payload: bytes, *, keeps_path: bool) -> tuple[bytes, Exception | None]:
    """Call what ``packed_call`` has packed, in this rank; return the record, and what was raised.

    ``keeps_path``: whether what this process imports is found where it is first, then at the
    caller's places; else at the caller's only.
    """
    stream = io.BytesIO(payload)
    paths = pickle.load(stream)
    if keeps_path:
        paths = [*sys.path, *(path for path in paths if path not in sys.path)]
    sys.path[:] = paths
    record: dict[str, Any]
    try:
        fn, args = pickle.load(stream)
        record = {"result": fn(int(os.environ["KOLOVOD_RANK"]), *args)}
        return cloudpickle.dumps({**record, "time": time.time()}), None
    except Exception as error:
        record = {"traceback": _traceback_of_callee(error), "time": time.time()}
        with contextlib.suppress(Exception):
            record["exception"] = cloudpickle.dumps(error)
        return pickle.dumps(record), error


def _traceback_of_callee(error: Exception) -> str:
    """Return the traceback without the frames of this file that lead to it."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def end_world_by(error: BaseException) -> None:
    """Tell the other ranks that ``error`` ends this one."""
    lifecycle = sys.modules.get("kolovod.lifecycle")
    if lifecycle is not None:  # without it there is no world
        lifecycle.end_by(error)
