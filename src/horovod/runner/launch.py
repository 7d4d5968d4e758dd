"""The ``horovodrun`` command."""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Sequence

import horovod
from horovod.common import util
from horovod.runner.common.util.hosts import parse_host_files, parse_hosts
from horovod.runner.flags import parse_args, say, variables_of
from kolovod.launch.cli import main as kolovod

__all__ = ["check_build", "parse_args", "run_commandline"]

_HERE = {"localhost", "127.0.0.1", "::1"}


def run_commandline(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (``sys.argv[1:]`` by default); returns the exit code.

    That of Horovod where a rank fails: 1, whatever the rank's was, which is said.
    """
    options = parse_args(arguments)
    if options.check_build:
        print(check_build(options.verbose))
        return 0
    try:
        code = kolovod(_arguments(options))
    except ValueError as error:
        options.parser.error(str(error))
        raise  # not reached: error() exits
    if code != 0:
        say(
            "Horovod detected that one or more processes exited with non-zero status, thus "
            f"causing the job to be terminated. The first one: exit code {code}"
        )
    return min(code, 1)


def main() -> None:
    """The console script."""
    sys.exit(run_commandline())


def _arguments(options: argparse.Namespace) -> list[str]:
    """What ``kolovod`` is to be called with."""
    count = options.num_proc
    if options.config_file is not None:
        raise ValueError(f"--config-file {options.config_file}: not supported, give flags instead")
    hosts = options.hosts or (options.hostfile and parse_host_files(options.hostfile))
    if hosts:
        infos = parse_hosts(hosts)
        elsewhere = [info.hostname for info in infos if not is_here(info.hostname)]
        if elsewhere:
            raise ValueError(
                f"host {elsewhere[0]}: ranks on other hosts are not started by this release; use "
                "mpirun or torchrun for that"
            )
        slots = sum(info.slots for info in infos)
        count = slots if count is None else count
        if count > slots:
            raise ValueError(
                f"Requested more processes ({count}) than there are available slots ({slots})"
            )
    if count is None:
        raise ValueError("-np N, --hosts or --hostfile must say how many ranks to start")
    arguments = ["run", "-np", str(count)]
    if options.timestamps:
        arguments.append("--timestamps")
    if options.output_filename:
        arguments += ["--output-dir", options.output_filename]
    if options.use_mpi:
        arguments += ["--backend", "mpi"]
    for name, value in variables_of(options).items():
        arguments += ["-x", f"{name}={value}"]
    if options.verbose:
        say(" ".join(["kolovod", *arguments, "--", *options.command]))
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    return [*arguments, "--", *command]


def is_here(hostname: str) -> bool:
    """Whether that is this host."""
    return hostname in _HERE or hostname in (socket.gethostname(), socket.getfqdn())


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
