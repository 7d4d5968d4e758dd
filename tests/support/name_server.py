"""Answers for names as a cluster's name server does: ``name_server.py FILE``, a script.

FILE has the addresses of each name, in JSON. It is read anew for each question, so what a client
hears is what is in there right now.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
from pathlib import Path

_A = 1  # the type of an IPv4 address; RFC 1035
_IN = 1
_RESPONSE, _AUTHORITATIVE, _RECURSION = 0x8000, 0x0400, 0x0180
_UNKNOWN = 3


def answer(query: bytes, names: dict[str, list[str]]) -> bytes:
    """The message that answers ``query``, with all addresses of the name in it."""
    number, _, count = struct.unpack("!HHH", query[:6])
    assert count == 1
    labels, place = [], 12
    while query[place]:
        labels.append(query[place + 1 : place + 1 + query[place]].decode())
        place += 1 + query[place]
    kind, _ = struct.unpack("!HH", query[place + 1 : place + 5])
    question = query[12 : place + 5]
    addresses = names.get(".".join(labels).lower())
    flags = _RESPONSE | _AUTHORITATIVE | _RECURSION | (_UNKNOWN if addresses is None else 0)
    told = (addresses or []) if kind == _A else []
    # Each names the question's name by its place, and may be kept for 0 s.
    records = [
        struct.pack("!HHHIH", 0xC00C, _A, _IN, 0, 4) + socket.inet_aton(address) for address in told
    ]
    header = struct.pack("!HHHHHH", number, flags, 1, len(records), 0, 0)
    return header + question + b"".join(records)


def main() -> None:
    """Answer for ever."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("", 53))
        print("up", flush=True)
        while True:
            query, client = server.recvfrom(512)
            names = json.loads(Path(sys.argv[1]).read_text())
            server.sendto(answer(query, names), client)


if __name__ == "__main__":
    main()
