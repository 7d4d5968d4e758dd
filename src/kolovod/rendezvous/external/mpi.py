"""The environment of a rank that MPI has started: MPI carries address and secret of the job.

The lowest rank of a communicator runs the rendezvous server. Between hosts it listens at all its
addresses (net/addresses.py), and a rank of each other host makes sure that it is reached.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from kolovod.config import load
from kolovod.errors import (
    AuthenticationError,
    BootstrapError,
    KolovodError,
    SettingError,
)
from kolovod.net.addresses import connect_any, own_addresses
from kolovod.net.channel import new_secret
from kolovod.rendezvous.external.address_exchange import close_at_exit
from kolovod.rendezvous.external.launchers import Found, find
from kolovod.rendezvous.rank_environment import RankEnvironment, local_and_cross
from kolovod.rendezvous.server import LABEL, RendezvousServer

__all__ = ["communicator_of", "is_communicator", "meet", "ranks_of", "why_unusable"]

_PROBE_TIMEOUT_S = 5.0


class _Offer(NamedTuple):
    """The data that the lowest rank tells the others."""

    address: str
    """The address of the rendezvous server: "ip:port", or several."""
    secret: str
    error: str = ""


def is_communicator(value: Any) -> bool:
    """Return whether ``value`` is an mpi4py communicator."""
    return hasattr(value, "Get_group") and hasattr(value, "Get_size")


def why_unusable(found: Found) -> str:
    """Return why mpi4py cannot be asked about the job that ``found`` is of; "" if it can."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return f"mpi4py cannot be used ({error})"
    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    if (rank, size) == (found.rank, found.size):
        return ""
    library = MPI.Get_library_version().splitlines()[0][:80]
    return f"mpi4py uses another MPI ({library}), for which this is rank {rank} of {size}"


def communicator_of(ranks: Sequence[int]) -> Any:
    """Make a communicator of ``ranks`` of MPI's world; these call it, and nobody else."""
    from mpi4py import MPI

    group = MPI.COMM_WORLD.Get_group().Incl(list(ranks))
    return MPI.COMM_WORLD.Create_group(group)


def ranks_of(comm: Any) -> list[int]:
    """Return the ranks in MPI's world of an mpi4py communicator's members, which must be ascending.

    Raises InvalidArgumentError for other communicators, for other values, and where MPI has not
    started the ranks.
    """
    if not is_communicator(comm):
        raise SettingError(f"expected a list of ranks or an mpi4py communicator, not {comm!r}")
    from mpi4py import MPI

    known = MPI.COMM_WORLD.Get_size()
    found = find(os.environ)
    launched = os.environ.get("KOLOVOD_SIZE") or str(known if found is None else found.size)
    if launched != str(known):
        raise SettingError(
            f"{launched} ranks were started without MPI, which knows {known}: start them with "
            "horovodrun --mpi, or with the mpirun of mpi4py's MPI, to use communicators"
        )
    group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    ranks = list(MPI.Group.Translate_ranks(group, list(range(group.Get_size())), world))
    if ranks != sorted(ranks):
        raise SettingError(
            f"the communicator's members are the ranks {ranks} of MPI.COMM_WORLD, in this order: "
            "ranks keep their order here, so give one with ascending members"
        )
    return ranks


def meet(comm: Any) -> RankEnvironment:
    """Return this process's place among MPI's ranks; all members of ``comm`` call it, no others.

    Raises BootstrapError, on every rank, if the lowest one is not reached from all hosts.
    """
    from mpi4py import MPI

    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    host = os.environ.get("KOLOVOD_HOST") or socket.gethostname()
    hosts: list[str] = comm.allgather(host)
    own = comm.Get_rank()
    local = local_and_cross(hosts, own)
    offer = _offer(size, len(set(hosts)) > 1) if own == 0 else None
    address, secret, error = comm.bcast(offer, root=0)
    if error:
        raise BootstrapError(error)
    tries = host != hosts[0] and local[0] == 0
    answers = comm.allgather(_is_reached(address, secret) if tries else True)
    deaf = sorted({h for h, is_reached in zip(hosts, answers, strict=True) if not is_reached})
    if deaf:
        raise BootstrapError(
            f"rank {ranks_of(comm)[0]} on host {hosts[0]} listens at {address}, and none of this "
            f"is reached from host {', '.join(deaf)}: does a firewall keep them apart? "
            "KOLOVOD_STORE_HOST and KOLOVOD_STORE_PORT name another address"
        )
    return RankEnvironment(rank, size, *local, host, address, secret)


def _offer(size: int, is_between_hosts: bool) -> _Offer:
    """Open the lowest rank's server, for as long as the process lives; return where it is."""
    secret = new_secret()
    try:
        wanted = load(os.environ).interface_names
        rendezvous = RendezvousServer(
            secret, size, *(own_addresses(wanted) if is_between_hosts else ())
        )
    except KolovodError as error:  # the others wait for an answer
        return _Offer("", "", f"the lowest rank cannot listen: {error}")
    rendezvous.start()
    close_at_exit(rendezvous.close)
    return _Offer(rendezvous.address, secret)


def _is_reached(address: str, secret: str) -> bool:
    deadline = time.monotonic() + _PROBE_TIMEOUT_S
    try:
        connect_any(address, secret, LABEL, deadline).close()
    except (AuthenticationError, EOFError, OSError):
        return False
    return True
