"""The handshake of docs/security.md, written from that page with hashlib and hmac alone.

It shares nothing with the product. Not for use: it is slow, and its timing tells secrets.
"""

from __future__ import annotations

import hmac
import struct

__all__ = [
    "CHACHA",
    "MAGIC",
    "SEALED_MAGIC",
    "agree",
    "client_proof",
    "expand",
    "frame",
    "message_key",
    "next_key",
    "open_record",
    "proof_and_session",
    "public_key",
    "seal_record",
    "transcript",
    "x25519",
]

MAGIC, SEALED_MAGIC = b"KOLOVOD\x01", b"KOLOVOD\x02"
CHACHA = 2


def mac(key: bytes, data: bytes) -> bytes:
    return hmac.new(key, data, "sha256").digest()


def transcript(label: str, server_nonce: bytes, client_nonce: bytes) -> bytes:
    text = label.encode("utf-8")
    return struct.pack(">I", len(text)) + text + server_nonce + client_nonce


def client_proof(secret: str, said: bytes) -> bytes:
    return mac(secret.encode("utf-8"), b"client" + said)


def proof_and_session(secret: str, said: bytes) -> tuple[bytes, bytes]:
    key = secret.encode("utf-8")
    return mac(key, b"server" + said), mac(key, b"session" + said)


def frame(session: bytes, direction: bytes, sequence: int, body: bytes) -> bytes:
    proof = mac(session, direction + struct.pack(">Q", sequence) + body)
    return struct.pack(">I", len(body)) + proof + body


# Keys ---------------------------------------------------------------------------------------------


def expand(key: bytes, info: bytes) -> bytes:
    """HKDF-Expand of RFC 5869 to 32 bytes, which are one block."""
    return mac(key, info + b"\x01")


def agree(session: bytes, private: bytes, others_public: bytes) -> bytes:
    return mac(session, x25519(private, others_public))


def message_key(agreed: bytes, purpose: str, sender: str) -> bytes:
    return expand(agreed, f"kolovod {purpose} {sender}".encode())


def next_key(key: bytes) -> bytes:
    return expand(key, b"kolovod next")


_P = 2**255 - 19


def x25519(private: bytes, point: bytes) -> bytes:
    """RFC 7748, 5."""
    clamped = bytearray(private)
    clamped[0] &= 248
    clamped[31] = (clamped[31] & 127) | 64
    k = int.from_bytes(clamped, "little")
    u = int.from_bytes(point, "little") & (2**255 - 1)
    x1, x2, z2, x3, z3, swap = u, 1, 0, u, 1, 0
    for t in reversed(range(255)):
        bit = k >> t & 1
        if swap ^ bit:
            x2, x3, z2, z3 = x3, x2, z3, z2
        swap = bit
        a, b, c, d = (x2 + z2) % _P, (x2 - z2) % _P, (x3 + z3) % _P, (x3 - z3) % _P
        da, cb, aa, bb = d * a % _P, c * b % _P, a * a % _P, b * b % _P
        e = (aa - bb) % _P
        x3, z3 = (da + cb) ** 2 % _P, x1 * (da - cb) ** 2 % _P
        x2, z2 = aa * bb % _P, e * (aa + 121665 * e) % _P
    if swap:
        x2, z2 = x3, z3
    return (x2 * pow(z2, _P - 2, _P) % _P).to_bytes(32, "little")


def public_key(private: bytes) -> bytes:
    return x25519(private, (9).to_bytes(32, "little"))


# Records: ChaCha20-Poly1305 of RFC 8439 -----------------------------------------------------------


def _rotated(value: int, by: int) -> int:
    return (value << by | value >> (32 - by)) & 0xFFFFFFFF


def _block(key: bytes, counter: int, nonce: bytes) -> bytes:
    start = list(
        struct.unpack("<16I", b"expand 32-byte k" + key + struct.pack("<I", counter) + nonce)
    )
    s = list(start)
    rows = ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15),
            (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14))  # fmt: skip
    for _ in range(10):
        for a, b, c, d in rows:
            for x, y, z, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
                s[x] = (s[x] + s[y]) & 0xFFFFFFFF
                s[z] = _rotated(s[z] ^ s[x], by)
    return struct.pack("<16I", *((x + y) & 0xFFFFFFFF for x, y in zip(s, start, strict=True)))


def _stream(key: bytes, nonce: bytes, data: bytes) -> bytes:
    blocks = b"".join(_block(key, 1 + at // 64, nonce) for at in range(0, len(data), 64))
    return bytes(x ^ y for x, y in zip(data, blocks, strict=False))


def _tag(key: bytes, nonce: bytes, head: bytes, sealed: bytes) -> bytes:
    once = _block(key, 0, nonce)
    r = int.from_bytes(once[:16], "little") & 0x0FFFFFFC0FFFFFFC0FFFFFFC0FFFFFFF
    data = b"".join(part + bytes(-len(part) % 16) for part in (head, sealed))
    data += struct.pack("<QQ", len(head), len(sealed))
    total = 0
    for at in range(0, len(data), 16):
        total = (total + int.from_bytes(data[at : at + 16] + b"\x01", "little")) * r % (2**130 - 5)
    return ((total + int.from_bytes(once[16:32], "little")) % 2**128).to_bytes(16, "little")


def seal_record(key: bytes, number: int, body: bytes) -> bytes:
    head, nonce = struct.pack("<I", len(body)), struct.pack("<IQ", 0, number)
    sealed = _stream(key, nonce, body)
    return head + sealed + _tag(key, nonce, head, sealed)


def open_record(key: bytes, number: int, record: bytes) -> bytes:
    """Raises ValueError for one that is not the next."""
    head, sealed, tag = record[:4], record[4:-16], record[-16:]
    nonce = struct.pack("<IQ", 0, number)
    if tag != _tag(key, nonce, head, sealed):
        raise ValueError("another tag")
    return _stream(key, nonce, sealed)
