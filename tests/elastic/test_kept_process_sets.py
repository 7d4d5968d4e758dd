"""Process sets in the state of an elastic job: they follow their members through the worlds."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from jobs_with_deaths import run
from launched import KOLOVOD

from kolovod import elastic
from kolovod.elastic import process_sets
from kolovod.elastic.process_sets import KeptSets
from kolovod.errors import InvalidArgumentError

SETS = """
import json, os, signal, sys
import kolovod.numpy as kv
from kolovod import elastic
kv.init()
slot = int(os.environ["KOLOVOD_SLOT"])
joins = not os.environ["KOLOVOD_FIRST_HOSTS"]
state = elastic.State(
    step=0,
    low=elastic.ProcessSet([0, 1]),
    high=elastic.ProcessSet([0] if joins else [2, 3]),  # a joiner takes those of the others
    ends=elastic.ProcessSet([0, 3], on_loss="drop"),
    all=elastic.ProcessSet(range(4)),
    size=4,
)
names = ["low", "high", "ends", "all"]
seen = []

def sums():
    found = {}
    for name in names:
        one = getattr(state, name)
        if one.is_dropped:
            found[name] = None
        elif one.included():
            total = kv.allreduce(float(10 ** slot), name, kv.Sum, process_set=one)
            found[name] = [int(total), one.size(), one.process_set_id]
    return found

@state.on_size_change  # kv.size() is that of the moment, this the same on all ranks
def follow(before, after):
    state.size = after

@elastic.run
def train(state):
    while state.step < 60:
        found = elastic.exactly(sums)
        if not seen or seen[-1][1] != found:
            seen.append([kv.size(), found])
        state.step += 1
        if not joins and (state.step, slot) in [(10, 1), (30, 3)]:
            os.kill(os.getpid(), signal.SIGKILL)
        state.commit()
        while state.size < 4:  # who was lost comes back, as another one
            elastic.exactly(lambda: None)
            state.commit()

train(state)
print("saw", json.dumps([slot, joins, seen]), flush=True)
"""


@pytest.mark.slow
def test_sets_follow_their_members_and_not_the_ranks() -> None:
    done = run("-np", "4", "--label-hosts", "a:3,b:1", script=("-c", SETS))
    assert done.returncode == 0, done.stderr
    seen: dict[tuple[int, bool], list[dict[str, list[int] | None]]] = {}
    for slot, joins, all_seen in map(json.loads, re.findall(r"saw (.*)", done.stdout)):
        seen[slot, joins] = [found for _, found in all_seen]
    assert sorted(seen) == [(0, False), (1, True), (2, False), (3, True)], done.stderr
    low, high, ends, everybody = [11, 2, 1], [1100, 2, 2], [1001, 2, 3], [1111, 4, 4]
    first, second, third = seen[0, False]
    assert first == {"low": low, "ends": ends, "all": everybody}
    assert second == {"low": [1, 1, 1], "ends": ends, "all": [1101, 3, 4]}
    assert third == {"low": [1, 1, 1], "ends": None, "all": [101, 2, 4]}
    first, second, third = seen[2, False]
    assert first == {"high": high, "all": everybody}
    assert second == {"high": high, "all": [1101, 3, 4]}
    assert third == {"high": [100, 1, 2], "ends": None, "all": [101, 2, 4]}
    assert seen[1, True] == [{}, {"ends": None}]
    assert seen[3, True] == [{"ends": None}]


TRAINING = """
import os, signal
from kolovod import elastic
from kolovod.core.transaction import transaction
few = elastic.ProcessSet([0, 2])
slot = int(os.environ["KOLOVOD_SLOT"])
{setup}

@elastic.run
def train(state):
    global tickets
    while state.step < 30:
        if state.step == 10 and slot == 2 and os.environ["KOLOVOD_FIRST_HOSTS"]:
            os.kill(os.getpid(), signal.SIGKILL)
        step(float(slot + 1))
        tickets = transaction().passed
        state.step += 1
        state.commit()

train(state)
print("moved", slot, weight(), tickets, flush=True)
"""
OPTIMIZERS = {
    "torch": """
import torch
import kolovod.torch as kv
kv.init()
model = torch.nn.Linear(3, 1)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), 0.125)
optimizer = kv.DistributedOptimizer(optimizer, model.named_parameters(), process_set=few)
state = elastic.State(model=model, optimizer=optimizer, few=few, step=0)

def step(x):
    optimizer.zero_grad()
    model(torch.full((1, 3), x)).sum().backward()
    optimizer.step()

def weight():
    return model.weight[0, 0].item()
""",
    "tensorflow": """
import tensorflow as tf
import kolovod.tensorflow as kv
kv.init()
w = tf.Variable([0.0, 0.0, 0.0])
optimizer = kv.DistributedOptimizer(tf.keras.optimizers.SGD(0.125), process_set=few)
optimizer.build([w])
state = elastic.State(w=w, few=few, step=0)

@tf.function
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(w * x)
    optimizer.apply_gradients([(tape.gradient(loss, w), w)])

def weight():
    return float(w[0])
""",
    "jax": """
import jax, jax.numpy as jnp, optax
import kolovod.jax as kv
kv.init()
optimizer = kv.DistributedOptimizer(optax.sgd(0.125), process_set=few)
state = elastic.State(w=jnp.zeros(3), s=optimizer.init(jnp.zeros(3)), few=few, step=0)

def update(w, s, x):
    updates, s = optimizer.update(jax.grad(lambda w: (w * x).sum())(w), s, w)
    return optax.apply_updates(w, updates), s

jitted = jax.jit(update)

def step(x):
    way = jitted if state.step % 2 else update
    state.w, state.s = way(state.w, state.s, x)

def weight():
    return float(state.w[0])
""",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "torch",
        pytest.param("tensorflow", marks=[pytest.mark.frameworks, pytest.mark.thorough]),
        pytest.param("jax", marks=pytest.mark.frameworks),
    ],
)
def test_an_optimizer_over_a_set_steps_with_the_ranks_outside(kind: str) -> None:
    """Ranks 0 and 2 average (1 + 3) / 2; rank 1, and rank 0 when it is the last, step alone."""
    if kind != "torch":
        pytest.importorskip(kind, reason=f"{kind} is not installed")
    done = run("-np", "3", script=("-c", TRAINING.replace("{setup}", OPTIMIZERS[kind])))
    assert done.returncode == 0, done.stderr
    found = re.findall(r"moved (\d) (.*) (\d+)", done.stdout)
    assert len({tickets for _, _, tickets in found}) == 1  # all have made the same steps
    assert int(found[0][2]) >= 30
    moved = {rank: weight for rank, weight, _ in found}
    assert moved["0"] == str(-0.125 * (10 * 2 + 20 * 1))
    assert moved["1"] == str(-0.125 * 30 * 2)
    assert "was killed by signal 9" in done.stderr


def test_a_job_that_is_not_elastic_has_the_sets_as_well() -> None:
    code = (
        "import kolovod.numpy as kv; from kolovod import elastic; kv.init()\n"
        "state = elastic.State(first=elastic.ProcessSet([0]))\n"
        "one = state.first\n"
        "work = lambda state: one.included() and kv.allreduce(3.0, process_set=one)\n"
        "print('got', elastic.run(work)(state), elastic.run(work)(state))"
    )
    command = [*KOLOVOD, "run", "-np", "2", "--", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"got (.*)", done.stdout)) == ["3.0 3.0", "False False"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sets", "code", "message"),
    [
        ("low=elastic.ProcessSet([0, 5])", 1, r"rank 5 is not in 0\.\.1, the ranks that the job"),
        ("low=elastic.ProcessSet([0]), **{'high': elastic.ProcessSet([1])} if kv.rank() else {}", 0,
         "this rank has 2 process sets in its state, rank 0 has 1"),
    ],
)  # fmt: skip
def test_wrong_sets_are_named(sets: str, code: int, message: str) -> None:
    """Where one rank is wrong the others go on without it."""
    script = (
        "import kolovod.numpy as kv; from kolovod import elastic; kv.init()\n"
        f"elastic.run(lambda state: 1)(elastic.State({sets}))"
    )
    done = run("-np", "2", script=("-c", script))
    assert done.returncode == code
    assert re.search(message, done.stderr)


def test_ranks_of_the_first_world_are_checked_without_the_others() -> None:
    """So each rank ends by its own error, also if it comes to it when another has ended by it."""
    sets = [elastic.ProcessSet([1]), elastic.ProcessSet([5, 0])]
    with pytest.raises(InvalidArgumentError, match=r"\[0, 5\]: rank 5 is not in 0\.\.1"):
        KeptSets(sets, 2)
    KeptSets(sets, 6)
    KeptSets(sets, None)  # who joins takes those of rank 0


def test_a_set_that_is_dropped_says_why() -> None:
    with pytest.raises(InvalidArgumentError, match="on_loss is 'keep'"):
        elastic.ProcessSet([0], "keep")  # type: ignore[arg-type]
    pair = elastic.ProcessSet([1, 0], "drop")
    world = SimpleNamespace(epoch=3, size=2, members=(1, 7))
    assert not pair.follow([0, 1], world)  # type: ignore[arg-type]
    assert pair.is_dropped
    for use in (pair.included, lambda: pair.position(0), pair.membership):
        with pytest.raises(InvalidArgumentError, match=r"\[0\] were lost, and on_loss is \"drop\""):
            use()
    alone = elastic.ProcessSet([0])
    assert not alone.follow([0], world)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"all its members, \[0\], were lost"):
        alone.included()
    shrunk = elastic.ProcessSet([0, 1])
    assert shrunk.follow([0, 1], world)  # type: ignore[arg-type]
    assert (shrunk.ranks, shrunk.numbers) == ([0], (0, 1))


def test_a_rank_without_sets_meets_those_that_have_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they would wait for it in a broadcast that it never enters."""
    monkeypatch.setattr(process_sets, "current", SimpleNamespace)
    told = SimpleNamespace(broadcast_object=lambda own, root, name: [(0, 1)])
    monkeypatch.setattr(process_sets, "Objects", lambda current: told)
    with pytest.raises(InvalidArgumentError, match="has 0 process sets in its state, rank 0 has 1"):
        KeptSets([], 2).form()
