"""MXNet in jobs of ``kolovod run --elastic``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from frameworks import is_installed
from jobs_with_deaths import run, train

pytestmark = [
    pytest.mark.skipif(not is_installed("mxnet"), reason="MXNet is not installed"),
    pytest.mark.timeout(330),
]


def test_killed_ranks_are_replaced_and_no_step_is_lost(tmp_path: Path) -> None:
    results = train("mxnet", 2, [1, 0], tmp_path, "-np", "2", deadline_s=300)
    for result in results:  # every step counts once, with those who took part
        assert result["result"][0] == -sum(result["slots"])


UPDATING = """
import os, signal
import mxnet as mx
import kolovod.mxnet as kv
from kolovod import elastic
kv.init()
slot = int(os.environ["KOLOVOD_SLOT"])
net = mx.gluon.nn.Dense(3, in_units=2)
net.initialize(mx.init.Constant(float(slot)))
parameters = list(net.collect_params().values())
optimizer = kv.DistributedOptimizer(mx.optimizer.create("sgd", learning_rate=1.0))
update = mx.optimizer.get_updater(optimizer)
state = elastic.State(net=net, step=0, kills=0)

@elastic.run
def train(state):
    while state.step < 30 or state.kills < 2:
        state.step += 1
        dies = state.step in (10, 20) and kv.size() == 3
        state.kills += dies
        for i, parameter in enumerate(parameters):
            if dies and i == 1 and slot == state.kills:  # in the middle of a step
                os.kill(os.getpid(), signal.SIGKILL)
            parameter.grad()[:] = 1.0
            update(i, parameter.grad(), parameter.data())
        state.commit()
        if state.step == 19 and kv.size() < 3:
            state.step -= 1
            for parameter in parameters:
                parameter.data()[:] += 1.0

train(state)
values = [parameter.data().asnumpy().ravel().tolist() for parameter in parameters]
print("ends", slot, state.step, *values, flush=True)
"""


def test_each_update_of_an_optimizer_is_a_step() -> None:
    """Averages of ones are ones, whoever takes part: each weight falls by one in a step."""
    done = run("-np", "3", script=("-c", UPDATING), deadline_s=300)
    assert done.returncode == 0, done.stderr
    ends = re.findall(r"ends (\d) (\d+) (.*)", done.stdout)
    assert len(ends) >= 2, done.stderr
    for _, steps, values in ends:
        weight = -float(steps)
        assert values == f"{[weight] * 6} {[0.0 + weight] * 3}"
    assert done.stderr.count("was killed by signal 9") == 4
