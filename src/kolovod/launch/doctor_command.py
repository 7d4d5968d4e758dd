"""``kolovod doctor``: its flags."""

from __future__ import annotations

import argparse

from kolovod.launch import host_flags
from kolovod.launch.doctor import run_doctor

__all__ = ["add"]


def add(parser: argparse.ArgumentParser) -> None:
    """Give the command its arguments."""
    parser.description = (
        "Look at versions, frameworks, GPUs, MPI, memory, limits and cores of every "
        "host, and at the links between them; print what to do. Exits with 1 if a job would not "
        "start. (`kolovod check` looks at a script.)"
    )
    parser.set_defaults(
        act=_examine,
        num_proc=None,
        label_hosts="",
        host_discovery_script=None,
        max_np=None,
    )
    host_flags.add(parser)


def _examine(options: argparse.Namespace) -> int:
    hosts, ssh = ["localhost"], None
    if options.hosts or options.hostfile:
        places, ssh = host_flags.places(options)
        hosts = [place.name for place in places]
    return run_doctor(hosts, ssh)
