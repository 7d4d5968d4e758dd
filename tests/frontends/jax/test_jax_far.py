"""Arrays on another device than the CPU: eager verbs bring them through host memory."""

from __future__ import annotations

import os

import numpy as np
import pytest
from forked import run_jax_ranks
from frameworks import check_eager_verbs, is_installed

from kolovod.errors import InvalidArgumentError

pytestmark = [
    pytest.mark.skipif(not is_installed("jax"), reason="JAX is not installed"),
    pytest.mark.timeout(170),
]


def test_every_eager_verb_of_far_arrays():
    def work(rank):
        import kolovod.jax as kv
        from kolovod.jax import frontend

        frontend.is_near = lambda device: False
        kv.init()
        check_eager_verbs(kv.collectives, "jax", ("float32", "bfloat16", "int32", "bool"))
        kv.shutdown()

    run_jax_ranks(2, work, timeout_s=150)


def test_results_are_where_the_arrays_are():
    def work(rank):
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
        import jax

        import kolovod.jax as kv
        from kolovod.jax import frontend

        frontend.is_near = lambda device: device.id == 0
        kv.init()
        _, far = jax.local_devices()
        array = jax.device_put(np.full((2, 3), rank + 1.0, np.float32), far)
        found = [
            kv.allreduce(array, op=kv.Sum),
            kv.allreduce_async(array, op=kv.Sum).wait(),
            kv.grouped_allreduce([array, array], op=kv.Sum)[1],
            kv.allgather(array),
            kv.allgather_async(array).wait(),
            kv.broadcast(array, 1),
            kv.reducescatter(array, op=kv.Sum),
        ]
        assert all(each.devices() == {far} for each in found)
        assert [float(each.sum()) for each in found] == [18.0, 18.0, 18.0, 18.0, 18.0, 12.0, 9.0]
        assert array.tolist() == [[rank + 1.0] * 3] * 2
        mesh = jax.sharding.Mesh(np.array(jax.local_devices()), ("x",))
        spread = jax.device_put(
            np.ones((2, 3), np.float32),
            jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")),
        )
        with pytest.raises(InvalidArgumentError, match="is on several devices"):
            kv.allreduce(spread)
        kv.shutdown()

    run_jax_ranks(2, work, timeout_s=150)
