"""Horovod's elastic states and loop, in one process: what is saved, restored, and entered again."""

from __future__ import annotations

import queue
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch

import horovod.torch as hvd
from horovod.common.elastic import ObjectState, State, run_fn
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.common.notifications import HostUpdateResult, WorkerNotificationManager, _kind
from horovod.runner.elastic.discovery import FixedHosts, HostDiscovery, HostDiscoveryScript
from horovod.torch.elastic import state as states
from horovod.torch.elastic.sampler import ElasticSampler
from kolovod.elastic.ballots import Ballot, Member
from kolovod.elastic.ballots import World as ElasticWorld
from kolovod.errors import BootstrapError, MismatchError

ADDED, REMOVED = HostUpdateResult.added, HostUpdateResult.removed


@pytest.fixture
def alone():
    hvd.init()
    yield
    hvd.shutdown()


def objects(**values):
    return ObjectState(lambda value: value, lambda: 0, **values)


# --- states ---


def test_values_go_back_to_the_last_commit():
    state = objects(step=0, seen=[])
    state.step = 1
    state.seen.append("a")
    state.restore()
    assert (state.step, state.seen) == (0, [])  # as it began
    state.step = 2
    state.seen.append("b")
    state.commit()
    state.step = 3
    state.seen.append("c")
    state.restore()
    assert (state.step, state.seen) == (2, ["b"])
    state.seen.append("d")  # no part of the copy
    state.restore()
    assert state.seen == ["b"]


def test_values_become_those_of_rank_0_and_stay():
    state = ObjectState(lambda value: {"step": 7}, lambda: 1, step=1)
    state.sync()
    assert state.step == 7
    state.step = 8
    state.restore()
    assert state.step == 7


def test_a_state_without_values_sends_nothing():
    ObjectState(lambda value: pytest.fail("sent"), lambda: 0).sync()


@pytest.mark.parametrize("method", ["save", "restore", "sync"])
def test_a_state_of_its_own_says_how(method):
    with pytest.raises(NotImplementedError):
        getattr(State(lambda value: value, lambda: 0), method)()


@pytest.mark.parametrize(
    ("updates", "skip_sync"),
    [([REMOVED], True), ([ADDED], False), ([REMOVED, ADDED], False), ([REMOVED, REMOVED], True),
     ([HostUpdateResult.no_update], False)],
)  # fmt: skip
def test_hosts_that_change_interrupt_the_next_commit(updates, skip_sync):
    state = objects(step=0)
    assert state._host_messages.empty()
    state.check_host_updates()
    for timestamp, update in enumerate(updates, 1):
        state.on_hosts_updated(timestamp, update)
    state.step = 5
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.commit()
    assert caught.value.skip_sync is skip_sync
    assert state._last_updated_timestamp == len(updates)
    assert state._host_messages.empty()
    state.step = 6
    state.restore()
    assert state.step == 5  # it was saved before
    state.commit()
    state.on_hosts_updated(1, ADDED)  # nothing new
    state.commit()
    state._last_updated_timestamp = 0  # as some scripts do
    state.on_hosts_updated(1, ADDED)
    with pytest.raises(HostsUpdatedInterrupt):
        state.check_host_updates()


def test_what_rank_0_has_heard_counts():
    state = ObjectState(lambda value: (0, 12.5, REMOVED), lambda: 1)
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.check_host_updates()
    assert caught.value.skip_sync
    deaf = ObjectState(lambda value: (3, 3, HostUpdateResult.no_update), lambda: 1)
    deaf.on_hosts_updated(9, ADDED)
    deaf.check_host_updates()
    assert deaf._last_updated_timestamp == 3


def test_a_reset_forgets_messages_and_calls_back():
    class Resetting(ObjectState):
        def reset(self):
            calls.append("reset")

    calls = []
    state = Resetting(lambda value: value, lambda: 0)
    state.register_reset_callbacks([lambda: calls.append("first"), lambda: calls.append("second")])
    state.register_reset_callbacks([lambda: calls.append("third")])
    state.on_hosts_updated(1, ADDED)
    state.on_reset()
    assert calls == ["reset", "first", "second", "third"]
    assert isinstance(state._host_messages, queue.Queue)
    assert state._host_messages.empty()


# --- the loop ---


class Watched(ObjectState):
    """Says what is done with it."""

    def __init__(self):
        super().__init__(lambda value: value, lambda: 0, step=0)
        self.calls = []

    def sync(self):
        self.calls.append("sync")

    def restore(self):
        self.calls.append("restore")

    def on_reset(self):
        self.calls.append("on_reset")


ENTERED_AGAIN = {
    "an operation fails": (HorovodInternalError(), "restore reset on_reset sync"),
    "hosts are added": (HostsUpdatedInterrupt(False), "reset on_reset sync"),
    "hosts are removed": (HostsUpdatedInterrupt(True), "reset on_reset"),
}


@pytest.mark.parametrize("what", ENTERED_AGAIN)
def test_the_function_is_entered_again(what):
    error, calls = ENTERED_AGAIN[what]
    state = Watched()

    def work(given, *, factor):
        assert given is state
        state.calls.append("enter")
        state.step += 1
        if state.step == 1:
            raise error
        return factor * state.step

    assert run_fn(work, lambda: state.calls.append("reset"))(state, factor=10) == 20
    assert state.calls == ["sync", "enter", *calls.split(), "enter"]


def test_a_failure_after_a_skipped_sync_syncs():
    state = Watched()
    errors = [HostsUpdatedInterrupt(True), HorovodInternalError(), None]

    def work(given):
        error = errors.pop(0)
        if error is not None:
            raise error

    run_fn(work, lambda: None)(state)
    assert state.calls == ["sync", "on_reset", "restore", "on_reset", "sync"]


def test_a_callback_that_fails_with_a_rank_is_repeated():
    state = Watched()
    fails = [True, True]

    def on_reset():
        state.calls.append("on_reset")
        if fails:
            fails.pop()
            raise HorovodInternalError

    state.on_reset = on_reset
    errors = [HostsUpdatedInterrupt(False)]

    def work(given):
        for error in [errors.pop() for _ in errors]:
            raise error

    run_fn(work, lambda: None)(state)
    again = ["on_reset", "restore"]
    assert state.calls == ["sync", *again, *again, "on_reset", "sync"]


@pytest.mark.parametrize("error", [MismatchError("shapes differ"), ValueError("no"), SystemExit(3)])
def test_other_errors_end_it(error):
    def work(given):
        raise error

    with pytest.raises(type(error)) as caught:
        run_fn(work, lambda: pytest.fail("reset"))(Watched())
    assert caught.value is error


def test_a_reset_that_fails_ends_it():
    def reset():
        raise HorovodInternalError("rank 1 has ended")

    def work(given):
        raise HorovodInternalError("an operation")

    with pytest.raises(HorovodInternalError, match="rank 1 has ended"):
        run_fn(work, reset)(Watched())


# --- who hears of changes ---


def world(*numbers):
    members = tuple(Member(number, number, "a") for number in numbers)
    return ElasticWorld(Ballot(0, -1), 1, members)


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [((0, 1), (0,), REMOVED), ((0,), (0, 5), ADDED), ((0, 1), (0, 5), HostUpdateResult.mixed),
     ((0, 1), (0, 1), HostUpdateResult.no_update)],
)  # fmt: skip
def test_what_has_changed(before, after, kind):
    assert _kind(world(*before), world(*after)) == kind


def test_listeners_are_told(monkeypatch):
    session = SimpleNamespace(change=None)
    monkeypatch.setattr("horovod.common.membership.join", lambda: session)
    manager = WorkerNotificationManager()
    manager.init()
    heard = []
    listener = SimpleNamespace(on_hosts_updated=lambda *message: heard.append(message))
    manager.register_listener(listener)
    assert heard == []
    session.change = world(0, 1), world(0)
    session.hears_of_change()  # as the session's thread does
    manager.look()
    assert [update for _, update in heard] == [REMOVED] * 2
    assert heard[0][0] < heard[1][0]
    manager.remove_listener(listener)
    manager.look()
    assert len(heard) == 2
    manager.register_listener(listener)  # who comes later hears of what waits
    assert len(heard) == 3


# --- discovery ---


@pytest.mark.parametrize(
    ("said", "wanted"),
    [("", {}), ("\n", {}), ("a:2\nb\n", {"a": 2, "b": 4}), ("10.0.0.1:3", {"10.0.0.1": 3})],
)
def test_a_discovery_script(said, wanted):
    script = HostDiscoveryScript("unused", 4)
    script._execute_discovery_script = lambda: said
    assert script.find_available_hosts_and_slots() == wanted


def test_a_discovery_script_is_run_by_a_shell(tmp_path):
    (tmp_path / "hosts").write_text("a:2\n")
    script = HostDiscoveryScript(f"cat {tmp_path}/hosts | tr a b", None)
    assert script.find_available_hosts_and_slots() == {"b": 2}
    with pytest.raises(BootstrapError, match=r"'exit 3' ended with 3"):
        HostDiscoveryScript("exit 3", 1).find_available_hosts_and_slots()
    with pytest.raises(ValueError, match=r"'a b'.*not of the form"):
        HostDiscoveryScript("echo a b", 1).find_available_hosts_and_slots()


def test_fixed_hosts():
    fixed = FixedHosts({"a": 1})
    assert fixed.find_available_hosts_and_slots() == {"a": 1}
    fixed.set({"b": 2})
    assert fixed.find_available_hosts_and_slots() == {"b": 2}
    with pytest.raises(NotImplementedError):
        HostDiscovery().find_available_hosts_and_slots()


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


# --- PyTorch ---


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
