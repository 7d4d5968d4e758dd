"""LocalSGD and DiLoCo of Keras in an elastic job: a rank is killed, and who joins is a copy."""

from __future__ import annotations

import numpy as np
import periodic_replay as replay
import pytest
from dying import die
from keras_jobs import RUNNERS, prepared, runs, weights
from periodic_replay import model_of
from slow import slow_but
from survivors import NoLoss, Survivors
from test_keras_periodic import assert_near, seen_by, train, variables_of

from kolovod import elastic
from kolovod.core.transaction import use_transaction
from kolovod.core.world import current
from kolovod.elastic.steps import Steps
from kolovod.errors import InvalidArgumentError

pytestmark = pytest.mark.timeout(200)
SIZE, BATCHES, DEATH, EVERY = 3, 12, 7, 4
OPTIONS = {"fragments": 3, "fragment_sync_delay": 1, "local_share": 0.25}


def killed(rank, which):
    """Rank 2 dies between two exchanges of the others, while nothing is on its way."""
    keras, kv = prepared(which)
    model = model_of(keras, which)
    diloco = kv.callbacks.DiLoCo(EVERY, **OPTIONS)
    diloco.set_model(model)
    ongoing = Steps(Survivors([0, 1]), current, entered=diloco.enter_world)
    use_transaction(ongoing)
    ongoing.begin()
    parts = ((0,), (1,), (2,))
    alone = replay.DiLoCo(SIZE, EVERY, fragments=parts, delay=1, share=0.25)

    def check(batch):
        found = alone.run(1)
        assert_near(weights(model), found[rank], which)
        if batch + 1 == DEATH:
            die(rank, 2)
            del alone.ranks[2]

    train(model, rank, [diloco, seen_by(keras, check)], last=BATCHES)
    diloco.synchronize()
    assert_near(weights(model), alone.synchronize(), which)
    use_transaction(None)
    return [np.asarray(each).tobytes() for each in (*weights(model), *diloco._common)]


@pytest.mark.parametrize("which", slow_but(["torch"], RUNNERS))
def test_survivors_go_on(which):
    runs(which)  # skips what is not installed
    first, second, _ = RUNNERS[which](SIZE, killed, which, timeout_s=100, keep_going=True)
    assert first == second


def joined(rank, which):
    """Rank 1 comes when rank 0 has trained; then both have."""
    keras, kv = prepared(which)
    use_transaction(Steps(NoLoss(), current))
    model = model_of(keras, which)
    diloco = kv.callbacks.DiLoCo(EVERY, fragments=2)
    state = elastic.State(diloco=diloco)
    with pytest.raises(InvalidArgumentError, match=r"call its set_model\(model\) before"):
        diloco.enter_world()
    diloco.set_model(model)
    diloco.enter_world()
    with pytest.raises(InvalidArgumentError, match="leave model out"):
        elastic.State(diloco=diloco, model=model).sync()

    def everything():
        numbers = [*weights(model), *variables_of(model.optimizer), *diloco._common]
        return diloco.steps, [np.array(each) for each in numbers]

    model.optimizer.build(model.trainable_variables)
    found = []
    for late in (1, None):
        if rank != late:
            diloco._exchange.before_step()
            model.trainable_variables[0].assign_add(np.full((3, 2), rank + 1.0))
            diloco._velocities[0] += rank + 1.0
            diloco.steps += 1 + rank
        before = everything()
        state.sync()
        found.append((before, everything(), np.array(diloco._velocities[0])))
    use_transaction(None)
    kv.barrier()
    kv.shutdown()
    return found


@pytest.mark.parametrize("which", slow_but(["torch"], RUNNERS))
def test_who_joins_is_a_copy(which):
    (first, later), (second, last) = runs(which)(joined, which)

    def same(one, other):
        return one[0] == other[0] and all(map(np.array_equal, one[1], other[1]))

    assert same(first[0], first[1])
    assert not same(second[0], first[0])
    assert same(second[1], first[1])
    np.testing.assert_array_equal(second[2], first[2])
    assert same(later[0], later[1])
    assert same(last[0], last[1])
    assert not same(later[1], last[1])
