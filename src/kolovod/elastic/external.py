"""Elastic jobs whose ranks Slurm, Kubernetes, MPI or a supervisor starts, and starts again.

There is no launcher of ours: the coordinator is a member from the beginning (standby.py), first
rank 0. Who comes finds it by the join endpoint (join_endpoint.py). The slot of a process is the
rank that its launcher has given it, so one that is started again fills the slot of the one before.
Where each rank's host has a name of its own, as a pod has, all of them are asked
(join_endpoints.py).
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from kolovod.config import Settings
from kolovod.coordination import record_file
from kolovod.coordination.membership import PREPARE_S, Policy
from kolovod.coordination.protocol import Left
from kolovod.elastic.join_endpoint import Facts, JoinEndpoint, JoinServer
from kolovod.elastic.join_endpoints import JoinEndpoints
from kolovod.errors import (
    AuthenticationError,
    BootstrapError,
    ElasticArgumentError,
    ElasticBootstrapError,
)
from kolovod.net.addresses import LOOPBACK, addresses_beside, own_addresses
from kolovod.net.channel import new_secret
from kolovod.rendezvous.external.address_exchange import RefusedError
from kolovod.rendezvous.external.launchers import Found
from kolovod.rendezvous.external.meeting import (
    exchange_name,
    secret_between_hosts,
    store_addresses,
)
from kolovod.rendezvous.rank_environment import RankEnvironment

__all__ = ["External"]

_AGAIN_S = 0.2
_LOOK_S = 1.0
_GATHER_S = 2.0
"""How long the first of those that join waits for others: a scheduler starts them one by one."""


class External:
    """The way of this process into such a job: ``meet``, then ``begin`` with a client."""

    def __init__(self, found: Found, environ: Mapping[str, str], settings: Settings) -> None:
        """Raises InvalidArgumentError; BootstrapError where an address or a secret is missing."""
        size, most = found.size, settings.max_np or found.size
        if not 1 <= settings.min_np <= size <= most:
            raise ElasticArgumentError(
                f"KOLOVOD_MIN_NP={settings.min_np}, {size} ranks that {found.launcher.name} "
                f"starts, KOLOVOD_MAX_NP={most}: they must not descend"
            )
        self._found, self._settings = found, settings
        self._host = found.host or socket.gethostname()
        job = exchange_name(found, environ)
        name = f"{job}-{found.store_port}-elastic" if found.is_one_host else ""
        secret = "" if name else secret_between_hosts(found, environ)
        self._join_endpoint = JoinEndpoint(name, found.store_host, found.store_port, secret, most)
        self._endpoints: JoinEndpoints | None = None
        """None: there is one, rank 0's."""
        if found.numbers_hosts and not name:
            self._endpoints = JoinEndpoints(
                self._join_endpoint, found.host_of, found.rank, self._host
            )
        self._looked_s = -math.inf
        self._facts = Facts("")
        self._hint = ""
        self._endpoint: JoinServer | None = None
        self._lacks: Callable[[int], bool] = lambda slot: False
        self._closed = threading.Event()
        self.policy: Policy | None = None
        """The policy of a job that begins, for its first coordinator; None: that is another."""
        self.record_copy: record_file.Copy | None = None
        """Where this process's record is kept when it has ended."""
        self.left: Left | None = None
        """What the process has left that was in this slot before."""
        self._record_path: Path | None = None
        if settings.record_dir:
            file = f"{job}-{found.store_port}-{found.rank}.record"
            self._record_path = Path(settings.record_dir, file)

    @property
    def addresses(self) -> list[str]:
        """The addresses at which the client is to listen.

        They lead towards the coordinator, or are those at which others look for rank 0.
        """
        if self._join_endpoint.name:
            return [LOOPBACK]
        wanted = self._settings.interface_names
        if self._hint:  # by numbers: what rank 0's host is called may be unknown by now
            return addresses_beside(self._hint, wanted, 0)
        return own_addresses(wanted) if wanted else self._store_addresses()

    def _store_addresses(self) -> list[str]:
        return store_addresses(self._found, self._settings.start_timeout_s)

    # --- the way in ---

    def meet(self) -> RankEnvironment:
        """Meet those that begin the job, or find it where it is.

        Raises StartTimeoutError, AuthenticationError, BootstrapError.
        """
        kept = None if self._record_path is None else record_file.read_kept(self._record_path)
        facts = self._lead_in() if self._found.rank == 0 else self._discover_until_told()
        self._hint = facts.coordinator
        self._facts = facts._replace(hosts=())
        if self._record_path is not None:
            self.record_copy = record_file.Copy(self._record_path, facts.job)
            if kept is not None and kept[0] == facts.job:  # not that of an earlier job
                self.left = kept[1]
        return RankEnvironment(
            self._found.rank if facts.hosts else 0,
            len(facts.hosts) or 1,
            host=self._host,
            secret=facts.secret or self._join_endpoint.secret,
            coordinator=facts.coordinator,
            slot=self._found.rank,
            first_hosts=facts.hosts,
            min_np=self._settings.min_np,
        )

    def _lead_in(self) -> Facts:
        """Do rank 0's part: the job begins here, or goes on elsewhere."""
        timeout_s = self._settings.start_timeout_s
        deadline = time.monotonic() + timeout_s
        addresses = [] if self._join_endpoint.name else self._store_addresses()
        while (endpoint := self._join_endpoint.take(addresses)) is None:
            try:
                return self._join_endpoint.discover(0, self._host, time.monotonic() + _LOOK_S)
            except (AuthenticationError, RefusedError):
                raise
            except BootstrapError:  # its holder is just ending, say
                pass
            if time.monotonic() >= deadline:
                raise ElasticBootstrapError(
                    f"rank 0 cannot open {self._where()}, where the ranks of this job are to meet, "
                    "and nobody of the job answers there: does another process run as rank 0, too, "
                    "or have the port? KOLOVOD_STORE_HOST and KOLOVOD_STORE_PORT say where that is"
                )
            time.sleep(_AGAIN_S)
        try:
            look = None if self._endpoints is None else self._endpoints.look_at_all
            facts = endpoint.gather(self._found.size, self._host, timeout_s, look)
        except BaseException:
            endpoint.close()
            raise
        self._endpoint = endpoint
        if not facts.hosts:
            return facts
        self.policy = Policy(
            min_np=self._settings.min_np,
            max_np=self._join_endpoint.most,
            elastic_timeout_s=self._settings.elastic_timeout_s,
            gather_s=_GATHER_S,
            prepare_s=PREPARE_S,
            replaced_are_dead=True,
        )
        return facts._replace(
            secret=new_secret() if self._join_endpoint.name else "", job=new_secret()
        )

    def _discover_until_told(self) -> Facts:
        deadline = time.monotonic() + self._settings.start_timeout_s
        while True:
            try:
                return self._join_endpoint.discover(self._found.rank, self._host, deadline)
            except (AuthenticationError, RefusedError):
                raise
            except BootstrapError as error:
                if self._endpoints is not None:
                    self._pause()
                    if (facts := self._endpoints.look_at_some(first=False)) is not None:
                        return facts
                if time.monotonic() + _AGAIN_S >= deadline:
                    raise ElasticBootstrapError(
                        f"{error} It was tried for {self._settings.start_timeout_s:g} s; "
                        "KOLOVOD_START_TIMEOUT_S sets the limit"
                    ) from None
            time.sleep(_AGAIN_S)

    def _where(self) -> str:
        return (
            "a socket"
            if self._join_endpoint.name
            else f"{self._join_endpoint.host}:{self._join_endpoint.port}"
        )

    # --- from then on ---

    def begin(self, address: str, hosts: tuple[str, ...], lacks: Callable[[int], bool]) -> None:
        """Let others find this process: it is a member, and its client is at ``address``.

        ``hosts``: of those that the job begins with. ``lacks(slot)``: whether this process is
        coordinator, and has nobody in that slot.
        """
        self._facts = self._facts._replace(coordinator=address)
        self._lacks = lacks
        if self._endpoint is not None:
            self._endpoint.tell(self._facts._replace(hosts=hosts))
        threading.Thread(target=self._keep, name="kolovod join endpoint", daemon=True).start()

    def coordinator(self) -> str:
        """Return the address of a member that knows the coordinator.

        Raises BootstrapError, AuthenticationError.
        """
        hint, self._hint = self._hint, ""
        if hint:
            return hint
        if self._endpoints is not None:
            self._pause()
            if (facts := self._endpoints.look_at_some(first=True)) is not None:
                return facts.coordinator
            raise ElasticBootstrapError("none of the ranks that were asked belongs to the job")
        if self._endpoint is not None and (told := self._endpoint.told) is not None:
            return (
                told.coordinator
            )  # the others find this process at the join endpoint, and nobody else
        by = time.monotonic() + _LOOK_S
        return self._join_endpoint.discover(self._found.rank, self._host, by).coordinator

    def _pause(self) -> None:
        """Look around no more often than once in _LOOK_S."""
        time.sleep(max(0.0, self._looked_s + _LOOK_S - time.monotonic()))
        self._looked_s = time.monotonic()

    def close(self) -> None:
        """Tell nobody any more where the job is: the client is over. Idempotent."""
        self._closed.set()
        if self._endpoint is not None:
            self._endpoint.close()

    def forget(self) -> None:
        """Close the join endpoint's sockets in a forked child."""
        if self._endpoint is not None:
            self._endpoint.forget()

    def _keep(self) -> None:
        """Hold the join endpoint if nobody on this host does; tell rank 0 where the job is."""
        holds_first = self._endpoints is None or self._found.rank == 0
        addresses: list[str] = []
        with contextlib.suppress(BootstrapError, OSError):
            addresses = [] if self._join_endpoint.name else self._own_store_addresses()
        while not self._closed.wait(_LOOK_S):
            if self._endpoint is None and (addresses or self._join_endpoint.name):
                endpoint = self._join_endpoint.take(addresses)
                if endpoint is not None:
                    endpoint.tell(self._facts)
                    self._endpoint = endpoint
                    if self._closed.is_set():
                        endpoint.close()
            if (self._endpoint is None or not holds_first) and self._lacks(0):
                with contextlib.suppress(BootstrapError):
                    self._join_endpoint.discover(
                        self._found.rank, self._host, time.monotonic() + _LOOK_S, self._facts
                    )

    def _own_store_addresses(self) -> list[str]:
        """Return those of the join endpoint's addresses that are this host's."""
        own = own_addresses()
        return [address for address in store_addresses(self._found, 0.0) if address in own]
