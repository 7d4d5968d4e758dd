"""The place of a rank that has met the others through ``torch.distributed``'s store.

That store is open to everybody who can reach its port, so no secret goes through it: it only tells
where rank 0 can be found on this host. Rank 0 runs a ``Store`` of ours with a fresh secret, and
gives both out at an AF_UNIX socket, where the kernel vouches for the user at either end.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from datetime import timedelta
from typing import Protocol

from kolovod.errors import AuthenticationError, BootstrapError, StartTimeoutError
from kolovod.launch.auth import new_secret, same_user
from kolovod.launch.place import Place
from kolovod.launch.store import Store

__all__ = ["Meeting", "TorchStore", "meet"]

_MAX_BYTES = 4096  # of what rank 0 gives out
_SEND_TIMEOUT_S = 5.0


class TorchStore(Protocol):
    """What is used of a ``torch.distributed.Store``."""

    def set(self, key: str, value: str) -> None:
        """Write."""
        ...

    def get(self, key: str) -> bytes:
        """Read what is there."""
        ...

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Until all are there; RuntimeError when the time is over."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Count, and return the sum."""
        ...


class Meeting:
    """A rank's place, and what must stay open as long as worlds are to be formed from it."""

    def __init__(self, place: Place, store: Store | None = None, door: _Door | None = None) -> None:
        """``store``, ``door``: on rank 0."""
        self.place = place
        self._store = store
        self._door = door

    def close(self) -> None:
        """No further world will be formed. Idempotent."""
        for server in (self._door, self._store):
            if server is not None:
                server.close()


def meet(store: TorchStore, rank: int, size: int, timeout_s: float) -> Meeting:
    """Meet the other ranks of the job, each of which calls this once for every world.

    Raises StartTimeoutError if rank 0 does not come in time, AuthenticationError if what is found
    in its stead belongs to another user, BootstrapError if it is on another host.
    """
    # Counted by each rank for itself: a store that outlives a world keeps the old world's keys.
    number = store.add(f"kolovod/meetings/{rank}", 1)
    key = f"kolovod/meeting/{number}"
    host = socket.gethostname()
    if rank == 0:
        secret = new_secret()
        ours = Store(secret, size)
        ours.start()
        door = _Door({"store": ours.address, "secret": secret}, size)
        store.set(key, json.dumps({"host": host, "socket": door.name}))
        return Meeting(
            Place(0, size, 0, size, host=host, store=ours.address, secret=secret), ours, door
        )
    try:
        store.wait([key], timedelta(seconds=timeout_s))
        found = json.loads(store.get(key))
    except (RuntimeError, ValueError) as error:
        raise StartTimeoutError(
            f"rank {rank} did not hear of rank 0 through torch.distributed's store within "
            f"{timeout_s:g} s ({error}). KOLOVOD_START_TIMEOUT_S sets the limit"
        ) from None
    if found["host"] != host:
        raise BootstrapError(
            f"rank 0 is on host {found['host']}, rank {rank} on host {host}: this version forms a "
            "world on one host"
        )
    address, secret = _ask(found["socket"], rank, time.monotonic() + timeout_s)
    return Meeting(Place(rank, size, rank, size, host=host, store=address, secret=secret))


def _ask(name: str, rank: int, deadline: float) -> tuple[str, str]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(max(0.1, deadline - time.monotonic()))
        data = b""
        try:
            sock.connect(f"\0{name}")
            if not same_user(sock):
                raise AuthenticationError(
                    f"rank {rank} found a process of another user where rank 0 should be: has "
                    "somebody else written to torch.distributed's store?"
                )
            while chunk := sock.recv(_MAX_BYTES):
                data += chunk
            given = json.loads(data)
            return given["store"], given["secret"]
        except (OSError, ValueError) as error:
            raise BootstrapError(
                f"rank {rank} cannot reach rank 0 on this host ({error}): it has ended, or is in "
                "another network namespace, or belongs to another user"
            ) from error


class _Door:
    """Tells every process of this user that comes in; other users find it shut."""

    def __init__(self, facts: dict[str, str], size: int) -> None:
        self.name = f"kolovod-{secrets.token_hex(16)}"
        self._answer = json.dumps(facts).encode()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(64 + size)
        self._thread = threading.Thread(target=self._serve, name="kolovod-door", daemon=True)
        self._pid = os.getpid()
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # close() ends the accept
            while True:
                sock, _ = self._listener.accept()
                with sock, contextlib.suppress(OSError):
                    if same_user(sock):
                        sock.settimeout(_SEND_TIMEOUT_S)
                        sock.sendall(self._answer)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if os.getpid() == self._pid:
            self._thread.join()
