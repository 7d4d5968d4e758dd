"""``kolovod.spark.run`` and ``run_elastic``: a function as the ranks of a job, in Spark's tasks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from kolovod.clusters.calls import Call, call_in, elastic_options, packed, size_of
from kolovod.launch.function import console
from kolovod.notices import report_to_stderr
from kolovod.spark.cluster import SparkCluster, active_context

__all__ = ["call_tasks", "run", "run_elastic"]

_SETTLE_S = 1.0
"""After so long without another task an elastic job begins with those that there are."""


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    num_proc: int | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    start_timeout_s: float = 600.0,
    executable: str = "",
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on ``num_proc`` ranks in Spark; return the results by rank.

    Each is a process that a task of one barrier stage starts, so all run at once or none. Without
    ``num_proc`` there are ``spark.default.parallelism`` of them. ``fn`` calls ``kolovod.init()``
    itself. ``env``: further variables of the ranks; ``executable``: the ranks' Python, by default
    that of the tasks. ``timeout_s``: how many seconds all may take, without an end by default;
    ``start_timeout_s``: seconds for Spark to start the tasks. What ranks print is passed on to the
    driver, marked with the rank.

    Raises RankFailed for the rank that failed first, with its traceback in the text and its
    exception as ``__cause__``; BootstrapError where there is no SparkContext or too few tasks run;
    InvalidArgumentError for a wrong number. No task is left behind.
    """
    size, _, _ = size_of(_parallelism(num_proc), "num_proc")
    call = Call(
        packed(fn, args, kwargs),
        size,
        environment=dict(env or {}),
        timeout_s=timeout_s,
        executable=executable,
    )
    return call_tasks(call, size, size, start_timeout_s)


def run_elastic(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    min_num_proc: int = 1,
    max_num_proc: int | None = None,
    env: Mapping[str, str] | None = None,
    start_timeout_s: float = 600.0,
    elastic_timeout_s: float = 600.0,
    reset_limit: int | None = None,
    executable: str = "",
) -> list[Any]:
    """Do as ``run``, in an elastic job of ``min_num_proc`` to ``max_num_proc`` ranks.

    ``fn`` calls a function made by ``kolovod.elastic.run``. The ranks are in ordinary tasks of one
    stage, ``max_num_proc`` of them (by default ``spark.default.parallelism``), which last as long
    as the job. A rank that is lost is started again in its task; a task that is lost Spark starts
    again, as often as ``spark.task.maxFailures`` says. The results are those of the ranks at the
    end.

    ``start_timeout_s``: seconds for Spark to start ``min_num_proc`` tasks; ``elastic_timeout_s``:
    seconds to wait until there are as many ranks again; ``reset_limit``: how often the world may
    change, without a limit by default. ``env``, ``executable``: see ``run``.

    Raises as ``run``, for the rank that failed last, and JobOverError where the job cannot go on.
    """
    least, most, _ = size_of((min_num_proc, _parallelism(max_num_proc)), "the numbers of ranks")
    elastic = elastic_options(
        least, most, elastic_timeout_s=elastic_timeout_s, reset_limit=reset_limit
    )
    call = Call(packed(fn, args, kwargs), most, elastic, dict(env or {}), executable=executable)
    return call_tasks(call, least, most, start_timeout_s)


def _parallelism(wanted: int | None) -> int:
    return active_context().defaultParallelism if wanted is None else wanted


def call_tasks(
    call: Call,
    least: int,
    most: int,
    start_timeout_s: float,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
) -> list[Any]:
    """Make the call with ``most`` tasks, when ``least`` run. ``stdout``: not this process's own."""
    is_elastic = call.elastic is not None
    cluster = SparkCluster(
        active_context(), most, barrier=not is_elastic, executable=call.executable
    )
    try:
        cluster.start_tasks()
        cluster.wait_for(least, most, start_timeout_s, _SETTLE_S)
        return call_in(
            cluster,
            call,
            report_to_stderr,
            stdout or console(sys.stdout),
            stderr or console(sys.stderr),
        )
    finally:
        cluster.close()
