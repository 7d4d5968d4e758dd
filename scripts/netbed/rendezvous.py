"""A job's rendezvous server, on the host where a launcher would be: ``rendezvous.py SIZE ADDRESS``.

The secret is in KOLOVOD_SECRET. Says where it listens; ends with its input.
"""

from __future__ import annotations

import contextlib
import os
import sys

from kolovod.rendezvous.server import RendezvousServer


def main() -> None:
    """Serve until the input ends."""
    size, address = sys.argv[1:]
    with contextlib.closing(
        RendezvousServer(os.environ["KOLOVOD_SECRET"], int(size), address)
    ) as server:
        server.start()
        print(server.address, flush=True)
        for line in sys.stdin:  # "RANK CAUSE": that process has ended
            rank, _, cause = line.strip().partition(" ")
            server.mark_dead(int(rank), cause)


if __name__ == "__main__":
    main()
