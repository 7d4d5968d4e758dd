"""``horovod.run``: a function as the ranks of one world."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from horovod.runner.common.util.hosts import parse_host_files, parse_hosts
from horovod.runner.launch import is_here
from kolovod.testing import RankFailed, run_ranks

__all__ = ["run"]

_LIMIT_S = 24 * 86_400.0  # as long as the system can wait


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
    """Call ``func(*args, **kwargs)`` on ``num_proc`` ranks of this host; the results by rank.

    Raises ValueError for arguments that contradict each other, RuntimeError when a rank fails,
    with its traceback. What is about ssh, MPI, interfaces and elasticity is not used here.
    """
    if np is not None:
        warnings.warn("np is deprecated, use num_proc", DeprecationWarning, stacklevel=2)
        num_proc = np
    if hosts is not None and hostfile is not None:
        raise ValueError("hosts and hostfile say the same thing: give one of them")
    if use_gloo and use_mpi:
        raise ValueError("use_gloo and use_mpi exclude each other")
    for given, name in ((min_num_proc or min_np, "min_num_proc"),
                        (host_discovery_script, "host_discovery_script")):  # fmt: skip
        if given is not None:
            raise ValueError(f"{name}: elastic jobs are not started by this release")
    text = hosts or (hostfile and parse_host_files(hostfile))
    if text:
        infos = parse_hosts(text)
        elsewhere = [info.hostname for info in infos if not is_here(info.hostname)]
        if elsewhere:
            raise ValueError(f"host {elsewhere[0]}: ranks on other hosts are not started here")
        if num_proc > sum(info.slots for info in infos):
            raise ValueError(f"num_proc is {num_proc}, more than the slots of {text}")
    env = {} if start_timeout is None else {"HOROVOD_START_TIMEOUT": str(start_timeout)}
    positional, keywords = tuple(args), dict(kwargs or {})
    try:
        return run_ranks(
            num_proc, lambda rank: func(*positional, **keywords), timeout_s=_LIMIT_S, env=env
        )
    except RankFailed as error:
        raise RuntimeError(
            "Horovod detected that one or more processes exited with non-zero status, thus "
            f"causing the job to be terminated. The first one: {error}"
        ) from None
