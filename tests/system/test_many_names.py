"""Jobs with thousands of names, new ones each round, in another order on each rank."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from launched import KOLOVOD
from slow import thorough_but

CODE = """
import random, sys
import numpy as np, kolovod as kv
kv.init()
rank, size, names = kv.rank(), kv.size(), int(sys.argv[1])
rng = random.Random(rank)
for round in range(3):
    order = list(range(names))
    rng.shuffle(order)
    handles = {}
    for i in order:
        data = np.full(2, float(i + rank), np.float32)
        handles[i] = kv.allreduce_async(data, name=f"{round}.{i}", op=kv.Sum)
    rng.shuffle(order)
    for i in order:
        assert handles.pop(i).wait()[0] == size * i + size * (size - 1) / 2
"""


@pytest.mark.slow
@pytest.mark.timeout(260)
@pytest.mark.parametrize("place", ["a:2", "a:3", "a:4", "a:1,b:1"])
@pytest.mark.parametrize("capacity", thorough_but([2, 8192], [1, 2, 16, 8192]))
def test_no_wait_stalls(capacity, place):
    run(capacity, place, names=21_000, deadline_s=240)  # 5 to 40 s; a stall lasts for ever


def test_no_wait_stalls_with_fewer_names():
    run(2, "a:3", names=2_000, deadline_s=90)


def run(capacity, place, names, deadline_s):
    size = sum(int(part.split(":")[1]) for part in place.split(","))
    command = [*KOLOVOD, "run", "-np", str(size), "--label-hosts", place]
    done = subprocess.run(
        [*command, "--", sys.executable, "-c", CODE, str(names)],
        env={**os.environ, "KOLOVOD_CACHE_CAPACITY": str(capacity)},
        capture_output=True,
        text=True,
        timeout=deadline_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
