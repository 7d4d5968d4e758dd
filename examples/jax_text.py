"""Train a small transformer on the characters of real text: Python's own standard library.

    kolovod run -np 2 python examples/jax_text.py
    python examples/jax_text.py                        # the same script as a single process

``--accumulate 4`` sums the gradients of four passes before they travel, ``--compression bf16``
sends them in bfloat16. What makes a script distributed is marked [1] to [5].
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import kolovod.jax as kv

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))  # anything else becomes a question mark
HELD_OUT = 0.05  # of the text
HEAD_WIDTH = 32


def positive(text: str) -> int:
    """A number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a positive number")
    return number


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=positive, default=300, help="of the optimizer")
    parser.add_argument("--batch-size", type=positive, default=16, help="windows per process")
    parser.add_argument("--accumulate", type=positive, default=1, help="passes in one step")
    parser.add_argument("--context", type=positive, default=64, help="characters in a window")
    parser.add_argument("--layers", type=positive, default=2)
    parser.add_argument("--width", type=positive, default=128, help="a multiple of 32")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate for one process")
    parser.add_argument("--warmup", type=positive, default=50, help="steps to the full rate")
    parser.add_argument("--characters", type=positive, default=2_000_000, help="of text to read")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--compression", choices=["none", "fp16", "bf16"], default="none")
    parser.add_argument("--report-every", type=positive, default=50, help="steps")
    return parser.parse_args()


def load_text(characters: int) -> np.ndarray[Any, Any]:
    """The sources in alphabetical order as numbers of ALPHABET, the same on every rank."""
    parts, left = [], characters
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        part = path.read_text(encoding="utf-8", errors="replace")[:left]
        parts.append(part)
        left -= len(part)
        if left == 0:
            break
    numbers = {character: number for number, character in enumerate(ALPHABET)}
    unknown = numbers["?"]
    return np.array([numbers.get(character, unknown) for character in "".join(parts)], np.int32)


def draw(text: np.ndarray[Any, Any], windows: int, context: int, dice: np.random.Generator) -> Any:
    """``windows`` pieces of the text, each with the character that follows."""
    starts = dice.integers(len(text) - context, size=(windows, 1))
    return text[starts + np.arange(context + 1)]


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
        "characters": matrix(len(ALPHABET), width),
        "positions": matrix(context, width),
        "layers": [layer() for _ in range(layers)],
        "head": matrix(width, len(ALPHABET)),
    }


def loss_of(params: dict[str, Any], windows: jax.Array) -> jax.Array:
    """Mean cross entropy of the next characters of ``windows`` (count, context + 1), in nats."""
    seen, following = windows[:, :-1], windows[:, 1:]
    x = params["characters"][seen] + params["positions"][: seen.shape[1]]
    for layer in params["layers"]:
        heads = (*x.shape[:2], x.shape[2] // HEAD_WIDTH, 3 * HEAD_WIDTH)
        query, key, value = jnp.split((norm(x) @ layer["attend"]).reshape(heads), 3, axis=-1)
        attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + attended.reshape(x.shape) @ layer["joined"]
        x = x + jax.nn.gelu(norm(x) @ layer["wide"]) @ layer["narrow"]
    scores = norm(x) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, following).mean()


def norm(x: jax.Array) -> jax.Array:
    """To mean 0 and variance 1."""
    return jax.nn.standardize(x, axis=-1, epsilon=1e-5)


def train(arguments: argparse.Namespace) -> None:
    """Train, reporting on rank 0."""
    rank, workers = kv.rank(), kv.size()
    text = load_text(arguments.characters)
    cut = int(len(text) * (1 - HELD_OUT))
    # [2] Shard the data: every rank draws windows of its own.
    dice = np.random.default_rng(arguments.seed + rank)
    held_out = draw(text[cut:], 8 * arguments.batch_size, arguments.context, dice)
    # [3] Scale the learning rate: Adam's steps bear the square root of the workers.
    rate = optax.linear_schedule(0.0, arguments.lr * math.sqrt(workers), arguments.warmup)
    # [4] Average the gradients, after as many passes as were asked for.
    optimizer = kv.DistributedOptimizer(
        optax.adamw(rate),
        compression=getattr(kv.Compression, arguments.compression),
        backward_passes_per_step=arguments.accumulate,
    )
    # [5] Start equal: rank 0's values everywhere.
    key = jax.random.key(arguments.seed + rank)
    params = new_params(key, arguments.context, arguments.layers, arguments.width)
    params = kv.broadcast_pytree(params)
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any, windows: Any) -> tuple[Any, Any]:
        gradients = jax.grad(loss_of)(params, windows)
        gradients = jax.tree.map(lambda gradient: gradient / arguments.accumulate, gradients)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    if rank == 0:
        print(f"{count:,} parameters, {cut:,} characters, {workers} process(es)", flush=True)
    started = time.perf_counter()
    for number in range(1, arguments.steps + 1):
        for _ in range(arguments.accumulate):
            windows = draw(text[:cut], arguments.batch_size, arguments.context, dice)
            params, state = step(params, state, windows)
        if number % arguments.report_every == 0 or number == arguments.steps:
            bits = kv.allreduce(jax.jit(loss_of)(params, held_out), "bits").item() / math.log(2)
            passes = number * workers * arguments.accumulate
            seen = passes * arguments.batch_size * arguments.context
            pace = seen / (time.perf_counter() - started)
            if rank == 0:
                print(
                    f"step {number:4}/{arguments.steps}  {bits:5.3f} bits per character held out"
                    f"  {pace:9,.0f} characters/s",
                    flush=True,
                )


def main() -> None:
    """Train."""
    # [1] Join the other processes; without the launcher this is a world of one.
    arguments = parse_arguments()
    kv.init()
    train(arguments)
    kv.shutdown()


if __name__ == "__main__":
    main()
