"""horovodrun's command line: its flags, the variables they set, and what has no effect here.

The names in the result of ``parse_args`` are Horovod's.
"""

from __future__ import annotations

import argparse
import math
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import horovod
from horovod.runner.nics import interface_variables

__all__ = ["FLAGS", "SWITCHES", "WITHOUT_EFFECT", "Flag", "Switch", "parse_args", "variables_of"]

LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")


@dataclass(frozen=True)
class Flag:
    """A flag with a value, which is also that of a variable of the ranks."""

    name: str
    variable: str
    kind: type[int] | type[float] | type[str]
    text: str = ""
    factor: int = 1
    """The factor by which the value is multiplied in the variable."""
    maximum: float = math.inf
    choices: tuple[str, ...] = ()
    is_list: bool = False
    """True: the value is a list of numbers; a list of one is that number."""

    @property
    def dest(self) -> str:
        """Its name in the result of ``parse_args``."""
        return self.name[2:].replace("-", "_")

    def checked(self, given: object, what: str) -> int | float | str:
        """The value that ``given``, a text or of the right type, stands for.

        Raises ValueError, whose text begins with ``what``. Numbers are at least 0.
        """
        try:
            if isinstance(given, bool):
                raise ValueError
            value = self.kind(str(given))
        except ValueError:
            kind = {int: "a whole number", float: "a number", str: "a text"}[self.kind]
            raise ValueError(f"{what}: expected {kind}") from None
        if self.is_list and str(value).isdecimal():
            value = int(value)
        elif isinstance(value, str):
            value = value.upper() if self.choices else value
            if self.choices and value not in self.choices:
                raise ValueError(f"{what}: expected one of {', '.join(self.choices)}")
        elif not 0 <= value <= self.maximum:
            upper = "" if self.maximum == math.inf else f" and <= {self.maximum:g}"
            raise ValueError(f"{what}: must be >= 0{upper}")
        return value


@dataclass(frozen=True)
class Switch:
    """Two flags, for 1 and for 0 in a variable of the ranks."""

    dest: str
    """Its name in the result of ``parse_args``: True if ``on`` was given, None for neither."""
    on: str
    off: str
    variable: str
    text: str = ""
    shown: str = "on"
    """The one of the two that --help lists."""
    inverted: bool = False
    """``on`` is 0 in the variable."""


FLAGS = (
    Flag("--start-timeout", "HOROVOD_START_TIMEOUT", int, "seconds for all ranks to come [60]"),
    Flag("--fusion-threshold-mb", "HOROVOD_FUSION_THRESHOLD", int,
         "MiB of tensors that travel together; 0: each alone [64]", 1 << 20),
    Flag("--cycle-time-ms", "HOROVOD_CYCLE_TIME", float),
    Flag("--cache-capacity", "HOROVOD_CACHE_CAPACITY", int,
         "names that can be announced by one bit [8192]"),
    Flag("--autotune-log-file", "HOROVOD_AUTOTUNE_LOG", str,
         "file for what was tried and chosen, a line of JSON each"),
    Flag("--autotune-warmup-samples", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES", int),
    Flag("--autotune-steps-per-sample", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", int),
    Flag("--autotune-bayes-opt-max-samples", "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", int),
    Flag("--autotune-gaussian-process-noise", "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", float,
         maximum=1.0),
    Flag("--timeline-filename", "HOROVOD_TIMELINE", str, "file for a timeline of all ranks"),
    Flag("--stall-check-warning-time-seconds", "HOROVOD_STALL_CHECK_TIME_SECONDS", int,
         "report a rank that keeps the others waiting for longer [60]"),
    Flag("--stall-check-shutdown-time-seconds", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", int,
         "every rank fails then; 0: never [0]"),
    Flag("--num-nccl-streams", "HOROVOD_NUM_NCCL_STREAMS", int),
    Flag("--thread-affinity", "HOROVOD_THREAD_AFFINITY", str,
         "core for the engine's thread of each rank of this host: 0,1,2,3 for four",
         is_list=True),
    Flag("--gloo-timeout-seconds", "HOROVOD_GLOO_TIMEOUT_SECONDS", int),
    Flag("--log-level", "HOROVOD_LOG_LEVEL", str, choices=LOG_LEVELS),
)  # fmt: skip


def _pair(name: str, variable: str, text: str = "") -> Switch:
    return Switch(name.replace("-", "_"), f"--{name}", f"--no-{name}", variable, text)


SWITCHES = (
    _pair("hierarchical-allreduce", "HOROVOD_HIERARCHICAL_ALLREDUCE"),
    _pair("hierarchical-allgather", "HOROVOD_HIERARCHICAL_ALLGATHER"),
    _pair("torus-allreduce", "HOROVOD_TORUS_ALLREDUCE"),
    _pair("autotune", "HOROVOD_AUTOTUNE",
          "try bucket sizes in the first hundred steps (PyTorch)"),
    _pair("timeline-mark-cycles", "HOROVOD_TIMELINE_MARK_CYCLES",
          "mark the start of each bucket in the timeline"),
    _pair("mpi-threads-disable", "HOROVOD_MPI_THREADS_DISABLE"),
    Switch("no_stall_check", "--no-stall-check", "--stall-check", "HOROVOD_STALL_CHECK_DISABLE",
           "never report late ranks"),
    Switch("log_with_timestamp", "--log-with-timestamp", "--log-without-timestamp",
           "HOROVOD_LOG_HIDE_TIME", shown="off", inverted=True),
)  # fmt: skip

_OLD_NAMES = {"--log-hide-timestamp": False, "--no-log-hide-timestamp": True}

WITHOUT_EFFECT = (
    (("HOROVOD_CYCLE_TIME",),
     "there is no cycle: a tensor is announced at once"),
    (("HOROVOD_HIERARCHICAL_ALLREDUCE", "HOROVOD_HIERARCHICAL_ALLGATHER",
      "HOROVOD_TORUS_ALLREDUCE"),
     "that ranks of one host share memory is always made use of"),
    (("HOROVOD_AUTOTUNE_WARMUP_SAMPLES", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
      "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE"),
     "nothing is searched: two trials of bucket sizes at most"),
    (("HOROVOD_NUM_NCCL_STREAMS", "HOROVOD_BATCH_D2D_MEMCOPIES", "HOROVOD_DISABLE_NVTX_RANGES",
      "HOROVOD_ENABLE_ASYNC_COMPLETION"),
     "about GPU code of Horovod that has no counterpart"),
    (("HOROVOD_ENABLE_XLA_OPS",), "operations within XLA programs need no switch"),
    (("HOROVOD_DISABLE_GROUP_FUSION",), "what a group travels with does not change its result"),
    (("HOROVOD_DYNAMIC_PROCESS_SETS",), "process sets can always be added and removed"),
    (("HOROVOD_MPI_THREADS_DISABLE",), "mpi4py decides how MPI is initialised"),
    (("HOROVOD_ADASUM_MPI_CHUNK_SIZE",), "Adasum needs no MPI"),
    (("HOROVOD_CCL_CACHE",), "oneCCL is not used"),
    (("HOROVOD_GLOO_TIMEOUT_SECONDS",),
     "a lost rank ends a wait at once; against one that is only late there is "
     "--stall-check-shutdown-time-seconds"),
    (("HOROVOD_LOG_LEVEL", "HOROVOD_LOG_HIDE_TIME"),
     "there is no log: a failure is an exception, a late rank is reported"),
    (("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS"),
     "set for scripts that look at them; --mpi or KOLOVOD_BACKEND chooses"),
    (("--disable-cache",), "hosts are reached anew each time, so nothing is cached"),
    (("--jsrun",), "ranks are started by ssh, or by jsrun itself"),
    (("HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX",),
     "of Spark estimators, which there are none of"),
)  # fmt: skip
"""What is accepted so that command lines and job scripts go on working, and why it does nothing."""


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; exit with 2 for a wrong one, with 0 for --version and --help."""
    parser = argparse.ArgumentParser(
        prog="horovodrun",
        usage="horovodrun -np N [options] COMMAND ...",
        description="Start COMMAND N times, as ranks 0 to N-1 of one world.\n"
        "These are Horovod's flags, on Kolovod; 'kolovod run' has more.",
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_job(parser)
    _add_hosts(parser)
    _add_elastic(parser)
    for flag in FLAGS:
        parser.add_argument(
            flag.name, type=_checking(flag), dest=flag.dest, metavar=flag.kind.__name__.upper(),
            help=flag.text or _no_effect(flag.variable),
        )  # fmt: skip
    for switch in SWITCHES:
        pair = parser.add_mutually_exclusive_group()
        text = switch.text or _no_effect(switch.variable)
        for name, value in ((switch.on, True), (switch.off, False)):
            is_shown = value == (switch.shown == "on")
            pair.add_argument(name, dest=switch.dest, action="store_const", const=value,
                              help=text if is_shown else argparse.SUPPRESS)  # fmt: skip
    for name in _OLD_NAMES:
        parser.add_argument(name, action=_OldName, nargs=0, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    options = parser.parse_args(arguments)
    options.parser = parser
    return options


def _add_job(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-v", "--version", action="version", version=horovod.__version__)
    add("-np", "--num-proc", type=int, dest="num_proc", metavar="N",
        help="how many ranks; by default as many as there are slots")  # fmt: skip
    add("-cb", "--check-build", action="store_true", help="say what there is, and exit")
    add("--verbose", action="store_true", help="say what is started")
    add("--config-file", metavar="FILE",
        help="flags by name in a YAML file; one that is also given here wins over it")  # fmt: skip
    add("--output-filename", metavar="DIR",
        help="also write each rank's output to DIR/rank.N/stdout and stderr")  # fmt: skip
    add("-prefix-timestamp", "--prefix-output-with-timestamp", action="store_true",
        help="put the time before each line of output")  # fmt: skip
    add("--disable-cache", action="store_true", help=_no_effect("--disable-cache"))
    controller = parser.add_mutually_exclusive_group()
    controller.add_argument("--gloo", dest="use_gloo", action="store_true",
                            help="the default: Kolovod's own engine")  # fmt: skip
    controller.add_argument("--mpi", dest="use_mpi", action="store_true",
                            help="start by mpirun, and let MPI carry the data")  # fmt: skip
    controller.add_argument("--jsrun", dest="use_jsrun", action="store_true",
                            help=_no_effect("--jsrun"))  # fmt: skip
    add("--mpi-args", metavar="TEXT", help="with --mpi: further arguments of mpirun")
    add("--binding-args", metavar="TEXT", help="with --mpi: how mpirun binds ranks to cores")
    add("--tcp", dest="tcp_flag", action="store_true", help="set NCCL_IB_DISABLE=1")


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...",
                       help="hosts, reached by ssh, and how many ranks each takes; names of "
                       "this host count as several")  # fmt: skip
    hosts.add_argument("-hostfile", "--hostfile", metavar="FILE",
                       help="the same in a file, as lines HOST slots=N")  # fmt: skip
    hosts.add_argument("--host-discovery-script", metavar="COMMAND",
                       help="of an elastic job: asked once a second, it prints the hosts that "
                       "there are, in lines HOST or HOST:SLOTS")  # fmt: skip
    add = parser.add_argument
    add("--network-interfaces", "--network-interface", dest="nics", action="append",
        metavar="NAME,...", type=_names,
        help="set NCCL_SOCKET_IFNAME, and GLOO_SOCKET_IFNAME for the first")  # fmt: skip
    add("-p", "--ssh-port", type=int, metavar="PORT")
    add("-i", "--ssh-identity-file", metavar="FILE", help="a private key")


def _add_elastic(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "elastic jobs",
        "--min-np or --host-discovery-script asks for one: when a process fails its host is left "
        "out, and the others go on from the last commit",
    )
    add = group.add_argument
    add("--min-np", "--min-num-proc", dest="min_num_proc", type=int, metavar="N",
        help="ranks without which the job waits [-np]")  # fmt: skip
    add("--max-np", "--max-num-proc", dest="max_num_proc", type=int, metavar="N",
        help="ranks at most [as many as the hosts have slots]")  # fmt: skip
    add("--slots-per-host", dest="slots", type=int, metavar="N",
        help="of a discovered host whose line has no number [1]")  # fmt: skip
    add("--elastic-timeout", type=int, metavar="SECONDS",
        help="how long to wait for ranks, at the beginning and after a loss "
        "[HOROVOD_ELASTIC_TIMEOUT, or 600]")  # fmt: skip
    add("--reset-limit", type=int, metavar="N",
        help="how often the ranks may change before the job ends [no limit]")  # fmt: skip
    add("--blacklist-cooldown-range", dest="cooldown_range", type=int, nargs=2,
        metavar=("MIN", "MAX"), help="for how many seconds a host is left out, the first time and "
        "at most [for ever]")  # fmt: skip


def is_elastic(options: argparse.Namespace) -> bool:
    """Return whether an elastic job is asked for. Raises ValueError for flags that lack others."""
    if options.min_num_proc is not None or options.host_discovery_script is not None:
        return True
    for dest, flag in (("max_num_proc", "--max-np"), ("slots", "--slots-per-host"),
                       ("elastic_timeout", "--elastic-timeout"),
                       ("reset_limit", "--reset-limit"),
                       ("cooldown_range", "--blacklist-cooldown-range")):  # fmt: skip
        if getattr(options, dest) is not None:
            raise ValueError(
                f"{flag} is of elastic jobs: give --min-np or --host-discovery-script, too"
            )
    return False


class _OldName(argparse.Action):
    """A flag that Horovod itself has given another name."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        assert option is not None
        value = _OLD_NAMES[option]
        new = "--log-with-timestamp" if value else "--log-without-timestamp"
        warnings.warn(f"{option} is deprecated, use {new}", DeprecationWarning, stacklevel=2)
        namespace.log_with_timestamp = value


def _checking(flag: Flag) -> Any:
    def parse(text: str) -> int | float | str:
        try:
            return flag.checked(text, repr(text))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _no_effect(name: str) -> str:
    assert any(name in names for names, _ in WITHOUT_EFFECT), name
    return "without effect, see below"


def _epilog() -> str:
    lines = ["accepted, without effect (flags and variables), and why:"]
    for names, reason in WITHOUT_EFFECT:
        for text, indent in ((", ".join(names), "  "), (reason, "      ")):
            lines += textwrap.wrap(text, 78, initial_indent=indent, subsequent_indent=indent,
                                   break_on_hyphens=False)  # fmt: skip
    lines.append("What Horovod reads when it is compiled or tested is not read.")
    return "\n".join(lines)


def variables_of(options: argparse.Namespace) -> dict[str, str]:
    """Return the variables that the flags set in the ranks' environment."""
    controller = "mpi" if options.use_mpi else "gloo"
    variables = {"HOROVOD_CONTROLLER": controller, "HOROVOD_CPU_OPERATIONS": controller}
    for flag in FLAGS:
        value = getattr(options, flag.dest)
        if value is not None:
            variables[flag.variable] = str(value * flag.factor if flag.factor != 1 else value)
    for switch in SWITCHES:
        value = getattr(options, switch.dest)
        if value is not None:
            variables[switch.variable] = str(int(value != switch.inverted))
    variables.update(interface_variables([nic for given in options.nics or () for nic in given]))
    if options.tcp_flag:
        variables["NCCL_IB_DISABLE"] = "1"
    return variables
