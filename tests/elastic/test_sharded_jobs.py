"""Jobs of ``kolovod run --elastic`` with a sharded optimizer: ranks are killed, come and leave.

One process with the unsharded optimizer makes each step again: it has the same parameters and the
same state, bit for bit.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from jobs_with_deaths import SCRIPT, replay_of, run, train

from kolovod import elastic


@pytest.mark.slow
def test_a_killed_rank_is_replaced_and_gets_its_part(tmp_path: Path) -> None:
    train("shards", 3, [1], tmp_path, "-np", "3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "full", "plan", "hosts"),
    [
        ("shards", 2, [1, 0], []),
        ("shards", 4, [3, 0, 1], ["--label-hosts", "a:2,b:2"]),
        ("recomputed shards", 3, [2, 0], []),
    ],
    ids=["a rank alone", "two hosts", "computed again"],
)
def test_killed_ranks_are_replaced(
    kind: str, full: int, plan: list[int], hosts: list[str], tmp_path: Path
) -> None:
    train(kind, full, plan, tmp_path, "-np", str(full), *hosts)


LEAVING = f"""
import os, signal, sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import elastic_script
import kolovod.torch as kv
from kolovod import elastic
kv.init()
slot = int(os.environ["KOLOVOD_SLOT"])
work = elastic_script.OfShards(slot)
work.distribute(slot)
log = elastic.MembershipLog(work.tensors)
state = elastic.State(step=0, slots=[], alone=0, log=log, **work.values())

@elastic.run
def train(state):
    while state.alone < 6:
        state.slots.append(work.step(state, log.member))
        state.alone += state.slots[-1] == 1
        if state.step == 4 and slot == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        if state.slots.count(3) == 5 and slot == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        state.step += 1
        state.commit()

train(state)
print("slots", state.slots, flush=True)
log.save(sys.argv[1])
"""


@pytest.mark.slow
def test_ranks_that_leave_hand_their_parts_over(tmp_path: Path) -> None:
    path = str(tmp_path / "log.json")
    done = run("-np", "3", script=("-c", LEAVING, path))
    assert done.returncode == 0, done.stderr
    (said,) = re.findall(r"slots \[(.*)\]", done.stdout)
    slots = [int(bits) for bits in said.split(", ")]
    assert sorted(slots, reverse=True) == slots
    assert set(slots) == {7, 3, 1}, done.stderr
    replay_of("shards", elastic.MembershipLog.load(path).state_dict(), slots)
