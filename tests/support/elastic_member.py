"""A process with a membership client, as its test tells it: JSON values in lines of standard input.

First its place; then "failed", "stop", "finished", "contacts", "change", "ending", "end". It says
each world that it comes into, as soon as it is there.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

from kolovod.coordination.coordinator_state import first_world
from kolovod.elastic.membership_client import MembershipClient
from kolovod.errors import JobOverError

lock = threading.Lock()


def say(value: Any) -> None:
    with lock:
        print(json.dumps(value), flush=True)


def follow(client: MembershipClient) -> None:
    try:
        while True:
            say(client.next_world()._asdict())
    except JobOverError as error:
        say({"over": str(error)})


def main() -> None:
    given = json.loads(sys.stdin.readline())
    hosts = given.get("first_hosts")
    first = None if hosts is None else (given["slot"], first_world(enumerate(hosts)))
    client = MembershipClient(
        given["launcher"],
        given["secret"],
        given["slot"],
        given["host"],
        first=first,
        record_path=given.get("record_path", ""),
    )
    threading.Thread(target=follow, args=(client,), daemon=True).start()
    for line in sys.stdin:
        order = json.loads(line)
        if order == "failed":
            client.failed("connection reset")
        elif order == "stop":
            client.stop_for_next()
        elif order == "finished":
            client.finished()
        elif order == "contacts":
            say({"contacts": sorted(client._standby._contacts)})
        elif order == "change":
            say({"change": client.wants_change})
        elif order == "ending":  # who has finished, as far as it knows as a coordinator
            acting = client._standby._acting
            say({"ending": [] if acting is None else sorted(acting.coordinator._ending)})
        elif order == "end":
            return


main()
