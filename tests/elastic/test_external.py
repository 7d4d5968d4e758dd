"""What ranks tell each other at the join endpoint of a job that others start. Threads as ranks."""

from __future__ import annotations

import functools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from ports import reserve_port

from kolovod.config import load
from kolovod.elastic.external import External
from kolovod.rendezvous.external.launchers import find

SECRET = "0123456789abcdef0123456789abcdef"
LIMIT_S = 30.0


@functools.cache
def endpoint_port() -> str:
    """One for all: a test closes the join endpoint behind it."""
    return str(reserve_port())


def external(rank: int, **variables: str) -> External:
    environ = {
        "KOLOVOD_RANK": str(rank),
        "KOLOVOD_SIZE": "2",
        "KOLOVOD_MIN_NP": "1",
        "KOLOVOD_STORE_HOST": "127.0.0.1",
        "KOLOVOD_STORE_PORT": endpoint_port(),
        "KOLOVOD_START_TIMEOUT_S": "20",
        **variables,
    }
    found = find(environ)
    assert found is not None
    return External(found, environ, load(environ))


@pytest.mark.parametrize(
    ("variables", "tells_secret"),
    [({"KOLOVOD_SECRET": SECRET}, False), ({"KOLOVOD_LOCAL_SIZE": "2"}, True)],
    ids=["hosts", "one host"],
)
def test_a_secret_that_all_have_is_not_told(variables: dict[str, str], tells_secret: bool) -> None:
    """Between hosts the join endpoint is not encrypted."""
    zero, one = external(0, **variables), external(1, **variables)
    told: list[Any] = []
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(zero.meet), pool.submit(one.meet)
        own = first.result(LIMIT_S)
        zero.begin("127.0.0.1:4000", own.first_hosts, lambda slot: False)
        other = second.result(LIMIT_S)
        told.append(one._join_endpoint.discover(1, "a", time.monotonic() + LIMIT_S))
    zero.close()
    assert own.secret == other.secret != ""
    assert own.first_hosts == other.first_hosts
    assert other.coordinator == "127.0.0.1:4000"
    assert (told[0].secret == own.secret) == tells_secret
    assert tells_secret or told[0].secret == ""
    assert SECRET not in own.secret
