"""The flags of ``kolovod run`` for elastic jobs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs_with_deaths import DEADLINE_S, run
from launched import KOLOVOD


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--min-np", "3"], "--min-np 3, -np 2, --max-np 2: they must not descend"),
        (["--max-np", "1"], "--min-np 1, -np 2, --max-np 1: they must not descend"),
        (["--keep-going"], "--keep-going beside --elastic"),
        (
            ["--replica-size", "2", "--max-np", "5"],
            "--min-np 2, -np 2, --max-np 5: they must be multiples of --replica-size 2",
        ),
    ],
)
def test_wrong_options_are_named(flags: list[str], message: str) -> None:
    done = run("-np", "2", *flags, script=("-c", "1"))
    assert done.returncode == 2
    assert message in done.stderr


GROWING = """
import os, sys, time
import kolovod, kolovod.numpy as kv
from kolovod import elastic
kv.init()
state = elastic.State(step=0, sizes=[])
hosts = sys.argv[1]
wanted = ["localhost:1\\n127.0.0.1:1\\n", "localhost:2\\n127.0.0.1:1\\n", "127.0.0.1:1\\n", ""]

@elastic.run
def train(state):
    while True:
        size = int(elastic.exactly(lambda: kv.allreduce(1.0, "one", kv.Sum)))
        if not state.sizes or state.sizes[-1] != size:
            state.sizes.append(size)
            state.step = 0
        state.step += 1
        if state.step == 20 and kv.rank() == 0:
            text = wanted[len(state.sizes)]
            if text:
                with open(hosts + ".new", "w") as file:
                    file.write(text)
                os.rename(hosts + ".new", hosts)
        if state.sizes == [2, 3, 1] and state.step == 20:
            return
        state.commit()
        time.sleep(0.005)

train(state)
print("sizes", *state.sizes, flush=True)
"""


@pytest.mark.slow
def test_hosts_are_discovered(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:1\n127.0.0.1:1\n")
    flags = ["-np", "2", "--host-discovery-script", f"cat {hosts}"]
    done = run(*flags, script=("-c", GROWING, str(hosts)))
    assert done.returncode == 0, done.stderr
    assert re.findall(r"sizes (.*)", done.stdout) == ["2 3 1"]
    assert "the hosts are now localhost:2, 127.0.0.1:1" in done.stderr
    assert "the hosts are now 127.0.0.1:1" in done.stderr
    assert "was lost" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "listed", "size"),
    [
        (["--min-np", "1", "--max-np", "2"], "localhost:3", 2),
        (["--min-np", "2"], "localhost:2", 2),
        (["--slots-per-host", "2"], "localhost", 2),
    ],
    ids=["min and max", "min", "slots"],
)
def test_flags_of_elastic_jobs_need_no_other(flags: list[str], listed: str, size: int) -> None:
    """A job that is discovered begins with all places that there are."""
    command = [*KOLOVOD, "run", *flags, "--host-discovery-script", f"echo {listed}"]
    script = "import os; print('first hosts', os.environ['KOLOVOD_FIRST_HOSTS'])"
    done = subprocess.run(
        [*command, "--", sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("first hosts") == size, done.stdout


def test_max_np_is_how_many_begin_where_hosts_have_more_places() -> None:
    command = [*KOLOVOD, "run", "--max-np", "2", "--label-hosts", "a:2,b:2", "--"]
    code = "import kolovod as kv; kv.init(); print('size', kv.size())"
    done = subprocess.run(
        [*command, sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"size (\d)", done.stdout) == ["2", "2"]
