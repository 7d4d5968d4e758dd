"""``horovod.run``: a function as the ranks of one world."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from horovod.common.arguments import warn_of_old_names
from horovod.runner.common.util.hosts import labels_of, parse_host_files, parse_hosts
from horovod.runner.elastic.launch import (
    call_elastic,
    discovery_of,
    elastic_options,
    with_horovods_mark,
)
from horovod.runner.nics import interface_variables
from kolovod import RankFailed, SshOptions
from kolovod.launch.function import CallOptions, call_on_ranks, call_without_rank
from kolovod.launch.job import JobOptions
from kolovod.notices import report_to_stderr

__all__ = ["run"]


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call ``func(*args, **kwargs)`` on ``num_proc`` ranks; return the results by rank.

    ``min_num_proc`` or ``host_discovery_script`` asks for an elastic job, as horovodrun's flags of
    these names do. Then ``func`` calls a function made by ``hvd.elastic.run``, and the results are
    those of ``min_num_proc`` of the ranks at the end (None: as many as ``num_proc``).
    ``hosts``, ``hostfile``: hosts with slots, as for horovodrun (by default this one), which are
    reached by ssh; ``executable``: the Python of the ranks; ``output_filename``: a folder for their
    output as well; ``network_interfaces``: as horovodrun's flag. What is about mpirun has no
    effect.

    Raises ValueError for arguments that contradict each other, RuntimeError when a rank fails, or
    an elastic job cannot go on: its text ends with the rank's traceback, or the reason.
    """
    given = locals()
    warn_of_old_names(np=np, min_np=min_np, max_np=max_np, network_interface=network_interface)
    num_proc = num_proc if np is None else np
    if hosts is not None and hostfile is not None:
        raise ValueError("hosts and hostfile say the same thing: give one of them")
    if use_gloo and use_mpi:
        raise ValueError("use_gloo and use_mpi exclude each other")
    if use_mpi:
        warnings.warn("use_mpi: ranks of horovod.run are started without MPI", stacklevel=2)
    min_num_proc = min_num_proc if min_np is None else min_np
    max_num_proc = max_num_proc if max_np is None else max_np
    is_elastic = min_num_proc is not None or host_discovery_script is not None
    for name in () if is_elastic else ("max_num_proc", "slots", "reset_limit", "cooldown_range"):
        if given[name] is not None:
            raise ValueError(
                f"{name} is of elastic jobs: give min_num_proc or host_discovery_script, too"
            )
    text = hosts or (hostfile and parse_host_files(hostfile))
    infos = parse_hosts(text) if text else []
    if infos and not is_elastic and num_proc > sum(info.slots for info in infos):
        raise ValueError(f"num_proc is {num_proc}, more than the slots of {text}")
    names = network_interfaces or network_interface or ()
    nics = names.split(",") if isinstance(names, str) else list(names)
    env = interface_variables(nics)
    if start_timeout is not None:
        env["HOROVOD_START_TIMEOUT"] = str(start_timeout)
    if verbose:
        print(f"horovod.run: {num_proc} rank(s) of {executable or sys.executable}", flush=True)
    positional, keywords = tuple(args), dict(kwargs or {})
    if is_elastic:
        elastic = elastic_options(
            discovery_of(host_discovery_script, slots, infos),
            num_proc=max(num_proc, min_num_proc or 1),
            min_num_proc=min_num_proc,
            max_num_proc=max_num_proc,
            reset_limit=reset_limit,
            cooldown_range=cooldown_range,
        )
        return call_elastic(
            elastic,
            lambda: func(*positional, **keywords),
            executable or sys.executable,
            JobOptions(
                environment=with_horovods_mark(env),
                ssh=SshOptions(port=ssh_port, identity=ssh_identity_file),
                output_dir=None if output_filename is None else Path(output_filename),
                report=report_to_stderr,
            ),
        )
    try:
        options = CallOptions(
            environment=env,
            hosts=labels_of(infos, num_proc),
            ssh=SshOptions(port=ssh_port, identity=ssh_identity_file) if infos else None,
            output_dir=None if output_filename is None else Path(output_filename),
            executable=executable or "",
        )
        return call_on_ranks(num_proc, call_without_rank, (func, positional, keywords), options)
    except RankFailed as error:
        raise RuntimeError(
            "Horovod detected that one or more processes exited with non-zero status, thus "
            f"causing the job to be terminated. The first one: {error}"
        ) from error.__cause__
