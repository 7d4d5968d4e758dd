"""external.torchrun: ranks that meet through a store like torch.distributed's."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from kolovod.errors import BootstrapError, StartTimeoutError
from kolovod.rendezvous.external import torchrun
from kolovod.rendezvous.external.torchrun import meet

TIMEOUT_S = 20.0


class FakeStore:
    """As torch.distributed's, for threads."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self.values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        with self._changed:
            ready = lambda: all(key in self.values for key in keys)  # noqa: E731
            if not self._changed.wait_for(ready, timeout.total_seconds()):
                raise RuntimeError("wait timeout")

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            total = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(total).encode()
            return total


@pytest.fixture(autouse=True)
def no_secret(monkeypatch):
    monkeypatch.delenv("KOLOVOD_SECRET", raising=False)
    monkeypatch.delenv("KOLOVOD_HOST", raising=False)


def all_meet(store, size):
    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(lambda rank: meet(store, rank, size, TIMEOUT_S), range(size)))
    for one in found:
        one.close()
    return [one.environment for one in found]


def test_all_ranks_find_rank_0_and_share_a_secret_that_is_not_in_the_store():
    store = FakeStore()
    seen = set()
    for _ in range(2):  # the store outlives the first meeting
        places = all_meet(store, 4)
        assert [place.rank for place in places] == [0, 1, 2, 3]
        assert {place.size for place in places} == {4}
        ((address, secret),) = {(place.rendezvous, place.secret) for place in places}
        assert address.startswith("127.0.0.1:")
        assert not any(secret.encode() in value for value in store.values.values())
        seen.add(secret)
    assert len(seen) == 2


def test_a_common_secret_is_used_and_told_to_nobody(monkeypatch):
    monkeypatch.setenv("KOLOVOD_SECRET", "what all ranks know")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    store = FakeStore()
    assert {place.secret for place in all_meet(store, 2)} == {"what all ranks know"}
    assert not any(b"what all" in value for value in store.values.values())


def test_rank_0_does_not_come():
    with pytest.raises(StartTimeoutError, match=r"rank 1 did not hear of rank 0 .* within 0.1 s"):
        meet(FakeStore(), 1, 2, 0.1)


def test_rank_0_has_gone():
    store = FakeStore()
    meet(store, 0, 2, TIMEOUT_S).close()
    with pytest.raises(BootstrapError, match="rank 1 cannot reach rank 0 on this host"):
        meet(store, 1, 2, TIMEOUT_S)


def test_another_host_without_a_common_secret(monkeypatch):
    store = FakeStore()
    found = meet(store, 0, 2, TIMEOUT_S)
    monkeypatch.setenv("KOLOVOD_HOST", "elsewhere")
    with pytest.raises(BootstrapError, match=f"{socket.gethostname()} and has no KOLOVOD_SECRET"):
        meet(store, 1, 2, TIMEOUT_S)
    found.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can become somebody else")
def test_another_user_is_told_nothing():
    store = FakeStore()
    found = meet(store, 0, 2, TIMEOUT_S)
    (door,) = [name for name in store.values["kolovod/meeting/1"].decode().split('"')
               if name.startswith("kolovod-")]  # fmt: skip
    script = (
        "import os, socket, sys; os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX); s.connect(chr(0) + sys.argv[1]); print(s.recv(99))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, door], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    found.close()
    assert done.stdout == "b''\n", done.stderr


def test_where_rank_0_cannot_open_the_exchange_no_server_is_left(monkeypatch):
    made = []

    class Noted(torchrun.RendezvousServer):
        is_closed = False

        def __init__(self, *given):
            super().__init__(*given)
            made.append(self)

        def close(self):
            self.is_closed = True
            super().close()

    def fail(*given):
        raise BootstrapError("the name is taken")

    monkeypatch.setattr(torchrun, "RendezvousServer", Noted)
    monkeypatch.setattr(torchrun, "unix_exchange", fail)
    with pytest.raises(BootstrapError, match="the name is taken"):
        meet(FakeStore(), 0, 2, TIMEOUT_S)
    assert [server.is_closed for server in made] == [True]
