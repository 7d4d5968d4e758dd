"""Jobs with a million names in all, new ones each round, in another order on each rank."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from launched import KOLOVOD

CODE = """
import random
import numpy as np, kolovod as kv
kv.init()
rank, size, names = kv.rank(), kv.size(), 21_000
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
@pytest.mark.parametrize("place", ["a:2", "a:3", "a:4", "a:1,b:1"])
@pytest.mark.parametrize("capacity", [1, 2, 16, 8192])
def test_no_wait_stalls(capacity, place):
    size = sum(int(part.split(":")[1]) for part in place.split(","))
    command = [*KOLOVOD, "run", "-np", str(size), "--label-hosts", place]
    done = subprocess.run(
        [*command, "--", sys.executable, "-c", CODE],
        env={**os.environ, "KOLOVOD_CACHE_CAPACITY": str(capacity)},
        capture_output=True,
        text=True,
        timeout=240,  # it takes 5 to 40 s, and a stall lasts for ever
    )
    assert done.returncode == 0, done.stdout + done.stderr
