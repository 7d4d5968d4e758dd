import jax
import jax.numpy as jnp
import numpy as np
import optax

x = jnp.linspace(-1, 1, 2048).reshape(256, 8)
y = x.sum(axis=1, keepdims=True)
optimizer = optax.sgd(0.05)


def loss_of(params, batch, target):
    return jnp.mean((batch @ params["w"] + params["b"] - target) ** 2)


@jax.jit
def step(params, state, batch, target):
    loss, gradients = jax.value_and_grad(loss_of)(params, batch, target)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


params = {"w": jnp.asarray(np.random.normal(size=(8, 1))), "b": jnp.zeros(1)}
state = optimizer.init(params)
for epoch in range(2):
    for batch, target in zip(jnp.split(x, 8), jnp.split(y, 8)):
        params, state, loss = step(params, state, batch, target)
    print(f"epoch {epoch}: {float(loss):.4f}")
np.savez("params.npz", **params)
