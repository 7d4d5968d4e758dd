"""Trains a network on handwritten digits with JAX while processes may end, come and leave.

    kolovod run --elastic -np 3 python examples/elastic_jax.py

Kill any of the processes (the launcher prints their numbers): the others repeat the step that they
were at, a new process takes its place, and the loss goes on as if nothing had been.
``--kill-every 60`` has the processes do that themselves.
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

import kolovod.jax as kv
from kolovod import elastic


def logits_of(params: dict[str, jax.Array], images: jax.Array) -> jax.Array:
    """Two layers."""
    return jax.nn.relu(images @ params["first"]) @ params["second"]


def main() -> None:
    """Train for so many steps, and say how well the model does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--kill-every", type=int, default=0, metavar="STEPS")
    options = parser.parse_args()

    kv.init()
    data = load_digits()
    images, labels = jnp.asarray(data.data / 16, jnp.float32), jnp.asarray(data.target)
    first, second = jax.random.split(jax.random.key(1))
    params = {
        "first": 0.1 * jax.random.normal(first, (64, 128)),
        "second": 0.1 * jax.random.normal(second, (128, 10)),
    }
    optimizer = kv.DistributedOptimizer(optax.sgd(0.1, momentum=0.9))
    state = elastic.State(params=params, opt_state=optimizer.init(params), step=0)

    def step(params: Any, opt_state: Any, key: jax.Array) -> tuple[Any, Any, jax.Array]:
        batch = jax.random.randint(key, (32,), 0, len(images))

        def loss_of(params: Any) -> jax.Array:
            logits = logits_of(params, images[batch])
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels[batch]).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, kv.allreduce(loss, "loss")

    step = jax.jit(step, donate_argnums=(0, 1))

    @elastic.run
    def train(state: Any) -> None:
        while state.step < options.steps:
            victim = state.step // options.kill_every % kv.size() if options.kill_every else -1
            is_time = options.kill_every and state.step % options.kill_every == 30
            if is_time and kv.rank() == victim and kv.size() > 1:
                print(f"step {state.step}: rank {kv.rank()} ends", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            key = jax.random.key(10_000 * kv.rank() + state.step)
            state.params, state.opt_state, loss = step(state.params, state.opt_state, key)
            if kv.rank() == 0 and state.step % 50 == 0:
                print(f"step {state.step}: {kv.size()} ranks, loss {loss:.3f}", flush=True)
            state.step += 1
            state.commit()

    train(state)
    if kv.rank() == 0:
        right = (logits_of(state.params, images).argmax(1) == labels).mean()
        print(f"{options.steps} steps: {100 * right:.2f} % right")


if __name__ == "__main__":
    main()
