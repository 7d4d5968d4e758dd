"""The launcher that started this process: one table, by what each leaves in the environment.

Pure: variables in, facts out; what is done with them is in ``meeting.py``. A row is recognised by
all of its ``marks``. The order matters: launchers start each other, and what is inside comes first
(a rank of ``torchrun`` under ``srun`` has the variables of both).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kolovod.errors import SettingError

__all__ = [
    "LAUNCHERS",
    "Found",
    "Launcher",
    "asked_store",
    "expand_hosts",
    "find",
    "is_rank_of_slurm",
    "why_alone",
]

_FIRST_PORT, _PORTS = 20_000, 9_000  # below what systems give to outgoing connections
_MAX_HOSTS = 1 << 16
_LOOPBACK = re.compile(r"localhost|::1|127(\.\d{1,3}){3}")
_NUMBERED = re.compile(r"([^.]*-)0(\..*)?")
_FIRST_STEP_WITHOUT_RANKS = 0xFFFF_FFF0  # Slurm's own numbers: of a batch script, of a shell
_ALLOCATIONS = ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID")


@dataclass(frozen=True)
class Launcher:
    """A row: the variables that tell something. Of several, the first that is set counts."""

    name: str
    marks: tuple[str, ...]
    """All are set on its ranks, and only there."""
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    job: tuple[str, ...] = ()
    """Together they are the same on all ranks of a job, and others in another job."""
    node_count: str = ""
    node_name: str = ""
    """What it calls this host."""
    nodes: tuple[str, ...] = ()
    """The hosts of its ranks, rank 0's first: a Slurm host list."""
    master: str = ""
    """The name of rank 0's host."""
    export: str = "set it for all ranks"
    """The way in which all ranks get a variable; for messages."""
    is_mpi: bool = False
    numbers_hosts: bool = False
    """Each rank has a host of its own: rank 0 NAME-0 or NAME-0.DOMAIN, and the others alike."""


LAUNCHERS = (
    Launcher(
        "your own launcher",
        marks=("KOLOVOD_RANK", "KOLOVOD_SIZE", "KOLOVOD_STORE_HOST"),
        rank=("KOLOVOD_RANK",),
        size=("KOLOVOD_SIZE",),
        local_rank=("KOLOVOD_LOCAL_RANK",),
        local_size=("KOLOVOD_LOCAL_SIZE",),
        job=("KOLOVOD_STORE_HOST",),
    ),
    Launcher(
        "torchrun",
        marks=("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        rank=("RANK",),
        size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE",),
        job=("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
        master="MASTER_ADDR",
        export="export it before torchrun on every host",
    ),
    Launcher(
        "jsrun",
        marks=("JSM_NAMESPACE_RANK",),
        rank=("JSM_NAMESPACE_RANK",),
        size=("JSM_NAMESPACE_SIZE", "OMPI_COMM_WORLD_SIZE"),
        local_rank=("JSM_NAMESPACE_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_size=("JSM_NAMESPACE_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        job=("PMIX_NAMESPACE",),
        export="export it before jsrun, which hands the environment on",
        is_mpi=True,
    ),
    Launcher(
        "Open MPI",
        marks=("OMPI_COMM_WORLD_RANK",),
        rank=("OMPI_COMM_WORLD_RANK",),
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=("PMIX_NAMESPACE",),
        export="export it and add -x KOLOVOD_SECRET to mpirun",
        is_mpi=True,
    ),
    Launcher(
        "MPICH or Intel MPI",
        marks=("PMI_RANK", "MPI_LOCALRANKID"),
        rank=("PMI_RANK",),
        size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID",),
        local_size=("MPI_LOCALNRANKS",),
        export="export it before mpirun, which hands the environment on",
        is_mpi=True,
    ),
    # A batch script has the variables of rank 0, too: see ``is_rank_of_slurm``.
    Launcher(
        "Slurm",
        marks=("SLURM_STEP_ID", "SLURM_PROCID"),
        rank=("SLURM_PROCID",),
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        job=("SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
        node_count="SLURM_STEP_NUM_NODES",
        node_name="SLURMD_NODENAME",
        nodes=("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
        export="export it before srun, sbatch or salloc, which hand the environment on",
    ),
    Launcher(
        "an MPI launcher",
        marks=("PMI_RANK", "PMI_SIZE"),
        rank=("PMI_RANK",),
        size=("PMI_SIZE",),
        local_rank=("PMI_LOCAL_RANK",),
        local_size=("PMI_LOCAL_SIZE",),
        is_mpi=True,
    ),
    # Indexed jobs whose pods have nothing to do with each other do not set KOLOVOD_SIZE.
    Launcher(
        "Kubernetes",
        marks=("JOB_COMPLETION_INDEX", "KOLOVOD_SIZE"),
        rank=("JOB_COMPLETION_INDEX",),
        size=("KOLOVOD_SIZE",),
        job=("KOLOVOD_STORE_HOST",),
        export="mount it or set it from a Secret in the pod template",
        numbers_hosts=True,
    ),
    Launcher(
        "torch's env://",
        marks=("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        rank=("RANK",),
        size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE",),
        job=("MASTER_ADDR", "MASTER_PORT"),
        master="MASTER_ADDR",
    ),
)


@dataclass(frozen=True)
class Found:
    """The facts that a launcher has told one of its ranks."""

    launcher: Launcher
    rank: int
    size: int
    local_rank: int | None
    """None: it does not say; the world counts by hosts in any case."""
    local_size: int | None
    is_one_host: bool
    """Whether all ranks are known to be on this host."""
    job: str
    """The same on all ranks, and different from other jobs'; "" if nothing tells."""
    host: str
    """This host's label; "" if the launcher has none."""
    hosts: tuple[str, ...] = field(default=())
    """The hosts of the job, rank 0's first, if there is a list."""
    store_host: str = ""
    """The host of rank 0; "" if nothing tells."""
    store_port: int = 0
    """The port at which the ranks meet on it."""
    is_named: bool = False
    """Whether several starts, by any launchers, make one elastic job (KOLOVOD_JOB_NAME)."""

    @property
    def identity(self) -> str:
        """A text that all ranks of the job have in common, and ranks of other jobs have not."""
        return self.job if self.is_named else f"{self.launcher.name} {self.job}"

    @property
    def numbers_hosts(self) -> bool:
        """True if ``host_of`` knows the hosts of all ranks."""
        return self.launcher.numbers_hosts and _NUMBERED.fullmatch(self.store_host) is not None

    def host_of(self, rank: int) -> str:
        """Return the name of the host that this rank has to itself; "" if nothing tells."""
        name = _NUMBERED.fullmatch(self.store_host) if self.launcher.numbers_hosts else None
        return "" if name is None else f"{name[1]}{rank}{name[2] or ''}"

    @property
    def doubt(self) -> str:
        """A hint for where nobody else comes: the variables may be another job's."""
        names = dict.fromkeys((*self.launcher.marks, self.launcher.rank[0], self.launcher.size[0]))
        return (
            f"If {self.launcher.name} has not started this process, and the variables that say so "
            f"are left over, unset {', '.join(names)}"
        )

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}, started by {self.launcher.name}"


def find(
    environ: Mapping[str, str], read_file: Callable[[str], str] = lambda path: ""
) -> Found | None:
    """Return which launcher started this process, by the first row that matches.

    None: none of the table has. ``read_file``: returns the text of PBS_NODEFILE. Raises
    InvalidArgumentError naming the variable that is missing or wrong.
    """
    for launcher in LAUNCHERS:
        if launcher.name == "Slurm" and not is_rank_of_slurm(environ):
            continue
        if all(environ.get(name, "").strip() for name in launcher.marks):
            return _found(launcher, environ, read_file)
    return None


def is_rank_of_slurm(environ: Mapping[str, str]) -> bool:
    """Return whether ``srun`` has started this process, or one that it comes from.

    Slurm gives a number of a step to a batch script, and to a shell of ``salloc``, too.
    """
    step = environ.get("SLURM_STEP_ID", "").strip()
    return bool(step) and not (step.isdecimal() and int(step) >= _FIRST_STEP_WITHOUT_RANKS)


def why_alone(environ: Mapping[str, str]) -> str:
    """Return a warning if no launcher has started this process, but variables speak of others.

    This is so in the batch script of a Slurm job with several tasks. "": there is nothing to say.
    """
    tasks = environ.get("SLURM_NTASKS", "").strip()
    is_in_job = bool(environ.get("SLURM_JOB_ID")) and tasks.isdecimal() and int(tasks) > 1
    if not is_in_job or is_rank_of_slurm(environ):
        return ""
    return (
        f"this process trains alone: SLURM_NTASKS={tasks} is set, but srun has not started it. "
        "Start ranks with srun or kolovod run, or unset SLURM_NTASKS if one process is meant"
    )


def asked_store(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return KOLOVOD_STORE_HOST and KOLOVOD_STORE_PORT: where ranks are to meet; "" and 0: not set.

    Raises InvalidArgumentError for what is no port.
    """
    host = environ.get("KOLOVOD_STORE_HOST", "").strip().strip("[]")
    port = environ.get("KOLOVOD_STORE_PORT", "").strip()
    if not port:
        return host, 0
    if not re.fullmatch(r"\d{1,5}", port, re.ASCII) or not 0 < int(port) < 1 << 16:
        raise SettingError(f"KOLOVOD_STORE_PORT={port!r}: expected a port, 1 to 65535")
    return host, int(port)


def _found(
    launcher: Launcher, environ: Mapping[str, str], read_file: Callable[[str], str]
) -> Found:
    first, name = _named(environ)
    rank = first + _required(launcher, environ, launcher.rank)
    size = _required(launcher, environ, ("KOLOVOD_SIZE",) if first else launcher.size)
    most = size
    if _optional(environ, ("KOLOVOD_MIN_NP",)):  # an elastic job, which may grow
        most = max(size, _optional(environ, ("KOLOVOD_MAX_NP",)) or 0)
    if most > size and not rank < most:
        raise SettingError(
            f"{launcher.rank[0]}={rank} and KOLOVOD_MAX_NP={most}: {launcher.name} starts more "
            "ranks than the elastic job may have; ask it for fewer, or begin a job with more"
        )
    if not rank < most:
        raise SettingError(
            f"{launcher.rank[0]}={rank} and {launcher.size[0]}={size}: {launcher.name} cannot have "
            "set both; the rank must be below the size"
        )
    hosts = _hosts(launcher, environ, read_file)
    master = environ.get(launcher.master, "").strip().strip("[]") if launcher.master else ""
    asked_host, asked_port = asked_store(environ)
    local_size = _optional(environ, launcher.local_size)
    node_count = _optional(environ, (launcher.node_count,))
    is_one_host = local_size == size or node_count == 1 or is_loopback(master)
    job = f"KOLOVOD_JOB_NAME={name}" if name else _job(launcher, environ)
    return Found(
        launcher=launcher,
        rank=rank,
        size=size,
        local_rank=_optional(environ, launcher.local_rank),
        local_size=local_size,
        is_one_host=is_one_host and not name and (not asked_host or is_loopback(asked_host)),
        job=job,
        host=environ.get("KOLOVOD_HOST") or environ.get(launcher.node_name, ""),
        hosts=hosts,
        store_host=asked_host or master or (hosts[0] if hosts else ""),
        store_port=asked_port or _port("" if name else launcher.name, job),
        is_named=bool(name),
    )


def _named(environ: Mapping[str, str]) -> tuple[int, str]:
    """Return the rank of this launcher's first process, and the job's name; "": it has none."""
    first = _optional(environ, ("KOLOVOD_FIRST_RANK",)) or 0
    name = environ.get("KOLOVOD_JOB_NAME", "").strip()
    if name and not environ.get("KOLOVOD_MIN_NP"):
        raise SettingError(
            f"KOLOVOD_JOB_NAME={name!r}: it names an elastic job; set KOLOVOD_MIN_NP, too, or "
            "leave it out"
        )
    needed = ("KOLOVOD_JOB_NAME", "KOLOVOD_SIZE", "KOLOVOD_STORE_HOST")
    missing = [variable for variable in needed if not environ.get(variable)]
    if first and missing:
        raise SettingError(
            f"KOLOVOD_FIRST_RANK={first}: these ranks join an elastic job that others begin, so "
            f"set {', '.join(missing)}, too: its name, with how many ranks it begins, and rank "
            "0's host"
        )
    return first, name


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is a name of the loopback interface, without asking anybody."""
    return _LOOPBACK.fullmatch(host) is not None


def _job(launcher: Launcher, environ: Mapping[str, str]) -> str:
    names = (*launcher.job, *_ALLOCATIONS)
    return " ".join(f"{name}={environ[name]}" for name in names if environ.get(name))


def _port(name: str, job: str) -> int:
    """Return a port that follows from the job."""
    digest = hashlib.sha256(f"{name} {job}".encode()).digest()
    return _FIRST_PORT + int.from_bytes(digest[:8], "big") % _PORTS


def _hosts(
    launcher: Launcher, environ: Mapping[str, str], read_file: Callable[[str], str]
) -> tuple[str, ...]:
    """Return the job's hosts in their order, each once: the launcher's, else the scheduler's."""
    for name in (*launcher.nodes, "SLURM_JOB_NODELIST"):
        if environ.get(name):
            return tuple(dict.fromkeys(expand_hosts(environ[name])))
    names: list[str] = []
    if environ.get("LSB_MCPU_HOSTS"):
        names = environ["LSB_MCPU_HOSTS"].split()[::2]  # each with its number of slots
    elif environ.get("LSB_HOSTS"):
        names = environ["LSB_HOSTS"].split()
    elif environ.get("PBS_NODEFILE"):
        names = read_file(environ["PBS_NODEFILE"]).split()
    if launcher.name == "jsrun":  # its job script runs on a node that has no ranks
        names = [name for name in names if not name.startswith(("batch", "login"))]
    return tuple(dict.fromkeys(names))


def expand_hosts(text: str) -> list[str]:
    """Return the names of a Slurm host list: "n[1-3,7],m-[01-10]" has fourteen.

    Numbers keep their leading zeros; several brackets in a name make all combinations, the last one
    running fastest. Raises InvalidArgumentError for what is no host list, or has over 65536 names.
    """
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+|[\[\],]", text):
        if part == ",":
            continue
        expanded = [""]
        for piece in re.split(r"(\[[^\[\]]*\])", part):
            options = _numbers(piece[1:-1], text) if piece.startswith("[") else [piece]
            if len(names) + len(expanded) * len(options) > _MAX_HOSTS:
                raise SettingError(f"{text!r} names over {_MAX_HOSTS} hosts")
            expanded = [prefix + option for prefix in expanded for option in options]
        names += expanded
    if not names or not all(re.fullmatch(r"[\w.:-]+", name) for name in names):
        raise SettingError(f"{text[:200]!r} is no host list: expected one like n[1-3,7],m2")
    return names


def _numbers(text: str, whole: str) -> list[str]:
    """Return the numbers that a bracket stands for: "01-03,7" is 01, 02, 03, 7."""
    numbers: list[str] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part, re.ASCII)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if found is None or not 0 <= last - first < _MAX_HOSTS:
            raise SettingError(f"{whole[:200]!r} is no host list: what is [{text[:80]}]?")
        numbers += [str(number).zfill(len(found[1])) for number in range(first, last + 1)]
    return numbers


def _required(launcher: Launcher, environ: Mapping[str, str], names: tuple[str, ...]) -> int:
    number = _optional(environ, names)
    if number is None:
        marks = ", ".join(f"{mark}={environ[mark]}" for mark in launcher.marks[:2])
        raise SettingError(
            f"this process seems to be a rank of {launcher.name} ({marks}), but {names[0]} is not "
            "set: unset those to run alone, or start it with kolovod run"
        )
    return number


def _optional(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """Return the number in the first variable that is set; None: none is."""
    for name in names:
        text = environ.get(name, "").strip()
        if text:
            if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
                raise SettingError(f"{name}={text!r}: expected a whole number")
            return int(text)
    return None
