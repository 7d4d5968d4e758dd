"""Connections that encrypt: their handshake, their keys, and who is not let in."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from middle import Middle, echo, encrypting, member, port_of, soon

from kolovod import _native
from kolovod.errors import (
    AuthenticationError,
    BootstrapError,
)
from kolovod.net import channel
from kolovod.net.channel import connect, greet, new_secret
from kolovod.net.encryption import OFFER_BYTES, Exchange, require_libcrypto
from kolovod.net.server import Server
from kolovod.net.sockets import read_exactly
from kolovod.rendezvous import mesh
from kolovod.rendezvous.client import join
from kolovod.rendezvous.mesh import Links
from kolovod.rendezvous.protocol import Formation
from kolovod.rendezvous.server import RendezvousServer

SECRET = new_secret()
TEXT = "text that only ranks should read"


@contextlib.contextmanager
def server(handler: Callable[[channel.Channel], None] = echo) -> Any:
    listener = socket.create_server(("127.0.0.1", 0), backlog=16)
    made = Server(listener, SECRET, "test", handler)
    made.start()
    with contextlib.closing(made):
        yield listener.getsockname()


def call(address: tuple[str, int], timeout_s: float = 10) -> object:
    deadline = soon(timeout_s)
    channel = connect(socket.AF_INET, address, SECRET, "test", deadline, encrypted=True)
    with contextlib.closing(channel):
        assert channel.is_sealed
        channel.send([TEXT, "x" * 100_000], deadline)
        return channel.receive(deadline)


def test_a_sealed_conversation() -> None:
    with server() as address, Middle(address) as middle:
        assert call(middle.address) == [TEXT, "x" * 100_000]
        seen = b"".join(middle.seen.values())
        assert len(seen) > 200_000
        assert TEXT.encode() not in seen
        assert b"xxxxxxxx" not in seen


HANDSHAKE = {True: 8 + 32 + OFFER_BYTES + 32, False: 8 + 32 + 32 + OFFER_BYTES}


@pytest.mark.parametrize("from_client", [True, False])
def test_one_bit_anywhere_ends_the_connection(from_client: bool) -> None:
    """In the handshake, the magic numbers among it, and in the message after it."""
    begin = HANDSHAKE[from_client]
    for at in (*range(0, begin, 9), 7, begin - 1, begin + 1, begin + 4, begin + 50_000):

        def change(side: bool, offset: int, data: bytes, at: int = at) -> bytes:
            if side is not from_client or not offset <= at < offset + len(data):
                return data
            changed = bytearray(data)
            # Of the magic number: the bit that turns one kind of handshake into the other.
            changed[at - offset] ^= 3 if at == 7 else 1
            return bytes(changed)

        with (
            server() as address,
            Middle(address, change) as middle,
            pytest.raises((AuthenticationError, EOFError, OSError)),
        ):
            call(middle.address, timeout_s=1)
        assert TEXT.encode() not in middle.seen[True]


def test_a_client_that_wants_encryption_takes_nothing_else() -> None:
    """Whoever answers as if it were not asked for, even one that knows the secret."""
    near, far = socket.socketpair()

    def answer_in_the_clear() -> None:
        nonce = bytes(32)
        far.sendall(channel.MAGIC + nonce)
        asked = read_exactly(far, HANDSHAKE[True], soon())
        transcript = channel._transcript("test", nonce, asked[8:40])
        far.sendall(channel._digest(SECRET.encode(), b"server", transcript) + bytes(OFFER_BYTES))

    with near, far, ThreadPoolExecutor(1) as pool:
        pool.submit(answer_in_the_clear)
        with pytest.raises(AuthenticationError, match="does not know"):
            greet(near, SECRET, "test", soon(), encrypted=True)


def test_each_connection_has_its_own_keys() -> None:
    """The same conversation twice: nothing that is sealed is the same."""
    records = []
    with server() as address:
        for _ in range(2):
            with Middle(address) as middle:
                call(middle.address)
                records.append(middle.seen)
    for side in (True, False):
        one, other = (seen[side][HANDSHAKE[side] + 4 :] for seen in records)
        assert len(one) == len(other)
        assert one[:16] != other[:16]
    # Nor is one direction that of the other.
    assert records[0][True][HANDSHAKE[True] + 4 :] != records[0][False][HANDSHAKE[False] + 4 :]


def test_the_cipher_is_one_that_both_do_well() -> None:
    class Old(Exchange):
        """Of a host without AES instructions."""

        def __init__(self) -> None:
            super().__init__()
            self._ciphers = 2

    new = Exchange()
    new._ciphers = 3
    assert new.answer(new.offer())[0] == 1
    assert new.answer(Old().offer())[0] == 2
    assert Old().answer(new.offer())[0] == 2
    new._ciphers = 1
    with pytest.raises(AuthenticationError, match="no cipher in common"):
        Old().answer(new.offer())
    with pytest.raises(AuthenticationError, match="unasked"):
        new.agree(bytes(32), 2, Old().offer(), is_server=False)
    with pytest.raises(AuthenticationError, match="makes no key"):
        new.agree(bytes(32), 1, bytes(OFFER_BYTES), is_server=False)


def test_a_host_that_can_do_neither_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "offered_ciphers", lambda: 0)
    with pytest.raises(BootstrapError, match=r"host h has OpenSSL.*without ChaCha20"):
        require_libcrypto("h")


@pytest.mark.parametrize("sealed", [True, False])
def test_the_rendezvous_is_sealed_as_well(sealed: bool) -> None:
    with contextlib.closing(RendezvousServer(SECRET, 2)) as server, ThreadPoolExecutor(2) as pool:
        server.start()
        with Middle(port_of(server.address)) as middle:
            address = "{}:{}".format(*middle.address)
            members = [encrypting(rank, sealed) for rank in (0, 1)]
            waiting = [pool.submit(join, address, SECRET, [0, 1], one, 10) for one in members]
            for future in waiting:
                with future.result(20) as joined:
                    assert joined.formation.members == tuple(members)
            assert (b"members" in middle.seen[True]) is not sealed
            assert (b"localhost" in middle.seen[False]) is not sealed


@pytest.mark.parametrize("sealed", [True, False])
def test_a_rank_that_encrypts_differently_is_not_let_in(sealed: bool) -> None:
    """Should it come in spite of what all have told each other at the rendezvous server."""
    listener = mesh.Listener(["127.0.0.1"], 2)
    world = Formation(1, (member(0, listener.address), member(1)))
    elsewhere = mesh.Listener(["127.0.0.1"], 2)
    with (
        contextlib.closing(Links(0, world, listener, SECRET, encrypted=sealed)) as links,
        contextlib.closing(Links(1, world, elsewhere, SECRET, encrypted=not sealed)) as other,
    ):
        listener.start(SECRET, links._serve)
        with pytest.raises((EOFError, OSError)):
            other._call(0, "data", soon(5), soon(5))
        assert links._arrivals.empty()
