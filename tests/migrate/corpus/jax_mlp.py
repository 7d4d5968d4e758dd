import jax
import jax.numpy as jnp
import numpy as np
import optax

key = jax.random.PRNGKey(0)
rng = np.random.default_rng(0)
X = rng.normal(size=(1200, 8)).astype(np.float32)
Y = (X[:, 0] * X[:, 1] > 0).astype(np.int32)
X_train, Y_train, X_test, Y_test = X[:800], Y[:800], X[800:], Y[800:]


def init_params(key, sizes):
    keys = jax.random.split(key, len(sizes))
    return [(jax.random.normal(k, (m, n)) * jnp.sqrt(2 / m), jnp.zeros(n))
            for k, m, n in zip(keys, sizes[:-1], sizes[1:])]


def forward(params, x):
    for w, b in params[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = params[-1]
    return x @ w + b


def loss_fn(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(forward(params, x), y).mean()


params = init_params(key, [8, 32, 2])
optimizer = optax.adam(1e-2)
opt_state = optimizer.init(params)


@jax.jit
def train_step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = optimizer.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


batch_size = 20
for epoch in range(10):
    perm = rng.permutation(len(X_train))
    for i in range(0, len(X_train), batch_size):
        batch = perm[i:i + batch_size]
        params, opt_state, loss = train_step(params, opt_state, X_train[batch], Y_train[batch])
    print(f"epoch {epoch} loss {loss:.4f}")
accuracy = jnp.mean(forward(params, X_test).argmax(-1) == Y_test)
print("accuracy", float(accuracy))
