"""Connections whose both ends know the job's secret.

Nothing else is parsed before the proof, sizes are bounded before memory is taken, and every read
has a deadline. The handshake, and then the frames (integers are big-endian)::

    server -> client   magic[8]  server_nonce[32]
    client -> server   magic[8]  client_nonce[32]  HMAC(secret, "client" transcript)[32]
    server -> client   HMAC(secret, "server" transcript)[32]
                  or   32 zeros: the client's proof is wrong
      transcript       label_length: uint32  label  server_nonce  client_nonce
    frame              body_length: uint32  HMAC(key, direction sequence: uint64 body)[32]  body
      key              HMAC(secret, "session" transcript), direction "c" or "s", sequence from 0
      body             one JSON value in UTF-8, at most 1 MiB

If the client wants the connection encrypted, both ends also agree on keys (encryption.py), which
are fresh, so that who learns the secret later cannot read what was recorded; then a frame is a
record (csrc/transport/sealer.h), and the offers are parts of the transcript::

    client -> server   ENCRYPTED_MAGIC[8]  client_nonce[32]  offer[33]  HMAC(...)[32]
    server -> client   HMAC(...)[32]  answer[33]
                  or   31 zeros and a one: this host cannot encrypt, or no cipher is common

A server does as the client wishes and says so (``Channel.is_sealed``); a client that wants
encryption takes nothing else.

A connection that ends without either was dropped, because too many others came: the client tries
again. HMAC is HMAC-SHA256. The label says what the connection is for, so that a proof made for one
server is of no use at another. The client proves itself first: a stranger learns nothing but a
nonce.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

from kolovod import _native
from kolovod.errors import AuthenticationError, BootstrapError
from kolovod.net.encryption import OFFER_BYTES, Exchange
from kolovod.net.sockets import close_all, hang_up, read_exactly, set_deadline
from kolovod.net.unix_sockets import OtherUserError, connect_by

__all__ = [
    "HANDSHAKE_TIMEOUT_S",
    "Channel",
    "accept",
    "connect",
    "encode",
    "greet",
    "new_secret",
    "retried",
]

MAGIC = b"KOLOVOD\x01"
ENCRYPTED_MAGIC = b"KOLOVOD\x02"
NONCE_BYTES = 32
MAX_BODY_BYTES = 1 << 20
HANDSHAKE_TIMEOUT_S = 10.0
_FDS_PER_MESSAGE = 64  # the kernel's limit is 253
_REFUSAL = bytes(NONCE_BYTES)
_CANNOT_ENCRYPT = bytes(NONCE_BYTES - 1) + b"\x01"
_TAG_BYTES = 16
_TRIES = 20  # of a handshake, by a client that is dropped
_PAUSE_S = 0.05  # between the first two; longer and longer
_ALTERED = "a message was altered on its way, or is a replay"
_LENGTH = struct.Struct(">I")
_SEQUENCE = struct.Struct(">Q")


def encode(message: Any) -> bytes:
    """Return one JSON value as the body of a frame. Raises BootstrapError if it is too large."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_BODY_BYTES:
        raise BootstrapError(f"a message of {len(body)} bytes is over {MAX_BODY_BYTES} bytes")
    return body


def new_secret() -> str:
    """Return a fresh secret of 256 bits, as text."""
    return secrets.token_hex(32)


def _digest(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")


def _transcript(label: str, server_nonce: bytes, client_nonce: bytes) -> bytes:
    encoded = label.encode()
    return _LENGTH.pack(len(encoded)) + encoded + server_nonce + client_nonce


class Channel:
    """One authenticated connection. Not for use by several threads at once, except ``close``."""

    def __init__(
        self,
        sock: socket.socket,
        key: bytes,
        *,
        is_server: bool,
        agreement: _native.Agreement | None = None,
    ) -> None:
        """``agreement``: the connection is encrypted."""
        self._agreement = agreement
        self._sealer = agreement and _native.MessageSealer(agreement.keys("messages"))
        self._sock = sock
        self._key = key
        self._out, self._in = (b"s", b"c") if is_server else (b"c", b"s")
        self._sent = 0
        self._received = 0

    @property
    def is_sealed(self) -> bool:
        """True if messages are encrypted."""
        return self._agreement is not None

    def record_keys(self) -> _native.RecordKeys | None:
        """Return the keys for the engine, which gets the connection next; None if not encrypted."""
        return self._agreement and self._agreement.keys("records")

    def fileno(self) -> int:
        """Return the socket's descriptor, for polling."""
        return self._sock.fileno()

    def send(self, message: Any, deadline: float) -> None:
        """Send one JSON value by ``deadline`` (``time.monotonic()`` seconds).

        Raises BootstrapError if it is too large, OSError (a TimeoutError at the deadline) if the
        connection is broken.
        """
        self.send_encoded(encode(message), deadline)

    def send_encoded(self, body: bytes, deadline: float) -> None:
        """Send what ``encode`` has made, as ``send`` does: for a message that goes to many."""
        if self._sealer is not None:
            frame = self._sealer.seal(body)
        else:
            proof = _digest(self._key, self._out, _SEQUENCE.pack(self._sent), body)
            frame = _LENGTH.pack(len(body)) + proof + body
        self._sent += 1
        set_deadline(self._sock, deadline)
        self._sock.sendall(frame)

    def receive(self, deadline: float) -> Any:
        """Receive one JSON value by ``deadline``.

        Raises AuthenticationError if it was not sent by the other end, BootstrapError if it is not
        JSON, EOFError if the other end closed the connection, OSError (a TimeoutError at the
        deadline) if it is broken.
        """
        if self._sealer is not None:
            return _parse(self._receive_sealed(self._sealer, deadline))
        header = read_exactly(self._sock, _LENGTH.size + NONCE_BYTES, deadline)
        (length,) = _LENGTH.unpack_from(header)
        if length > MAX_BODY_BYTES:
            raise AuthenticationError(f"a message says it has {length} bytes: refused")
        body = read_exactly(self._sock, length, deadline)
        proof = _digest(self._key, self._in, _SEQUENCE.pack(self._received), body)
        if not hmac.compare_digest(proof, header[_LENGTH.size :]):
            raise AuthenticationError(_ALTERED)
        self._received += 1
        return _parse(body)

    def _receive_sealed(self, sealer: _native.MessageSealer, deadline: float) -> bytes:
        head = read_exactly(self._sock, _LENGTH.size, deadline)
        length = int.from_bytes(head, "little")
        if length > MAX_BODY_BYTES:
            raise AuthenticationError(f"a message says it has {length} bytes: refused")
        body = sealer.open(head + read_exactly(self._sock, length + _TAG_BYTES, deadline))
        if body is None:
            raise AuthenticationError(_ALTERED)
        return body

    def send_fds(self, fds: Sequence[int], deadline: float) -> None:
        """Send file descriptors over an AF_UNIX connection; the receiver must know how many."""
        for start in range(0, len(fds), _FDS_PER_MESSAGE):
            set_deadline(self._sock, deadline)
            socket.send_fds(self._sock, [b"F"], list(fds[start : start + _FDS_PER_MESSAGE]))

    def receive_fds(self, count: int, deadline: float) -> list[int]:
        """Receive exactly ``count`` file descriptors; the caller closes them."""
        fds: list[int] = []
        try:
            while len(fds) < count:
                set_deadline(self._sock, deadline)
                expected = min(count - len(fds), _FDS_PER_MESSAGE)
                data, got, flags, _ = socket.recv_fds(self._sock, 1, expected)
                fds += got
                if not data:
                    raise EOFError("the connection was closed")
                if len(got) != expected or flags & socket.MSG_CTRUNC:
                    raise BootstrapError(
                        f"{len(got)} of {expected} file descriptors arrived: the limit on open "
                        "files (ulimit -n) is probably too low"
                    )
        except BaseException:
            close_all(fds)
            raise
        return fds

    def detach(self) -> int:
        """Return the connection's descriptor, for use without frames; the caller closes it."""
        return self._sock.detach()

    def keep(self) -> Channel:
        """Hand the connection over to the caller: the server that made it leaves it open."""
        sock = socket.socket(fileno=self._sock.detach())
        kept = Channel(sock, self._key, is_server=self._out == b"s")
        kept._sent, kept._received = self._sent, self._received
        kept._agreement, kept._sealer = self._agreement, self._sealer
        return kept

    def close(self) -> None:
        """Close the connection; a thread that waits on it is woken."""
        hang_up(self._sock)

    def forget(self) -> None:
        """Close it in a forked child only: the parent's connection stays open."""
        self._sock.close()


def connect(
    family: socket.AddressFamily,
    address: Any,
    secret: str,
    label: str,
    deadline: float,
    *,
    encrypted: bool = False,
) -> Channel:
    """Connect to ``address`` and prove the secret, both ways.

    ``encrypted``: what passes is encrypted. Raises AuthenticationError if the other end is another
    user's, does not know the secret, or cannot encrypt; OSError (a TimeoutError at the deadline) if
    nobody is there.
    """

    def attempt() -> Channel:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            connect_by(sock, address, deadline)
            return greet(sock, secret, label, deadline, encrypted=encrypted)
        except OtherUserError as error:
            hang_up(sock)
            raise AuthenticationError(str(error)) from None
        except BaseException:
            hang_up(sock)
            raise

    return retried(attempt, deadline)


def retried(attempt: Callable[[], Channel], deadline: float) -> Channel:
    """Call ``attempt``, again a few times while a server drops it, and return its result."""
    tries = 0
    while True:
        try:
            return attempt()
        except _Dropped:
            tries += 1
            if tries == _TRIES:
                raise
            time.sleep(max(0.0, min(_PAUSE_S * tries, deadline - time.monotonic())))


class _Dropped(AuthenticationError):
    """The server closed the connection before either end had proved anything."""


def greet(
    sock: socket.socket, secret: str, label: str, deadline: float, *, encrypted: bool = False
) -> Channel:
    """Do the client's half of the handshake on a connected socket.

    Raises what ``connect`` raises; the caller closes ``sock`` then.
    """
    key = secret.encode()
    purpose = label.split(" ", 1)[0]
    hello = _read_or_dropped(sock, len(MAGIC) + NONCE_BYTES, deadline, purpose)
    if hello[: len(MAGIC)] != MAGIC:
        raise AuthenticationError(f"what answers as the {purpose} does not speak our protocol")
    client_nonce = secrets.token_bytes(NONCE_BYTES)
    exchange = Exchange() if encrypted else None
    magic, offer = (ENCRYPTED_MAGIC, exchange.offer()) if exchange else (MAGIC, b"")
    transcript = _transcript(label, hello[len(MAGIC) :], client_nonce) + offer
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # then reading ends, too
        sock.sendall(magic + client_nonce + offer + _digest(key, b"client", transcript))
    proof = _read_or_dropped(sock, NONCE_BYTES, deadline, purpose)
    if proof == _REFUSAL:
        raise AuthenticationError(
            f"the {purpose} refused this process: its secret (KOLOVOD_SECRET) is not that of the "
            "job, or it has come to the wrong address"
        )
    if exchange and proof == _CANNOT_ENCRYPT:
        raise AuthenticationError(
            f"the {purpose} cannot encrypt, as KOLOVOD_ENCRYPT asks: its host has no libcrypto "
            "(OpenSSL 1.1.1 or later), or no cipher that this one offers"
        )
    answer = _read_or_dropped(sock, OFFER_BYTES, deadline, purpose) if exchange else b""
    transcript += answer
    if not hmac.compare_digest(proof, _digest(key, b"server", transcript)):
        raise AuthenticationError(f"the {purpose} does not know this job's secret (KOLOVOD_SECRET)")
    session = _digest(key, b"session", transcript)
    agreement = None
    if exchange:
        agreement = exchange.agree(session, answer[0], answer, is_server=False)
    return Channel(sock, session, is_server=False, agreement=agreement)


def accept(
    sock: socket.socket,
    secret: str,
    label: str,
    deadline: float,
    admit: Callable[[], None] = lambda: None,
) -> Channel:
    """Do the server's half of the handshake on an accepted connection.

    ``admit()``: is called when the client has proved itself, and before it hears so. Raises
    AuthenticationError, EOFError, OSError, or what ``admit`` does; the caller closes ``sock`` then.
    """
    key = secret.encode()
    server_nonce = secrets.token_bytes(NONCE_BYTES)
    set_deadline(sock, deadline)
    sock.sendall(MAGIC + server_nonce)
    magic = read_exactly(sock, len(MAGIC), deadline)
    encrypted = magic == ENCRYPTED_MAGIC
    client_nonce = read_exactly(sock, NONCE_BYTES, deadline)
    offer = read_exactly(sock, OFFER_BYTES, deadline) if encrypted else b""
    proof = read_exactly(sock, NONCE_BYTES, deadline)
    transcript = _transcript(label, server_nonce, client_nonce) + offer
    expected = _digest(key, b"client", transcript)
    if magic not in (MAGIC, ENCRYPTED_MAGIC) or not hmac.compare_digest(proof, expected):
        _refuse(sock, _REFUSAL)
        raise AuthenticationError("a client does not know this job's secret")
    admit()
    exchange, answer = None, b""
    if encrypted:
        try:
            exchange = Exchange()
            answer = exchange.answer(offer)
        except AuthenticationError:
            _refuse(sock, _CANNOT_ENCRYPT)
            raise
    transcript += answer
    sock.sendall(_digest(key, b"server", transcript) + answer)
    session = _digest(key, b"session", transcript)
    agreement = None
    if exchange:
        agreement = exchange.agree(session, answer[0], offer, is_server=True)
    return Channel(sock, session, is_server=True, agreement=agreement)


def _refuse(sock: socket.socket, why: bytes) -> None:
    with contextlib.suppress(OSError):
        sock.sendall(why)


def _parse(body: bytes) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        return json.loads(body, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise BootstrapError(
            f"a malformed message of {len(body)} bytes: {type(error).__name__}: {error}"
        ) from None


def _read_or_dropped(sock: socket.socket, count: int, deadline: float, purpose: str) -> bytes:
    try:
        return read_exactly(sock, count, deadline)
    except (EOFError, ConnectionResetError):
        raise _Dropped(
            f"the {purpose} closes the connection during the handshake, again and again: it is "
            "flooded with connections, or no part of this job"
        ) from None
