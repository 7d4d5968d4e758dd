"""The callback that commits the state of an elastic job."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from keras_jobs import runs

pytestmark = pytest.mark.timeout(150)


def commits(rank: int) -> Any:
    """What the state was at each commit of two epochs of three batches."""
    import keras

    import kolovod.keras as kv
    from kolovod.elastic import ElasticSampler, State
    from kolovod.errors import InvalidArgumentError

    kv.init()
    events: list[Any] = []

    class Noting(State):
        def commit(self) -> None:
            events.append((getattr(self, "epoch", None), getattr(self, "batch", None)))

    class Before(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            events.append(f"end of {epoch}")

    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((6, 1))

    def fit(state: Any, **options: int) -> list[Any]:
        events.clear()
        callbacks = [Before(), kv.callbacks.CommitCallback(state, **options)]
        model.fit(x, x, batch_size=2, epochs=2, callbacks=callbacks, verbose=0)
        return list(events)

    with pytest.raises(InvalidArgumentError, match="state is a dict: give a kolovod"):
        kv.callbacks.CommitCallback({})
    with pytest.raises(InvalidArgumentError, match="batches_per_commit is 0"):
        kv.callbacks.CommitCallback(State(), 0)
    every = fit(Noting(epoch=0, batch=0))
    second = fit(Noting(epoch=0, batch=0), batches_per_commit=2)
    plain = fit(Noting())
    sampler = Noting(sampler=ElasticSampler(range(6), batch_size=1))
    known = fit(sampler)
    events.clear()
    callbacks = [Before(), kv.callbacks.CommitCallback(sampler)]
    model.fit(((x[:2], x[:2]) for _ in range(3)), callbacks=callbacks, verbose=0)
    return every, second, plain, known, list(events)


def test_batches_are_committed_and_counted() -> None:
    ((every, second, plain, known, unknown), _) = runs("torch")(commits)
    assert every == [
        *[(0, 1), (0, 2), "end of 0", (1, 0)],
        *[(1, 1), (1, 2), "end of 1", (2, 0)],
    ]
    assert second == [(0, 2), "end of 0", (1, 0), (1, 2), "end of 1", (2, 0)]
    none = (None, None)
    # A commit for each step, wherever Keras finds out that there is no more.
    assert known == [none, none, "end of 0", none, none, none, "end of 1", none]
    assert unknown.count(none) == 3
    assert plain == [none, none, "end of 0", none, none, none, "end of 1", none]
