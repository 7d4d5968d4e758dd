"""Ranks that train with MXNet hear it when they are not alike."""

from __future__ import annotations

import pytest
from forked import run_mxnet_ranks
from frameworks import is_installed

from kolovod.errors import MismatchError
from kolovod.gradients import sentinel

pytestmark = pytest.mark.skipif(not is_installed("mxnet"), reason="MXNet is not installed")


def trained(mx, kv, change=None, process_set=None):
    """What is said on this rank; ``change(net, trainer)`` comes on rank 1 after 5 of 22 steps."""
    said = []
    sentinel.report_to_stderr = said.append
    net = mx.gluon.nn.Dense(3, in_units=4, prefix="layer_")
    net.initialize(mx.init.Constant(0.5))
    trainer = kv.DistributedTrainer(
        net.collect_params(), "sgd", {"learning_rate": 0.01}, process_set=process_set
    )
    for step in range(22):
        if step == 5 and kv.rank() == 1 and change is not None:
            change(net, trainer)
        with mx.autograd.record():
            loss = net(mx.nd.full((2, 4), 0.1 * (step + kv.rank()))).sum()
        loss.backward()
        trainer.step(1)
    return said


def updated(mx, kv, change=None):
    """The same by a loop that calls an updater, for each parameter by itself."""
    said = []
    sentinel.report_to_stderr = said.append
    weights = [mx.nd.full((4, 3), 0.5), mx.nd.full((3,), 0.5)]
    optimizer = mx.optimizer.create(
        "sgd", learning_rate=0.01, param_idx2name={0: "weight", 1: "bias"}
    )
    updater = mx.optimizer.get_updater(kv.DistributedOptimizer(optimizer))
    for step in range(22):
        if step == 5 and kv.rank() == 1 and change is not None:
            change(weights, optimizer)
        for index, weight in enumerate(weights):
            updater(index, mx.nd.full(weight.shape, 0.1 * (step + kv.rank())), weight)
    return said


def check_of_updaters(rank):
    import mxnet as mx

    import kolovod.mxnet as kv

    kv.init()

    def lower(weights, optimizer):
        optimizer.set_learning_rate(0.005)

    def disturb(weights, optimizer):
        weights[1] += 1

    assert updated(mx, kv) == []
    rate, weights = updated(mx, kv, lower), updated(mx, kv, disturb)
    if rank != 0:
        assert rate == weights == []
        return
    (text,) = rate
    assert "option 'learning_rate' of the parameters from 'weight'" in text
    assert "rank 0 has 0.01, rank 1 has 0.005" in text
    (text,) = weights
    assert "in step 11 of SGD: parameter" in text, text
    assert "'bias'" in text, text


def check(rank):
    import mxnet as mx

    import kolovod.mxnet as kv

    kv.init()

    def lower(net, trainer):
        trainer.set_learning_rate(0.005)

    def disturb(net, trainer):
        net.bias.set_data(net.bias.data() + 1)

    alone = kv.add_process_set([0])
    assert trained(mx, kv) == trained(mx, kv, disturb, alone) == []
    rate, weights = trained(mx, kv, lower), trained(mx, kv, disturb)
    sentinel.use("error")
    with pytest.raises(MismatchError, match="KOLOVOD_SENTINEL=error"):
        trained(mx, kv, lower)
    sentinel.use("off")
    assert trained(mx, kv, lower) == []
    if rank != 0:
        assert rate == weights == []
        return
    (text,) = rate
    assert "in step 6 of SGD: option 'learning_rate' of the parameters from 'layer_" in text
    assert "rank 0 has 0.01, rank 1 has 0.005" in text
    (text,) = weights
    assert "in step 11 of SGD: parameter 'layer_" in text


@pytest.mark.parametrize("work", [check, check_of_updaters])
def test_differences_are_told(work):
    run_mxnet_ranks(2, work)
