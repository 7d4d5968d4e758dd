"""The ``horovodrun`` command."""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import sys
from collections.abc import Mapping, Sequence

import horovod
from horovod.common import util
from horovod.runner.common.util.hosts import HostInfo, labels_of, parse_host_files, parse_hosts
from horovod.runner.config_file import apply_config_file
from horovod.runner.flags import parse_args, refuse_elastic, variables_of
from kolovod.config import load
from kolovod.core.affinity import check_affinity
from kolovod.launch.cli import main as kolovod

__all__ = ["check_build", "parse_args", "run_commandline"]


def run_commandline(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (``sys.argv[1:]`` by default); returns the exit code.

    That of Horovod where a rank fails: 1, whatever the rank's was, which is said.
    """
    options = parse_args(arguments)
    if options.check_build:
        print(check_build(options.verbose))
        return 0
    try:
        translated = _arguments(options)
    except ValueError as error:
        options.parser.error(str(error))
    if options.verbose:
        _say(shlex.join(["kolovod", *translated]))
    code = kolovod(translated)
    if code != 0:
        _say(
            "Horovod detected that one or more processes exited with non-zero status, thus "
            f"causing the job to be terminated. The first one: exit code {code}"
        )
    return min(code, 1)


def main() -> None:
    """The console script."""
    sys.exit(run_commandline())


def _arguments(options: argparse.Namespace) -> list[str]:
    """What ``kolovod`` is to be called with. Raises ValueError for what cannot be started."""
    refuse_elastic(options)
    if options.config_file is not None:
        apply_config_file(options, options.config_file)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise ValueError("no COMMAND to run, for example: horovodrun -np 2 python train.py")
    infos = _hosts(options)
    count = _count(options.num_proc, infos)
    variables = variables_of(options)
    settings = load({**os.environ, **variables})
    hosts = labels_of(infos, count)
    check_affinity(settings.thread_affinity, hosts or ["localhost"] * count)
    if options.use_mpi or settings.backend == "mpi":
        options.use_mpi = True
        return [*_for_mpi(options, count, hosts), *_setting(variables_of(options)), "--", *command]
    arguments = ["run", "-np", str(count)]
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


def _setting(variables: Mapping[str, str]) -> list[str]:
    return [part for name, value in variables.items() for part in ("-x", f"{name}={value}")]


def _for_mpi(options: argparse.Namespace, count: int, hosts: Sequence[str]) -> list[str]:
    """The same for ranks that mpirun starts."""
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
    """What there is, in Horovod's form."""

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
