"""Horovod's TensorFlow interface: names, parameters and defaults; verbs, gradients, errors."""

from __future__ import annotations

import numpy as np
import pytest
from forked import run_tensorflow_ranks
from frameworks import is_installed, keras_variable

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.skipif(not is_installed("tensorflow"), reason="TensorFlow is not installed"),
    pytest.mark.timeout(200),
]

GPS = "process_set=GPS"
SCALES = "prescale_factor=1.0, postscale_factor=1.0"
DEVICES = "device_dense='', device_sparse=''"
SCOPED = f"name=None, ignore_name_scope=False, {GPS}"
COMMON = f"average=None, {DEVICES}, compression=none, op=None, {SCALES}"
TAPE = (
    f"gradtape, {DEVICES}, compression=none, sparse_as_dense=False, op=Average, "
    f"gradient_predivide_factor=1.0, num_groups=0, groups=None, {GPS}, "
)
SIGNATURES = {
    "init": "comm=None, process_sets=None",
    **dict.fromkeys(("shutdown", "is_initialized", "rank", "size", "local_rank", "join"), ""),
    "allreduce": f"tensor, {COMMON}, name=None, {GPS}, ignore_name_scope=False",
    "grouped_allreduce": f"tensors, {COMMON}, {GPS}, ignore_name_scope=False, name=None",
    "allgather": f"tensor, {SCOPED}",
    "grouped_allgather": f"tensors, {SCOPED}",
    "broadcast": f"tensor, root_rank, {SCOPED}",
    "broadcast_": f"variables, root_rank, name=None, {GPS}",
    "alltoall": f"tensor, splits=None, {SCOPED}",
    "reducescatter": "tensor, device_dense='', compression=none, op=Average, name=None, "
    f"{GPS}, ignore_name_scope=False, {SCALES}",
    "grouped_reducescatter": "tensors, device_dense='', compression=none, op=Average, "
    f"{GPS}, {SCALES}",
    **dict.fromkeys(("rank_op", "local_rank_op", "local_size_op"), "name=None"),
    **dict.fromkeys(("size_op", "process_set_included_op"), "process_set_id=0, name=None"),
    "broadcast_variables": f"variables, root_rank, {GPS}, inplace=False",
    "broadcast_object": f"obj, root_rank=0, session=None, name=None, {GPS}",
    "broadcast_object_fn": f"root_rank=0, session=None, name=None, {GPS}",
    "allgather_object": f"obj, session=None, name=None, {GPS}",
    "broadcast_global_variables": "root_rank",
    "BroadcastGlobalVariablesHook": "root_rank, device=''",
    "DistributedOptimizer": f"optimizer, name=None, use_locking=False, {DEVICES}, "
    "compression=none, sparse_as_dense=False, backward_passes_per_step=1, op=Average, "
    "gradient_predivide_factor=1.0, average_aggregated_gradients=False, num_groups=0, "
    f"groups=None, {GPS}, scale_local_gradients=True",
    "DistributedGradientTape": TAPE + "scale_local_gradients=True",
    "PartialDistributedGradientTape": TAPE + "local_layers=None, scale_local_gradients=True",
    "SyncBatchNormalization": "fused=False, **kwargs",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "vars_to_refs": "vars",
    "refs_to_vars": "refs",
    "gpu_available": "ext_base_name, verbose=False",
}
METHODS = {
    "gradient": "self, target, sources, output_gradients=None, use_generic_names=False",
    "register_local_source": "self, source",
}
HELPER = "backward_passes_per_step, allreduce_func, sparse_as_dense, average_aggregated_gradients"
METHODS["get_local_and_global_gradients"] = METHODS["gradient"]
NAMES = (
    "Adasum Average Max Min Product Sum Compression ProcessSet global_process_set cross_rank "
    "cross_size local_size is_homogeneous mpi_built nccl_built handle_average_backwards_"
    "compatibility check_num_rank_power_of_2 LocalGradientAggregationHelper start_timeline"
)
MODULES = {
    "horovod.tensorflow.mpi_ops": "_allreduce allgather size_op rank join broadcast_",
    "horovod.tensorflow.compression": "Compression Compressor NoneCompressor FP16Compressor",
    "horovod.tensorflow.functions": "broadcast_variables broadcast_object allgather_object",
    "horovod.tensorflow.gradient_aggregation": "LocalGradientAggregationHelper",
    "horovod.tensorflow.gradient_aggregation_eager": "LocalGradientAggregationHelperEager",
    "horovod.tensorflow.data.compute_service": "TfDataServiceConfig tf_data_service "
    "send_to_data_service compute_worker_fn",
}


def written(hvd, function):
    """The parameters as the table writes them."""
    import inspect

    texts = []
    for parameter in inspect.signature(function).parameters.values():
        default, text = parameter.default, parameter.name
        if parameter.kind is parameter.VAR_KEYWORD:
            text = f"**{text}"
        elif default is hvd.Compression.none:
            text += "=none"
        elif default is hvd.global_process_set:
            text += "=GPS"
        elif text == "op" and default is not parameter.empty and default is not None:
            assert default == hvd.Average
            text += "=Average"
        elif default is not parameter.empty:
            text += f"={default!r}"
        texts.append(text)
    return ", ".join(texts)


def check_names(tf, hvd):
    import importlib

    for name, wanted in SIGNATURES.items():
        assert written(hvd, getattr(hvd, name)) == wanted, name
    tape = hvd.DistributedGradientTape(tf.GradientTape())
    for name, wanted in METHODS.items():
        assert written(hvd, getattr(type(tape), name)) == wanted, name
    service = importlib.import_module("horovod.tensorflow.data.compute_service")
    assert written(hvd, service.send_to_data_service) == (
        "dataset, compute_config, rank, size=None, processing_mode='distributed_epoch', "
        "reuse_dataset=False, round_robin=False"
    )
    assert written(hvd, service.TfDataServiceConfig) == (
        "dispatchers, workers_per_dispatcher, dispatcher_side, addresses, key, timeout=60"
    )
    helpers = [
        getattr(importlib.import_module(module), names)
        for module, names in MODULES.items()
        if module.startswith("horovod.tensorflow.gradient_aggregation")
    ]
    assert [written(hvd, helper) for helper in helpers] == [
        f"{HELPER}, rank=0, optimizer_type=None, {GPS}, scale_local_gradients=True, name=''",
        f"{HELPER}, {GPS}, scale_local_gradients=True",
    ]
    for name in (*NAMES.split(), *hvd.__all__):
        assert hasattr(hvd, name), name
    for module, names in MODULES.items():
        found = importlib.import_module(module)
        assert [name for name in names.split() if not hasattr(found, name)] == []
    assert hvd.__version__ == "0.28.1"
    assert written(hvd, hvd.elastic.TensorFlowKerasState) == (
        "model, optimizer=None, backend=None, **kwargs"
    )
    assert written(hvd, hvd.elastic.TensorFlowState) == "variables=None, session=None, **kwargs"
    assert written(hvd, hvd.elastic.run) == "func"
    with pytest.raises(AttributeError, match="no attribute 'allreduced'"):
        getattr(hvd, "allreduced")  # noqa: B009
    table = {hvd.vars_to_refs(v): v for v in (tf.Variable(1.0), keras_variable(tf, 2.0))}
    assert [hvd.refs_to_vars(ref).numpy() for ref in table] == [1.0, 2.0]
    first = tf.Variable(1.0)
    assert hvd.refs_to_vars(hvd.vars_to_refs([first, first])) == [first, first]


def full(tf, value, *shape):
    return tf.fill(shape or (2, 3), float(value))


def check_results(tf, hvd, rank, run):
    """Every verb; ``run`` calls a function as it is, or as a graph."""
    x = full(tf, rank + 1)

    def value(call):
        result = run(call)
        return tf.nest.map_structure(lambda t: t.numpy().tolist(), result)

    assert value(lambda: hvd.allreduce(x)) == [[1.5] * 3] * 2
    assert (
        value(lambda: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, name="a:b"))
        == [[6] * 3] * 2
    )
    assert value(lambda: hvd.allreduce(x, compression=hvd.Compression.fp16)) == [[1.5] * 3] * 2
    assert value(lambda: [hvd.allreduce(x, op=hvd.Max, name="n") for _ in range(2)])[1][0][0] == 2
    assert value(lambda: hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum))[1] == [[6] * 3] * 2
    assert hvd.grouped_allreduce([]) == []
    rows = full(tf, rank, rank + 1, 2)
    assert value(lambda: hvd.allgather(rows, name="g")) == [[0, 0], [1, 1], [1, 1]]
    assert value(lambda: hvd.grouped_allgather([rows, x]))[0] == [[0, 0], [1, 1], [1, 1]]
    assert value(lambda: hvd.broadcast(x, 1)) == [[2] * 3] * 2
    assert value(lambda: hvd.alltoall(tf.range(4) + 10 * rank)) == [
        2 * rank + 10 * r + i for r in range(2) for i in range(2)
    ]
    moved, received = run(lambda: hvd.alltoall(tf.range(3) + 10 * rank, tf.constant([1, 1])))
    assert moved.numpy().tolist() == [rank, 10 + rank]
    assert (received.dtype, received.numpy().tolist()) == (tf.int32, [1, 1])
    assert value(lambda: hvd.reducescatter(tf.ones([3, 1]), op=hvd.Sum)) == [[2.0]] * (2 - rank)
    assert value(lambda: hvd.grouped_reducescatter([tf.ones([2, 1])])) == [[[1.0]]]
    facts = value(lambda: [hvd.rank_op(), hvd.size_op(), hvd.local_size_op(), hvd.local_rank_op()])
    assert facts == [rank, 2, 2, rank]
    assert value(lambda: hvd.process_set_included_op()) == 1


def check_sparse(tf, hvd, rank, run):
    slices = tf.IndexedSlices(full(tf, rank + 1, 1, 2), tf.constant([rank]), tf.constant([4, 2]))
    for op, factor in ((hvd.Average, 0.5), (hvd.Sum, 1.0)):
        found, dense = run(lambda op=op: hvd.grouped_allreduce([slices, full(tf, rank)], op=op))
        assert isinstance(found, tf.IndexedSlices)
        assert found.indices.numpy().tolist() == [0, 1]
        assert found.values.numpy().tolist() == [[factor] * 2, [2 * factor] * 2]
        assert dense.numpy().tolist() == [[factor] * 3] * 2
    for options in ({"op": hvd.Adasum}, {"op": hvd.Max}, {"prescale_factor": 2.0}):
        with pytest.raises(NotImplementedError, match="IndexedSlices can be added up"):
            hvd.allreduce(slices, **options)


def check_gradients(tf, hvd, rank, run):
    """Rank r's loss is (r + 1) * sum(result), with Horovod's factors."""

    def gradient(verb, *shape):
        x = tf.Variable(tf.ones(shape))

        def call():
            with tf.GradientTape() as tape:
                loss = (rank + 1.0) * tf.reduce_sum(verb(x))
            return tape.gradient(loss, x)

        return tf.convert_to_tensor(run(call)).numpy().tolist()

    assert gradient(lambda x: hvd.allreduce(x, op=hvd.Sum), 2) == [3, 3]
    assert gradient(hvd.allreduce, 2) == [1.5, 1.5]
    assert gradient(lambda x: hvd.allreduce(x, op=hvd.Max), 2) == [2, 2]
    assert gradient(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=3.0), 1) == [9]
    assert gradient(lambda x: hvd.grouped_allreduce([x, x], op=hvd.Sum)[1], 1) == [3]
    assert gradient(hvd.allgather, 3, 1) == [[1.5]] * 3
    assert gradient(lambda x: hvd.grouped_allgather([x, 2 * x])[1], 2) == [3, 3]
    assert gradient(lambda x: hvd.broadcast(x, 0), 2) == [1.5 * (1 - rank)] * 2
    assert gradient(hvd.alltoall, 2) == [1, 2]
    assert gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum), 2) == [2, 4]
    assert gradient(hvd.reducescatter, 2) == [1, 2]

    def looped(verb):
        def call(x):
            x = tf.identity(x)
            for i in tf.range(2):
                for _ in tf.range(i + 1):
                    x = verb(x)
            return x

        return call

    assert gradient(looped(lambda x: hvd.allreduce(x, op=hvd.Max)), 2) == [2, 2]
    share = (1.5 * 0.25) * (1 - rank)  # the mean with a rank that has none, twice
    assert gradient(looped(lambda x: hvd.broadcast(x, 0)), 2) == [share] * 2
    assert gradient(looped(lambda x: tf.ensure_shape(hvd.allgather(x)[:2], [2])), 2) == [share] * 2


def check_errors(tf, hvd, rank, run):
    """Of TensorFlow's classes; outside of graphs of Horovod's, too."""
    from horovod.common.exceptions import HorovodInternalError

    mismatch = tf.errors.FailedPreconditionError
    with pytest.raises(mismatch, match="rank 1 has") as caught:
        run(lambda: hvd.allreduce(full(tf, 1, 2 + rank)))
    if run(tf.executing_eagerly) is True:
        assert isinstance(caught.value, HorovodInternalError)
    with pytest.raises(mismatch, match="root"):
        run(lambda: hvd.broadcast(full(tf, 1), rank))
    with pytest.raises(tf.errors.InvalidArgumentError):
        run(lambda: hvd.alltoall(tf.range(2), tf.constant([2, 1])))
    with pytest.raises(ValueError, match=r"a scalar has no|at least rank 1"):
        run(lambda: hvd.reducescatter(tf.constant(1.0)))
    assert run(lambda: hvd.allreduce(full(tf, 1), op=hvd.Sum)).numpy()[0, 0] == 2


def check_arguments(tf, hvd, rank):
    x = full(tf, rank + 1)
    with pytest.warns(DeprecationWarning, match="average is deprecated"):
        assert hvd.allreduce(x, average=False).numpy()[0, 0] == 3
    with pytest.raises(ValueError, match="op only"):
        hvd.allreduce(x, average=True, op=hvd.Sum)
    for process_set in ([0], 0, "world"):
        with pytest.raises(ValueError, match="give a ProcessSet"):
            hvd.allreduce(x, process_set=process_set)
    assert hvd.mpi_ops._allreduce(x).numpy()[0, 0] == 3
    alone = hvd.add_process_set([1])
    if rank == 1:
        assert hvd.allreduce(x, op=hvd.Sum, process_set=alone).numpy()[0, 0] == 2
        assert hvd.size_op(alone.process_set_id).numpy() == 1
    else:
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="rank 0 is not in"):
            hvd.allreduce(x, process_set=alone)
    assert hvd.process_set_included_op(alone.process_set_id).numpy() == rank
    hvd.remove_process_set(alone)
    variables = [tf.Variable(float(rank)), tf.Variable([rank, 7])]
    assert hvd.broadcast_(variables, 1) == variables
    assert [v.numpy().tolist() for v in variables] == [1.0, [1, 7]]
    assert hvd.broadcast_object({"r": rank}, 1) == {"r": 1}
    assert hvd.broadcast_object_fn(1)(rank) == 1
    assert hvd.allgather_object(rank) == [0, 1]
    with pytest.raises(RuntimeError, match=r"hvd\.broadcast_variables"):
        hvd.broadcast_global_variables(0)
    with pytest.raises(ValueError, match="fused"):
        hvd.SyncBatchNormalization(fused=True)
    layer = hvd.SyncBatchNormalization(momentum=0.0)
    layer(np.full((rank + 1, 1), float(rank)), training=True)  # two samples of 1, one of 0
    np.testing.assert_allclose(np.array(layer.moving_mean), [2 / 3], rtol=1e-6)
    assert hvd.join().numpy() in (0, 1)


def test_names_and_verbs():
    def work(rank):
        import tensorflow as tf

        import horovod.tensorflow as hvd

        with pytest.raises(ValueError, match=r"init\(\)"):
            hvd.rank()
        hvd.init()
        for run in (lambda call: call(), lambda call: tf.function(call)()):
            check_results(tf, hvd, rank, run)
            check_sparse(tf, hvd, rank, run)
            check_gradients(tf, hvd, rank, run)
            check_errors(tf, hvd, rank, run)
        check_arguments(tf, hvd, rank)
        check_names(tf, hvd)

    run_tensorflow_ranks(2, work, timeout_s=100)


def test_what_needs_a_power_of_two():
    def work(rank):
        import tensorflow as tf

        import horovod.tensorflow as hvd

        hvd.init()
        with pytest.raises(NotImplementedError, match="not 3"):
            hvd.allreduce(tf.ones([2]), op=hvd.Adasum)
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)
        with pytest.raises(NotImplementedError, match="not 3"):
            hvd.DistributedOptimizer(optimizer, op=hvd.Adasum)
        assert hvd.allreduce(tf.ones([2]), op=hvd.Sum).numpy().tolist() == [3, 3]

    run_tensorflow_ranks(3, work, timeout_s=100)
