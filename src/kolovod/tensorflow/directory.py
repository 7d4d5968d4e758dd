"""The directory by which the servers of a tf.data service and those who use them find each other.

A directory is one server; each request is a connection of its own, which proves the secret::

    client -> directory  {"do": "dispatcher", "number": n, "address": text}  a dispatcher is there
                         {"do": "worker", "number": n, "worker": m}          so is a worker of it
                         {"do": "find dispatcher", "number": n, "timeout_s"}
                         {"do": "find workers", "number": n, "timeout_s"}    all of a dispatcher
                         {"do": "stay"}                                      until it closes
                         {"do": "close"}
    directory -> client  {"address": text or null}   or   {"error": text}
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from kolovod.errors import BootstrapError, DataServiceError, StartTimeoutError
from kolovod.net.addresses import address_of, connect_any, listen
from kolovod.net.channel import Channel
from kolovod.net.messages import mapping, number, text, whole
from kolovod.net.server import Server

_LABEL = "data service"
_SEND_TIMEOUT_S = 10.0
_LONGEST_S = 1e7


class Directory:
    """The server. Thread based; ``close`` ends its threads."""

    def __init__(
        self, dispatchers: int, workers_per_dispatcher: int, secret: str, hosts: Sequence[str]
    ) -> None:
        """``hosts``: the addresses where it listens. Raises BootstrapError if it cannot."""
        self._dispatchers, self._workers_per_dispatcher = dispatchers, workers_per_dispatcher
        self._addresses: dict[int, str] = {}
        self._workers: dict[int, set[int]] = {}
        self._changed = threading.Condition()
        self._closed = False
        listeners = listen(hosts, 128)
        self.address = ",".join(map(address_of, listeners))
        self._servers = [Server(sock, secret, _LABEL, self._serve) for sock in listeners]
        for server in self._servers:
            server.start()

    def close(self) -> None:
        """Stop: those who stay hear of it. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for server in self._servers:
            server.close()

    def _serve(self, channel: Channel) -> None:
        message = mapping(channel.receive(time.monotonic() + _SEND_TIMEOUT_S))
        try:
            answer = {"address": self._answer(message)}
        except BootstrapError as error:
            answer = {"error": str(error)}
        with contextlib.suppress(OSError):  # who asked is gone
            channel.send(answer, time.monotonic() + _SEND_TIMEOUT_S)

    def _answer(self, message: dict[str, Any]) -> str | None:
        do = text(message, "do", 20)
        if do in ("close", "stay"):
            with self._changed:
                if do == "close":
                    self._closed = True
                    self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed)
            return None
        which = whole(message, "number", 0, self._dispatchers - 1)
        if do == "dispatcher":
            with self._changed:
                self._addresses[which] = text(message, "address", 1000)
                self._changed.notify_all()
        elif do == "worker":
            last = self._dispatchers * self._workers_per_dispatcher - 1
            with self._changed:
                self._workers.setdefault(which, set()).add(whole(message, "worker", 0, last))
                self._changed.notify_all()
        elif do == "find dispatcher":
            missing = f"dispatcher {which} has not started"
            self._wait(lambda: which in self._addresses, message, missing)
            return self._addresses[which]
        elif do == "find workers":
            wanted = self._workers_per_dispatcher
            missing = f"not all of the {wanted} workers of dispatcher {which} have started"
            self._wait(lambda: len(self._workers.get(which, ())) >= wanted, message, missing)
        else:
            raise DataServiceError(f"a request to do {do!r}, which is nothing known")
        return None

    def _wait(self, condition: Callable[[], bool], message: Any, missing: str) -> None:
        timeout_s = number(message, "timeout_s", _LONGEST_S)
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._closed, timeout_s)
            if condition():
                return
        raise DataServiceError(
            "the data service has been closed" if self._closed else f"{missing} in {timeout_s:g} s"
        )


class DirectoryClient:
    """Asks a directory, one connection for each question."""

    def __init__(self, address: str, secret: str, timeout_s: float = 60.0) -> None:
        """``timeout_s``: to connect, and where a method is given none."""
        self._address, self._secret, self._timeout_s = address, secret, timeout_s

    def register_dispatcher(self, dispatcher_id: int, dispatcher_address: str) -> None:
        """Say where the dispatcher of that number is, "grpc://host:port"."""
        self._ask("dispatcher", dispatcher_id, address=dispatcher_address)

    def register_worker_for_dispatcher(self, dispatcher_id: int, worker_id: int) -> None:
        """Say that a worker of it serves."""
        self._ask("worker", dispatcher_id, worker=worker_id)

    def wait_for_dispatcher_registration(
        self, dispatcher_id: int, timeout: float | None = None
    ) -> str:
        """Wait for the dispatcher's address, and return it.

        Raises StartTimeoutError after ``timeout`` s.
        """
        address = self._ask("find dispatcher", dispatcher_id, timeout=timeout)
        assert address is not None
        return address

    def wait_for_dispatcher_worker_registration(
        self, dispatcher_id: int, timeout: float | None = None
    ) -> None:
        """Wait until all its workers serve. Raises StartTimeoutError after ``timeout`` seconds."""
        self._ask("find workers", dispatcher_id, timeout=timeout)

    def wait_for_shutdown(self) -> None:
        """Wait until the directory closes, or is no more."""
        with contextlib.suppress(OSError, EOFError):
            self._say({"do": "stay"}, time.monotonic() + _LONGEST_S)

    def shutdown(self) -> None:
        """Have the directory close, and so everybody who waits for that."""
        with contextlib.suppress(OSError, EOFError):
            self._say({"do": "close"}, time.monotonic() + _SEND_TIMEOUT_S)

    def _ask(self, do: str, which: int, timeout: float | None = None, **more: Any) -> str | None:
        timeout_s = self._timeout_s if timeout is None else timeout
        message = {"do": do, "number": which, "timeout_s": timeout_s, **more}
        try:
            answer = mapping(self._say(message, time.monotonic() + timeout_s + _SEND_TIMEOUT_S))
        except (OSError, EOFError) as error:
            raise DataServiceError(
                f"the data service at {self._address} does not answer: {error}"
            ) from error
        if "error" in answer:
            raise StartTimeoutError(f"data service: {text(answer, 'error', 1000)}")
        return None if answer.get("address") is None else text(answer, "address", 1000)

    def _say(self, message: dict[str, Any], deadline: float) -> Any:
        connected_by = min(deadline, time.monotonic() + self._timeout_s)
        channel = connect_any(self._address, self._secret, _LABEL, connected_by)
        try:
            channel.send(message, time.monotonic() + _SEND_TIMEOUT_S)
            return channel.receive(deadline)
        finally:
            channel.close()
