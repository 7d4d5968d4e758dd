"""Horovod's elastic state and sampler for PyTorch, in one process."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch

import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.elastic import state as states
from horovod.torch.elastic.sampler import ElasticSampler
from kolovod.errors import InvalidArgumentError


@pytest.fixture
def alone():
    hvd.init()
    yield
    hvd.shutdown()


# --- the sampler ---


def placed(monkeypatch, rank, size):
    monkeypatch.setattr("horovod.torch.elastic.sampler.rank", lambda: rank)
    monkeypatch.setattr("horovod.torch.elastic.sampler.size", lambda: size)


def test_a_sampler_deals_by_turns(monkeypatch):
    dealt = []
    for rank in range(3):
        placed(monkeypatch, rank, 3)
        sampler = ElasticSampler(range(10), shuffle=False)
        assert (len(sampler), sampler.num_samples, sampler.total_size) == (4, 4, 12)
        assert sampler.remaining_indices == list(range(10))
        dealt.append(list(sampler))
    assert dealt == [[0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1]]


def test_a_sampler_goes_on_with_other_ranks(monkeypatch):
    import random

    placed(monkeypatch, 1, 2)
    sampler = ElasticSampler(range(20), seed=5)
    sampler.set_epoch(3)
    order = list(range(20))
    random.Random(8).shuffle(order)
    assert sampler.remaining_indices == order
    sampler.record_batch(0, 3)
    sampler.record_batch(1, 3)
    saved = sampler.state_dict()
    assert saved == {"epoch": 3, "processed_num": 12}
    placed(monkeypatch, 2, 3)
    other = ElasticSampler(range(20), seed=5)
    other.load_state_dict(saved)
    assert other.remaining_indices == order[12:]
    assert other.indices == [order[14], order[17], order[12]]
    assert (other.num_replicas, other.rank, other.epoch) == (3, 2, 3)
    other.set_epoch(4)
    assert other.processed_num == 0
    assert len(other.remaining_indices) == 20


@pytest.mark.parametrize(("samples", "length"), [(0, 0), (1, 1), (2, 1), (4, 2)])
def test_a_sampler_of_few_samples(monkeypatch, samples, length):
    placed(monkeypatch, 2, 3)
    sampler = ElasticSampler(range(samples), shuffle=False)
    assert len(list(sampler)) == len(sampler) == length


# --- states ---


def training(optimizer=torch.optim.SGD, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    return model, optimizer(model.parameters(), 0.1, **options)


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()


def bits(model, optimizer):
    tensors = [*model.state_dict().values()]
    for values in optimizer.state_dict()["state"].values():
        tensors += [value for value in values.values() if isinstance(value, torch.Tensor)]
    return [tensor.clone() for tensor in tensors]


def same(left, right):
    return len(left) == len(right) and all(map(torch.equal, left, right))


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {}), (torch.optim.Adagrad, {})],
    ids=["sgd", "adam", "adagrad"],
)
def test_models_and_optimizers_go_back_in_place(alone, optimizer, options):
    model, optimizer = training(optimizer, **options)
    state = hvd.elastic.TorchState(model, optimizer, batch=0)
    start = bits(model, optimizer)
    step(model, optimizer)
    if optimizer.state_dict()["state"]:
        state.restore()
        assert same(bits(model, optimizer), start)
    step(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.05
    state.batch = 2
    state.commit()
    kept = bits(model, optimizer)
    where = [p.data_ptr() for p in model.parameters()]
    own = [v.data_ptr() for s in optimizer.state.values() for v in s.values()
           if isinstance(v, torch.Tensor)]  # fmt: skip
    for _ in range(2):  # the copy is not what the model goes on with
        step(model, optimizer)
        optimizer.param_groups[0]["lr"] = 7.0
        state.batch = 9
        assert not same(bits(model, optimizer), kept)
        state.restore()
        assert same(bits(model, optimizer), kept)
        assert optimizer.param_groups[0]["lr"] == 0.05
        assert state.batch == 2
        assert all(p.grad is None for p in model.parameters())
        assert [p.data_ptr() for p in model.parameters()] == where
        assert own == [v.data_ptr() for s in optimizer.state.values() for v in s.values()
                       if isinstance(v, torch.Tensor)]  # fmt: skip


def test_copies_are_made_into_the_same_memory(alone):
    model, optimizer = training(momentum=0.9)
    step(model, optimizer)
    state = hvd.elastic.TorchState(model, optimizer)

    def copies():
        handlers = [state._handlers[name]._saved for name in ("model", "optimizer")]
        momentum = [values["momentum_buffer"] for values in handlers[1]["state"].values()]
        return [tensor.data_ptr() for tensor in (*handlers[0].values(), *momentum)]

    before = copies()
    step(model, optimizer)
    state.commit()
    assert copies() == before
    state.sync()
    assert copies() == before


def test_assigning_saves_the_new_value(alone):
    model, optimizer = training()
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, other=torch.nn.Linear(1, 1))
    assert sorted(state._handlers) == ["model", "optimizer", "other"]
    fresh = torch.nn.Linear(2, 2)
    kept = fresh.weight.detach().clone()
    state.model = fresh
    fresh.weight.data.add_(1.0)
    state.restore()
    assert state.model is fresh
    assert torch.equal(fresh.weight, kept)


def test_a_model_may_come_later(alone):
    state = hvd.elastic.TorchState(batch=1)
    assert (state.model, state.optimizer) == (None, None)
    state.model = torch.nn.Linear(1, 1)
    kept = state.model.weight.detach().clone()
    state.model.weight.data.add_(1.0)
    state.restore()
    assert torch.equal(state.model.weight, kept)


def test_schedules_and_scalers_stay_with_their_optimizer(alone):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    unused = torch.amp.GradScaler("cpu", enabled=False)
    state = hvd.elastic.TorchState(
        model=model, optimizer=optimizer, schedule=schedule, scaler=scaler, unused=unused
    )
    schedule.step()
    state.commit()
    schedule.step()
    scaler.update(2.0)
    for go_back in (state.restore, state.sync):
        go_back()
        assert state.schedule is schedule
        assert state.scaler is scaler
        assert (schedule.last_epoch, optimizer.param_groups[0]["lr"]) == (1, 0.5)
        assert scaler.get_scale() == 8.0
    state.schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_models_and_optimizers_in_lists_and_dicts(alone):
    models = [torch.nn.Linear(2, 1), torch.nn.Linear(1, 2)]
    optimizer = torch.optim.SGD(models[1].parameters(), lr=1.0, momentum=0.5)
    state = hvd.elastic.TorchState(models=models, others={"o": (optimizer,)}, losses=[1.0])
    before = [parameter.detach().clone() for model in models for parameter in model.parameters()]
    for go_back in (state.restore, state.sync):
        models[1](torch.ones(1, 1)).sum().backward()
        if go_back == state.restore:
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 2.0
            state.losses.append(2.0)
        go_back()
        assert state.models is models
        assert state.others["o"][0] is optimizer
        assert optimizer.param_groups[0]["params"][0] is models[1].weight
        now = [parameter for model in models for parameter in model.parameters()]
        assert all(map(torch.equal, now, before))
        assert (optimizer.param_groups[0]["lr"], state.losses) == (1.0, [1.0])
    state.restore()
    state.reset()
    assert models[1].weight.grad is None
    state.models = [torch.nn.Linear(1, 1)]
    with pytest.raises(InvalidArgumentError, match="a list of the state has a int beside models"):
        hvd.elastic.TorchState(mixed=[models[0], 1])


def test_a_sampler_in_a_state(alone, monkeypatch):
    sampler = ElasticSampler(range(12), shuffle=False)
    state = hvd.elastic.TorchState(sampler=sampler)
    sampler.record_batch(0, 4)
    state.commit()
    sampler.record_batch(1, 4)
    state.restore()
    assert sampler.processed_num == 4
    assert list(sampler) == list(range(4, 12))
    placed(monkeypatch, 1, 2)
    state.on_reset()
    assert list(sampler) == [5, 7, 9, 11]


def test_handlers_of_ones_own(alone):
    class Counting(states.StateHandler):
        def __init__(self, value):
            super().__init__(value)
            self.save()

        def save(self):
            self.saved = list(self.value)

        def restore(self):
            self.value[:] = self.saved

        def sync(self):
            self.value.append("synced")
            self.save()

    before = states.get_handler_registry()
    try:
        states.set_handler_registry([(list, Counting), *before])
        state = hvd.elastic.TorchState(log=["a"], step=0)
    finally:
        states.set_handler_registry(before)
    assert isinstance(state._handlers["log"], Counting)
    state.sync()
    state.log.append("b")
    state.restore()
    assert state.log == ["a", "synced"]
    assert [kind for kind, _ in before] == [torch.nn.Module, torch.optim.Optimizer, ElasticSampler]


def test_a_static_job_runs_it_as_it_is(alone):
    model, optimizer = training()
    state = hvd.elastic.TorchState(model, optimizer, batch=0)

    @hvd.elastic.run
    def train(state, batches):
        while state.batch < batches:
            step(model, optimizer)
            state.batch += 1
            state.commit()
            if state.batch == 2 and not entered:
                entered.append(state.batch)
                raise HorovodInternalError("by hand")
        return hvd.size()

    entered = []
    assert train(state, 4) == 1
    assert state.batch == 4
