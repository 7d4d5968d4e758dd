"""The place of a rank that MPI has started: MPI carries the store's address and the job's secret.

The lowest rank of a communicator runs the store. Between hosts it listens on all its addresses at
first, a rank of each other host tries them, and the first one that all of them reach is used.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from kolovod.errors import AuthenticationError, BootstrapError, InvalidArgumentError
from kolovod.launch.auth import connect, new_secret
from kolovod.launch.door import close_at_exit
from kolovod.launch.launchers import Found, find
from kolovod.launch.place import Place, local_and_cross
from kolovod.launch.store import LABEL, Store

__all__ = ["communicator_of", "is_communicator", "meet", "ranks_of", "why_unusable"]

_PROBE_TIMEOUT_S = 5.0
_SIOCGIFADDR = 0x8915  # linux/sockios.h


class _Offer(NamedTuple):
    """What the lowest rank tells the others."""

    addresses: list[str]
    secret: str
    error: str = ""


def is_communicator(value: Any) -> bool:
    """Whether ``value`` is an mpi4py communicator."""
    return hasattr(value, "Get_group") and hasattr(value, "Get_size")


def why_unusable(found: Found) -> str:
    """Why mpi4py cannot be asked about the job that ``found`` is of; "" if it can."""
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
    """A communicator of ``ranks`` of MPI's world, made by these only."""
    from mpi4py import MPI

    group = MPI.COMM_WORLD.Get_group().Incl(list(ranks))
    return MPI.COMM_WORLD.Create_group(group)


def ranks_of(comm: Any) -> list[int]:
    """The ranks in MPI's world of an mpi4py communicator's members, which must be ascending.

    Raises InvalidArgumentError for other communicators, for other values, and where MPI has not
    started the ranks.
    """
    if not is_communicator(comm):
        raise InvalidArgumentError(
            f"expected a list of ranks or an mpi4py communicator, not {comm!r}"
        )
    from mpi4py import MPI

    known = MPI.COMM_WORLD.Get_size()
    found = find(os.environ)
    launched = os.environ.get("KOLOVOD_SIZE") or str(known if found is None else found.size)
    if launched != str(known):
        raise InvalidArgumentError(
            f"{launched} ranks were started without MPI, which knows {known}: start them with "
            "horovodrun --mpi, or with the mpirun of mpi4py's MPI, to use communicators"
        )
    group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    ranks = list(MPI.Group.Translate_ranks(group, list(range(group.Get_size())), world))
    if ranks != sorted(ranks):
        raise InvalidArgumentError(
            f"the communicator's members are the ranks {ranks} of MPI.COMM_WORLD, in this order: "
            "ranks keep their order here, so give one with ascending members"
        )
    return ranks


def meet(comm: Any) -> Place:
    """The place of this process among MPI's ranks; all members of ``comm`` call it, nobody else.

    Raises BootstrapError, on every rank, if no address of the lowest one is reached from all hosts.
    """
    from mpi4py import MPI

    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    host = os.environ.get("KOLOVOD_HOST") or socket.gethostname()
    hosts: list[str] = comm.allgather(host)
    own = comm.Get_rank()
    stores: list[Store] = []
    offer = None
    if own == 0:
        offer = _offer(size, len(set(hosts)) > 1, stores)
    addresses, secret, error = comm.bcast(offer, root=0)
    if error:
        raise BootstrapError(error)
    local = local_and_cross(hosts, own)
    tries = host != hosts[0] and local[0] == 0
    found = comm.allgather(_reached(addresses, secret) if tries else None)
    chosen = [a for a in addresses if all(answers is None or a in answers for answers in found)]
    for store in stores:
        if chosen and store.address == chosen[0]:
            close_at_exit(store.close)
        else:
            store.close()
    if not chosen:
        deaf = sorted({h for h, answers in zip(hosts, found, strict=True) if answers is not None})
        raise BootstrapError(
            f"rank {ranks_of(comm)[0]} on host {hosts[0]} listens at {', '.join(addresses)}, and "
            f"none of these is reached from all of the hosts {', '.join(deaf)}: does a firewall "
            "keep them apart? KOLOVOD_STORE_HOST and KOLOVOD_STORE_PORT name another address"
        )
    return Place(rank, size, *local, host, chosen[0], secret)


def _offer(size: int, is_between_hosts: bool, stores: list[Store]) -> _Offer:
    """The lowest rank's stores, into ``stores``, and where they are."""
    secret = new_secret()
    try:
        for address in own_addresses() if is_between_hosts else ["127.0.0.1"]:
            stores.append(Store(secret, size, address))
            stores[-1].start()
    except OSError as error:  # the others wait for an answer
        return _Offer([], "", f"the lowest rank cannot listen: {error}")
    if not stores:
        return _Offer([], "", f"host {socket.gethostname()} has no address but the loopback one")
    return _Offer([store.address for store in stores], secret)


def own_addresses() -> list[str]:
    """The IPv4 addresses of this host's interfaces, without the loopback ones."""
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                request = struct.pack("256s", name.encode())
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, request)
            except OSError:  # it has none
                continue
            addresses.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in addresses if not address.startswith("127.")]


def _reached(addresses: Sequence[str], secret: str) -> list[str]:
    """Those of ``addresses`` at which a store answers that knows ``secret``."""
    with ThreadPoolExecutor(len(addresses)) as pool:
        answers = pool.map(lambda address: _is_reached(address, secret), addresses)
        return [address for address, is_there in zip(addresses, answers, strict=True) if is_there]


def _is_reached(address: str, secret: str) -> bool:
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + _PROBE_TIMEOUT_S
    try:
        connect(socket.AF_INET, (host, int(port)), secret, LABEL, deadline).close()
    except (AuthenticationError, EOFError, OSError):
        return False
    return True
