"""``horovod.spark.run`` and ``run_elastic``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TextIO

from horovod.common.arguments import warn_of_old_names
from horovod.runner.elastic.discovery import FixedHosts
from horovod.runner.elastic.launch import elastic_options, failure_of, with_horovods_mark
from horovod.runner.nics import interface_variables
from kolovod.clusters.calls import Call, packed
from kolovod.coordination.hosts import RetryPolicy
from kolovod.errors import BootstrapError, JobOverError, StartTimeoutError
from kolovod.launch.function import RankFailed
from kolovod.spark.cluster import active_context
from kolovod.spark.run import call_tasks

__all__ = ["run", "run_elastic"]

_START_S = 600.0
_NO_CONTEXT = (
    "Could not find an active SparkContext, are you running in a PySpark session? "
    "(Spark Connect has none)"
)


def _default_num_proc() -> int:
    try:
        context = active_context()
    except BootstrapError:
        raise Exception(_NO_CONTEXT) from None  # the type that Horovod's users catch
    count: int = context.defaultParallelism
    return count


def _start_timeout_s(given: float | None) -> float:
    text = os.environ.get("HOROVOD_SPARK_START_TIMEOUT") or str(_START_S)
    try:
        return float(text) if given is None else float(given)
    except ValueError:
        raise ValueError(f"HOROVOD_SPARK_START_TIMEOUT={text!r}: expected a number") from None


def _called(
    call: Call,
    least: int,
    most: int,
    start_timeout: float | None,
    stdout: TextIO | None,
    stderr: TextIO | None,
) -> list[Any]:
    """Run ``call``. Raises RuntimeError if a rank, or the job, fails; StartTimeoutError."""
    try:
        return call_tasks(call, least, most, _start_timeout_s(start_timeout), stdout, stderr)
    except StartTimeoutError as error:  # with what Horovod's users look for
        said = f"Timed out waiting for Spark tasks to start. {error}"
        raise StartTimeoutError(said) from error
    except (RankFailed, JobOverError) as error:
        raise failure_of(error) from error.__cause__


def _variables(env: Mapping[str, Any] | None, nics: Any) -> dict[str, str]:
    names = nics.split(",") if isinstance(nics, str) else list(nics or ())
    own = {name: str(value) for name, value in (env or {}).items()}
    return {**interface_variables(names), **own}


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] = {},
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, Any] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Any = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on ``num_proc`` ranks in Spark's tasks; return the results.

    ``num_proc``: by default ``spark.default.parallelism``. ``start_timeout``: seconds for Spark to
    start the tasks, by default HOROVOD_SPARK_START_TIMEOUT or 600. ``env``: further variables of
    the ranks; ``stdout``, ``stderr``: where their output goes, by default this process's;
    ``prefix_output_with_timestamp``: with the time before each line; ``verbose``: from 2 on it
    says how many ranks there are; ``nics``: interfaces to use, a list or names with commas;
    ``executable``: the ranks' Python. What is about mpirun has no effect.

    Raises an Exception where there is no SparkContext, ValueError for arguments that contradict
    each other, RuntimeError when a rank fails: its text ends with the rank's traceback.
    """
    if use_gloo and use_mpi:
        raise ValueError("use_gloo and use_mpi exclude each other")
    if use_mpi:
        warnings.warn("use_mpi: ranks in Spark are started without MPI", stacklevel=2)
    default = _default_num_proc()
    size = default if num_proc is None else num_proc
    if size < 1:
        raise ValueError(f"num_proc={num_proc}: at least one rank is needed")
    if verbose >= 2:
        print(f"Running {size} processes (spark.default.parallelism={default})...", flush=True)
    call = Call(
        packed(fn, args, kwargs),
        size,
        environment=_variables(env, nics),
        executable=executable or "",
        timestamps=prefix_output_with_timestamp,
    )
    return _called(call, size, size, start_timeout, stdout, stderr)


def run_elastic(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] = {},
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, Any] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Any = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """``run`` as an elastic job: ``fn`` calls a function made by ``hvd.elastic.run``.

    It begins with ``num_proc`` ranks (by default ``spark.default.parallelism``) and goes on with
    ``min_num_proc`` (by default as many); ``max_num_proc``: how many tasks are asked of Spark (by
    default ``num_proc``). A rank that fails is started again in its task; a task that is lost Spark
    starts again (``spark.task.maxFailures``). Returns what the ranks at the end return.

    ``elastic_timeout``: seconds to wait until there are ``min_num_proc`` ranks, by default 600;
    ``reset_limit``: how often the world may change. ``min_np``, ``max_np``: old names. The others
    are as of ``run``, which raises the same, too.
    """
    warn_of_old_names(min_np=min_np, max_np=max_np)
    default = _default_num_proc()
    np = default if num_proc is None else num_proc
    least = min_num_proc if min_num_proc is not None else min_np
    most = max_num_proc if max_num_proc is not None else max_np
    elastic = elastic_options(
        FixedHosts({"tasks": max(np, most or np)}),
        num_proc=np,
        min_num_proc=least,
        max_num_proc=np if most is None else most,
        elastic_timeout=elastic_timeout,
        reset_limit=reset_limit,
    )
    # A host is no unit in Spark: whether an executor is used again Spark's own settings say.
    elastic = replace(elastic, retry=RetryPolicy(), places={})
    if verbose >= 2:
        print(f"Running {np} processes (spark.default.parallelism={default})...", flush=True)
    call = Call(
        packed(fn, args, kwargs),
        np,
        elastic,
        with_horovods_mark(_variables(env, nics)),
        timestamps=prefix_output_with_timestamp,
    )
    return _called(call, np, elastic.max_np, start_timeout, stdout, stderr)
