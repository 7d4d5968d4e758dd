import jax.numpy as jnp
from jax import grad, jit, random

key = random.PRNGKey(1)
x = random.normal(key, (600, 3))
y = x @ jnp.array([1.0, -1.0, 2.0])


def loss(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


@jit
def update(w, x, y, lr=0.1):
    return w - lr * grad(loss)(w, x, y)


w = jnp.zeros(3)
for i in range(100):
    w = update(w, x[:400], y[:400])
print("accuracy", float(1 - loss(w, x[400:], y[400:]) / jnp.var(y[400:])))
