"""horovodrun's command line, and the variables that its flags set."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import horovod


class Flag(NamedTuple):
    """A flag that sets a variable of the ranks."""

    names: tuple[str, ...]
    variable: str
    kind: Callable[[str], Any]
    text: str
    factor: int = 1


_NO_EFFECT = "accepted; nothing here depends on it"
FLAGS = (
    Flag(("--fusion-threshold-mb",), "HOROVOD_FUSION_THRESHOLD", int,
         "MiB of tensors that travel together", 1 << 20),
    Flag(("--cycle-time-ms",), "HOROVOD_CYCLE_TIME", float, _NO_EFFECT),
    Flag(("--cache-capacity",), "HOROVOD_CACHE_CAPACITY", int, "names known by a bit"),
    Flag(("--timeline-filename",), "HOROVOD_TIMELINE", str, "file for the timeline"),
    Flag(("--stall-check-warning-time-seconds",), "HOROVOD_STALL_CHECK_TIME_SECONDS", int,
         "report ranks that are late for so long"),
    Flag(("--stall-check-shutdown-time-seconds",), "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", int,
         "fail then"),
    Flag(("--autotune-log-file",), "HOROVOD_AUTOTUNE_LOG", str, _NO_EFFECT),
    Flag(("--autotune-warmup-samples",), "HOROVOD_AUTOTUNE_WARMUP_SAMPLES", int, _NO_EFFECT),
    Flag(("--autotune-steps-per-sample",), "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", int, _NO_EFFECT),
    Flag(("--autotune-bayes-opt-max-samples",), "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", int,
         _NO_EFFECT),
    Flag(("--autotune-gaussian-process-noise",), "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", float,
         _NO_EFFECT),
    Flag(("--num-nccl-streams",), "HOROVOD_NUM_NCCL_STREAMS", int, _NO_EFFECT),
    Flag(("--thread-affinity",), "HOROVOD_THREAD_AFFINITY", str, _NO_EFFECT),
    Flag(("--gloo-timeout-seconds",), "HOROVOD_GLOO_TIMEOUT_SECONDS", int, _NO_EFFECT),
    Flag(("--log-level",), "HOROVOD_LOG_LEVEL", str, _NO_EFFECT),
    Flag(("--start-timeout",), "HOROVOD_START_TIMEOUT", int, "seconds for all ranks to come"),
)  # fmt: skip

SWITCHES = {
    "hierarchical-allreduce": ("HOROVOD_HIERARCHICAL_ALLREDUCE", _NO_EFFECT),
    "hierarchical-allgather": ("HOROVOD_HIERARCHICAL_ALLGATHER", _NO_EFFECT),
    "torus-allreduce": ("HOROVOD_TORUS_ALLREDUCE", _NO_EFFECT),
    "autotune": ("HOROVOD_AUTOTUNE", _NO_EFFECT),
    "timeline-mark-cycles": ("HOROVOD_TIMELINE_MARK_CYCLES", _NO_EFFECT),
    "mpi-threads-disable": ("HOROVOD_MPI_THREADS_DISABLE", _NO_EFFECT),
    "log-hide-timestamp": ("HOROVOD_LOG_HIDE_TIME", _NO_EFFECT),
}


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; exits with 2 for a wrong one, with 0 for --version and --help."""
    parser = argparse.ArgumentParser(
        prog="horovodrun",
        description="Start COMMAND as the ranks of one world. Horovod's flags, on Kolovod.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-v", "--version", action="version", version=horovod.__version__)
    add("-np", "--num-proc", type=int, dest="num_proc", metavar="N")
    add("-cb", "--check-build", action="store_true", help="say what there is, and exit")
    add("--disable-cache", action="store_true", help=_NO_EFFECT)
    add("--network-interfaces", "--network-interface", dest="nics", action="append",
        help=_NO_EFFECT)  # fmt: skip
    add("--output-filename", metavar="DIR", help="also write each rank's output below it")
    add("--verbose", action="store_true", help="say what is started")
    add("--config-file", metavar="FILE", help="not supported: give flags")
    add("-p", "--ssh-port", type=int, help=_NO_EFFECT)
    add("-i", "--ssh-identity-file", help=_NO_EFFECT)
    add("-prefix-timestamp", "--prefix-output-with-timestamp", action="store_true",
        dest="timestamps", help="put the time before each line of output")  # fmt: skip
    add("--no-stall-check", action="store_true", help="never report late ranks")
    add("--mpi-args", help=_NO_EFFECT)
    add("--tcp", action="store_true", help=_NO_EFFECT)
    add("--binding-args", help=_NO_EFFECT)
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...")
    hosts.add_argument("-hostfile", "--hostfile", metavar="FILE")
    controller = parser.add_mutually_exclusive_group()
    controller.add_argument("--gloo", dest="use_gloo", action="store_true", help="the default")
    controller.add_argument("--mpi", dest="use_mpi", action="store_true", help="by mpirun")
    for flag in FLAGS:
        add(*flag.names, type=flag.kind, dest=flag.variable, help=flag.text)
    for name, (variable, text) in SWITCHES.items():
        pair = parser.add_mutually_exclusive_group()
        pair.add_argument(f"--{name}", dest=variable, action="store_const", const="1", help=text)
        pair.add_argument(
            f"--no-{name}", dest=variable, action="store_const", const="0", help=argparse.SUPPRESS
        )
    add("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    options = parser.parse_args(arguments)
    options.parser = parser
    return options


def variables_of(options: argparse.Namespace) -> dict[str, str]:
    """What the flags set in the ranks' environment."""
    variables = {}
    for flag in FLAGS:
        value = getattr(options, flag.variable)
        if value is not None:
            variables[flag.variable] = str(value * flag.factor if flag.factor != 1 else value)
    for variable, _ in SWITCHES.values():
        if getattr(options, variable) is not None:
            variables[variable] = getattr(options, variable)
    if options.no_stall_check:
        variables["HOROVOD_STALL_CHECK_DISABLE"] = "1"
    return variables


def say(text: str) -> None:
    """A line on standard error."""
    print(text, file=sys.stderr, flush=True)
