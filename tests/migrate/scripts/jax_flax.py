import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen
from flax.training.train_state import TrainState


def loss_of(params, apply, batch):
    return jnp.mean((apply({"params": params}, batch) - batch.sum(1, keepdims=True)) ** 2)


@jax.jit
def train_step(state, batch):
    grads = jax.grad(loss_of)(state.params, state.apply_fn, batch)
    return state.apply_gradients(grads=grads)


def main():
    model = linen.Dense(1)
    data = jnp.linspace(-1, 1, 2048).reshape(256, 8)
    variables = model.init(jax.random.key(np.random.randint(100)), data[:1])
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    state = TrainState.create(apply_fn=model.apply, params=variables["params"], tx=tx)
    for start in range(0, 256, 32):
        state = train_step(state, data[start : start + 32])
    return state.params


if __name__ == "__main__":
    params = main()
