"""Horovod's names in worlds that grow and shrink."""

from __future__ import annotations

import pytest
from forked import run_keras_ranks, run_torch_ranks
from frameworks import is_installed
from growing import MOMENTUM, RATE, STEPS, batch, check, replayed, start, worlds_of


@pytest.mark.skipif(not is_installed("torch"), reason="PyTorch is not installed")
def test_torch():
    def work(launched_as):
        import torch

        import horovod.torch as hvd

        hvd.init(comm=[launched_as])
        net = torch.nn.Linear(3, 2, dtype=torch.float64)
        with torch.no_grad():
            net.weight.copy_(torch.from_numpy(start()[0].T + launched_as))
            net.bias.copy_(torch.from_numpy(start()[1]))
        sgd = torch.optim.SGD(net.parameters(), RATE, MOMENTUM)
        optimizer = hvd.DistributedOptimizer(sgd, net.named_parameters())
        hvd.shutdown()
        found = []
        for phase in worlds_of(hvd, launched_as):
            hvd.broadcast_parameters(net.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            for row in range(STEPS):
                optimizer.zero_grad()
                inputs, targets = map(torch.from_numpy, batch(phase, row, launched_as))
                torch.nn.functional.mse_loss(net(inputs), targets).backward()
                optimizer.step()
            now = [net.weight.detach().numpy().T.copy(), net.bias.detach().numpy().copy()]
            found += [None] * (phase - len(found)) + [now]
        return found

    check(run_torch_ranks(3, work), replayed())


@pytest.mark.frameworks
@pytest.mark.skipif(not is_installed("keras"), reason="Keras is not installed")
@pytest.mark.skipif(not is_installed("tensorflow"), reason="TensorFlow is not installed")
@pytest.mark.timeout(150)
def test_keras_on_tensorflow():
    def work(launched_as):
        import keras

        import horovod.tensorflow.keras as hvd
        from kolovod.keras import broadcast_model

        keras.backend.set_floatx("float64")
        hvd.init(comm=[launched_as])
        dense = keras.layers.EinsumDense("ab,bc->ac", 2, bias_axes="c")
        model = keras.Sequential([keras.layers.Input((3,)), dense])
        model.set_weights([value + launched_as for value in start()])
        sgd = keras.optimizers.SGD(RATE, momentum=MOMENTUM)
        model.compile(hvd.DistributedOptimizer(sgd), "mse")
        hvd.shutdown()
        found = []
        for phase in worlds_of(hvd, launched_as):
            if phase:
                broadcast_model(model)
            for row in range(STEPS):
                model.train_on_batch(*batch(phase, row, launched_as))
            found += [None] * (phase - len(found)) + [model.get_weights()]
        return found

    results = run_keras_ranks(3, work, timeout_s=120, env={"KOLOVOD_ELASTIC": "1"})
    check(results, replayed(), rtol=1e-6)
