"""Worlds that form beside the present one: which are kept for whom, and which are closed."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kolovod.background_formation import BackgroundFormations
from kolovod.errors import BootstrapError

DEADLINE_S = 30


class Formed:
    """In the place of a formation."""

    def __init__(self) -> None:
        self.is_closed = threading.Event()

    def close(self) -> None:
        self.is_closed.set()


class Told:
    """Whether a world works, as often as it is said."""

    def __init__(self) -> None:
        self.words: list[bool] = []
        self._is_said = threading.Event()

    def __call__(self, works: bool) -> None:
        self.words.append(works)
        self._is_said.set()

    def wait(self) -> list[bool]:
        assert self._is_said.wait(DEADLINE_S)
        return self.words


def key(epoch: int, term: int = 1) -> tuple[Any, ...]:
    return ((term, -1), epoch, "rest")


def begin(formations: BackgroundFormations, of: tuple[Any, ...]) -> Formed:
    formed: Any = Formed()
    told = Told()
    formations.begin(of, lambda: formed, told)
    assert told.wait() == [True]
    assert isinstance(formed, Formed)
    return formed


@pytest.fixture
def formations():
    made = BackgroundFormations()
    yield made
    made.drop(DEADLINE_S)


def test_a_world_is_taken_once_and_is_not_closed_then(formations: BackgroundFormations) -> None:
    formed = begin(formations, key(2))
    assert formations.take(key(2)) is formed
    assert formations.take(key(2)) is None
    assert not formed.is_closed.is_set()


def test_a_script_that_is_late_finds_its_world_though_the_one_after_it_forms(
    formations: BackgroundFormations,
) -> None:
    first, second = begin(formations, key(2)), begin(formations, key(3))
    assert formations.take(key(2)) is first
    assert formations.take(key(3)) is second
    assert not first.is_closed.is_set()
    assert not second.is_closed.is_set()


def test_a_later_world_stays_where_a_script_enters_one_that_was_not_formed_ahead(
    formations: BackgroundFormations,
) -> None:
    """The others count on it: this process has said that it works."""
    later = begin(formations, key(3))
    assert formations.take(key(2)) is None
    assert formations.take(key(3)) is later


@pytest.mark.parametrize("next_one", [key(4), key(1, term=2)])
def test_what_another_world_follows_is_closed(
    formations: BackgroundFormations, next_one: tuple[Any, ...]
) -> None:
    before = begin(formations, key(3))
    assert formations.take(next_one) is None
    assert before.is_closed.wait(DEADLINE_S)
    assert formations.take(key(3)) is None


def test_two_are_kept_at_most(formations: BackgroundFormations) -> None:
    worlds = [begin(formations, key(epoch)) for epoch in (2, 3, 4)]
    assert worlds[0].is_closed.wait(DEADLINE_S)
    assert formations.take(key(3)) is worlds[1]
    assert formations.take(key(4)) is worlds[2]


def test_who_asks_again_is_told_again_of_the_same(formations: BackgroundFormations) -> None:
    formed = begin(formations, key(2))
    again = Told()
    formations.begin(key(2), lambda: pytest.fail("it forms once"), again)
    assert again.wait() == [True]
    assert formations.take(key(2)) is formed


def test_what_cannot_form_is_said_and_nothing_is_taken(formations: BackgroundFormations) -> None:
    def fail() -> Any:
        raise BootstrapError("no memory")

    told = Told()
    formations.begin(key(2), fail, told)
    assert told.wait() == [False]
    assert formations.take(key(2)) is None
