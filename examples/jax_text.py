"""Train a small transformer on the characters of real text: Python's own standard library.

    kolovod run -np 2 python examples/jax_text.py
    python examples/jax_text.py                        # the same script as a single process

``--accumulate 4`` sums the gradients of four passes before they travel, ``--compression bf16``
sends them in bfloat16. What makes a script distributed is marked [1] to [5].
"""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
import text_data

import kolovod.jax as kv

HEAD_WIDTH = 32
HELD_OUT_WINDOWS = 128  # of each process


def new_params(key: Any, context: int, layers: int, width: int) -> dict[str, Any]:
    """Of a transformer with ``layers`` layers."""
    keys = iter(jax.random.split(key, 3 + 4 * layers))

    def matrix(rows: int, columns: int) -> jax.Array:
        return jax.random.normal(next(keys), (rows, columns)) / math.sqrt(rows)

    def layer() -> dict[str, jax.Array]:
        return {
            "attend": matrix(width, 3 * width),
            "joined": matrix(width, width),
            "wide": matrix(width, 4 * width),
            "narrow": matrix(4 * width, width),
        }

    return {
        "characters": matrix(len(text_data.ALPHABET), width),
        "positions": matrix(context, width),
        "layers": [layer() for _ in range(layers)],
        "head": matrix(width, len(text_data.ALPHABET)),
    }


def loss_of(params: dict[str, Any], windows: jax.Array) -> jax.Array:
    """Mean cross entropy of the next characters of ``windows`` (count, context + 1), in nats."""
    seen, following = windows[:, :-1], windows[:, 1:]
    x = params["characters"][seen] + params["positions"][: seen.shape[1]]
    for layer in params["layers"]:
        heads = (*x.shape[:2], x.shape[2] // HEAD_WIDTH, 3 * HEAD_WIDTH)
        query, key, value = jnp.split((norm(x) @ layer["attend"]).reshape(heads), 3, axis=-1)
        x = x + attend(query, key, value).reshape(x.shape) @ layer["joined"]
        x = x + jax.nn.gelu(norm(x) @ layer["wide"]) @ layer["narrow"]
    scores = norm(x) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, following).mean()


def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Each character to those before it and itself; all are (count, context, heads, width)."""
    scores = jnp.einsum("bqhw,bkhw->bhqk", query, key) / math.sqrt(HEAD_WIDTH)
    weights = jax.nn.softmax(jnp.where(jnp.tri(scores.shape[-1]), scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhw->bqhw", weights, value)


def norm(x: jax.Array) -> jax.Array:
    """To mean 0 and variance 1."""
    return jax.nn.standardize(x, axis=-1, epsilon=1e-5)


def train(arguments: argparse.Namespace, workers: int) -> Any:
    """Train as ``workers`` processes do; this world may have as many ranks, or be a single one."""
    training, held_out = text_data.load_text(arguments.characters)
    context, seed = arguments.context, arguments.seed
    shape = (arguments.steps, arguments.accumulate, arguments.batch_size * workers)
    # [2] Shard the data: all ranks draw alike, and each takes its own part.
    own = slice(kv.rank(), None, kv.size())
    windows = text_data.draw(training, shape, context, seed)[:, :, own]
    test = text_data.draw(held_out, (HELD_OUT_WINDOWS * workers,), context, seed)[own]
    # [3] Scale the learning rate: Adam's steps bear the square root of the workers.
    rate = optax.linear_schedule(0.0, arguments.lr * math.sqrt(workers), arguments.warmup)
    # [4] Average the gradients, after as many passes as were asked for.
    optimizer = kv.DistributedOptimizer(
        optax.adamw(rate),
        compression=getattr(kv.Compression, arguments.compression),
        backward_passes_per_step=arguments.accumulate,
    )
    # [5] Start equal: rank 0's values everywhere.
    key = jax.random.key(seed + kv.rank())
    params = new_params(key, context, arguments.layers, arguments.width)
    params = kv.broadcast_pytree(params)
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any, windows: Any) -> tuple[Any, Any]:
        gradients = jax.grad(loss_of)(params, windows)
        gradients = jax.tree.map(lambda gradient: gradient / arguments.accumulate, gradients)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    if kv.rank() == 0:
        size = f"{count:,} parameters, {len(training):,} characters"
        print(f"{size}, {kv.size()} process(es)", flush=True)
    started = time.perf_counter()
    for number, passes in enumerate(windows, start=1):
        for batch in passes:
            params, state = step(params, state, batch)
        if number % arguments.report_every == 0 or number == arguments.steps:
            bits = kv.allreduce(jax.jit(loss_of)(params, test), "bits").item() / math.log(2)
            seen = number * shape[1] * shape[2] * context
            pace = seen / (time.perf_counter() - started)
            if kv.rank() == 0:
                print(
                    f"step {number:4}/{arguments.steps}  {bits:5.3f} bits per character held out"
                    f"  {pace:9,.0f} characters/s",
                    flush=True,
                )
    return params


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = text_data.options(__doc__.splitlines()[0])
    parser.add_argument("--accumulate", type=text_data.positive, default=1, help="passes in a step")
    parser.add_argument("--compression", choices=["none", "fp16", "bf16"], default="none")
    return parser.parse_args()


def main() -> None:
    """Train."""
    # [1] Join the other processes; without the launcher this is a world of one.
    arguments = parse_arguments()
    kv.init()
    train(arguments, kv.size())
    kv.shutdown()


if __name__ == "__main__":
    main()
