"""A process's part in an elastic job of Horovod's kind, with what stands for its client."""

from __future__ import annotations

import os

import pytest

import kolovod
from horovod.common import basics, membership
from kolovod.errors import JobOverError


class MembershipClient:
    """Notes what it is told."""

    def __init__(self, **fields):
        self.has_state = True
        self.expects_world = True
        self.others_come = False
        self.min_np = 1
        self.told = []
        vars(self).update(fields)

    def __getattr__(self, name):
        def note(*arguments, **named):
            self.told.append((name, *arguments, *named.items()))

        return note


@pytest.fixture
def alone():
    basics.init()
    yield
    basics.shutdown()


def with_client(monkeypatch, **fields):
    client = MembershipClient(**fields)
    monkeypatch.setattr(membership, "join", lambda: client)
    return client


def test_without_an_elastic_job_nothing_happens(monkeypatch):
    monkeypatch.delenv("HOROVOD_RANK", raising=False)
    basics.init()
    try:
        assert "HOROVOD_RANK" not in os.environ
        assert membership.client() is None
        assert [membership.must_sync(wants) for wants in (True, False)] == [True, False]
        membership.failed(ValueError())
        membership.stops()
        membership.synced()
        membership.enough(lambda: pytest.fail("reset"))
        with pytest.raises(KeyError), membership.gives_up():
            raise KeyError
    finally:
        basics.shutdown()


@pytest.mark.parametrize(("wants", "has_state", "answer"), [
    (True, True, True), (False, True, False), (False, False, True), (True, False, True),
])  # fmt: skip
def test_who_lacks_the_state_has_all_sync(monkeypatch, alone, wants, has_state, answer):
    with_client(monkeypatch, has_state=has_state)
    assert membership.must_sync(wants) is answer


def test_who_enters_a_world_finds_its_place_in_the_environment(monkeypatch):
    with_client(monkeypatch)
    for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"):
        monkeypatch.setenv(f"HOROVOD_{name}", "7")
    kolovod.init()
    try:
        with membership.entering():
            kolovod.init()
        names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
        assert [os.environ[f"HOROVOD_{name}"] for name in names] == list("010101")
    finally:
        kolovod.shutdown()


@pytest.mark.parametrize(("has_left", "kind"), [(True, SystemExit), (False, JobOverError)])
def test_who_is_not_wanted_any_more_ends_well(monkeypatch, capsys, has_left, kind):
    with_client(monkeypatch)
    with pytest.raises(kind) as caught, membership.entering():
        raise JobOverError("the job goes on without this process", has_left)
    if has_left:
        assert caught.value.code == 0
        assert "the job goes on without this process" in capsys.readouterr().err


def test_all_stop_for_a_world_that_waits(monkeypatch):
    client = with_client(monkeypatch)
    membership.stops()
    assert client.told == [("stop_for_next",)]


def test_where_none_waits_another_one_is_asked_for(monkeypatch):
    monkeypatch.setattr(membership, "_WORD_OF_CHANGE_S", 0.05)
    client = with_client(monkeypatch, expects_world=False)
    membership.stops()
    assert [what for what, *_ in client.told] == ["failed"]


def test_too_few_wait(monkeypatch, alone):
    client = with_client(monkeypatch, min_np=2)
    worlds = []

    def reset():
        worlds.append("another")
        client.min_np = 1 if len(worlds) == 2 else 2

    membership.enough(reset)
    assert worlds == ["another"] * 2
    assert client.told == [("stop_for_next", ("is_wanted", False))] * 2


@pytest.mark.parametrize(
    ("error", "told"),
    [(ValueError("no"), [("resign", "ValueError: no")]),
     (SystemExit(3), [("resign", "SystemExit: 3")]),
     (SystemExit(0), []), (SystemExit(None), []), (JobOverError("over"), [])],
)  # fmt: skip
def test_the_others_hear_of_who_gives_up(monkeypatch, error, told):
    client = with_client(monkeypatch)
    with pytest.raises(type(error)), membership.gives_up():
        raise error
    assert client.told == told
