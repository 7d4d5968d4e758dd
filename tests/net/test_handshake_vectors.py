"""The handshake is what docs/security.md says: its vectors, and an end that was written from it."""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import handshake_spec as spec
import pytest

from kolovod import _native
from kolovod.errors import AuthenticationError
from kolovod.net import channel
from kolovod.net.sockets import read_exactly

ROOT = Path(__file__).parents[2]
SECRET = secrets.token_hex(32)
LABEL = "test äöü 192.0.2.1:7"
BODY = b'{"a":1}'


def vectors() -> dict[str, str]:
    text = (ROOT / "docs" / "security.md").read_text()
    (block,) = re.findall(r"```\n(secret  .*?)```", text, re.DOTALL)
    return dict(re.split(r"  +", line, maxsplit=1) for line in block.splitlines())


def by_specification(given: dict[str, str]) -> dict[str, bytes]:
    """What follows from the first rows of the table."""
    known = {name: bytes.fromhex(text) for name, text in given.items() if name in GIVEN}
    said = spec.transcript(given["label"], known["server nonce"], known["client nonce"])
    proof, session = spec.proof_and_session(given["secret"], said)
    mine, theirs = known["client private key"], known["server private key"]
    offer, answer = b"\x03" + spec.public_key(mine), b"\x02" + spec.public_key(theirs)
    sealed_proof, sealed_session = spec.proof_and_session(given["secret"], said + offer + answer)
    agreed = spec.agree(sealed_session, mine, answer[1:])
    assert agreed == spec.agree(sealed_session, theirs, offer[1:])
    keys = {
        f"{purpose} key {sender}": spec.message_key(agreed, purpose, sender)
        for purpose in ("messages", "records")
        for sender in ("client", "server")
    }
    key = keys["messages key client"]
    return {
        **known,
        "transcript": said,
        "client proof": spec.client_proof(given["secret"], said),
        "server proof": proof,
        "session key": session,
        "frame c 0": spec.frame(session, b"c", 0, BODY),
        "frame s 1": spec.frame(session, b"s", 1, BODY),
        "offer": offer,
        "answer": answer,
        "encrypted client proof": spec.client_proof(given["secret"], said + offer),
        "encrypted server proof": sealed_proof,
        "encrypted session key": sealed_session,
        "shared": spec.x25519(mine, answer[1:]),
        "agreed": agreed,
        **keys,
        "messages key client next": spec.next_key(key),
        "record client 0": spec.seal_record(key, 0, BODY),
        "record client 1": spec.seal_record(key, 1, BODY),
    }


GIVEN = ("server nonce", "client nonce", "client private key", "server private key")


def test_the_vectors_are_what_follows_from_the_specification() -> None:
    given = vectors()
    computed = {name: value.hex() for name, value in by_specification(given).items()}
    assert {**computed, "secret": given["secret"], "label": given["label"]} == given


def test_the_engine_is_tested_with_the_same_vectors() -> None:
    """``csrc/transport/handshake_vectors_test.cc`` computes them."""
    text = (ROOT / "csrc/transport/handshake_vectors_test.cc").read_text()
    table = dict(re.findall(r'\{"([^"]+)",\s*"([0-9a-f]+)"\}', text))
    assert len(table) == 14
    given = vectors()
    assert {name: given[name] for name in table} == table


def test_the_arithmetic_of_the_specification_is_that_of_its_rfcs() -> None:
    private = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    theirs = bytes.fromhex("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a")
    shared = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
    assert spec.x25519(private, theirs).hex() == shared  # RFC 7748, 6.1
    key, nonce = bytes(range(32)), bytes.fromhex("000000090000004a00000000")
    assert spec._block(key, 1, nonce)[:8].hex() == "10f1e7e4d13b5915"  # RFC 8439, 2.3.2


# The product's Python -----------------------------------------------------------------------------


@contextlib.contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(20)
        theirs.settimeout(20)
        yield ours, theirs


def soon() -> float:
    return time.monotonic() + 20


def in_thread(act: Callable[[], Any]) -> Any:
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(act)
    finally:
        pool.shutdown(wait=False)


def read(sock: socket.socket, count: int) -> bytes:
    return read_exactly(sock, count, soon())


def test_the_products_bytes_are_the_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of its ends, with the nonces of the table."""
    given = vectors()
    wanted = by_specification(given)
    nonces = {"server": wanted["server nonce"], "client": wanted["client nonce"]}
    with pair() as (ours, theirs):
        monkeypatch.setattr(channel.secrets, "token_bytes", lambda _: nonces["client"])
        client = in_thread(lambda: channel.greet(ours, given["secret"], given["label"], soon()))
        theirs.sendall(spec.MAGIC + wanted["server nonce"])
        assert read(theirs, 72) == spec.MAGIC + wanted["client nonce"] + wanted["client proof"]
        theirs.sendall(wanted["server proof"])
        made = client.result(20)
        made.send({"a": 1}, soon())
        assert read(theirs, 43) == wanted["frame c 0"]
    with pair() as (ours, theirs):
        monkeypatch.setattr(channel.secrets, "token_bytes", lambda _: nonces["server"])
        server = in_thread(lambda: channel.accept(ours, given["secret"], given["label"], soon()))
        assert read(theirs, 40) == spec.MAGIC + wanted["server nonce"]
        theirs.sendall(spec.MAGIC + wanted["client nonce"] + wanted["client proof"])
        assert read(theirs, 32) == wanted["server proof"]
        made = server.result(20)
        for _ in range(2):
            made.send({"a": 1}, soon())
        read(theirs, 43)
        assert read(theirs, 43) == wanted["frame s 1"]


def needs_chacha() -> None:
    try:
        if _native.offered_ciphers() & spec.CHACHA:
            return
    except _native.EngineError:
        pass
    pytest.skip("needs libcrypto with ChaCha20-Poly1305")


@contextlib.contextmanager
def greeted() -> Iterator[tuple[socket.socket, Future[channel.Channel], bytes]]:
    """A client's end, the product's server at the other one, and the nonce that it has sent."""
    needs_chacha()
    with pair() as (ours, theirs):
        server = in_thread(lambda: channel.accept(ours, SECRET, LABEL, soon()))
        yield theirs, server, read(theirs, 40)[8:]


def made_offer() -> tuple[bytes, bytes]:
    """A private key, and what a client offers with it."""
    private = secrets.token_bytes(32)
    return private, bytes([spec.CHACHA]) + spec.public_key(private)


def test_a_client_written_from_the_specification_is_understood() -> None:
    nonce = secrets.token_bytes(32)
    with greeted() as (theirs, server, server_nonce):
        private, offer = made_offer()
        said = spec.transcript(LABEL, server_nonce, nonce) + offer
        theirs.sendall(spec.SEALED_MAGIC + nonce + offer + spec.client_proof(SECRET, said))
        proof, answer = read(theirs, 32), read(theirs, 33)
        assert answer[0] == spec.CHACHA
        wanted, session = spec.proof_and_session(SECRET, said + answer)
        assert proof == wanted
        agreed = spec.agree(session, private, answer[1:])
        made = server.result(20)
        assert made.is_sealed
        for number in range(2):
            key = spec.message_key(agreed, "messages", "client")
            theirs.sendall(spec.seal_record(key, number, BODY))
            assert made.receive(soon()) == {"a": 1}
            made.send({"a": number}, soon())
            (length,) = struct.unpack("<I", head := read(theirs, 4))
            key = spec.message_key(agreed, "messages", "server")
            sealed = head + read(theirs, length + 16)
            assert spec.open_record(key, number, sealed) == b'{"a":%d}' % number


def test_a_server_written_from_the_specification_is_understood() -> None:
    needs_chacha()
    private, nonce = secrets.token_bytes(32), secrets.token_bytes(32)
    with pair() as (ours, theirs):
        client = in_thread(lambda: channel.greet(ours, SECRET, LABEL, soon(), encrypted=True))
        theirs.sendall(spec.MAGIC + nonce)
        magic, client_nonce, offer, proof = (read(theirs, count) for count in (8, 32, 33, 32))
        assert magic == spec.SEALED_MAGIC
        said = spec.transcript(LABEL, nonce, client_nonce) + offer
        assert proof == spec.client_proof(SECRET, said)
        answer = bytes([spec.CHACHA]) + spec.public_key(private)
        proof, session = spec.proof_and_session(SECRET, said + answer)
        theirs.sendall(proof + answer)
        made = client.result(20)
        agreed = spec.agree(session, private, offer[1:])
        made.send({"a": 1}, soon())
        key = spec.message_key(agreed, "messages", "client")
        assert read(theirs, len(BODY) + 20) == spec.seal_record(key, 0, BODY)
        theirs.sendall(spec.seal_record(spec.message_key(agreed, "messages", "server"), 0, BODY))
        assert made.receive(soon()) == {"a": 1}


@pytest.mark.parametrize("what", ["secret", "label", "nonce", "role", "offer"])
def test_each_part_of_the_transcript_is_authenticated(what: str) -> None:
    """A client that is wrong in one of them has no place."""
    nonce = secrets.token_bytes(32)
    with greeted() as (theirs, server, server_nonce):
        _, offer = made_offer()
        label = LABEL + ("x" if what == "label" else "")
        said = spec.transcript(label, server_nonce, nonce if what != "nonce" else bytes(32))
        said += offer if what != "offer" else bytes([3]) + offer[1:]
        secret = SECRET if what != "secret" else SECRET[:-1]
        proof = spec.client_proof(secret, said)
        if what == "role":
            proof, _ = spec.proof_and_session(secret, said)
        theirs.sendall(spec.SEALED_MAGIC + nonce + offer + proof)
        assert read(theirs, 32) == bytes(32)
        with pytest.raises(AuthenticationError):
            server.result(20)
