"""What a rank that joins is given of a state, by front end: rank 0's values, whatever it has."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from forked import KERAS_RUNNERS, run_jax_ranks, run_ranks, run_tensorflow_ranks
from frameworks import is_installed

from kolovod.elastic import State

pytestmark = pytest.mark.frameworks
needs_jax = pytest.mark.skipif(not is_installed("jax"), reason="JAX is not installed")
needs_tensorflow = pytest.mark.skipif(
    not is_installed("tensorflow"), reason="TensorFlow is not installed"
)


def trees(rank: int) -> Any:
    import jax
    import jax.numpy as jnp

    import kolovod.jax as kv

    kv.init()
    full = [jnp.float32(1.5), jnp.arange(3)]
    state: Any = State(
        alike={"w": jnp.full(3, rank + 1.0), "n": rank, "f": jnp.tanh},
        grown=full if rank == 0 else [],  # of another structure, and of no JAX at all
        shrunk=full[:1] if rank == 0 else full,
        odd=[jnp.float32(rank), {rank}],  # with a leaf that no array can carry
        key=jax.random.key(rank),
        plain=rank,
    )
    state.sync()
    state.sync()
    assert isinstance(state.alike["w"], jax.Array)
    assert state.alike["f"] is jnp.tanh
    numbers = [
        np.asarray(each).tolist() for each in (state.alike["w"], *state.grown, *state.shrunk)
    ]
    key = jax.random.key_data(state.key).tolist()
    return numbers, float(state.odd[0]), state.odd[1], key, state.alike["n"], state.plain


@needs_jax
def test_pytrees() -> None:
    first, second = run_jax_ranks(2, trees)
    assert first == second
    assert first[0] == [[1.0, 1.0, 1.0], 1.5, [0, 1, 2], 1.5]
    assert first[1:] == (0.0, {0}, [0, 0], 0, 0)


def variables(rank: int) -> Any:
    import tensorflow as tf

    import kolovod.tensorflow as kv

    kv.init()
    module = tf.Module()
    module.inner = tf.Variable([rank + 1.0, 2.0])
    legacy = tf.compat.v1.train.MomentumOptimizer(1.0, 0.5)
    legacy._create_slots([module.inner])
    legacy.get_slot(module.inner, "momentum").assign([rank + 3.0, rank + 4.0])
    own = tf.Variable(rank)
    state: Any = State(module=module, own=own, legacy=legacy)
    state.sync()
    assert (state.module, state.own, state.legacy) == (module, own, legacy)
    return (
        module.inner.numpy().tolist(),
        int(own),
        legacy.get_slot(module.inner, "momentum").numpy().tolist(),
    )


@needs_tensorflow
def test_variables_and_modules() -> None:
    assert run_tensorflow_ranks(2, variables) == [([1.0, 2.0], 0, [3.0, 4.0])] * 2


def models(rank: int, front_end: str) -> Any:
    import importlib

    import keras

    kv = importlib.import_module(f"kolovod.{front_end}")  # TensorFlow's knows Keras's models, too
    if front_end == "keras" and rank == 0:  # to which the model is one of its own modules
        importlib.import_module("kolovod.torch")
    kv.init()
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(0.1 * (rank + 1), momentum=0.5), "mse")
    model.set_weights([np.full((1, 1), rank + 1.0)])
    if rank == 0:  # where the other's optimizer has no velocity yet
        model.train_on_batch(np.ones((1, 1)), np.ones((1, 1)) * 3)
    alone = keras.optimizers.SGD(0.25 * (rank + 1))
    alone.build(model.trainable_variables)
    state: Any = State(model=model, alone=alone)
    state.sync()
    assert (state.model, state.alone) == (model, alone)
    values = [*model.get_weights(), *model.optimizer.variables, *alone.variables]
    return [np.asarray(value).tolist() for value in values]


@pytest.mark.parametrize("which", ["torch", pytest.param("tensorflow", marks=needs_tensorflow)])
def test_models_and_optimizers(which: str) -> None:
    if not is_installed("keras"):
        pytest.skip("keras is not installed")
    front_end = "tensorflow" if which == "tensorflow" else "keras"
    first, second = KERAS_RUNNERS[which](2, models, front_end)
    assert first == second
    assert first[-1] == 0.25 or first[-2] == 0.25
    assert first[0] != [[1.0]]  # it has had a step


def unbuilt(rank: int) -> None:
    import keras

    import kolovod.keras as kv
    from kolovod.errors import MismatchError, RankLeftError

    kv.init()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.5)
    if rank == 0:
        optimizer.build([keras.Variable([1.0])])
    refused = MismatchError if rank else RankLeftError
    with pytest.raises(refused, match="call optimizer.build" if rank else "rank 1"):
        State(optimizer=optimizer).sync()


def test_an_optimizer_that_is_built_on_one_rank_only() -> None:
    if not is_installed("keras"):
        pytest.skip("keras is not installed")
    KERAS_RUNNERS["torch"](2, unbuilt)


def unknown(rank: int) -> None:
    import kolovod.numpy as kv
    from kolovod.elastic import share_by
    from kolovod.errors import InvalidArgumentError, RankLeftError

    kv.init()
    if rank == 0:
        share_by(lambda value: isinstance(value, set), lambda name, value: value)
        with contextlib.suppress(RankLeftError):  # the other may have ended
            State(value={1}).sync()
        return
    with pytest.raises(InvalidArgumentError, match="import the same front ends"):
        State(value={1}).sync()


def test_a_kind_that_one_rank_has_not_heard_of() -> None:
    run_ranks(2, unknown)
