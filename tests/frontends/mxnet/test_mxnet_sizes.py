"""MXNet's trainers and optimizers in worlds that grow and shrink, each of them one object."""

from __future__ import annotations

import pytest
from forked import run_mxnet_ranks
from frameworks import is_installed
from growing import RATE, STEPS, batch, check, replayed, start, worlds_of

pytestmark = pytest.mark.skipif(not is_installed("mxnet"), reason="MXNet is not installed")


def new_net(mx, launched_as):
    net = mx.gluon.nn.Dense(2, in_units=3, dtype="float64")
    net.initialize()
    kernel, bias = (value + launched_as for value in start())
    net.weight.set_data(mx.nd.array(kernel.T, dtype="float64"))
    net.bias.set_data(mx.nd.array(bias, dtype="float64"))
    return net


def stepping(mx, names, net, way):
    """What steps with the gradients that ``net`` has."""
    options = {"learning_rate": RATE}
    if way == "trainer":
        trainer = names.DistributedTrainer(net.collect_params(), "sgd", options)
        return lambda: trainer.step(1)
    optimizer = names.DistributedOptimizer(mx.optimizer.create("sgd", **options))
    update = mx.optimizer.get_updater(optimizer)

    def step():
        for i, parameter in enumerate(net.collect_params().values()):
            update(i, parameter.grad(), parameter.data())

    return step


WAYS = ["kolovod trainer", "kolovod optimizer", "horovod trainer", "horovod optimizer"]


def test_steps_in_worlds_that_grow_and_shrink():
    def work(launched_as):
        import mxnet as mx

        import horovod.mxnet as hvd
        import kolovod.mxnet as kv

        kv.init(comm=[launched_as])  # all are made in a world of one
        trained = {}
        for way in WAYS:
            package, kind = way.split()
            net = new_net(mx, launched_as)
            trained[way] = net, stepping(mx, {"kolovod": kv, "horovod": hvd}[package], net, kind)
        kv.shutdown()
        found = {way: [] for way in WAYS}
        for phase in worlds_of(kv, launched_as):
            for way, (net, step) in trained.items():
                kv.broadcast_parameters(net.collect_params())
                for row in range(STEPS):
                    inputs, targets = batch(phase, row, launched_as)
                    with mx.autograd.record():
                        given = mx.nd.array(inputs, dtype="float64")
                        loss = ((net(given) - mx.nd.array(targets, dtype="float64")) ** 2).mean()
                    loss.backward()
                    step()
                now = [net.weight.data().asnumpy().T, net.bias.data().asnumpy()]
                found[way] += [None] * (phase - len(found[way])) + [now]
        return found

    results = run_mxnet_ranks(3, work, timeout_s=100, env={"KOLOVOD_ELASTIC": "1"})
    for way in WAYS:
        check([each[way] for each in results], replayed(momentum=0.0), rtol=1e-5)
