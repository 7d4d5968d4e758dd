"""Horovod's scripts hear of hosts when discovery has found them, and stop until they are there."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from horovod.runner.elastic.discovery import HostDiscovery
from horovod.runner.elastic.launch import elastic_options
from kolovod.launch.elastic_job import ElasticJob
from kolovod.launch.job import JobOptions

pytestmark = pytest.mark.timeout(180)

SCRIPT = """
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])

def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)

if (folder / "grow").exists():  # found later: not there before the others have heard of its host
    until((folder / "heard").exists)
    if sys.argv[2] == "fails":
        sys.exit(3)

import horovod.common.basics as hvd
import kolovod.numpy as kv
from horovod.common.elastic import ObjectState, run_fn
hvd.init()
state = ObjectState(kv.broadcast_object, hvd.rank, sizes=[])

def steps(state):
    while len(state.sizes) < 12:
        kv.allreduce(1.0, "one")
        state.sizes.append(hvd.size())
        if len(state.sizes) == 5 and hvd.rank() == 0:
            (folder / "grow").touch()
            until(lambda: not state._host_messages.empty())
            (folder / "heard").touch()
        state.commit()
    return state.sizes

print(json.dumps(run_fn(steps, lambda: (hvd.shutdown(), hvd.init()))(state)))
"""


class Growing(HostDiscovery):
    """Another host is found when the job asks for it, by a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        more = {"127.0.0.1": 2} if (self.folder / "grow").exists() else {}
        return {"localhost": 2, **more}


@pytest.mark.parametrize(
    ("what", "sizes"),
    [("comes", [4] * 7), pytest.param("fails", [2] * 7, marks=pytest.mark.slow)],
)
def test_ranks_hear_of_it_before_its_processes_are_there(
    what: str, sizes: list[int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And if these do not come, the same ranks go on."""
    elastic = elastic_options(
        Growing(tmp_path), num_proc=2, min_num_proc=2, max_num_proc=4, reset_limit=2
    )
    with ElasticJob(elastic, JobOptions(stdout=sys.stdout, stderr=sys.stderr)) as job:
        job.start([sys.executable, "-c", SCRIPT, str(tmp_path), what])
        assert job.wait() == 0
    out, err = capfd.readouterr()
    results = [json.loads(found) for found in re.findall(r":(\[.*\])$", out, re.MULTILINE)]
    assert results == [[2] * 5 + sizes] * sizes[-1], err
