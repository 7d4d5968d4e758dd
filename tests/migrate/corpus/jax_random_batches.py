import jax
import jax.numpy as jnp
import numpy as np
import optax

np.random.seed(0)
X = np.random.randn(1500, 6).astype("float32")
Y = (np.abs(X).sum(1) > 4.7).astype("int32")
schedule = optax.exponential_decay(0.1, transition_steps=50, decay_rate=0.9)
tx = optax.sgd(schedule, momentum=0.9)


def model(params, x):
    h = jnp.maximum(0, x @ params["w1"] + params["b1"])
    return h @ params["w2"] + params["b2"]


@jax.jit
def step(params, state, x, y):
    def loss(p):
        return optax.softmax_cross_entropy_with_integer_labels(model(p, x), y).mean()

    grads = jax.grad(loss)(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


params = {
    "w1": jnp.array(np.random.randn(6, 64) * 0.5), "b1": jnp.zeros(64),
    "w2": jnp.array(np.random.randn(64, 2) * 0.1), "b2": jnp.zeros(2),
}
state = tx.init(params)
for it in range(400):
    pick = np.random.randint(0, 1000, 32)
    params, state = step(params, state, X[pick], Y[pick])
np.savez("model.npz", **params)
print("accuracy", np.mean(np.argmax(model(params, X[1000:]), axis=1) == Y[1000:]))
