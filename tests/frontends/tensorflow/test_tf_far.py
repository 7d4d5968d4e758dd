"""Tensors and variables on another device than the CPU: they go through host memory."""

from __future__ import annotations

import pytest
from forked import run_tensorflow_ranks
from frameworks import check_eager_verbs, is_installed

pytestmark = [
    pytest.mark.skipif(not is_installed("tensorflow"), reason="TensorFlow is not installed"),
    pytest.mark.timeout(170),
]


def test_every_eager_verb_of_far_tensors():
    def work(rank):
        import kolovod.tensorflow as kv
        from kolovod.tensorflow import frontend

        frontend.is_near = lambda device: False
        kv.init()
        check_eager_verbs(kv.collectives, "tensorflow", ("float32", "bfloat16", "int32", "bool"))
        kv.shutdown()

    run_tensorflow_ranks(2, work, timeout_s=150)


def test_results_are_where_the_tensors_are():
    def work(rank):
        import tensorflow as tf

        (cpu,) = tf.config.list_physical_devices("CPU")
        two = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpu, two)
        import kolovod.tensorflow as kv
        from kolovod.tensorflow import frontend

        frontend.is_near = lambda device: "CPU:1" not in device
        kv.init()
        with tf.device("CPU:1"):
            tensor = tf.fill([2, 3], rank + 1.0)
            variable = tf.Variable(tensor)
        found = [
            kv.allreduce(tensor, op=kv.Sum),
            kv.allreduce(variable, op=kv.Sum),
            kv.allreduce_async(tensor, op=kv.Sum).wait(),
            kv.allgather(tensor),
            kv.broadcast(tensor, 1),
        ]
        assert all("CPU:1" in each.device for each in found)
        assert [float(tf.reduce_sum(each)) for each in found] == [18.0, 18.0, 18.0, 18.0, 12.0]
        kv.broadcast_variables([variable], 1)
        assert "CPU:1" in variable.device
        assert variable.numpy().tolist() == [[2.0] * 3] * 2
        with tf.device("CPU:1"), tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * (rank + 1.0))
        (gradient,) = kv.DistributedGradientTape(tape).gradient(loss, [variable])
        assert gradient.numpy().tolist() == [[1.5] * 3] * 2
        kv.shutdown()

    run_tensorflow_ranks(2, work, timeout_s=150)
