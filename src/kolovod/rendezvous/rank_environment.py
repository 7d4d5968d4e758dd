"""A rank's place in the job: written into the environment by the launcher, read by the rank."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kolovod.errors import SettingError

__all__ = [
    "COORDINATOR",
    "RankEnvironment",
    "local_and_cross",
    "read_rank_environment",
    "thread_limits",
    "usable_cores",
    "whole_number",
    "without_mpi_variables",
]

COORDINATOR = "KOLOVOD_COORDINATOR"
_NUMBERS = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_MPI_VARIABLES = {
    "OMPI_COMM_WORLD_RANK": "rank",
    "OMPI_COMM_WORLD_SIZE": "size",
    "OMPI_COMM_WORLD_LOCAL_RANK": "local_rank",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "local_size",
    "OMPI_COMM_WORLD_NODE_RANK": "local_rank",
    "OMPI_UNIVERSE_SIZE": "size",
}


@dataclass(frozen=True)
class RankEnvironment:
    """Numbers and addresses of one rank of a job."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    host: str = "localhost"
    rendezvous: str = ""
    """The address at which the ranks meet, "host:port"; "" in a world of one."""
    secret: str = field(default="", repr=False)
    coordinator: str = ""
    """The address of the coordinator of an elastic job; "" if the job is not elastic."""
    slot: int = 0
    """The place that this process fills in an elastic job; the next one there has the same."""
    process: int | None = None
    """The number by which its launcher calls it; no other process of the job has the same."""
    replica: tuple[int, ...] = ()
    """The launcher's numbers of the processes that hold a model together, this one included, in the
    order of their parts; none where each holds a whole one."""
    first_hosts: tuple[str, ...] = ()
    """The hosts of the ranks that an elastic job starts with; none for who comes later."""
    min_np: int = 1
    """An elastic job of fewer ranks waits for more."""

    def variables(self) -> dict[str, str]:
        """Return the variables that carry it, with Horovod's names for scripts that read those."""
        variables = {}
        for name in _NUMBERS:
            variables[f"KOLOVOD_{name.upper()}"] = str(getattr(self, name))
            variables[f"HOROVOD_{name.upper()}"] = str(getattr(self, name))
        variables["HOROVOD_HOSTNAME"] = variables["KOLOVOD_HOST"] = self.host
        variables["KOLOVOD_STORE"] = self.rendezvous
        variables["KOLOVOD_SECRET"] = self.secret
        if self.coordinator:
            variables[COORDINATOR] = self.coordinator
            variables["KOLOVOD_SLOT"] = str(self.slot)
            if self.process is not None:
                variables["KOLOVOD_PROCESS"] = str(self.process)
            if len(self.replica) > 1:
                variables["KOLOVOD_REPLICA"] = ",".join(map(str, self.replica))
            variables["KOLOVOD_FIRST_HOSTS"] = ",".join(self.first_hosts)
            variables["KOLOVOD_MIN_NP"] = str(self.min_np)
            variables["KOLOVOD_ELASTIC"] = "1"
        return variables

    def mpi_variables(self) -> dict[str, str]:
        """Return the variables that Open MPI's ``mpirun`` sets.

        Programs ask by them whether they run in parallel. MPI itself does not read them: a program
        that calls MPI is alone there.
        """
        return {variable: str(getattr(self, name)) for variable, name in _MPI_VARIABLES.items()}

    def torch_variables(self, port: int, address: str) -> dict[str, str]:
        """Return the variables of ``torch.distributed``, whose store is at rank 0's ``address``."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }


def read_rank_environment(environ: Mapping[str, str]) -> RankEnvironment | None:
    """Return the place that ``environ`` tells; None if no launcher of ours has set one.

    Others set KOLOVOD_SIZE in a Kubernetes job, or KOLOVOD_STORE_HOST (see launchers.py).

    Raises InvalidArgumentError naming the variable that is missing or wrong.
    """
    if environ.get("KOLOVOD_STORE_HOST") and not environ.get("KOLOVOD_STORE"):
        return None
    if not environ.get("KOLOVOD_RANK"):
        if environ.get("KOLOVOD_SIZE") and not environ.get("JOB_COMPLETION_INDEX"):
            raise SettingError(
                f"KOLOVOD_SIZE={environ['KOLOVOD_SIZE']!r} is set, but KOLOVOD_RANK is not: set "
                "both (kolovod run does) or neither"
            )
        return None
    numbers = {
        "rank": whole_number(environ, "KOLOVOD_RANK", None),
        "size": whole_number(environ, "KOLOVOD_SIZE", None),
    }
    defaults = {
        "local_rank": numbers["rank"],
        "local_size": numbers["size"],
        "cross_rank": 0,
        "cross_size": 1,
    }
    for name, default in defaults.items():
        numbers[name] = whole_number(environ, f"KOLOVOD_{name.upper()}", default)
    for prefix in ("", "local_", "cross_"):
        rank, size = numbers[f"{prefix}rank"], numbers[f"{prefix}size"]
        if not 0 <= rank < size:
            variable = f"KOLOVOD_{prefix.upper()}"
            raise SettingError(
                f"{variable}RANK={rank} and {variable}SIZE={size}: the rank must be at least 0 and "
                "below the size"
            )
    environment = RankEnvironment(
        **numbers,
        host=environ.get("KOLOVOD_HOST") or "localhost",
        rendezvous=environ.get("KOLOVOD_STORE", ""),
        secret=environ.get("KOLOVOD_SECRET", ""),
        coordinator=environ.get(COORDINATOR, ""),
        slot=whole_number(environ, "KOLOVOD_SLOT", 0),
        process=whole_number(environ, "KOLOVOD_PROCESS", None)
        if environ.get("KOLOVOD_PROCESS")
        else None,
        min_np=whole_number(environ, "KOLOVOD_MIN_NP", 1),
        replica=_whole_numbers(environ, "KOLOVOD_REPLICA"),
        first_hosts=tuple(filter(None, environ.get("KOLOVOD_FIRST_HOSTS", "").split(","))),
    )
    for variable, value in (
        ("KOLOVOD_STORE", environment.rendezvous),
        ("KOLOVOD_SECRET", environment.secret),
    ):
        if environment.size > 1 and not value:
            raise SettingError(
                f"KOLOVOD_SIZE={environment.size}, but {variable} is not set: start the ranks with "
                "'kolovod run -np N ...', or set KOLOVOD_STORE_HOST to rank 0's host"
            )
    return environment


def whole_number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return a variable's value; without ``default`` it must be set, else InvalidArgumentError."""
    text = environ.get(name, "").strip()
    if not text and default is not None:
        return default
    if not text.isdecimal():
        raise SettingError(f"{name}={text!r}: expected a whole number")
    return int(text)


def _whole_numbers(environ: Mapping[str, str], name: str) -> tuple[int, ...]:
    """Return a variable's numbers; none if it is not set. Raises InvalidArgumentError."""
    texts = [text for text in environ.get(name, "").split(",") if text]
    if not all(text.isdecimal() for text in texts):
        raise SettingError(f"{name}={environ[name]!r}: expected whole numbers")
    return tuple(map(int, texts))


def local_and_cross(hosts: Sequence[str], rank: int) -> tuple[int, int, int, int]:
    """Return ``(local_rank, local_size, cross_rank, cross_size)`` of ``rank``.

    ``hosts[r]`` is rank r's host. The cross numbers count hosts, in the order of their first ranks,
    that have this local rank.
    """
    local_rank = hosts[:rank].count(hosts[rank])
    local_size = hosts.count(hosts[rank])
    having = [host for host in dict.fromkeys(hosts) if hosts.count(host) > local_rank]
    return local_rank, local_size, having.index(hosts[rank]), len(having)


def usable_cores() -> int:
    """Return the number of cores that the system lets this process use."""
    return len(os.sched_getaffinity(0))


def without_mpi_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without what ``RankEnvironment.mpi_variables`` has put there.

    A rank that starts a job of its own hands its environment on, and not all jobs have these
    variables: the ranks of one without would take the outer job's numbers for theirs.
    """
    return {
        variable: value
        for variable, value in environ.items()
        if variable not in _MPI_VARIABLES
        or value != environ.get(f"KOLOVOD_{_MPI_VARIABLES[variable].upper()}")
    }


def thread_limits(environ: Mapping[str, str], ranks: int, cores: int) -> dict[str, str]:
    """Return variables that limit the threads per rank: together the ranks use the cores once.

    None if the user has set OMP_NUM_THREADS; and a variable that is set stays as it is.
    """
    if environ.get("OMP_NUM_THREADS"):
        return {}
    threads = str(max(1, cores // ranks))
    return {name: threads for name in _THREAD_VARIABLES if not environ.get(name)}
