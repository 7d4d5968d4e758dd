"""The ``horovodrun`` command."""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import horovod
from horovod.common import util
from horovod.runner.common.util.hosts import HostInfo, labels_of, parse_host_files, parse_hosts
from horovod.runner.config_file import apply_config_file
from horovod.runner.elastic.launch import (
    discovery_of,
    elastic_options,
    run_elastic,
    with_horovods_mark,
)
from horovod.runner.flags import is_elastic, parse_args, variables_of
from kolovod.config import load
from kolovod.core.affinity import check_affinity
from kolovod.errors import BootstrapError
from kolovod.launch.agent_line import SshOptions
from kolovod.launch.cli import main as kolovod
from kolovod.launch.job import JobOptions
from kolovod.launch.streams import as_command
from kolovod.notices import report_to_stderr

__all__ = ["check_build", "parse_args", "run_commandline"]


def run_commandline(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (``sys.argv[1:]`` by default); returns the exit code.

    It is Horovod's where a rank fails: 1, whatever the rank's was, which is said.
    """
    options = parse_args(arguments)
    if options.check_build:
        print(check_build(options.verbose))
        return 0
    try:
        if options.config_file is not None:
            apply_config_file(options, options.config_file)
        if is_elastic(options):
            code = _run_elastic(options)
        else:
            translated = _arguments(options)
            if options.verbose:
                _say(shlex.join(["kolovod", *translated]))
            code = kolovod(translated)
    except ValueError as error:
        options.parser.error(str(error))
    if code != 0:
        _say(
            "Horovod detected that one or more processes exited with non-zero status, thus "
            f"causing the job to be terminated. The first one: exit code {code}"
        )
    return min(code, 1)


def main() -> None:
    """Run as the console script."""
    sys.exit(as_command(run_commandline))


def _arguments(options: argparse.Namespace) -> list[str]:
    """Return the arguments for ``kolovod``. Raises ValueError for what cannot be started."""
    command = _command(options)
    infos = _hosts(options)
    count = _count(options.num_proc, infos)
    variables = variables_of(options)
    settings = load({**os.environ, **variables})
    hosts = labels_of(infos, count)
    check_affinity(settings.thread_affinity, hosts or ["localhost"] * count)
    if options.use_mpi or settings.backend == "mpi":
        options.use_mpi = True
        return [*_for_mpi(options, count, hosts), *_setting(variables_of(options)), "--", *command]
    arguments = ["run", "-np", str(count), "--progress", "off"]  # as Horovod
    if not options.use_gloo:  # Horovod starts ranks by mpirun if it can, and scripts ask for it
        arguments.append("--mpi-variables")
    if options.prefix_output_with_timestamp:
        arguments.append("--timestamps")
    if options.output_filename:
        arguments += ["--output-dir", options.output_filename]
    if infos:
        runs = itertools.groupby(hosts)
        arguments += ["--hosts", ",".join(f"{h}:{len(list(same))}" for h, same in runs)]
    if options.ssh_port is not None:
        arguments += ["--ssh-port", str(options.ssh_port)]
    if options.ssh_identity_file is not None:
        arguments += ["--ssh-identity-file", options.ssh_identity_file]
    return [*arguments, *_setting(variables), "--", *command]


def _command(options: argparse.Namespace) -> list[str]:
    command: list[str] = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise ValueError("no COMMAND to run, for example: horovodrun -np 2 python train.py")
    return command


def _run_elastic(options: argparse.Namespace) -> int:
    """Run an elastic job to its end; return the exit code. Raises ValueError if it cannot start."""
    command = _command(options)
    variables = with_horovods_mark(variables_of(options))
    if options.use_mpi or load({**os.environ, **variables}).backend == "mpi":
        raise ValueError("an elastic job with MPI, whose number of ranks is fixed: leave one out")
    try:
        discovery = discovery_of(options.host_discovery_script, options.slots, _hosts(options))
        elastic = elastic_options(
            discovery,
            num_proc=options.num_proc,
            min_num_proc=options.min_num_proc,
            max_num_proc=options.max_num_proc,
            elastic_timeout=options.elastic_timeout,
            reset_limit=options.reset_limit,
            cooldown_range=options.cooldown_range,
        )
    except BootstrapError as error:  # the script fails at once
        report_to_stderr(str(error))
        return 1
    job_options = JobOptions(
        environment=variables,
        timestamps=options.prefix_output_with_timestamp,
        output_dir=Path(options.output_filename) if options.output_filename else None,
        ssh=SshOptions(port=options.ssh_port, identity=options.ssh_identity_file),
        stdout=sys.stdout,
        stderr=sys.stderr,
        report=report_to_stderr,
    )
    if options.verbose:
        _say(f"an elastic job of {shlex.join(command)}: {elastic}")
    return run_elastic(elastic, command, job_options)


def _setting(variables: Mapping[str, str]) -> list[str]:
    return [part for name, value in variables.items() for part in ("-x", f"{name}={value}")]


def _for_mpi(options: argparse.Namespace, count: int, hosts: Sequence[str]) -> list[str]:
    """Return the arguments for ranks that mpirun starts.

    Raises ValueError for options that mpirun does not leave to us.
    """
    if len(set(hosts)) > 1:  # one name says nothing that mpirun does not do anyway
        raise ValueError(
            f"--hosts or --hostfile with MPI names {', '.join(dict.fromkeys(hosts))}: mpirun "
            "starts the ranks and says where they are; give it arguments of its own with "
            "--mpi-args"
        )
    for name in ("output_filename", "prefix_output_with_timestamp"):
        if getattr(options, name):
            raise ValueError(
                f"--{name.replace('_', '-')} with MPI: mpirun passes on the ranks' output; give "
                "it arguments of its own with --mpi-args"
            )
    arguments = ["run", "-np", str(count), "--backend", "mpi"]
    further = f"{options.binding_args or ''} {options.mpi_args or ''}".strip()
    return [*arguments, f"--mpi-args={further}"] if further else arguments


def _hosts(options: argparse.Namespace) -> list[HostInfo]:
    text = options.hosts or (options.hostfile and parse_host_files(options.hostfile))
    return parse_hosts(text) if text else []


def _count(wanted: int | None, infos: Sequence[HostInfo]) -> int:
    slots = sum(info.slots for info in infos)
    count = (slots or None) if wanted is None else wanted
    if count is None:
        raise ValueError("-np N, --hosts or --hostfile must say how many ranks to start")
    if count < 1:
        raise ValueError(f"-np {count}: at least one rank is needed")
    if infos and count > slots:
        raise ValueError(
            f"Requested more processes ({count}) than there are available slots ({slots})"
        )
    return count


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def check_build(verbose: bool = False) -> str:
    """Return a list of what is available, in Horovod's form."""

    def box(there: object) -> str:
        return "[X]" if there else "[ ]"

    frameworks = (("TensorFlow", "tensorflow"), ("PyTorch", "torch"), ("MXNet", "mxnet"))
    lines = [f"Horovod v{horovod.__version__} (on Kolovod):", "", "Available Frameworks:"]
    lines += [f"    {box(util.extension_available(module))} {name}" for name, module in frameworks]
    lines += ["", "Available Controllers:", f"    {box(util.mpi_built())} MPI", "    [X] Gloo"]
    lines += ["", "Available Tensor Operations:", f"    {box(util.nccl_built())} NCCL"]
    lines += [f"    {box(util.ddl_built())} DDL", f"    {box(util.ccl_built())} CCL"]
    lines += [f"    {box(util.mpi_built())} MPI", "    [X] Gloo"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
