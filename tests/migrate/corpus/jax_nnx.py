import numpy as np
import optax
from flax import nnx


class MLP(nnx.Module):
    def __init__(self, din, dmid, dout, *, rngs: nnx.Rngs):
        self.linear1 = nnx.Linear(din, dmid, rngs=rngs)
        self.linear2 = nnx.Linear(dmid, dout, rngs=rngs)

    def __call__(self, x):
        return self.linear2(nnx.relu(self.linear1(x)))


@nnx.jit
def train_step(model, optimizer, x, y):
    def loss_fn(model):
        return ((model(x) - y) ** 2).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


rng = np.random.default_rng(0)
X = rng.uniform(-2, 2, (1000, 1)).astype("float32")
Y = np.sin(2 * X)
model = MLP(1, 48, 1, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
for step in range(400):
    idx = rng.integers(0, 700, size=32)
    loss = train_step(model, optimizer, X[idx], Y[idx])
print("accuracy", float(1 - ((model(X[700:]) - Y[700:]) ** 2).mean() / Y[700:].var()))
