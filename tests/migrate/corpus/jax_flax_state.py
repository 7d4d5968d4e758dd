"""A flax TrainState, as most of its examples have it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(features=8, kernel_size=(3, 3))(x))
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        return nn.Dense(features=2)(x.reshape((x.shape[0], -1)))


@jax.jit
def apply_model(state, images, labels):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, images)
        loss = jnp.mean(optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, 2)))
        return loss, logits

    (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return grads, loss, jnp.mean(jnp.argmax(logits, -1) == labels)


@jax.jit
def update_model(state, grads):
    return state.apply_gradients(grads=grads)


def train_epoch(state, train_ds, batch_size, rng):
    train_ds_size = len(train_ds["image"])
    steps_per_epoch = train_ds_size // batch_size
    perms = jax.random.permutation(rng, train_ds_size)[: steps_per_epoch * batch_size]
    for perm in perms.reshape((steps_per_epoch, batch_size)):
        grads, loss, accuracy = apply_model(state, train_ds["image"][perm, ...], train_ds["label"][perm, ...])
        state = update_model(state, grads)
    return state


def get_dataset(n, seed):
    rng = np.random.RandomState(seed)
    label = rng.randint(0, 2, n)
    image = rng.randn(n, 8, 8, 1) + np.where(label == 1, 1, -1)[:, None, None, None] * np.eye(8)[None, :, :, None]
    return {"image": image.astype(np.float32), "label": label}


def create_train_state(rng):
    cnn = CNN()
    params = cnn.init(rng, jnp.ones([1, 8, 8, 1]))["params"]
    tx = optax.sgd(0.02, 0.9)
    return train_state.TrainState.create(apply_fn=cnn.apply, params=params, tx=tx)


def main():
    train_ds, test_ds = get_dataset(600, 0), get_dataset(300, 1)
    rng = jax.random.key(0)
    rng, init_rng = jax.random.split(rng)
    state = create_train_state(init_rng)
    for epoch in range(1, 4):
        rng, input_rng = jax.random.split(rng)
        state = train_epoch(state, train_ds, 20, input_rng)
        _, test_loss, test_accuracy = apply_model(state, test_ds["image"], test_ds["label"])
        print("epoch:% 3d, test_loss: %.4f, accuracy %.3f" % (epoch, test_loss, test_accuracy))


if __name__ == "__main__":
    main()
