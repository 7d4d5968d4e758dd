"""horovod.mxnet: the names and parameters of Horovod, and its arithmetic."""

from __future__ import annotations

import inspect
import pickle

import numpy as np
import pytest
from forked import run_mxnet_ranks
from frameworks import is_installed

pytestmark = pytest.mark.skipif(not is_installed("mxnet"), reason="MXNet is not installed")

SCALED = "prescale_factor=1.0, postscale_factor=1.0"
REDUCED = f"average=None, name=None, priority=0, {SCALED}, process_set=GPS, op=None"
MOVED = "name=None, priority=0, process_set=GPS"
SCATTERED = f"op=0, {MOVED}, {SCALED}"
SIGNATURES = {
    "init": "comm=None, process_sets=None",
    **dict.fromkeys(
        ("shutdown", "is_initialized", "rank", "size", "local_rank", "local_size", "cross_rank",
         "cross_size"), "",
    ),
    **dict.fromkeys(("allreduce", "allreduce_"), f"tensor, {REDUCED}"),
    **dict.fromkeys(("grouped_allreduce", "grouped_allreduce_"), f"tensors, {REDUCED}"),
    "allgather": f"tensor, {MOVED}",
    "grouped_allgather": f"tensors, {MOVED}",
    **dict.fromkeys(("broadcast", "broadcast_"), f"tensor, root_rank, {MOVED}"),
    "alltoall": f"tensor, splits=None, {MOVED}",
    "reducescatter": f"tensor, {SCATTERED}",
    "grouped_reducescatter": f"tensors, {SCATTERED}",
    "broadcast_object": "obj, root_rank=0, name=None",
    "allgather_object": "obj, name=None",
    "broadcast_parameters": "params, root_rank=0, prefix=None",
    "DistributedOptimizer": "optimizer, gradient_predivide_factor=1.0, num_groups=0, "
    "process_set=GPS",
    "DistributedTrainer": "params, optimizer, optimizer_params=None, compression=none, "
    "gradient_predivide_factor=1.0, prefix=None, num_groups=0, process_set=GPS",
}  # fmt: skip


def test_signatures_and_names():
    def work(rank):
        import horovod.mxnet as hvd
        from horovod.mxnet import mpi_ops

        named = {id(hvd.global_process_set): "GPS", id(hvd.Compression.none): "none"}
        for name, wanted in SIGNATURES.items():
            written = [
                parameter.name
                if parameter.default is parameter.empty
                else f"{parameter.name}={named.get(id(parameter.default), parameter.default)}"
                for parameter in inspect.signature(getattr(hvd, name)).parameters.values()
            ]
            assert ", ".join(written) == wanted, name
        for module in (hvd, mpi_ops):
            assert [name for name in module.__all__ if not hasattr(module, name)] == []
        assert hvd.__version__ == "0.28.1"
        assert not {"join", "barrier", "elastic", "allreduce_async"} & set(dir(hvd))  # as there

    run_mxnet_ranks(1, work)


def test_before_init_the_words_are_those_of_horovod():
    def work(rank):
        import mxnet as mx

        import horovod.mxnet as hvd
        import kolovod

        x = mx.nd.ones(2)
        calls = (
            hvd.rank,
            hvd.size,
            lambda: hvd.allreduce(x),
            lambda: hvd.broadcast_(x, 0),
            lambda: hvd.allgather_object(3),
            lambda: hvd.broadcast_parameters({"x": x}),
        )
        for call in calls:
            with pytest.raises(ValueError, match="Horovod has not been initialized") as caught:
                call()
            assert isinstance(caught.value, hvd.HorovodInternalError)
        with pytest.raises(ValueError, match=r"^there is no world"):
            kolovod.rank()
        return True

    assert all(run_mxnet_ranks(1, work))


def test_verbs():
    def work(rank):
        import mxnet as mx

        import horovod.mxnet as hvd

        hvd.init()
        x = mx.nd.array([1.0, 2.0]) * (rank + 1)
        assert hvd.allreduce(x).asnumpy().tolist() == [1.5, 3.0]
        assert hvd.allreduce(x, op=hvd.Sum, priority=-3).asnumpy().tolist() == [3, 6]
        with pytest.warns(DeprecationWarning, match="use op instead"):
            assert hvd.allreduce(x, average=False).asnumpy().tolist() == [3, 6]
        with pytest.raises(ValueError, match="give op only"):
            hvd.allreduce(x, average=True, op=hvd.Sum)
        assert hvd.allreduce(x, prescale_factor=2.0, postscale_factor=0.5)[0].asscalar() == 1.5
        group = hvd.grouped_allreduce([x, x + 1], name="one name", op=hvd.Max)
        assert [one[0].asscalar() for one in group] == [2, 3]
        y = x.copy()
        assert hvd.allreduce_(y, name="one name") is y
        assert hvd.grouped_allreduce_([y], op=hvd.Sum)[0] is y
        assert y[0].asscalar() == 3
        assert hvd.allgather(x).shape == (4,)
        assert [one.shape for one in hvd.grouped_allgather([x, x[:1]])] == [(4,), (2,)]
        assert hvd.broadcast(x, 1)[0].asscalar() == 2
        assert hvd.broadcast_(y * rank, root_rank=1)[0].asscalar() == 3
        assert hvd.alltoall(x).asnumpy().tolist() == [[1, 2], [2, 4]][rank]
        for splits in ([1, 1], mx.nd.array([1, 1], dtype="int32")):
            _, received = hvd.alltoall(x, splits=splits)
            assert (received.asnumpy().tolist(), received.dtype) == ([1, 1], np.int32)
        with pytest.raises(ValueError, match="one whole number of rows"):
            hvd.alltoall(x, splits=mx.nd.array([1, 1]))
        assert hvd.reducescatter(x)[0].asscalar() == [1.5, 3.0][rank]
        assert hvd.grouped_reducescatter([x], hvd.Sum)[0][0].asscalar() == [3, 6][rank]
        assert hvd.broadcast_object([rank]) == [0]
        assert hvd.allgather_object(rank) == [0, 1]
        with pytest.raises(hvd.HorovodInternalError, match="rank 0 has"):
            hvd.allreduce(mx.nd.ones(2 + rank), name="different")
        with pytest.raises(ValueError, match="process_set is 7"):
            hvd.allreduce(x, process_set=7)
        with pytest.raises(ValueError, match="invalid params of type: <class 'list'>"):
            hvd.broadcast_parameters([x])
        params = {"x": x}
        hvd.broadcast_parameters(params, root_rank=1, prefix="before")
        assert x[0].asscalar() == 2

    run_mxnet_ranks(2, work)


def test_gradients_are_summed_and_rescaled():
    def work(rank):
        import mxnet as mx

        import horovod.mxnet as hvd

        hvd.init()

        def trained(optimizer, options, **arguments):
            weight = mx.gluon.Parameter("weight", shape=(2,), init="zeros", dtype="float64")
            weight.initialize()
            trainer = hvd.DistributedTrainer([weight], optimizer, options, **arguments)
            with mx.autograd.record():
                loss = weight.data() * mx.nd.ones(2, dtype="float64") * (rank + 1)
            loss.backward()
            trainer.allreduce_grads()
            gradient = weight.grad()[0].asscalar()
            trainer.update(2)
            return gradient, weight.data()[1].asscalar()

        one = {"learning_rate": 1.0}
        assert trained("sgd", one) == (3, -0.75)  # the mean, 1.5, by 2 samples of each rank
        assert trained("sgd", one, gradient_predivide_factor=2.0) == (1.5, -0.75)
        assert trained("sgd", one, compression=hvd.Compression.fp16, num_groups=1) == (3, -0.75)
        only = hvd.add_process_set([0])
        assert trained("sgd", one, process_set=only) == (rank + 1, -(rank + 1) / 2)

        sgd = mx.optimizer.SGD(learning_rate=1.0, rescale_grad=0.5)
        wrapped = hvd.DistributedOptimizer(sgd)
        assert (sgd.rescale_grad, wrapped.rescale_grad) == (0.25, 0.25)
        weight, gradient = mx.nd.zeros(2), mx.nd.ones(2) * (rank + 1)
        wrapped.update(0, weight, gradient, None)
        assert (gradient[0].asscalar(), weight[0].asscalar()) == (3, -0.75)
        loaded = pickle.loads(pickle.dumps(wrapped))
        assert type(loaded) is hvd.DistributedOptimizer
        assert loaded.rescale_grad == 0.25
        loaded.update(0, weight, mx.nd.ones(2) * (rank + 1), None)
        assert weight[0].asscalar() == -1.5
        with pytest.warns(UserWarning, match="takes the one within"):
            assert trained(wrapped, None) == (3, -0.375)  # by its rescale_grad, 0.5
        for wrong in ({"gradient_predivide_factor": 0.0}, {"num_groups": -1}):
            with pytest.raises(ValueError, match="give"):
                hvd.DistributedTrainer([], "sgd", **wrong)
            with pytest.raises(ValueError, match="give"):
                hvd.DistributedOptimizer(mx.optimizer.SGD(), **wrong)

    run_mxnet_ranks(2, work)
