"""A job that belongs to a command line: its signals, and what is said if it cannot be started."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence

from kolovod.errors import BootstrapError, text_with_code
from kolovod.launch.elastic_job import ElasticJob
from kolovod.launch.elastic_options import ElasticOptions
from kolovod.launch.heard_signals import PASSED_ON_ONLY
from kolovod.launch.job import Job, JobOptions
from kolovod.launch.local import MAY_RUN_ON_CODE
from kolovod.launch.other_python import advice
from kolovod.launch.saved_state import Persistence

__all__ = ["forwarding", "run_elastic_job"]

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *PASSED_ON_ONLY)


@contextlib.contextmanager
def forwarding(job: Job | ElasticJob, *, outlives_terminals: bool = False) -> Iterator[None]:
    """Pass signals to the launcher on to the job.

    ``outlives_terminals``: but not SIGHUP.
    """

    def hear(signum: int, _: object) -> None:
        if signum != signal.SIGHUP or not outlives_terminals:
            job.supervisor.signal(signum)

    before = {signum: signal.signal(signum, hear) for signum in _FORWARDED}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def run_elastic_job(
    elastic: ElasticOptions,
    command: Sequence[str],
    options: JobOptions,
    stopped: Callable[[str], None] = lambda reason: None,
    persistence: Persistence | None = None,
    watched: Callable[[ElasticJob], None] = lambda job: None,
) -> int:
    """Run ``command`` as an elastic job to its end; return the exit code.

    ``stopped(reason)`` is called if the job was ended since it could not go on. ``persistence``:
    see ElasticJob. ``watched`` is given the job before it starts. Raises InvalidArgumentError for
    what discovery says, as ``ElasticJob.start``, and BootstrapError if it cannot go on with an
    earlier launcher's job, which it leaves alone then.
    """
    job = ElasticJob(elastic, options, persistence)
    watched(job)
    outlives = persistence is not None
    # Signals are heard until nothing is left of it.
    with forwarding(job, outlives_terminals=outlives), job:
        try:
            job.start(command)
        except BootstrapError as error:
            if persistence is not None and persistence.goes_on:
                job.leave_alone()
                raise
            options.report(text_with_code(error))
            return 1
        code, failed = job.wait(), job.outcome.failed
        said = job.tail(failed[-1], "stderr") if code != 0 and failed else ""
        if what_to_do := advice(command, said):
            options.report(what_to_do)
        if job.stop_reason:
            stopped(job.stop_reason)
    return MAY_RUN_ON_CODE if code and job.supervisor.may_run_on else code
