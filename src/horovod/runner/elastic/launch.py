"""Elastic jobs in Horovod's way: a failed process takes its whole host along."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from horovod.runner.common.util.hosts import HostInfo
from horovod.runner.elastic.discovery import FixedHosts, HostDiscovery, HostDiscoveryScript
from kolovod.coordination.hosts import RetryPolicy
from kolovod.errors import JobOverError
from kolovod.launch import function as launch_function
from kolovod.launch.elastic_options import ElasticOptions
from kolovod.launch.foreground import run_elastic_job
from kolovod.launch.function import RankFailed, console, packed_call
from kolovod.launch.job import JobOptions
from kolovod.launch.other_python import not_found
from kolovod.launch.streams import go_on_without_reader

__all__ = [
    "call_elastic",
    "discovery_of",
    "elastic_options",
    "failure_of",
    "run_elastic",
    "with_horovods_mark",
]

_MAX_RANKS = 1 << 10
_TIMEOUT_S = 600.0
_LONGEST_COOLDOWN_S = 3600
_GATHER_S = 30.0  # from the first process that comes to the last of those started with it
_FAILED = (
    "Horovod detected that one or more processes exited with non-zero status, thus "
    "causing the job to be terminated."
)


def discovery_of(script: str | None, slots: int | None, infos: Sequence[HostInfo]) -> HostDiscovery:
    """Return the discovery of hosts. Raises ValueError if the hosts could never change."""
    if script is not None:
        return HostDiscoveryScript(script, slots)
    places: dict[str, int] = {}
    for info in infos:
        places[info.hostname] = places.get(info.hostname, 0) + info.slots
    if len(places) < 2:
        raise ValueError(
            "an elastic job needs --host-discovery-script, or at least two hosts in --hosts or "
            "--hostfile: where a process fails its whole host is avoided"
        )
    return FixedHosts(places)


def elastic_options(
    discovery: HostDiscovery,
    *,
    num_proc: int | None,
    min_num_proc: int | None,
    max_num_proc: int | None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
) -> ElasticOptions:
    """Return the options that Horovod's arguments of these names ask for.

    Asks ``discovery`` for the first time, and raises what that does. Raises ValueError for options
    that cannot be met.
    """
    np = num_proc or min_num_proc or 1
    min_np = np if min_num_proc is None else min_num_proc
    max_np = _MAX_RANKS if max_num_proc is None else max_num_proc
    if not 1 <= min_np <= np <= max_np:
        raise ValueError(
            f"min-np {min_np}, np {np}, max-np {max_np}: they must be at least 1, and not descend"
        )
    if reset_limit is not None and reset_limit < 0:
        raise ValueError(f"reset-limit {reset_limit}: give 0 or more")
    is_fixed = isinstance(discovery, FixedHosts)
    places = discovery.find_available_hosts_and_slots()
    if is_fixed and sum(places.values()) < np:
        raise ValueError(
            f"Requested more processes ({np}) than there are available slots "
            f"({sum(places.values())})"
        )
    return ElasticOptions(
        np=np,
        min_np=min_np,
        max_np=max_np,
        places=places,
        discover=None if is_fixed else discovery.find_available_hosts_and_slots,
        retry=RetryPolicy(retries=0, cooldown_s=_cooldown_s(cooldown_range), whole_host=True),
        elastic_timeout_s=_timeout_s(elastic_timeout),
        reset_limit=reset_limit,
        ends_for_growth=True,
        gather_started_s=_GATHER_S,
        begins_with_all=True,
    )


def _cooldown_s(given: Sequence[int] | None) -> tuple[float, float] | None:
    if given is None:
        return None
    if len(given) != 2 or not 1 <= given[0] <= given[1] <= _LONGEST_COOLDOWN_S:
        raise ValueError(
            f"blacklist cooldown range {' '.join(map(str, given))}: give two numbers of seconds "
            f"that do not descend, from 1 to {_LONGEST_COOLDOWN_S}"
        )
    return float(given[0]), float(given[1])


def _timeout_s(given: float | None) -> float:
    if given is not None:
        return float(given)
    text = os.environ.get("HOROVOD_ELASTIC_TIMEOUT") or str(_TIMEOUT_S)
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"HOROVOD_ELASTIC_TIMEOUT={text!r}: expected a number") from None


def with_horovods_mark(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of the ranks, and what tells scripts that their job is elastic."""
    return {**variables, "HOROVOD_ELASTIC": "1"}


def run_elastic(elastic: ElasticOptions, command: Sequence[str], options: JobOptions) -> int:
    """Run a command line to its end; return the exit code of the rank that failed, if one did."""
    if problem := not_found(command):
        options.report(problem)
        return 1
    go_on_without_reader()
    return run_elastic_job(elastic, command, options)


def call_elastic(
    elastic: ElasticOptions, function: Any, python: str, options: JobOptions
) -> list[Any]:
    """Call ``function()`` in every process; return the results of ``min_np`` of the last ranks.

    Raises RuntimeError if the job fails: its text has the reason, and a rank's traceback.
    """
    shown = replace(
        options,
        payload=packed_call(lambda rank: function(), ()),
        stdout=console(sys.stdout),
        stderr=console(sys.stderr),
    )
    try:
        return launch_function.call_elastic(elastic, shown, python)[: elastic.min_np]
    except (RankFailed, JobOverError) as error:
        raise failure_of(error) from error.__cause__


def failure_of(error: RankFailed | JobOverError) -> RuntimeError:
    """Return the error that users of Horovod expect instead."""
    return RuntimeError(f"{_FAILED} {error}")
