"""What a script has put into a state stays the object that it has, with rank 0's contents."""

from __future__ import annotations

import collections
import random
import types
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from forked import run_jax_ranks, run_ranks, run_tensorflow_ranks, run_torch_ranks
from frameworks import is_installed

from kolovod.elastic import ElasticSampler, State
from kolovod.errors import InvalidArgumentError


class Meter:
    def __init__(self, rank: int) -> None:
        self.total, self.history = float(rank), [rank]


class Slotted:
    __slots__ = ("n",)

    def __init__(self, n: int) -> None:
        self.n = n


@dataclass(frozen=True)
class Fixed:
    n: int


def plain(rank: int) -> Any:
    import kolovod.numpy as kv

    kv.init()
    own: dict[str, Any] = {
        "array": np.full(3, float(rank)),
        "arrays": [np.full(2, rank), {"w": np.full(1, rank)}],
        "strided": np.full((2, 4), rank)[:, ::2],
        "generator": np.random.default_rng(rank),
        "legacy": np.random.RandomState(rank),
        "python": random.Random(rank),
        "list": [rank],
        "dict": {"best": rank},
        "ordered": collections.OrderedDict(best=rank),
        "set": {rank},
        "recent": collections.deque([rank], maxlen=4),
        "bytes": bytearray([rank]),
        "namespace": types.SimpleNamespace(n=rank),
        "meter": Meter(rank),
    }
    state: Any = State(
        **own, step=rank, text=f"rank {rank}", fixed=Fixed(rank), slots=Slotted(rank)
    )
    for _ in range(2):  # as where a rank is lost meanwhile
        state.sync()
    assert all(getattr(state, name) is value for name, value in own.items())
    assert (state.step, state.text, state.fixed.n, state.slots.n) == (0, "rank 0", 0, 0)
    assert isinstance(state.meter, Meter)
    arrays = [own["array"], own["arrays"][0], own["arrays"][1]["w"], own["strided"]]
    drawn = own["generator"].random(), own["legacy"].rand(), own["python"].random()
    rest = [own[name] for name in ("list", "dict", "ordered", "set", "recent", "bytes")]
    objects = own["namespace"].n, own["meter"].total, own["meter"].history
    return [array.tolist() for array in arrays], drawn, rest, objects


def test_plain_values() -> None:
    first, second = run_ranks(2, plain)
    assert first == second
    assert first[0] == [[0.0] * 3, [0, 0], [0], [[0, 0], [0, 0]]]
    assert first[3] == (0.0, 0.0, [0])


def shared_memory(rank: int) -> Any:
    """Objects that are one on rank 1 and two on rank 0 must become two."""
    import kolovod.numpy as kv

    kv.init()
    array, values, both = np.zeros(2), [0], np.zeros(4)
    state: Any = State(
        a=array, b=array, pair=[array, array], c=values, d=values, e=both[:2], f=both[1:3]
    )
    if rank == 0:
        state.a, state.pair = array + 1, [array + 2, array + 3]
        state.c = [1]
        state.e, state.f = np.full(2, 4.0), np.full(2, 5.0)
    state.sync()
    arrays = [state.a, state.b, *state.pair, state.e, state.f]
    return [array.tolist() for array in arrays], state.c, state.d


def test_objects_that_are_one_on_one_rank_only() -> None:
    expected = ([[1.0] * 2, [0.0] * 2, [2.0] * 2, [3.0] * 2, [4.0] * 2, [5.0] * 2], [1], [0])
    assert run_ranks(2, shared_memory) == [expected] * 2


def together(rank: int) -> Any:
    """What two values have in common stays in common."""
    import kolovod.numpy as kv

    kv.init()
    counts = {"seen": rank}
    sampler = ElasticSampler(range(8), 2)
    state: Any = State(
        meter=types.SimpleNamespace(counts=counts, data=sampler), counts=counts, data=sampler
    )
    state.sync()
    assert state.meter.counts is state.counts
    assert state.meter.data is sampler
    return state.counts


def test_values_that_refer_to_one_another() -> None:
    assert run_ranks(2, together) == [{"seen": 0}] * 2


def hidden(rank: int) -> None:
    import kolovod.numpy as kv

    kv.init()
    with pytest.raises(InvalidArgumentError, match="has a ElasticSampler within it"):
        State(deals=[ElasticSampler(range(8), 2)]).sync()


def test_a_sampler_that_would_not_follow_the_ranks() -> None:
    run_ranks(2, hidden)


class Refusing:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __reduce__(self) -> Any:
        if self.rank == 0:
            raise ValueError("not this one")
        return Refusing, (1,)


def unpicklable(rank: int) -> None:
    import kolovod.numpy as kv

    kv.init()
    with pytest.raises(
        InvalidArgumentError, match=r"state\.odd of rank 0 .*ValueError: not this one"
    ):
        State(step=1, odd=[Refusing(rank)]).sync()
    state: Any = State(step=rank, odd=[Refusing(1)] if rank else 5)
    state.sync()
    assert (state.step, state.odd) == (0, 5)


def test_a_value_that_cannot_be_pickled_is_named() -> None:
    run_ranks(2, unpicklable)


class Own:
    """An object that knows itself how it gets to others, and cannot be pickled."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __reduce__(self) -> Any:
        raise ValueError("not this one")

    def state_dict(self) -> int:
        return self.n

    def load_state_dict(self, n: int) -> None:
        self.n = n


def late(rank: int) -> None:
    """On rank 1 nothing is there yet, whose contents could become rank 0's."""
    import kolovod.numpy as kv
    from kolovod.elastic import share_by

    def share(name: str, value: Any) -> set[int]:
        return kv.broadcast_object(value, 0)

    kv.init()
    with pytest.raises(InvalidArgumentError, match=r"state\.own of rank 0 .* not this one"):
        State(own=None if rank else Own(3)).sync()
    share_by(lambda value: isinstance(value, set), share)
    state: Any = State(own=Own(rank), members=None if rank else {1, 2})
    state.sync()
    assert (state.own.n, state.members) == (0, {1, 2})


def test_values_that_only_rank_0_has() -> None:
    run_ranks(2, late)


def schedules(rank: int) -> Any:
    import torch
    from torch.optim import lr_scheduler

    import kolovod.torch as kv

    kv.init()
    model = torch.nn.Linear(2, 1)
    optimizer = kv.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    optimizer.step()
    half = lr_scheduler.ExponentialLR(optimizer, 0.5)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (rank + 3))
    unused = torch.amp.GradScaler("cpu", enabled=False)
    if rank == 0:
        half.step()
    state: Any = State(
        model=model,
        optimizer=optimizer,
        half=half,
        others=[plateau, {"scaler": scaler}],
        unused=unused,
    )
    state.sync()
    assert state.half is half
    assert state.others[0] is plateau
    state.half.step()
    for loss in (1.0, 2.0):
        plateau.step(loss)
    return optimizer.param_groups[0]["lr"], half.last_epoch, scaler.get_scale()


def test_schedules_and_scalers() -> None:
    assert run_torch_ranks(2, schedules) == [(0.125, 2, 8.0)] * 2


class Average:
    """An average of a model's parameters, to which it refers."""

    def __init__(self, model: Any) -> None:
        self.parameters = list(model.parameters())
        self.values = [parameter.detach().clone() for parameter in self.parameters]


class Trainer:
    def __init__(self, model: Any, optimizer: Any, rank: int) -> None:
        self.model, self.optimizer, self.epoch = model, optimizer, rank


def modules(rank: int) -> Any:
    import torch

    import kolovod.torch as kv

    kv.init()
    torch.manual_seed(rank)
    first, second, third, fourth = (torch.nn.Linear(2, 1) for _ in range(4))
    optimizer = torch.optim.SGD(second.parameters(), lr=1.0 + rank, momentum=0.5)
    average = Average(first)
    trainer = Trainer(third, torch.optim.SGD(third.parameters(), lr=2.0 + rank), rank)
    alone = torch.nn.Parameter(torch.randn(2))
    loose = [torch.nn.Parameter(torch.randn(1)), torch.full((2,), float(rank))]
    generator = torch.Generator().manual_seed(rank)
    best = None if rank else fourth  # which rank 1 has not made yet
    state: Any = State(
        first=first,
        more=[second, (optimizer,)],
        average=average,
        trainer=trainer,
        alone=alone,
        loose=loose,
        generator=generator,
        best=best,
        of_alone=torch.optim.SGD([alone, loose[0]], lr=1.0),
    )
    state.sync()
    assert state.more[0] is second
    assert state.more[1][0] is optimizer
    assert state.trainer is trainer
    assert trainer.model is third
    assert state.average.parameters[0] is first.weight
    assert state.alone is alone
    assert state.loose is loose
    assert state.of_alone.param_groups[0]["params"][1] is loose[0]
    tensors = [*first.parameters(), *second.parameters(), *third.parameters(), alone, *loose]
    tensors += [*average.values, *state.best.parameters(), torch.rand(2, generator=generator)]
    rates = [each.param_groups[0]["lr"] for each in (optimizer, trainer.optimizer)]
    return [tensor.tolist() for tensor in tensors], rates, trainer.epoch


def test_modules_optimizers_and_tensors_within_other_values() -> None:
    first, second = run_torch_ranks(2, modules)
    assert first == second
    assert first[1:] == ([1.0, 2.0], 0)


def snapshots(rank: int) -> Any:
    """Tensors that are a model's on rank 1, and copies of it on rank 0."""
    import torch

    import kolovod.torch as kv

    kv.init()
    model = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(rank + 1.0)
    kept: Any = [model.weight.detach()]
    if rank == 0:
        kept = [torch.full((1, 2), 9.0)]
    state: Any = State(kept=kept, model=model)
    state.sync()
    return model.weight.tolist(), state.kept[0].tolist()


def test_copies_of_a_model_do_not_become_the_model() -> None:
    assert run_torch_ranks(2, snapshots) == [([[1.0, 1.0]], [[9.0, 9.0]])] * 2


def parts_of_modules(rank: int) -> Any:
    import torch

    import kolovod.torch as kv

    class Counting(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 1)
            self.n = rank
            self.register_buffer("seen", torch.full((2,), float(rank)), persistent=False)
            self.register_buffer("cache", torch.full((2 + rank,), float(rank)), persistent=False)
            late = None if rank else torch.ones(1)
            self.register_buffer("late", late, persistent=False)

        def get_extra_state(self) -> Any:
            return {"n": self.n}

        def set_extra_state(self, state: Any) -> None:
            self.n = state["n"]

    kv.init()
    model = torch.nn.Sequential(Counting())
    State(model=model).sync()
    own: Any = model[0]
    return own.n, own.seen.tolist(), own.cache.tolist(), own.late.tolist(), own.weight.tolist()


def test_extra_state_and_buffers_that_are_not_saved() -> None:
    first, second = run_torch_ranks(2, parts_of_modules)
    assert first == second
    assert first[:4] == (0, [0.0, 0.0], [0.0, 0.0], [1.0])


def computed_again(rank: int) -> None:
    """What ``run(redo="recompute")`` goes back to."""
    import torch

    import kolovod.torch as kv

    kv.init()
    model = torch.nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    history, seen, generator = [0], torch.zeros(2), torch.Generator().manual_seed(1)
    state: Any = State(
        models=[model],
        optimizer=optimizer,
        s=schedule,
        history=history,
        seen=[seen],
        g=generator,
        n=0,
    )
    drawn = generator.get_state()
    restore = state.keep()
    for _ in range(2):  # it may be needed again
        model(torch.randn(4, 2))
        schedule.step()
        history.append(1)
        state.n, state.history = 1, [5]
        seen.add_(1)
        torch.rand(1, generator=generator)
        restore()
        assert state.s is schedule
        assert (schedule.last_epoch, state.n, state.history) == (0, 0, [0])
        assert state.history is history
        assert state.seen[0] is seen
        assert seen.tolist() == [0.0, 0.0]
        assert torch.equal(generator.get_state(), drawn)
        assert state.models[0] is model
        assert int(model.num_batches_tracked) == 0


def test_a_step_that_is_computed_again_has_the_same_objects() -> None:
    run_torch_ranks(1, computed_again)


@pytest.mark.frameworks
@pytest.mark.skipif(not is_installed("tensorflow"), reason="TensorFlow is not installed")
def test_models_of_keras_within_other_values() -> None:
    first, second = run_tensorflow_ranks(2, of_keras)
    assert first == second


def of_keras(rank: int) -> Any:
    import keras
    import tensorflow as tf

    import kolovod.tensorflow as kv

    kv.init()
    keras.utils.set_random_seed(rank)
    pair = {
        name: keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)]) for name in "ab"
    }
    optimizer = keras.optimizers.SGD(0.5 + rank)
    optimizer.build(pair["a"].trainable_variables)
    variable, own = tf.Variable(float(rank)), dict(pair)
    layer, metric, weight = keras.layers.Dense(1), keras.metrics.Mean(), keras.Variable([rank])
    layer.build((None, 2))
    metric.update_state(1.0 + rank)
    loose = [layer, metric, weight]
    state: Any = State(pair=pair, more=[(optimizer, variable)], loose=loose)
    state.sync()
    assert all(now is before for now, before in zip(state.loose, loose, strict=True))
    assert state.pair["a"] is own["a"]
    assert state.more[0][1] is variable
    weights = [each.tolist() for model in own.values() for each in model.get_weights()]
    weights += [layer.get_weights()[0].tolist(), float(metric.result()), int(weight[0])]
    return weights, float(optimizer.learning_rate), float(variable)


@pytest.mark.frameworks
@pytest.mark.skipif(not is_installed("jax"), reason="JAX is not installed")
def test_containers_of_arrays_of_jax() -> None:
    assert run_jax_ranks(2, of_jax) == [([0.0, 0.0], 0.0)] * 2


def of_jax(rank: int) -> Any:
    import jax.numpy as jnp

    import kolovod.jax as kv

    kv.init()
    params = {"w": jnp.full(2, float(rank))}
    state: Any = State(params=params, more=types.SimpleNamespace(inner={"w": jnp.float32(rank)}))
    state.sync()
    assert state.params is params
    return params["w"].tolist(), float(state.more.inner["w"])


@pytest.mark.frameworks
@pytest.mark.skipif(not is_installed("flax"), reason="Flax is not installed")
def test_modules_of_nnx_are_changed_in_place() -> None:
    first, second = run_jax_ranks(2, of_nnx)
    assert first == second


def of_nnx(rank: int) -> Any:
    import jax.numpy as jnp
    import optax
    from flax import nnx

    import kolovod.jax as kv

    class Trainer:
        pass

    kv.init()
    model, inner = nnx.Linear(2, 1, rngs=nnx.Rngs(rank)), nnx.Linear(1, 1, rngs=nnx.Rngs(rank))
    optimizer = nnx.Optimizer(model, optax.sgd(0.5, momentum=0.5), wrt=nnx.Param)
    if rank == 0:
        optimizer.update(model, nnx.grad(lambda m: m(jnp.ones((1, 2))).sum())(model))
    trainer: Any = Trainer()
    trainer.model, trainer.epoch = inner, rank
    state: Any = State(model=model, optimizer=optimizer, trainer=trainer, rngs=nnx.Rngs(rank))
    state.sync()
    assert (state.model, state.optimizer) == (model, optimizer)
    assert state.trainer is trainer
    assert trainer.model is inner
    restore = state.keep()
    before = model.kernel[...].tolist()
    optimizer.update(model, nnx.grad(lambda m: m(jnp.ones((1, 2))).sum())(model))
    after = model.kernel[...].tolist()
    restore()
    assert model.kernel[...].tolist() == before
    return before, after, inner.kernel[...].tolist(), int(optimizer.step[...]), trainer.epoch
