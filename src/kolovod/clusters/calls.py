"""A function as the ranks of a job in a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TextIO

import cloudpickle

from kolovod.clusters.fleet import Cluster, ClusterFleet
from kolovod.coordination.hosts import RetryPolicy
from kolovod.errors import CommandArgumentError, HostError
from kolovod.launch.elastic_options import ElasticOptions
from kolovod.launch.function import (
    CallOptions,
    call_elastic,
    call_packed,
    call_without_rank,
    packed_call,
)
from kolovod.launch.job import JobOptions

__all__ = ["Call", "call_in", "elastic_options", "packed", "size_of"]


@dataclass(frozen=True)
class Call:
    """A function that is to be called, and by how many ranks. It can be pickled."""

    payload: bytes
    """The function and its arguments, see ``packed``."""
    size: int
    elastic: ElasticOptions | None = None
    """None: the job has ``size`` ranks, and ends when one fails."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further variables of the ranks."""
    timeout_s: float | None = None
    """The time for all of a job that is not elastic."""
    executable: str = ""
    """The Python of ranks that are processes of their own."""
    timestamps: bool = False
    """True: the time stands before each line of output."""


def packed(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    dumps: Callable[[Any], bytes] = cloudpickle.dumps,
) -> bytes:
    """Pack ``fn(*args, **kwargs)``, which each rank will call. ``dumps``: see ``packed_call``."""
    return packed_call(call_without_rank, (fn, tuple(args), dict(kwargs or {})), dumps)


def size_of(wanted: int | tuple[int, int], name: str) -> tuple[int, int, bool]:
    """Return the fewest and the most ranks that argument ``name`` asks for; if it is elastic.

    Raises InvalidArgumentError.
    """
    is_elastic = isinstance(wanted, tuple)
    least, most = wanted if isinstance(wanted, tuple) else (wanted, wanted)
    if not 1 <= least <= most:
        raise CommandArgumentError(
            f"{name}={wanted!r}: give a number from 1 on, or (fewest, most), which must not descend"
        )
    return least, most, is_elastic


def elastic_options(
    least: int,
    most: int,
    *,
    elastic_timeout_s: float,
    reset_limit: int | None,
) -> ElasticOptions:
    """Return the options of a job that begins with all places that there are.

    It keeps to ``kolovod.elastic``.
    """
    return ElasticOptions(
        np=least,
        min_np=least,
        max_np=most,
        retry=RetryPolicy(),
        elastic_timeout_s=elastic_timeout_s,
        reset_limit=reset_limit,
        begins_with_all=True,
    )


def call_in(
    cluster: Cluster,
    call: Call,
    report: Callable[[str], None],
    stdout: TextIO | None,
    stderr: TextIO | None,
) -> list[Any]:
    """Make the call, and close ``cluster``; return the results by rank, as ``kolovod.run`` does.

    ``report``, ``stdout``, ``stderr``: see JobOptions. Which hosts an elastic job may use the
    cluster says, if its options do not. Raises RankFailed, JobOverError, BootstrapError.
    """
    fleet = partial(ClusterFleet, cluster)
    try:
        if call.elastic is not None:
            options = JobOptions(
                environment=call.environment,
                timestamps=call.timestamps,
                payload=call.payload,
                stdout=stdout,
                stderr=stderr,
                report=report,
                fleet=fleet,
            )
            elastic = replace(call.elastic, discover=call.elastic.discover or cluster.places)
            return call_elastic(elastic, options, call.executable)
        hosts = [host for host, count in cluster.places().items() for _ in range(count)]
        if len(hosts) < call.size:
            raise HostError(f"{call.size} ranks, but places for {len(hosts)}")
        return call_packed(
            call.size,
            call.payload,
            CallOptions(
                timeout_s=call.timeout_s,
                environment=call.environment,
                timestamps=call.timestamps,
                hosts=hosts[: call.size],
                executable=call.executable,
                quiet=stdout is None,
                report=report,
                fleet=fleet,
                stdout=stdout,
                stderr=stderr,
            ),
        )
    finally:
        cluster.close()
