"""KOLOVOD_ENCRYPT: what somebody between two hosts sees, and what becomes of what he changes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from forked import run_ranks
from middle import Middle, encrypting, port_of

import kolovod
from kolovod import _native
from kolovod.config import load
from kolovod.errors import (
    AuthenticationError,
    BootstrapError,
    CollectiveAbortedError,
    InvalidArgumentError,
    RankLostError,
)
from kolovod.net import channel, encryption
from kolovod.net.channel import new_secret
from kolovod.net.encryption import OFFER_BYTES, Exchange
from kolovod.rendezvous import bootstrap, mesh
from kolovod.rendezvous.client import join
from kolovod.rendezvous.server import RendezvousServer

SECRET = new_secret()
HOSTS = ["a", "b"]
ON = {"KOLOVOD_ENCRYPT": "1"}
Change = Callable[[bool, int, bytes], bytes]


# Whole worlds, with somebody in between ---------------------------------------------------------


def listen_behind(middles: list[Middle], change: Change | None = None) -> None:
    """From now on, whoever looks for this rank finds a relay that leads to it."""

    class Behind(mesh.Listener):
        def __init__(self, addresses: Any, size: int) -> None:
            super().__init__(addresses, size)
            middles.append(Middle(port_of(self.address), change))
            self.address = "{}:{}".format(*middles[-1].address)

    bootstrap.Listener = Behind  # type: ignore[misc]


PATTERN = bytes(range(48, 112)) * 40
NAME = "the.name.of.a.layer"
TEXT = "text that only ranks should read"


def talk(rank: int) -> set[str] | None:
    """Kinds of things that a relay in front of rank 0 has seen in the clear."""
    middles: list[Middle] = []
    if rank == 0:
        listen_behind(middles)
    kolovod.init()
    for root in (0, 1):
        mine = np.frombuffer(PATTERN, np.uint8) * (rank == root)
        got = kolovod.broadcast(mine, root, name=f"{NAME}.{root}")
        assert got.tobytes() == PATTERN
        assert kolovod.broadcast_object({TEXT: rank}, root) == {TEXT: root}
    kolovod.barrier()
    kolovod.shutdown()
    if rank != 0:
        return None
    (middle,) = middles
    seen = b"".join(middle.seen.values())
    assert len(seen) > 2 * len(PATTERN)
    looked_for = {"tensor": PATTERN[:64], "name": NAME.encode(), "pickle": TEXT.encode()}
    return {what for what, data in looked_for.items() if data in seen}


def test_nothing_that_ranks_say_is_seen_in_between() -> None:
    assert run_ranks(2, talk, hosts=HOSTS, env=ON)[0] == set()


def test_without_encryption_all_of_it_is() -> None:
    """So that the test above can fail."""
    assert run_ranks(2, talk, hosts=HOSTS)[0] == {"tensor", "name", "pickle"}


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def leave_out(data: bytes) -> bytes:
    return data[: len(data) // 2]


def repeat(data: bytes) -> bytes:
    return data + data


def meddled_with(
    rank: int, from_client: bool, meddle: Callable[[bytes], bytes], least: int
) -> tuple[str, type[BaseException]]:
    """Of a world whose second operation meets ``meddle``: the error's text and kind."""
    on = threading.Event()

    def change(side: bool, offset: int, data: bytes) -> bytes:
        if not on.is_set() or side is not from_client or len(data) < least:
            return data
        on.clear()  # once is enough
        return meddle(data)

    if rank == 0:
        listen_behind([], change)
    kolovod.init()
    mine = np.full(200_000, rank + 1.0)
    assert np.all(kolovod.allreduce(mine, "first", op=kolovod.Sum) == 3)
    try:
        kolovod.barrier()
        if rank == 0:
            on.set()
        for _ in range(50):  # control may be met first, or the data
            assert np.all(kolovod.allreduce(mine, "then", op=kolovod.Sum) == 3)
    except CollectiveAbortedError as error:
        return str(error), type(error)
    raise AssertionError("nobody has noticed")


@pytest.mark.parametrize(
    ("meddle", "least"),
    [
        (flip, 1),  # a frame between leaders, since these come first
        (repeat, 1),
        (flip, 10_000),  # data
        (leave_out, 10_000),  # of which more follows: else it would be a network that is slow
        (repeat, 10_000),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.parametrize("from_client", [True, False])
def test_who_changes_what_passes_ends_the_world(
    from_client: bool, meddle: Callable[[bytes], bytes], least: int
) -> None:
    told = run_ranks(2, meddled_with, from_client, meddle, least, hosts=HOSTS, env=ON)
    for text, kind in told:
        assert re.search(r"rank [01] on host [ab] \(pid \d+\)", text), text
        assert kind is RankLostError
    assert any("changed on its way" in text or "says that it has" in text for text, _ in told), told


def with_a_timeline(rank: int) -> None:
    kolovod.init()
    for step in range(5):
        kolovod.allreduce(np.ones(100), f"step{step}")
        time.sleep(0.02)
    kolovod.shutdown()


def test_a_timeline_has_what_ranks_of_other_hosts_report(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    run_ranks(2, with_a_timeline, hosts=HOSTS, env={**ON, "KOLOVOD_TIMELINE": str(path)})
    events = json.loads(path.read_text())
    named = [event for event in events if event["name"] == "thread_name"]
    ranks = {event["pid"] for event in named if event["args"]["name"] == "allreduce.step4"}
    assert len(ranks) == 2


# The setting --------------------------------------------------------------------------------------


def with_another_setting(rank: int, value_of_0: str) -> str:
    os.environ["KOLOVOD_ENCRYPT"] = value_of_0 if rank == 0 else str(1 - int(value_of_0))
    with pytest.raises(BootstrapError) as caught:
        kolovod.init()
    return str(caught.value)


@pytest.mark.parametrize("value", ["0", "1"])
@pytest.mark.parametrize("hosts", [["a", "b", "b"], ["a", "a", "a"]], ids="".join)
def test_a_rank_with_another_setting_is_named_to_all(hosts: list[str], value: str) -> None:
    for text in run_ranks(3, with_another_setting, value, hosts=hosts):
        other = 1 - int(value)
        assert re.match(
            rf"rank 1 on host {hosts[1]} \(pid \d+\) has KOLOVOD_ENCRYPT={other}, but rank 0 on "
            rf"host a \(pid \d+\) has KOLOVOD_ENCRYPT={value}: set it alike",
            text,
        ), text


def no_library(*_: object) -> Any:
    raise _native.EngineError(1, "libcrypto.so.3: cannot open shared object file")


NONE_HERE = SimpleNamespace(
    offered_ciphers=no_library, KeyExchange=no_library, EngineError=_native.EngineError
)


def without_the_library_on_b(rank: int) -> str:
    if rank == 1:
        encryption._native = NONE_HERE  # type: ignore[attr-defined]
    with pytest.raises((BootstrapError, RankLostError)) as caught:
        kolovod.init()
    return str(caught.value)


def test_a_host_without_libcrypto_is_named() -> None:
    of_a, of_b = run_ranks(2, without_the_library_on_b, hosts=HOSTS, env=ON)
    assert "host b has no libcrypto that can be used (libcrypto.so.3: cannot open" in of_b
    assert "install OpenSSL" in of_b
    assert "rank 1" in of_a


def test_a_launcher_without_libcrypto_is_said_and_nothing_goes_in_the_clear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rendezvous server of a launcher that did not know that ranks would want encryption."""
    here = threading.get_ident()

    def exchange() -> Exchange:
        if threading.get_ident() == here:
            return Exchange()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(encryption, "_native", NONE_HERE)
            return Exchange()

    monkeypatch.setattr(channel, "Exchange", exchange)
    with contextlib.closing(RendezvousServer(SECRET, 2)) as server:
        server.start()
        with Middle(port_of(server.address)) as middle:
            address = "{}:{}".format(*middle.address)
            with pytest.raises(AuthenticationError, match="the rendezvous cannot encrypt"):
                join(address, SECRET, [0, 1], encrypting(0), 5)
        assert len(middle.seen[True]) == 8 + 32 + OFFER_BYTES + 32


@pytest.mark.parametrize("backend", ["gloo", "mpi", "nccl"])
def test_other_backends_are_not_left_in_the_clear(backend: str) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"KOLOVOD_BACKEND='{backend}'.*WireGuard"):
        load({**ON, "KOLOVOD_BACKEND": backend})
    assert load({"KOLOVOD_ENCRYPT": "0", "KOLOVOD_BACKEND": backend}).encrypt is False


def test_the_launchers_flag() -> None:
    script = "import kolovod, os; kolovod.init(); print('on=' + os.environ['KOLOVOD_ENCRYPT'])"
    command = [sys.executable, "-m", "kolovod", "run", "--encrypt", "--label-hosts", "a:1,b:1"]
    ended = subprocess.run(
        [*command, sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout.count("on=1")) == (0, 2), ended.stderr
