"""The part of the handshake (channel.py) that agrees on keys for an encrypted connection.

Each end has a fresh X25519 key pair, and offers its public key with the ciphers that its host does
well. The server chooses one of those that both offer. The shared secret of RFC 7748, which both
ends then know, and the handshake's session key become the connection's keys
(csrc/transport/keys.h).

    offer    ciphers: uint8, as bits: 1 AES-256-GCM, 2 ChaCha20-Poly1305   public_key[32]
    answer   cipher: uint8, one bit of them                                public_key[32]
"""

from __future__ import annotations

from kolovod import _native
from kolovod.errors import AuthenticationError, BootstrapError

__all__ = ["OFFER_BYTES", "Exchange", "require_libcrypto"]

OFFER_BYTES = 33
_INSTALL = (
    "install OpenSSL 1.1.1 or later (libssl3 of Debian and Ubuntu, openssl-libs of Fedora and RHEL)"
)


def require_libcrypto(host: str) -> None:
    """Raise BootstrapError, naming ``host``, if what encrypts is not on this host."""
    try:
        if _native.offered_ciphers():
            return
        found = f"{_native.libcrypto()} without ChaCha20-Poly1305, on a processor without AES"
    except _native.EngineError as error:
        found = f"no libcrypto that can be used ({error.args[1]})"
    raise BootstrapError(
        f"KOLOVOD_ENCRYPT is set, but host {host} has {found}: {_INSTALL} there, or leave "
        "KOLOVOD_ENCRYPT unset for all ranks, on a network that nobody else is on"
    )


class Exchange:
    """One end's part in agreeing on the keys of one connection."""

    def __init__(self) -> None:
        """Raises AuthenticationError if this host has no libcrypto."""
        try:
            self._mine = _native.KeyExchange()
            self._ciphers = _native.offered_ciphers()
        except _native.EngineError as error:
            raise AuthenticationError(f"this host cannot encrypt: {error.args[1]}") from None

    def offer(self) -> bytes:
        """Return the client's first message."""
        return bytes([self._ciphers]) + self._mine.public

    def answer(self, offer: bytes) -> bytes:
        """Return the server's answer to an offer.

        Raises AuthenticationError if no cipher is common.
        """
        common = offer[0] & self._ciphers
        if not common:
            raise AuthenticationError(f"no cipher in common: {offer[0]} and {self._ciphers}")
        return bytes([common & -common]) + self._mine.public

    def agree(
        self, session: bytes, cipher: int, others: bytes, *, is_server: bool
    ) -> _native.Agreement:
        """Derive the keys with ``others``, the other end's offer or answer.

        Raises AuthenticationError if it makes no key.
        """
        try:
            if cipher & self._ciphers:
                return self._mine.agree(session, others[1:], cipher, is_server)
        except (ValueError, _native.EngineError) as error:
            raise AuthenticationError(f"the other end's offer makes no key: {error}") from None
        raise AuthenticationError(f"the other end has chosen the cipher {cipher}, unasked")
