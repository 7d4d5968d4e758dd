"""Training with MXNet: as one process with the same global batch, and the same on all ranks."""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest
from forked import run_mxnet_ranks
from frameworks import is_installed

from kolovod.errors import InvalidArgumentError, MismatchError

pytestmark = pytest.mark.skipif(not is_installed("mxnet"), reason="MXNet is not installed")

ROWS, STEPS = 12, 4  # of a global batch


def data():
    """Batches for all ranks together, float64: images and labels."""
    draw = np.random.default_rng(11)
    return [(draw.normal(size=(ROWS, 1, 8, 8)), draw.integers(0, 5, ROWS)) for _ in range(STEPS)]


def net_of(mx, prefix, *, seed=0, hybrid=False, contexts=None):
    """A convolution and two dense layers in float64, some of whose shapes are known later."""
    net = mx.gluon.nn.HybridSequential(prefix=prefix)
    with net.name_scope():
        net.add(
            mx.gluon.nn.Conv2D(6, 3, activation="tanh"),
            mx.gluon.nn.Flatten(),
            mx.gluon.nn.Dense(40, activation="tanh"),
            mx.gluon.nn.Dense(5),
        )
    net.cast("float64")
    mx.random.seed(seed)
    net.initialize(mx.init.Xavier(), ctx=contexts)
    if hybrid:
        net.hybridize()
    return net


def train(mx, net, trainer, rank, size, batch_size=None):
    """All steps with this rank's part of each batch.

    ``batch_size`` is for ``step``; None: losses are averaged before, in float64. MXNet's optimizers
    take ``rescale_grad`` as a float32, so a third of it is not exact.
    """
    loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    for images, labels in data():
        mine = np.array_split(np.arange(ROWS), size)[rank]
        contexts = net.collect_params().list_ctx()
        with mx.autograd.record():
            losses = [
                loss_of(
                    net(mx.nd.array(images[part], ctx, dtype="float64")),
                    mx.nd.array(labels[part], ctx, dtype="float64"),
                )
                for part, ctx in zip(np.array_split(mine, len(contexts)), contexts, strict=True)
            ]
            if batch_size is None:
                losses = [
                    loss / mx.nd.array([len(mine)], loss.context, "float64") for loss in losses
                ]
        mx.autograd.backward(losses)
        trainer.step(batch_size or 1)
    return values_of(net)


def values_of(net):
    """By the names that ranks have in common."""
    prefix = net.prefix
    params = net.collect_params().items()
    return {name.removeprefix(prefix): p.list_data()[-1].asnumpy() for name, p in params}


def check_equal(kv, mine, wanted=None):
    """The same bits on all ranks; and what one process came to, to rounding."""
    for other in kv.allgather_object(mine):
        for name, values in other.items():
            np.testing.assert_array_equal(values, mine[name], name)
            if wanted is not None:
                np.testing.assert_allclose(values, wanted[name], 1e-9, 1e-11, err_msg=name)


OPTIMIZERS = {
    "sgd": {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01},
    "adam": {"learning_rate": 0.01},
}


@pytest.mark.parametrize("size", [2, 3])
def test_as_one_process_with_the_same_global_batch(size):
    def work(rank):
        import mxnet as mx

        import kolovod.mxnet as kv

        kv.init()
        for turn, (kind, options) in enumerate(OPTIMIZERS.items()):
            alone = net_of(mx, f"alone{turn}_")
            batch_size = ROWS if size == 2 else None
            trainer = mx.gluon.Trainer(alone.collect_params(), kind, options)
            wanted = train(mx, alone, trainer, 0, 1, batch_size)
            net = net_of(mx, f"net{turn}_", seed=rank, hybrid=turn == 1)
            params = net.collect_params()
            kv.broadcast_parameters(params)
            further = [{}, {"groups": 2, "gradient_predivide_factor": 2.0}][turn]
            trainer = kv.DistributedTrainer(params, kind, options, **further)
            batch_size = ROWS // 2 if size == 2 else None
            check_equal(kv, train(mx, net, trainer, rank, size, batch_size), wanted)

    run_mxnet_ranks(size, work)


def test_several_devices_compression_and_forgotten_broadcasts():
    def work(rank):
        import mxnet as mx

        import kolovod.mxnet as kv

        kv.init()
        alone = net_of(mx, "alone_")
        wanted = train(
            mx, alone, mx.gluon.Trainer(alone.collect_params(), "sgd", OPTIMIZERS["sgd"]), 0, 1
        )
        both = [mx.cpu(0), mx.cpu(1)]
        net = net_of(mx, "both_", contexts=both)
        kv.broadcast_parameters(net.collect_params())
        trainer = kv.DistributedTrainer(net.collect_params(), "sgd", OPTIMIZERS["sgd"])
        check_equal(kv, train(mx, net, trainer, rank, 2), wanted)
        for ctx in both:
            np.testing.assert_array_equal(
                net[3].bias.data(ctx).asnumpy(), values_of(net)["dense1_bias"]
            )

        net = net_of(mx, "small_")
        compression = {"compression": kv.Compression.fp16}
        kv.broadcast_parameters(net.collect_params())
        trainer = kv.DistributedTrainer(
            net.collect_params(), "sgd", OPTIMIZERS["sgd"], **compression
        )
        got = train(mx, net, trainer, rank, 2)
        check_equal(kv, got)
        difference = max(np.abs(got[name] - wanted[name]).max() for name in wanted)
        assert 1e-8 < difference < 1e-3  # float16 was used

        net = net_of(mx, "forgotten_", seed=rank)  # equal after the first step all the same
        trainer = kv.DistributedTrainer(net.collect_params(), "adam")
        check_equal(kv, train(mx, net, trainer, rank, 2))

    run_mxnet_ranks(2, work)


def test_gradients_are_averages_between_allreduce_and_update():
    def work(rank):
        import mxnet as mx

        import kolovod.mxnet as kv

        kv.init()
        members = kv.add_process_set([0, 1])
        weight = mx.gluon.Parameter("weight", shape=(2,), init="zeros")
        weight.initialize()
        trainer = kv.DistributedTrainer(
            [weight], "sgd", {"learning_rate": 1.0}, process_set=members
        )
        with mx.autograd.record():
            loss = weight.data() * (rank + 1)
        loss.backward()
        trainer.allreduce_grads()
        mean = 1.5 if rank < 2 else 3.0  # rank 2 is not a member
        assert weight.grad().asnumpy().tolist() == [mean] * 2
        weight.grad()[:] = mx.nd.clip(weight.grad(), 0, 1)
        trainer.update(4)
        assert weight.data().asnumpy().tolist() == [-0.25] * 2
        assert trainer.learning_rate == 1.0

    run_mxnet_ranks(3, work)


def test_the_store_adds_up_as_mxnets_own_do():
    def work(rank):
        import mxnet as mx

        import kolovod.mxnet as kv

        kv.init()
        alone = net_of(mx, "alone_")
        wanted = train(
            mx,
            alone,
            mx.gluon.Trainer(alone.collect_params(), "sgd", OPTIMIZERS["sgd"]),
            0,
            1,
            ROWS,
        )
        for turn, store in enumerate(("kolovod", mx.kv.create("kolovod"))):
            net = net_of(mx, f"net{turn}_")
            trainer = mx.gluon.Trainer(
                net.collect_params(), "sgd", OPTIMIZERS["sgd"], kvstore=store
            )
            check_equal(kv, train(mx, net, trainer, rank, 2, ROWS), wanted)
        assert (store.type, store.rank, store.num_workers) == ("kolovod", rank, 2)
        value, out = mx.nd.ones(2) * (rank + 1), [mx.nd.zeros(2), mx.nd.zeros(2)]
        store.pushpull("key", value, out=out, priority=-3)
        assert [v.asnumpy().tolist() for v in (value, *out)] == [[rank + 1] * 2, [3, 3], [3, 3]]
        store.pushpull(7, out)
        assert out[1].asnumpy().tolist() == [12, 12]
        store.broadcast("key", value, out)
        assert out[0].asnumpy().tolist() == [1, 1]
        assert not store.is_capable("optimizer")

        params = net.collect_params()
        refused = {
            "leave update_on_kvstore": lambda: store.set_optimizer(mx.optimizer.SGD()),
            "has no optimizer": lambda: store.save_optimizer_states("x"),
            "capability is 'magic'": lambda: store.is_capable("magic"),
            "only MXNet's own stores know": lambda: mx.gluon.Trainer(
                params, "sgd", kvstore="kolovod", compression_params={"type": "2bit"}
            ).allreduce_grads(),
        }
        for text, attempt in refused.items():
            with pytest.raises(InvalidArgumentError, match=text):
                attempt()
        with pytest.raises(ValueError, match="update_on_kvstore=False"):
            mx.gluon.Trainer(
                params, "sgd", kvstore="kolovod", update_on_kvstore=True
            ).allreduce_grads()

    run_mxnet_ranks(2, work)


def test_a_module_with_a_distributed_optimizer():
    """The interface of MXNet before Gluon."""

    def fit(mx, optimizer, images, labels, arguments, **store):
        x = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=5, name="fc")
        module = mx.mod.Module(mx.sym.SoftmaxOutput(x, name="softmax"), context=mx.cpu())
        batches = mx.io.NDArrayIter(images, labels, batch_size=len(images))
        module.bind(batches.provide_data, batches.provide_label)
        module.init_params(mx.init.Zero(), arg_params=arguments)
        module.init_optimizer(optimizer=optimizer, **store)
        for _ in range(STEPS):
            batches.reset()
            module.forward_backward(next(batches))
            module.update()
        return {name: value.asnumpy() for name, value in module.get_params()[0].items()}

    def work(rank):
        import mxnet as mx

        import kolovod.mxnet as kv

        kv.init()
        images, labels = data()[0]
        images = images.reshape(ROWS, -1)
        mine = np.array_split(np.arange(ROWS), 2)[rank]
        options = {"learning_rate": 0.1, "momentum": 0.9}
        start = {"fc_weight": mx.nd.ones((5, 64)) * rank, "fc_bias": mx.nd.zeros(5)}
        kv.broadcast_parameters(start, 1)
        wanted = fit(
            mx, mx.optimizer.SGD(rescale_grad=1 / ROWS, **options), images, labels, start,
            kvstore=None,
        )  # fmt: skip
        optimizer = kv.DistributedOptimizer(mx.optimizer.SGD(rescale_grad=2 / ROWS, **options))
        got = fit(mx, optimizer, images[mine], labels[mine], start, kvstore=None)
        for other in kv.allgather_object(got):
            for name, values in other.items():
                np.testing.assert_array_equal(values, got[name])
                np.testing.assert_allclose(values, wanted[name], 1e-4, 1e-6)  # float32
        with pytest.raises(InvalidArgumentError, match="give a Module kvstore=None"):
            fit(mx, "sgd", images[mine], labels[mine], start, kvstore="kolovod")

    run_mxnet_ranks(2, work)


def test_distributed_optimizer_is_the_one_that_it_is_made_of():
    def work(rank):
        import mxnet as mx

        import kolovod.mxnet as kv

        kv.init()
        inner = mx.optimizer.LARS(learning_rate=0.5, momentum=0.9)
        optimizer = kv.DistributedOptimizer(inner)
        assert isinstance(optimizer, mx.optimizer.Optimizer)
        optimizer.set_learning_rate(0.25)
        optimizer.rescale_grad = 0.5
        optimizer.set_wd_mult({"a_gamma": 2.0})
        assert (inner.lr, inner.rescale_grad, optimizer.learning_rate) == (0.25, 0.5, 0.25)
        assert optimizer.wd_mult is inner.wd_mult
        assert optimizer.aggregate_num == inner.aggregate_num

        def updated(optimizer):
            updater = mx.optimizer.get_updater(optimizer)
            weights = [mx.nd.zeros(3), mx.nd.zeros(2)]
            updater([0, 1], [mx.nd.ones(3) * (rank + 1), mx.nd.ones(2) * rank], weights)
            return updater, [weight[0].asscalar() for weight in weights]

        updater, stepped = updated(kv.DistributedOptimizer(mx.optimizer.SGD(learning_rate=1.0)))
        assert stepped == [-1.5, -0.5]
        loaded = mx.optimizer.get_updater(mx.optimizer.SGD())
        loaded.set_states(updater.get_states(dump_optimizer=True))
        assert type(loaded.optimizer) is kv.DistributedOptimizer
        assert updated(loaded.optimizer)[1] == [-1.5, -0.5]

        some = kv.add_process_set([0])
        apart = kv.DistributedOptimizer(mx.optimizer.SGD(learning_rate=1.0), process_set=some)
        assert updated(apart)[1] == [-rank - 1, -rank]
        with pytest.raises(InvalidArgumentError, match="dump_optimizer=False"):
            pickle.dumps(apart)

    run_mxnet_ranks(2, work)


def test_trainers_states_are_saved_and_loaded(tmp_path):
    def work(rank, folder):
        import mxnet as mx

        import kolovod.mxnet as kv

        kv.init()
        net = net_of(mx, "net_")
        kv.broadcast_parameters(net.collect_params())
        trainer = kv.DistributedTrainer(net.collect_params(), "sgd", OPTIMIZERS["sgd"])
        train(mx, net, trainer, rank, 2)
        name = f"{folder}/{rank}"
        trainer.save_states(name)
        net.save_parameters(name + ".params")
        wanted = train(mx, net, trainer, rank, 2)
        other = net_of(mx, "other_")
        other.load_parameters(name + ".params")
        trainer = kv.DistributedTrainer(other.collect_params(), "sgd", OPTIMIZERS["sgd"])
        trainer.load_states(name)
        got = train(mx, other, trainer, rank, 2)
        for key, values in got.items():
            np.testing.assert_array_equal(values, wanted[key])

    run_mxnet_ranks(2, work, str(tmp_path))


def test_what_cannot_work():
    def work(rank):
        import mxnet as mx

        import kolovod.mxnet as kv

        kv.init()
        net = net_of(mx, "net_")
        sgd = mx.optimizer.SGD()
        wrong = {
            "the optimizer is a DistributedOptimizer, which": {
                "optimizer": kv.DistributedOptimizer(sgd)
            },
            "process_set is 3": {"process_set": 3},
            "only with op Average": {"op": kv.Sum, "gradient_predivide_factor": 2.0},
            "gradient_predivide_factor is -1": {"gradient_predivide_factor": -1},
            "groups is -2": {"groups": -2},
            "compression is 'fp16'": {"compression": "fp16"},
            "MXNet has no bfloat16": {"compression": kv.Compression.bf16},
        }
        for text, given in wrong.items():
            with pytest.raises(InvalidArgumentError, match=re.escape(text)):
                kv.DistributedTrainer(net.collect_params(), **{"optimizer": sgd, **given})
        for text, optimizer in (
            ("optimizer is 'sgd'", "sgd"),
            ("DistributedOptimizer already", kv.DistributedOptimizer(sgd)),
        ):
            with pytest.raises(InvalidArgumentError, match=text):
                kv.DistributedOptimizer(optimizer)

        embedding = mx.gluon.nn.Embedding(4, 2, sparse_grad=True)
        embedding.initialize()
        trainer = kv.DistributedTrainer(embedding.collect_params(), "sgd")
        with mx.autograd.record():
            loss = embedding(mx.nd.array([1, 2])).sum()
        loss.backward()
        with pytest.raises(ValueError, match="sparse gradients"):
            trainer.step(1)

        own = mx.gluon.nn.Dense(2 + rank, in_units=3, prefix="own_")
        own.initialize()
        trainer = kv.DistributedTrainer(own.collect_params(), "sgd")
        with mx.autograd.record():
            loss = own(mx.nd.ones((1, 3)))
        loss.backward()
        with pytest.raises(MismatchError, match=r"rank 0 has \(2.*, rank 1 has \(3"):
            trainer.step(1)

    run_mxnet_ranks(2, work)
