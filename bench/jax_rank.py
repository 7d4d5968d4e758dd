"""One rank in bench/front_ends.py with JAX: ``python bench/jax_rank.py PEER``."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import front_ends_rank
import jax
import jax.numpy as jnp
import numpy as np
from front_ends_rank import BATCHES, LEARNING_RATE, MOMENTUM


def loss_of(params: Any, x: Any, labels: Any) -> Any:
    """Return the cross-entropy of layers with shortcuts, each width x width."""
    for w, b in params:
        x = x + 0.1 * jnp.tanh(x @ w + b)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], 1))


def step(average: Any, params: Any, momentum: Any, x: Any, labels: Any) -> Any:
    """SGD with momentum on what ``average`` makes of the gradients."""
    gradients = average(jax.grad(loss_of)(params, x, labels))
    momentum = jax.tree.map(lambda m, g: MOMENTUM * m + g, momentum, gradients)
    return jax.tree.map(lambda p, m: p - LEARNING_RATE * m, params, momentum), momentum


class Kolovod:
    """``allreduce_pytree`` inside ``jax.jit``."""

    def __init__(self) -> None:
        import kolovod.jax as kv

        kv.init()
        self._kv, self.rank, self.size = kv, kv.rank(), kv.size()

    def compiled(self) -> Any:
        return jax.jit(partial(step, self._kv.allreduce_pytree), donate_argnums=(0, 1))

    shared = own = staticmethod(jnp.asarray)

    def close(self) -> None:
        self._kv.shutdown()


class Alone(front_ends_rank.Alone):
    """No communication: each process trains by itself."""

    def compiled(self) -> Any:
        return jax.jit(partial(step, lambda gradients: gradients), donate_argnums=(0, 1))

    def shared(self, array: Any) -> Any:
        return jnp.asarray(array)

    def own(self, array: Any) -> Any:
        return jnp.asarray(array)


class Gloo(Alone):
    """``jax.distributed`` over gloo: ``pmean`` in a ``shard_map`` over one device per process."""

    def __init__(self) -> None:
        super().__init__()
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(os.environ["BENCH_COORDINATOR"], self.size, self.rank)
        self._mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ranks",))

    def compiled(self) -> Any:
        everywhere, cut = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("ranks")
        mean = partial(jax.lax.pmean, axis_name="ranks")
        mapped = jax.shard_map(
            partial(step, mean), mesh=self._mesh, check_vma=False,
            in_specs=(everywhere, everywhere, cut, cut), out_specs=(everywhere, everywhere),
        )  # fmt: skip
        return jax.jit(mapped, donate_argnums=(0, 1))

    def shared(self, array: Any) -> Any:
        return self._placed(array)

    def own(self, array: Any) -> Any:
        return self._placed(array, "ranks")

    def _placed(self, array: Any, *axes: str) -> Any:
        sharding = jax.sharding.NamedSharding(self._mesh, jax.sharding.PartitionSpec(*axes))
        return jax.make_array_from_process_local_data(sharding, array)

    def close(self) -> None:
        jax.distributed.shutdown()


class Training:
    """See front_ends_rank.Training."""

    def __init__(self, peer: Any, model: str) -> None:
        first = front_ends_rank.first_weights(model)
        self._params = jax.tree.map(peer.shared, first)
        self._momentum = jax.tree.map(lambda value: peer.shared(np.zeros_like(value)), first)
        own = front_ends_rank.batches(model, peer.rank)
        self._batches = [(peer.own(x), peer.own(labels)) for x, labels in own]
        self._step, self._count = peer.compiled(), 0

    def step(self) -> None:
        batch = self._batches[self._count % BATCHES]
        self._count += 1
        self._params, self._momentum = self._step(self._params, self._momentum, *batch)
        jax.block_until_ready((self._params, self._momentum))

    def weights(self) -> list[Any]:
        return [np.asarray(leaf.addressable_data(0)) for leaf in jax.tree.leaves(self._params)]


if __name__ == "__main__":
    front_ends_rank.serve({"kolovod": Kolovod, "alone": Alone, "own": Gloo}, Training)
