"""The flags of ``kolovod run`` for elastic jobs, and what they mean."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from kolovod.errors import CommandArgumentError
from kolovod.launch.discovery import ask_script
from kolovod.launch.elastic_options import ElasticOptions
from kolovod.launch.hosts import HostSlots
from kolovod.launch.job import JobOptions
from kolovod.launch.job_daemon import keep_again, run_kept_job
from kolovod.launch.status import Status

__all__ = ["MAX_RANKS", "add", "check_discovery", "is_elastic", "rank_count", "run"]

MAX_RANKS = 1024  # of one host, as in csrc/collectives/reduce.h


def rank_count(text: str) -> int:
    """Parse a number of ranks, for argparse."""
    if not text.isdecimal() or not 1 <= int(text) <= MAX_RANKS:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number from 1 to {MAX_RANKS}")
    return int(text)


def add(run: argparse.ArgumentParser) -> None:
    """Add the flags. Those without a default make a job elastic by themselves."""
    group = run.add_argument_group("elastic jobs, whose ranks may end, come and leave")
    group.add_argument(
        "--elastic",
        action="store_true",
        help="when a rank is lost let the others go on, and start another one in its place; the "
        "script calls kolovod.elastic.run. The other flags of this group mean it, too",
    )
    group.add_argument(
        "--min-np", type=rank_count, metavar="N", help="ranks without which the job waits [1]"
    )
    group.add_argument(
        "--max-np",
        type=rank_count,
        metavar="N",
        help="ranks at most [-np, or what discovery finds]",
    )
    group.add_argument(
        "--replica-size",
        type=rank_count,
        metavar="N",
        help="so many ranks hold one model together, sharded by PyTorch's fully_shard, and come "
        "and go together [1]",
    )
    group.add_argument(
        "--host-discovery-script",
        metavar="COMMAND",
        help="asked once a second, in the place of -H: prints the hosts that there are, in lines "
        "HOST or HOST:SLOTS",
    )
    group.add_argument(
        "--slots-per-host",
        type=rank_count,
        metavar="N",
        help="of a discovered host whose line has no number [1]",
    )
    group.add_argument(
        "--elastic-timeout",
        type=float,
        metavar="SECONDS",
        help="how long to wait for --min-np ranks [600]",
    )
    group.add_argument(
        "--reset-limit", type=int, metavar="N", help="how often the world may change [no limit]"
    )


def is_elastic(options: argparse.Namespace) -> bool:
    """Return whether any of them is given."""
    given = (
        options.min_np,
        options.max_np,
        options.host_discovery_script,
        options.slots_per_host,
        options.elastic_timeout,
        options.reset_limit,
        options.replica_size,
    )
    return options.elastic or any(value is not None for value in given)


def check_discovery(options: argparse.Namespace) -> None:
    """Raise InvalidArgumentError if flags beside a discovery script make no sense."""
    if options.hosts or options.hostfile or options.label_hosts:
        raise CommandArgumentError(
            "--host-discovery-script beside -H, --hostfile or --label-hosts: give one of them"
        )


def run(
    options: argparse.Namespace,
    command: list[str],
    places: Sequence[HostSlots],
    job_options: JobOptions,
    status: Status,
) -> int:
    """Run ``command`` at ``places``, or go on with a job; return the exit code.

    ``status`` shows meanwhile how the job gets on. Raises InvalidArgumentError.
    """
    if options.keep_going:
        raise CommandArgumentError("--keep-going beside --elastic, which lets the others go on")
    if options.mpi_variables:
        raise CommandArgumentError(
            "--mpi-variables beside --elastic, where the numbers that they name change"
        )
    script, slots = options.host_discovery_script, options.slots_per_host or 1
    size = options.replica_size or 1
    min_np = options.min_np or size
    most = sum(place.slots for place in places) // size * size  # that can be there to begin with
    np = options.num_proc or (min_np if script else min(most, options.max_np or most))
    max_np = options.max_np or (MAX_RANKS // size * size if script else np)
    if not min_np <= np <= max_np:
        raise CommandArgumentError(
            f"--min-np {min_np}, -np {np}, --max-np {max_np}: they must not descend"
        )
    if any(count % size for count in (min_np, np, max_np)):
        raise CommandArgumentError(
            f"--min-np {min_np}, -np {np}, --max-np {max_np}: they must be multiples of "
            f"--replica-size {size}"
        )
    elastic = ElasticOptions(
        np=np,
        min_np=min_np,
        max_np=max_np,
        places={place.name: place.slots for place in places},
        discover=partial(ask_script, script, slots) if script else None,
        elastic_timeout_s=600.0 if options.elastic_timeout is None else options.elastic_timeout,
        reset_limit=options.reset_limit,
        replica_size=size,
        begins_with_all=options.num_proc is None,
    )
    again = [sys.executable, "-m", "kolovod.launch.resume", *options.given]
    if options.goes_on is not None:
        return keep_again(options.goes_on, elastic, command, job_options, again)
    return run_kept_job(elastic, command, job_options, again, status)
