"""JAX with PyTorch's loader."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch.utils.data import DataLoader, TensorDataset


def numpy_collate(batch):
    xs, ys = zip(*batch)
    return np.stack(xs), np.array(ys)


torch.manual_seed(0)
x = torch.randn(1000, 5)
y = (x[:, 0] > x[:, 1:].mean(1)).long()
loader = DataLoader(TensorDataset(x[:700], y[:700]), batch_size=20, shuffle=True, collate_fn=numpy_collate)
key = jax.random.key(0)
params = {"w": 0.1 * jax.random.normal(key, (5, 2)), "b": jnp.zeros(2)}
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.02, weight_decay=1e-4))
opt_state = optimizer.init(params)


@jax.jit
def train_step(params, opt_state, bx, by):
    def loss_fn(p):
        return optax.softmax_cross_entropy_with_integer_labels(bx @ p["w"] + p["b"], by).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return params, opt_state, loss


for epoch in range(6):
    for bx, by in loader:
        params, opt_state, loss = train_step(params, opt_state, bx, by)
    print("epoch", epoch, "loss", float(loss))
hits = (x[700:].numpy() @ params["w"] + params["b"]).argmax(1) == y[700:].numpy()
print("accuracy", float(hits.mean()))
