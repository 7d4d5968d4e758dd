"""The flags that say on which hosts something happens, and how those are reached."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from kolovod.errors import CommandArgumentError
from kolovod.launch import elastic_flags
from kolovod.launch.agent_line import SshOptions
from kolovod.launch.allocation import allocation
from kolovod.launch.hosts import HostSlots, parse_host_file, parse_hosts
from kolovod.rendezvous.external.meeting import read_hosts

__all__ = ["add", "places"]


def add(run: argparse.ArgumentParser) -> None:
    """Add the flags."""
    group = run.add_argument_group("several hosts (reached by ssh, without a question)")
    hosts = group.add_mutually_exclusive_group()
    hosts.add_argument(
        "-H", "--hosts", metavar="A:4,B:4", help="hosts, and how many ranks each may take"
    )
    hosts.add_argument("--hostfile", metavar="FILE", help="the same, in lines HOST slots=N")
    group.add_argument("-p", "--ssh-port", type=int, metavar="PORT")
    group.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="a private key")
    group.add_argument(
        "--ssh-args",
        type=shlex.split,
        default=[],
        metavar="TEXT",
        help='further arguments of ssh, as one text: "-F FILE -o StrictHostKeyChecking=accept-new"',
    )
    group.add_argument(
        "--remote-python",
        default="",
        metavar="PATH",
        help="the Python with Kolovod on the other hosts [this one's path]",
    )
    group.add_argument(
        "--directory", default="", metavar="DIR", help="where ranks on other hosts run [this one]"
    )


def places(options: argparse.Namespace) -> tuple[list[HostSlots], SshOptions | None]:
    """Return the places where ranks may run, and how other hosts are reached (None: all run here).

    There are no places if a script will name them.
    """
    size: int | None = options.num_proc
    if options.host_discovery_script:
        elastic_flags.check_discovery(options)
        return [], _ssh(options)
    if options.label_hosts:
        if options.hosts or options.hostfile:
            raise CommandArgumentError(
                "--label-hosts beside -H or --hostfile: it labels ranks that all run here"
            )
        return parse_hosts(options.label_hosts), None
    if options.hosts:
        return parse_hosts(options.hosts), _ssh(options)
    if options.hostfile:
        return parse_host_file(_text_of(options.hostfile), options.hostfile), _ssh(options)
    listed = allocation(os.environ, read_hosts)
    if len(listed) >= 2:  # a single host is this one
        return listed, _ssh(options)
    if size is None:
        raise CommandArgumentError("-np N, -H or --hostfile must say how many ranks to start")
    return [HostSlots("localhost", max(size, options.max_np or 0))], None


def _ssh(options: argparse.Namespace) -> SshOptions:
    """Return the options by which other hosts are reached."""
    return SshOptions(
        port=options.ssh_port,
        identity=options.ssh_identity_file,
        arguments=options.ssh_args,
        python=options.remote_python,
        directory=options.directory,
    )


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandArgumentError(f"the host file {path} cannot be read: {error}") from None
