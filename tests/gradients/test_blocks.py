"""``Compression.int8`` and ``.int4`` of optimizers and tapes between hosts, in every front end.

A matrix is encoded, a bias and what is excluded by name are not. Learning rates are 1, so weights
are the averaged gradients with their sign turned. MXNet, which has an environment of its own:
tests/frontends/mxnet.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from blocks import COLUMNS, HOSTS, ROWS, average_of, bias, check, matrix, reduced
from forked import (
    KERAS_RUNNERS,
    run_jax_ranks,
    run_tensorflow_ranks,
    run_torch_ranks,
)
from frameworks import is_installed
from slow import slow_but

from kolovod.core.codecs import Codec
from kolovod.core.ops import Adasum, Average, Sum
from kolovod.errors import InvalidArgumentError
from kolovod.gradients.compression import Compression, InBlocks, Key, adapted
from kolovod.gradients.spec import ReduceSpec

CODECS = ("int8", "int4")
frameworks = pytest.mark.frameworks


def test_which_are_encoded():
    compressor = adapted(Compression.int8)
    assert isinstance(compressor, InBlocks)
    assert compressor.compress("w", matrix(0)).codec is Codec.int8
    assert compressor.compress("b", bias(0)).codec is Codec.none
    some = adapted(Compression.int4(exclude=["head.*", "*.norm.weight"], one_dimensional=True))
    assert some.compress("b", bias(0)).codec is Codec.int4
    for name in ("head.weight", "layers.3.norm.weight"):
        assert some.compress(name, matrix(0)).codec is Codec.none
    assert some.compress(Key(3, "head.weight"), matrix(0)).codec is Codec.none
    assert some.compress(Key(3, "headless"), matrix(0)).codec is Codec.int4
    assert repr(Compression.int4) == "Compression.int4"
    with pytest.raises(InvalidArgumentError, match=r"exclude is 'head': give a list"):
        Compression.int8(exclude="head")
    with pytest.raises(InvalidArgumentError, match=r"is Compression.int4, .* but op is Adasum"):
        ReduceSpec.checked(Compression.int4, Adasum, 1.0, None, (Average, Sum, Adasum))


def torch_optimizer(rank, horovod):
    import importlib

    import torch

    hvd = importlib.import_module("horovod.torch" if horovod else "kolovod.torch")
    hvd.init()

    def step(compression):
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.zeros(ROWS, COLUMNS))
        model.bias = torch.nn.Parameter(torch.zeros(2_000))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0),
            named_parameters=model.named_parameters(),
            compression=compression,
        )
        gradients = torch.from_numpy(matrix(rank)), torch.from_numpy(bias(rank))
        ((model.weight * gradients[0]).sum() + (model.bias * gradients[1]).sum()).backward()
        optimizer.step()
        return -model.weight.detach().numpy(), -model.bias.detach().numpy()

    for codec in CODECS:
        compression = getattr(hvd.Compression, codec)
        check(*step(compression), codec)
        check(*step(compression(exclude=["wei*"])), None)
        mine = torch.from_numpy(matrix(rank))
        total = hvd.allreduce(mine, compression=compression)
        assert np.array_equal(total.numpy(), average_of(matrix, codec))
        if not horovod:
            return_to = mine.clone().requires_grad_()
            hvd.allreduce(return_to, compression=compression).backward(mine)
            assert np.array_equal(return_to.grad.numpy(), average_of(matrix, codec))
    hvd.shutdown()


@frameworks
@pytest.mark.skipif(not is_installed("torch"), reason="PyTorch is not installed")
@pytest.mark.parametrize("horovod", [False, True], ids=["kolovod", "horovod"])
def test_torch(horovod):
    run_torch_ranks(2, torch_optimizer, horovod, hosts=HOSTS)


def tensorflow_tape(rank, horovod):
    import importlib

    import tensorflow as tf

    hvd = importlib.import_module("horovod.tensorflow" if horovod else "kolovod.tensorflow")
    hvd.init()
    weight = tf.Variable(tf.zeros((ROWS, COLUMNS)), name="weight")
    other = tf.Variable(tf.zeros(2_000), name="bias")

    def gradients(compression):
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(weight * matrix(rank)) + tf.reduce_sum(other * bias(rank))
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        return tape.gradient(total, [weight, other])

    for codec in CODECS:
        compression = getattr(hvd.Compression, codec)
        without = compression(exclude=["weight"])
        for run in (lambda f: f, tf.function):
            check(*run(functools.partial(gradients, compression))(), codec)
            check(*run(functools.partial(gradients, without))(), None)

            def averaged(compression=compression):
                return hvd.allreduce(tf.constant(matrix(rank)), compression=compression)

            assert np.array_equal(run(averaged)().numpy(), average_of(matrix, codec))
    hvd.shutdown()


@frameworks
@pytest.mark.skipif(not is_installed("tensorflow"), reason="TensorFlow is not installed")
@pytest.mark.parametrize("horovod", [False, True], ids=["kolovod", "horovod"])
def test_tensorflow(horovod):
    run_tensorflow_ranks(2, tensorflow_tape, horovod, hosts=HOSTS)


def jax_program(rank):
    import jax
    import jax.numpy as jnp

    import kolovod.jax as kv

    kv.init()
    tree = {"w": jnp.asarray(matrix(rank)), "b": jnp.asarray(bias(rank))}
    for codec in CODECS:
        compression = getattr(kv.Compression, codec)
        without = compression(exclude=["[[]'w']"])
        for run in (lambda f: f, jax.jit):
            of = run(lambda t, c=compression: kv.allreduce_pytree(t, compression=c))(tree)
            check(of["w"], of["b"], codec)
            of = run(lambda t, c=without: kv.allreduce_pytree(t, compression=c))(tree)
            check(of["w"], of["b"], None)
            one = run(lambda x, c=compression: kv.allreduce(x, compression=c))(tree["w"])
            assert np.array_equal(one, average_of(matrix, codec))
            pull = run(
                jax.grad(lambda x, c=compression: (kv.allreduce(x, compression=c) * x).sum())
            )
            assert np.isfinite(pull(tree["w"])).all()
    kv.shutdown()


@frameworks
@pytest.mark.skipif(not is_installed("jax"), reason="JAX is not installed")
def test_jax():
    run_jax_ranks(2, jax_program, hosts=HOSTS)


def keras_optimizer(rank, which):
    import importlib

    name = "tf_keras" if which == "tf_keras" else "keras"
    keras = importlib.import_module(name)
    kv = importlib.import_module("kolovod.keras")
    kv.init()
    for codec in CODECS:
        compression = getattr(kv.Compression, codec)
        for given, encoded in ((compression, codec), (compression(exclude=["*kernel*"]), None)):
            for eagerly in (False, True):
                model = keras.Sequential([
                    keras.layers.Input((ROWS,)),
                    keras.layers.Dense(COLUMNS, use_bias=False, kernel_initializer="zeros"),
                ])  # fmt: skip
                optimizer = kv.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=given)
                model.compile(optimizer, "mse", run_eagerly=eagerly)
                # Of one row with a single one, the gradient is a matrix with one row of numbers.
                features = np.eye(ROWS, dtype=np.float32)
                labels = matrix(rank)
                model.fit(features, labels, batch_size=ROWS, epochs=1, verbose=0)
                both = [matrix(r) * np.float32(-2.0 / labels.size) for r in range(2)]
                total = (both[0] + both[1]) / np.float32(2)
                wanted = total if encoded is None else reduced(both, HOSTS, encoded, 2)
                found = -np.asarray(model.get_weights()[0])
                np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-9)
                off = np.abs(found - total).max()
                assert (off > 1e-6) == (encoded is not None)
    kv.shutdown()


@frameworks
@pytest.mark.timeout(200)
@pytest.mark.parametrize("which", slow_but(["torch"], ["tensorflow", "torch", "jax", "tf_keras"]))
def test_keras(which):
    needed = which if which == "tf_keras" else "keras"
    for module in (needed, "tensorflow" if which == "tf_keras" else which):
        if not is_installed(module):
            pytest.skip(f"{module} is not installed")
    run = functools.partial(KERAS_RUNNERS[which], 2, timeout_s=150)
    run(keras_optimizer, which, hosts=HOSTS)
