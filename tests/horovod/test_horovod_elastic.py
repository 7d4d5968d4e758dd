"""Horovod's elastic states and loop, in one process: what is saved, restored, and entered again."""

from __future__ import annotations

import queue

import pytest

from horovod.common.elastic import ObjectState, State, run_fn
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.common.notifications import HostUpdateResult
from kolovod.errors import MismatchError

ADDED, REMOVED = HostUpdateResult.added, HostUpdateResult.removed


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


def test_a_state_of_its_own_says_how():
    class Unfinished(State):
        def save(self):
            """Of the three methods this is one."""

    with pytest.raises(TypeError, match=r"abstract.*restore.*sync"):
        Unfinished(lambda value: value, lambda: 0)


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
