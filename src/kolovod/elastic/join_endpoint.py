"""The join endpoint of an elastic job whose ranks another launcher than ours starts.

It is at an address that all ranks know, on the host where rank 0 begins. When the job begins, rank
0 holds it until all are there, and tells them who is. From then on whoever holds it says where the
coordinator is found, also to processes that come in the place of others. If rank 0's process has
ended, another one on that host takes the join endpoint, or the process that comes in its place.
That one does not know that the job goes on; so a coordinator that misses rank 0 asks there as
well, and says where it is. Where each rank is on a host of its own, every member holds a join
endpoint (join_endpoints.py). After the handshake (net/channel.py)::

    caller -> endpoint   {"rank", "host", "pid", "process": random,
                          "coordinator": text, "secret": text, "job": text}
    endpoint -> caller   {"facts": {"coordinator": text, "secret": text, "job": text,
                                    "hosts": [text]}}
                    or   {"gone": text}

``coordinator`` is where a member listens that knows the coordinator, or is it; of a caller ""
unless it is coordinator. ``secret`` is "" but on one host, where the kernel vouches for both ends.
``job``: random, the job's. ``hosts``: of the ranks that the job begins with; none for who comes
later. Until the job begins a caller is not answered. It may go away again, and its rank come as
another process.
"""

from __future__ import annotations

import math
import os
import reprlib
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kolovod.errors import BootstrapError, ElasticBootstrapError, StartTimeoutError
from kolovod.net import messages
from kolovod.net.addresses import listen
from kolovod.net.channel import HANDSHAKE_TIMEOUT_S, Channel
from kolovod.net.lost_hosts import notice_lost_host
from kolovod.net.server import Server
from kolovod.net.unix_sockets import listen_abstract
from kolovod.rendezvous.external.address_exchange import ask_once

__all__ = ["JoinServer", "Facts", "JoinEndpoint", "facts_of"]

LABEL = "elastic-join endpoint"
_DISCOVER_S = 2.0
_SEND_S = 2.0
_SIGNAL_S = 0.1  # between two looks whether a signal waits for its handler
_MAX_TEXT = 1 << 10
_LATE_DISCOVER_S = 5.0
"""For a coordinator to ask, where a job may go on without any of the ranks that it began with."""
_LOOK_PAUSE_S = 1.0
"""Between two looks for the job."""


class Facts(NamedTuple):
    """The facts that are told at the join endpoint; see the module."""

    coordinator: str
    secret: str = ""
    job: str = ""
    hosts: tuple[str, ...] = ()


def facts_of(value: Any) -> Facts:
    """Return the facts in a message. Raises BootstrapError naming what is wrong."""
    given = messages.mapping(value)
    hosts = given.get("hosts", [])
    if not isinstance(hosts, list):
        raise ElasticBootstrapError(
            f"a malformed message: hosts is {reprlib.repr(hosts)}; expected a list"
        )
    if len(hosts) > messages.MAX_RANKS:
        raise ElasticBootstrapError(
            f"a malformed message: hosts has {len(hosts)} entries; expected at most "
            f"{messages.MAX_RANKS}"
        )
    return Facts(
        messages.text(given, "coordinator", _MAX_TEXT),
        messages.text(given, "secret", _MAX_TEXT),
        messages.text(given, "job", _MAX_TEXT),
        tuple(messages.text({"host": host}, "host", 255) for host in hosts),
    )


@dataclass(frozen=True)
class JoinEndpoint:
    """The address of a join endpoint, and who may come there."""

    name: str
    """The name of an abstract AF_UNIX socket; "": it is between hosts."""
    host: str
    port: int
    secret: str
    """"" where the kernel vouches for whoever comes."""
    most: int
    """Ranks are below this number."""

    def discover(self, rank: int, host: str, answer_by: float, own: Facts | None = None) -> Facts:
        """Return where the coordinator is, as whoever holds the join endpoint says.

        ``own``: this process knows, and tells it. Raises BootstrapError if nobody is there,
        RefusedError, and AuthenticationError.
        """
        also = Facts("")._asdict() if own is None else own._asdict()
        del also["hosts"]
        address = self.name or (self.host, self.port)
        by = time.monotonic() + _DISCOVER_S
        answer = ask_once(
            address, self.secret, rank, host, by, label=LABEL, answer_by=answer_by, also=also
        )
        return facts_of(answer)

    def take(self, addresses: Sequence[str]) -> JoinServer | None:
        """Serve it at those of ``addresses`` that are this host's; None: another process does."""
        backlog = 64 + self.most
        try:
            if self.name:
                return JoinServer([listen_abstract(self.name, backlog)], self)
            return JoinServer(listen(addresses, backlog, self.port), self)
        except (BootstrapError, OSError):
            return None


@dataclass(eq=False)
class _Caller:
    rank: int
    host: str
    where: str
    channel: Channel
    bell: int
    """Rung when there is an answer."""
    answer: dict[str, Any] | None = None


class JoinServer:
    """The server of a join endpoint: a thread for each caller; ``close`` ends the threads."""

    def __init__(self, listeners: Sequence[socket.socket], endpoint: JoinEndpoint) -> None:
        """Takes over the sockets."""
        self._endpoint = endpoint
        self._changed = threading.Condition()
        self._callers: dict[int, _Caller] = {}  # that wait, by rank
        self._facts: Facts | None = None
        self._told: Facts | None = None  # by a coordinator that has come
        self._has_begun = False  # the job, whose member holds the join endpoint
        self._servers = [
            Server(listener, endpoint.secret, LABEL, self._serve, max_strangers=64 + endpoint.most)
            for listener in listeners
        ]
        for server in self._servers:
            server.start()

    def gather(
        self,
        size: int,
        own_host: str,
        timeout_s: float,
        look: Callable[[], Facts | None] | None = None,
    ) -> Facts:
        """Wait, as rank 0, for all other ranks below ``size``, or to hear that the job goes on.

        ``look``: finds out where it goes on, as far as this process can. Returns the hosts of all,
        or the coordinator. Raises StartTimeoutError, and what ``look`` raises.
        """
        deadline = time.monotonic() + timeout_s
        late_s = _LATE_DISCOVER_S if self._endpoint.most > size else 0.0
        begin_s, looked_s, look_s = math.inf, math.inf if look is None else 0.0, 0.0
        while True:
            if look is not None and time.monotonic() >= look_s:
                started_s = time.monotonic()
                if (found := look()) is not None:
                    self._hear_coordinator(found)
                looked_s, look_s = started_s, time.monotonic() + _LOOK_PAUSE_S
            with self._changed:
                if self._told is not None:
                    return self._told
                missing = [rank for rank in range(1, size) if rank not in self._callers]
                begin_s = math.inf if missing else min(begin_s, time.monotonic() + late_s)
                has_looked = not late_s or looked_s >= begin_s - late_s  # with all there
                if time.monotonic() >= begin_s and has_looked:
                    self._has_begun = True
                    hosts = [own_host, *(self._callers[rank].host for rank in range(1, size))]
                    return Facts("", hosts=tuple(hosts))
                left_s = deadline - time.monotonic()
                if missing and left_s <= 0:
                    names = ", ".join(map(str, missing[:20]))
                    raise StartTimeoutError(
                        f"rank {names} did not come within {timeout_s:g} s, and an elastic job "
                        f"begins with all {size}; KOLOVOD_START_TIMEOUT_S sets the limit"
                    )
                self._changed.wait(min(max(left_s, 0.01), _SIGNAL_S))

    @property
    def told(self) -> Facts | None:
        """The facts told by the coordinator that has come last."""
        with self._changed:
            return self._told

    def tell(self, facts: Facts) -> None:
        """Answer ``facts`` from now on, to those that wait as well: the job begins with them."""
        with self._changed:
            self._has_begun = True
            self._tell(facts)

    def _tell(self, facts: Facts) -> None:
        """Under the lock."""
        self._facts = facts._replace(hosts=())
        for caller in self._callers.values():
            begins = 0 < caller.rank < len(facts.hosts)
            self._answer(caller, {"facts": (facts if begins else self._facts)._asdict()})
        self._callers.clear()

    def _hear_coordinator(self, facts: Facts) -> None:
        """Note that the job goes on where these facts say."""
        with self._changed:
            self._told = facts
            if not self._has_begun:
                self._tell(facts)
            self._changed.notify_all()

    def close(self) -> None:
        """Let nobody in any more. Idempotent."""
        for server in self._servers:
            server.close()

    def forget(self) -> None:
        """Close the sockets in a forked child."""
        for server in self._servers:
            server.forget()

    @staticmethod
    def _answer(caller: _Caller, answer: dict[str, Any]) -> None:
        """Under the lock."""
        caller.answer = answer
        os.eventfd_write(caller.bell, 1)

    def _serve(self, channel: Channel) -> None:
        message = channel.receive(time.monotonic() + HANDSHAKE_TIMEOUT_S)
        bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            answer = self._hear(message, channel, bell)
        finally:
            os.close(bell)
        if answer is not None:
            channel.send(answer, time.monotonic() + _SEND_S)

    def _hear(self, message: Any, channel: Channel, bell: int) -> dict[str, Any] | None:
        """Return the answer to a caller; None: it has gone away."""
        try:
            caller = self._caller_of(message, channel, bell)
            said = facts_of(message)
        except BootstrapError as error:
            return {"gone": str(error)}
        with self._changed:
            if said.coordinator:
                self._hear_coordinator(said)
                return {"facts": Facts("")._asdict()}
            if self._facts is not None:
                return {"facts": self._facts._asdict()}
            if caller.rank == 0:
                return {"gone": f"another process runs as rank 0 (pid {os.getpid()})"}
            before = self._callers.get(caller.rank)
            if before is not None:
                text = f"another process has come as rank {caller.rank}, {caller.where}"
                self._answer(before, {"gone": text})
            self._callers[caller.rank] = caller
            self._changed.notify_all()
        notice_lost_host(channel.fileno())
        poll = select.poll()
        for fd in (bell, channel.fileno()):
            poll.register(fd, select.POLLIN)
        ready = poll.poll()
        with self._changed:
            if self._callers.get(caller.rank) is caller:
                del self._callers[caller.rank]
                self._changed.notify_all()
            return caller.answer if any(fd == bell for fd, _ in ready) else None

    def _caller_of(self, message: Any, channel: Channel, bell: int) -> _Caller:
        """Raises BootstrapError."""
        rank = messages.whole(message, "rank", 0, messages.MAX_RANKS)
        host = messages.text(message, "host", 255)
        pid = messages.whole(message, "pid", 0, 1 << 31)
        if not 0 <= rank < self._endpoint.most:
            raise ElasticBootstrapError(
                f"there is no rank {rank} to come: the job has at most {self._endpoint.most} ranks"
            )
        where = f"on host {host} (pid {pid})"
        return _Caller(rank, host, where, channel, bell)
