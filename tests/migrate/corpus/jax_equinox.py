import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jrandom
import optax


def dataloader(arrays, batch_size, *, key):
    size = arrays[0].shape[0]
    while True:
        key, subkey = jrandom.split(key)
        perm = jrandom.permutation(subkey, jnp.arange(size))
        for start in range(0, size - batch_size + 1, batch_size):
            yield tuple(array[perm[start : start + batch_size]] for array in arrays)


@eqx.filter_value_and_grad
def compute_loss(model, x, y):
    logits = jax.vmap(model)(x)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y))


def main(batch_size=16, learning_rate=1e-2, steps=300, seed=5678):
    data_key, model_key, loader_key = jrandom.split(jrandom.PRNGKey(seed), 3)
    x = jrandom.normal(data_key, (1000, 4))
    y = (x[:, 0] * x[:, 1] > 0).astype(int)
    model = eqx.nn.MLP(4, 2, width_size=32, depth=2, key=model_key)
    optim = optax.adam(learning_rate)
    opt_state = optim.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def make_step(model, x, y, opt_state):
        loss, grads = compute_loss(model, x, y)
        updates, opt_state = optim.update(grads, opt_state)
        model = eqx.apply_updates(model, updates)
        return loss, model, opt_state

    for step, (bx, by) in zip(range(steps), dataloader((x[:700], y[:700]), batch_size, key=loader_key)):
        loss, model, opt_state = make_step(model, bx, by, opt_state)
        if step % 100 == 0:
            print(f"step={step}, loss={loss.item()}")
    print("accuracy", float(jnp.mean(jax.vmap(model)(x[700:]).argmax(1) == y[700:])))


if __name__ == "__main__":
    main()
