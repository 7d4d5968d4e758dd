"""The hosts that a scheduler has given to the job script in which the launcher runs.

Pure: variables in, hosts out. Slurm's are from ``sbatch`` and ``salloc``, LSF's from ``bsub``,
PBS's from ``qsub``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from kolovod.errors import CommandArgumentError
from kolovod.launch.hosts import HostSlots
from kolovod.rendezvous.external.launchers import expand_hosts, is_rank_of_slurm

__all__ = ["allocation"]

_MAX_HOSTS = 1 << 16


def allocation(
    environ: Mapping[str, str], read_file: Callable[[str], str] = lambda path: ""
) -> list[HostSlots]:
    """Return the hosts and their slots, that of the job script first; [] if there are none.

    A step's process, which ``srun`` has started, has none: it is a rank, not a job script.
    ``read_file``: returns the text of PBS_NODEFILE. Raises InvalidArgumentError for variables that
    contradict each other.
    """
    if environ.get("SLURM_JOB_NODELIST"):
        return [] if is_rank_of_slurm(environ) else _slurm(environ)
    if environ.get("LSB_MCPU_HOSTS"):
        return _lsf(environ["LSB_MCPU_HOSTS"])
    if environ.get("PBS_NODEFILE"):
        return _counted(read_file(environ["PBS_NODEFILE"]).split())
    return []


def _slurm(environ: Mapping[str, str]) -> list[HostSlots]:
    """Return hosts with a slot for each task if the job asks for tasks, else for each CPU."""
    names = expand_hosts(environ["SLURM_JOB_NODELIST"])
    asks = environ.get("SLURM_NTASKS") or environ.get("SLURM_NTASKS_PER_NODE")
    variable = "SLURM_TASKS_PER_NODE" if asks else "SLURM_JOB_CPUS_PER_NODE"
    text = environ.get(variable) or "1"
    slots: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part.strip(), re.ASCII)
        if match is None or len(slots) + int(match[2] or 1) > _MAX_HOSTS:
            raise CommandArgumentError(f"{variable}={text!r}: expected numbers as in 4(x2),1")
        slots += [int(match[1])] * int(match[2] or 1)
    if len(slots) == 1:
        slots *= len(names)
    if len(slots) != len(names):
        raise CommandArgumentError(
            f"{variable}={text!r} is about {len(slots)} hosts, but SLURM_JOB_NODELIST="
            f"{environ['SLURM_JOB_NODELIST']!r} about {len(names)}"
        )
    return [HostSlots(name, count) for name, count in zip(names, slots, strict=True) if count]


def _lsf(text: str) -> list[HostSlots]:
    """Return the hosts of "host1 4 host2 2"."""
    words = text.split()
    if len(words) % 2 or not all(word.isdecimal() for word in words[1::2]):
        raise CommandArgumentError(f"LSB_MCPU_HOSTS={text!r}: expected hosts, each with a number")
    pairs = zip(words[::2], words[1::2], strict=True)
    return [HostSlots(name, int(count)) for name, count in pairs if int(count)]


def _counted(names: list[str]) -> list[HostSlots]:
    """Return the hosts, with a slot for each time that they are named."""
    return [HostSlots(name, names.count(name)) for name in dict.fromkeys(names)]
