import jax
import jax.numpy as jnp
import numpy as np
import optax

NUM_EPOCHS, BATCH, EVERY = 8, 10, 2


def batches(x, y, size, rng):
    order = rng.permutation(len(x))
    for start in range(0, len(x) - size + 1, size):
        pick = order[start : start + size]
        yield x[pick], y[pick]


def predict(p, x):
    return jnp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]


def main():
    rng = np.random.default_rng(9)
    x = rng.normal(size=(1000, 3)).astype("float32")
    y = (np.sin(x[:, 0]) + x[:, 1] * 0.5).astype("float32")[:, None]
    steps = NUM_EPOCHS * (700 // BATCH) // EVERY
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.03, 20, steps)
    tx = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)), every_k_schedule=EVERY)
    k1, k2 = jax.random.split(jax.random.key(0))
    params = {
        "w1": jax.random.normal(k1, (3, 24)) / 3**0.5, "b1": jnp.zeros(24),
        "w2": jax.random.normal(k2, (24, 1)) / 24**0.5, "b2": jnp.zeros(1),
    }
    state = tx.init(params)

    @jax.jit
    def step(params, state, bx, by):
        grads = jax.grad(lambda p: jnp.mean((predict(p, bx) - by) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(NUM_EPOCHS):
        for bx, by in batches(x[:700], y[:700], BATCH, rng):
            params, state = step(params, state, bx, by)
    mse = float(jnp.mean((predict(params, x[700:]) - y[700:]) ** 2))
    print("accuracy", 1 - mse / y[700:].var())


if __name__ == "__main__":
    main()
