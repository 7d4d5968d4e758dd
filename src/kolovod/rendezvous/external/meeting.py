"""The environment of a rank that another launcher has started (launchers.py says which).

Rank 0 runs the job's rendezvous server and opens an address exchange for it (address_exchange.py).
On one host the exchange is an AF_UNIX socket and the secret a fresh one. Between hosts MPI carries
both, where the launcher is MPI's and mpi4py works; else the exchange is a TCP port on rank 0's
host, and the secret the user's.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kolovod.errors import BootstrapError, SettingError
from kolovod.net import messages
from kolovod.net.addresses import LOOPBACK, endpoint, interface_to, own_addresses, resolve
from kolovod.net.channel import new_secret
from kolovod.notices import report_to_stderr
from kolovod.rendezvous.external import mpi
from kolovod.rendezvous.external.address_exchange import (
    ask,
    close_at_exit,
    tcp_exchange,
    unix_exchange,
)
from kolovod.rendezvous.external.job_secret import job_secret, read_secret
from kolovod.rendezvous.external.launchers import Found, find, is_loopback
from kolovod.rendezvous.rank_environment import RankEnvironment
from kolovod.rendezvous.server import RendezvousServer

__all__ = [
    "ExternalJob",
    "exchange_name",
    "find_launcher",
    "meet",
    "read_hosts",
    "secret_between_hosts",
    "store_addresses",
]

_RESOLVE_RETRY_S = 0.5
_MAX_ANCESTORS = 64
_MAX_TEXT = 1 << 12  # of what rank 0 tells


def find_launcher(environ: Mapping[str, str]) -> Found | None:
    """Return what ``launchers.find`` does, which may read the scheduler's list of hosts."""
    return find(environ, read_hosts)


def read_hosts(path: str) -> str:
    """Return the text of a scheduler's list of hosts; "" if it cannot be read."""
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError):
        return ""  # only the first host of a job has it, or it is gone: as if not set


class ExternalJob(NamedTuple):
    """The outcome of meeting other ranks: worlds among ``ranks`` can be formed there."""

    ranks: frozenset[int]
    environment: RankEnvironment


def meet(
    found: Found, environ: Mapping[str, str], members: Sequence[int], timeout_s: float
) -> ExternalJob:
    """Meet rank 0, or let the others meet this process. All ``members`` call it, once.

    Raises StartTimeoutError if rank 0 does not come in time, AuthenticationError if what is found
    in its stead does not know the secret, InvalidArgumentError if rank 0 is to stay away,
    BootstrapError if the environment is not enough: the message says what is missing.
    """
    why_not_mpi = ""
    if found.launcher.is_mpi and not found.is_one_host and not environ.get("KOLOVOD_STORE_HOST"):
        why_not_mpi = mpi.why_unusable(found)
        if not why_not_mpi:
            return ExternalJob(frozenset(members), mpi.meet(mpi.communicator_of(members)))
    if 0 not in members:
        raise SettingError(
            f"init(comm={list(members)}): the ranks that {found.launcher.name} has started meet at "
            "rank 0, so it must be one of them the first time"
        )
    host = found.host or socket.gethostname()
    if found.is_one_host:
        environment = _meet_here(found, host, exchange_name(found, environ), timeout_s)
    else:
        environment = _meet_between_hosts(found, environ, host, timeout_s, why_not_mpi)
    return ExternalJob(frozenset(range(found.size)), environment)


def _meet_here(found: Found, host: str, name: str, timeout_s: float) -> RankEnvironment:
    if found.rank == 0:
        return _open(found, host, [LOOPBACK], "", name)
    facts = ask(name, "", found.rank, host, timeout_s)
    return _environment(found, host, _told(facts, "rendezvous"), _told(facts, "secret"))


def _meet_between_hosts(
    found: Found, environ: Mapping[str, str], host: str, timeout_s: float, why_not_mpi: str
) -> RankEnvironment:
    secret = secret_between_hosts(found, environ, why_not_mpi)
    if found.rank == 0:
        return _open(found, host, store_addresses(found, timeout_s), secret, "")
    facts = ask((found.store_host, found.store_port), secret, found.rank, host, timeout_s)
    return _environment(found, host, _told(facts, "rendezvous"), secret)


def _told(facts: Mapping[str, Any], name: str) -> str:
    """Return one of the facts that rank 0 has told. Raises BootstrapError if it has not."""
    try:
        return messages.text(facts, name, _MAX_TEXT)
    except BootstrapError as error:
        raise BootstrapError(
            f"what rank 0 tells of the rendezvous makes no sense: {error}. Do all ranks run the "
            "same version of kolovod?"
        ) from None


def _open(
    found: Found, host: str, addresses: Sequence[str], common_secret: str, name: str
) -> RankEnvironment:
    """Open the rendezvous and its address exchange on rank 0, for as long as the process lives.

    ``name``: of the address exchange on this host; "" for one at the ``addresses``.
    """
    secret = common_secret or new_secret()
    with contextlib.ExitStack() as cleanup:
        try:
            rendezvous = RendezvousServer(secret, found.size, *addresses)
        except BootstrapError as error:
            if name:
                raise BootstrapError(
                    f"{found}, but rank 0 cannot listen on {', '.join(addresses)}, the loopback "
                    f"interface of its host ({error}): is that interface up?"
                ) from None
            where = f"{found.store_host} ({', '.join(addresses)})"
            raise BootstrapError(
                f"{found}, but {where}, where rank 0 should be, is not this host ({error}): set "
                "KOLOVOD_STORE_HOST to rank 0's host for all ranks"
            ) from None
        cleanup.callback(rendezvous.close)
        if name:
            facts = {"rendezvous": rendezvous.address, "secret": secret}
            exchange = unix_exchange(name, facts, found.size)
        else:
            facts = {"rendezvous": rendezvous.address}
            exchange = tcp_exchange(addresses, found.store_port, secret, facts, found.size)
        cleanup.callback(exchange.close)
        rendezvous.start()
        close_at_exit(cleanup.pop_all().close)
    return _environment(found, host, rendezvous.address, secret)


def _environment(found: Found, host: str, rendezvous: str, secret: str) -> RankEnvironment:
    """Return the environment. The world counts local ranks anew if the launcher tells none."""
    local = found.rank, found.size
    if found.local_rank is not None and found.local_size is not None:
        local = found.local_rank, found.local_size
    return RankEnvironment(
        found.rank, found.size, *local, host=host, rendezvous=rendezvous, secret=secret
    )


def secret_between_hosts(found: Found, environ: Mapping[str, str], why_not_mpi: str = "") -> str:
    """Return the job's secret, from its user's. Raises BootstrapError, which says what to set."""
    mpi_text = ""
    if why_not_mpi:
        mpi_text = f" MPI could carry all that, but {why_not_mpi}."
    if not found.store_host:
        raise BootstrapError(
            f"{found}: it may have ranks on several hosts, and nothing tells where rank 0 is."
            f"{mpi_text} Set KOLOVOD_STORE_HOST to the name of rank 0's host, and KOLOVOD_SECRET, "
            f"for all ranks. {found.doubt}"
        )
    secret = job_secret(environ, found.identity)
    if not secret:
        raise BootstrapError(
            f"{found}: it may have ranks on several hosts, and they have no secret in common."
            f"{mpi_text} Set one: export KOLOVOD_SECRET=$(openssl rand -hex 32) once for the job "
            f"({found.launcher.export}), or KOLOVOD_SECRET_FILE, a file that only you can read; or "
            f"KOLOVOD_INSECURE=1 where nobody else reaches these hosts. {found.doubt}"
        )
    if found.rank == 0 and not read_secret(environ):
        report_to_stderr("KOLOVOD_INSECURE: whoever reaches this job's ports can join it")
    return secret


def store_addresses(found: Found, timeout_s: float) -> list[str]:
    """Return the addresses of this host, which is rank 0's, at which the others look for it.

    Many systems give their own name a loopback address, which is of no use to others: then it is
    that of the interface towards the job's next host. Where each rank's host is named by its
    number, the name may still be unknown, or be that of the host before: then they are all that
    this host has.
    """
    if found.numbers_hosts:
        return own_addresses()
    addresses = _resolve(found, timeout_s)
    outside = [address for address in addresses if not is_loopback(address)]
    if outside or is_loopback(found.store_host):
        return outside or addresses
    others = [host for host in found.hosts if host != found.store_host]
    if not others:
        raise BootstrapError(
            f"{found}: {found.store_host} is {addresses[0]} here, where no other host reaches it. "
            "Set KOLOVOD_STORE_HOST to an address of rank 0's host that they do reach, for all "
            "ranks"
        )
    with contextlib.suppress(OSError):  # if it is not known either, all may be one machine's
        return [interface_to(endpoint(others[0], found.store_port))]
    return addresses


def _resolve(found: Found, timeout_s: float) -> list[str]:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return resolve(found.store_host)
        except OSError as error:  # a pod has its name a little after its start
            if time.monotonic() + _RESOLVE_RETRY_S >= deadline:
                raise BootstrapError(
                    f"{found}: the name of its host, {found.store_host}, is not known here "
                    f"({error}). Set KOLOVOD_STORE_HOST to its address for all ranks"
                ) from None
        time.sleep(_RESOLVE_RETRY_S)


def exchange_name(found: Found, environ: Mapping[str, str]) -> str:
    """Return the name of the address exchange on one host.

    It follows from facts that only the ranks of this job have in common.
    """
    job = found.identity
    if not found.is_named and not any(environ.get(name) for name in found.launcher.job):
        job = f"{job} {_starter(found.launcher.marks[0])}"
    facts = f"{os.geteuid()} {found.size} {job}"
    return f"kolovod-{hashlib.sha256(facts.encode()).hexdigest()[:32]}"


def _starter(mark: str) -> str:
    """Return which process has started the ranks here: the nearest above that is none itself.

    Launchers like MPICH's leave nothing in the environment that is theirs alone. Between them and a
    rank there may be others, a shell for example, which have inherited the rank's ``mark``.
    """
    pid = os.getppid()
    for _ in range(_MAX_ANCESTORS):
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # another user's, so it is no rank
            variables = []
        if not any(entry.startswith(f"{mark}=".encode()) for entry in variables):
            break
        pid = int(_status(pid)[1])
    return f"started by {pid} at {_status(pid)[19]}"


def _status(pid: int) -> list[str]:
    """Return /proc/PID/stat from the third field on: state, parent, ..., start time (proc(5))."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return ["?", "1", *["0"] * 18]
