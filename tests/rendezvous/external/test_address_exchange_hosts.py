"""Address exchange between hosts: rank 0 is found at the addresses that its name stands for."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from netbed import Bed, unavailable
from test_external_meeting import CODE, SECRET

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())


@pytest.fixture(scope="module")
def bed():
    with Bed(["a", "b"], with_sshd=False) as bed:
        yield bed


def form(bed, store_host, timeout_s=30):
    """A rank on each host; what they say."""
    common = {
        "KOLOVOD_SIZE": "2",
        "KOLOVOD_STORE_HOST": store_host,
        "KOLOVOD_SECRET": SECRET,
        "KOLOVOD_START_TIMEOUT_S": str(timeout_s),
        "PYTHONPATH": ":".join(filter(None, sys.path)),
    }
    processes = [
        bed.popen(
            host,
            [sys.executable, "-c", CODE],
            env={"PATH": "/usr/bin:/bin", **common, "KOLOVOD_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, host in enumerate("ab")
    ]
    try:
        deadline = time.monotonic() + 60
        return [p.communicate(timeout=deadline - time.monotonic())[0].strip() for p in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("kind", ["a-v6", "address", "brackets", "a"])
def test_a_world_meets_at_a_host_of_either_protocol(bed, kind):
    address = bed.addresses("a")[0].ipv6
    store_host = {"address": address, "brackets": f"[{address}]"}.get(kind, kind)
    assert form(bed, store_host) == ["0 2 0 0 3 a", "1 2 0 1 3 b"]


def test_no_such_rank_0(bed):
    """The address is that of the host which has no rank 0."""
    first, _ = form(bed, bed.addresses("b")[0].ipv6, timeout_s=2)
    assert "where rank 0 should be, is not this host" in first
    assert "set KOLOVOD_STORE_HOST to rank 0's host" in first
