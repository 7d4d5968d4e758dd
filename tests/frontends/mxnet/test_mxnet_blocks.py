"""``Compression.int8`` and ``.int4`` between hosts; see tests/gradients/test_blocks.py."""

from __future__ import annotations

import pytest
from blocks import COLUMNS, HOSTS, ROWS, bias, check, matrix
from forked import run_mxnet_ranks
from frameworks import is_installed

pytestmark = pytest.mark.skipif(not is_installed("mxnet"), reason="MXNet is not installed")
CODECS = ("int8", "int4")


def mxnet_trainer(rank):
    import mxnet as mx

    import kolovod.mxnet as kv

    kv.init()
    for codec in CODECS:
        compression = getattr(kv.Compression, codec)
        for given, encoded in ((compression, codec), (compression(exclude=["*weight"]), None)):
            weight = mx.gluon.Parameter("weight", shape=(ROWS, COLUMNS), init="zeros")
            other = mx.gluon.Parameter("bias", shape=(2_000,), init="zeros")
            parameters = {"weight": weight, "bias": other}
            for parameter in parameters.values():
                parameter.initialize(mx.init.Zero())
            trainer = kv.DistributedTrainer(
                parameters, "sgd", {"learning_rate": 1.0}, compression=given
            )
            with mx.autograd.record():
                total = (weight.data() * mx.nd.array(matrix(rank))).sum()
                total = total + (other.data() * mx.nd.array(bias(rank))).sum()
            total.backward()
            trainer.step(1)
            check(-weight.data().asnumpy(), -other.data().asnumpy(), encoded)
    kv.shutdown()


def test_gradients_of_a_trainer():
    run_mxnet_ranks(2, mxnet_trainer, hosts=HOSTS)
