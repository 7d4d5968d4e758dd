"""What the end of a process of an elastic job means, and the job's exit code."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import pytest

from kolovod.coordination import record_file
from kolovod.coordination.consensus import NOTHING, World
from kolovod.coordination.coordinator_state import first_world
from kolovod.launch.avoided_hosts import Process
from kolovod.launch.death import reported
from kolovod.launch.local import Ended
from kolovod.launch.outcome import How, Outcome

WORLD = first_world(enumerate("aab"))


class Coordinator:
    """Knows the members by the numbers of their processes."""

    world: World = WORLD
    known = True
    left_behind: frozenset[int] = frozenset()
    leaving: frozenset[int] = frozenset()

    def number_of(self, process: int) -> int | None:
        return process if self.known else None

    def lets_leave(self, number: int) -> bool:
        return number in self.leaving

    def has_let_go(self, number: int) -> bool:
        return number in self.leaving and number not in self.world.numbers

    def has_left_behind(self, number: int) -> bool:
        return number in self.left_behind


@pytest.fixture
def coordinator() -> Coordinator:
    return Coordinator()


@pytest.fixture
def outcome(coordinator: Any) -> Outcome:
    return Outcome(lambda: coordinator)


def process_in(slot: int) -> Process:
    return Process(slot, "aab"[slot], 0.0, member=slot)


def ended(number: int, code: int = 0, **how: Any) -> Ended:
    death = None if "lost" in how else reported(code)
    return Ended(number, 100 + number, death, host="aab"[number], **how)


def test_a_member_of_the_newest_world_that_ends_well_is_at_its_end(outcome: Outcome) -> None:
    assert outcome.note(process_in(1), 1, ended(1, result=b"one")) is How.AT_ITS_END
    assert outcome.ended_well
    assert outcome.exit_code(WORLD) == 0
    assert outcome.results() == [b"", b"one", b""]


def test_who_is_in_no_world_any_more_has_left(outcome: Outcome, coordinator: Any) -> None:
    coordinator.world = first_world([(0, "a")])
    assert outcome.note(process_in(2), 2, ended(2)) is How.LEFT
    assert outcome.left == {2: "b"}
    assert outcome.exit_code(coordinator.world) == 143  # all have left


def test_who_was_sent_away_leaves_its_place(outcome: Outcome, coordinator: Any) -> None:
    coordinator.world = first_world([(0, "a")])
    sent = process_in(1)
    sent.sent_away = True
    assert outcome.note(sent, 1, ended(1)) is How.LEFT
    assert outcome.left == {}


def test_who_leaves_while_no_launcher_is_there_has_left(outcome: Outcome, coordinator: Any) -> None:
    """The next one has not heard of the worlds between, and takes it for one that was cut off."""
    coordinator.world = first_world([(0, "a")])
    coordinator.left_behind = frozenset([2])
    assert outcome.was_cut_off(2)
    assert outcome.note(process_in(2), 2, ended(2)) is How.LEFT
    assert outcome.left == {2: "b"}


def test_of_a_process_that_this_launcher_does_not_know_its_record_tells(
    outcome: Outcome, coordinator: Any
) -> None:
    coordinator.known = False
    fd, path = record_file.new_file()
    try:
        with contextlib.closing(record_file.RecordFile(path)) as file:
            file.write(NOTHING.told(WORLD))
        record = record_file.read(fd)
    finally:
        os.close(fd)
    assert outcome.note(process_in(1), None, ended(1, record=record)) is How.AT_ITS_END


def test_a_failure_counts_unless_others_come_to_their_end(
    outcome: Outcome, coordinator: Any
) -> None:
    failed = ended(1, 7)
    assert outcome.note(process_in(1), 1, failed) is How.FAILED
    assert outcome.note_failed(process_in(1), 1, failed) == "rank 1 on host a (pid 101)"
    assert outcome.failed_as(failed) == (1, "rank 1 on host a (pid 101)")
    assert outcome.exit_code(WORLD) == 7
    coordinator.world = first_world([(0, "a")])
    assert outcome.note(process_in(0), 0, ended(0)) is How.AT_ITS_END
    assert outcome.exit_code(coordinator.world) == 0


def test_who_runs_on_a_host_that_is_reached_again_has_not_failed(outcome: Outcome) -> None:
    lost = ended(2, 0, lost="no sign of life")
    assert outcome.note(process_in(2), 2, lost) is How.FAILED
    name = outcome.note_failed(process_in(2), None, lost)
    assert name == "the process in slot 2 on host b (pid 102)"
    outcome.take_back({2}, [2])
    assert outcome.failed == []
    assert outcome.note(process_in(0), 0, ended(0)) is How.AT_ITS_END
    assert outcome.exit_code(WORLD) == 0


def test_all_members_of_the_newest_world_may_have_left(outcome: Outcome, coordinator: Any) -> None:
    """A scheduler must not take that for the end of their work, whatever was before."""
    coordinator.leaving = frozenset([0, 1])
    failed = ended(2, 7)
    assert outcome.note(process_in(2), 2, failed) is How.FAILED
    outcome.note_failed(process_in(2), 2, failed)
    coordinator.world = first_world([(0, "a"), (1, "a")])
    for number in (0, 1):
        assert outcome.note(process_in(number), number, ended(number)) is How.LEFT
    assert outcome.exit_code(coordinator.world) == 143


def test_who_was_told_to_end_does_not_count(outcome: Outcome) -> None:
    told = process_in(1)
    told.is_told = True
    assert outcome.note(told, 1, ended(1, 9)) is How.AS_TOLD
    assert outcome.exit_code(WORLD) == 143


def test_who_leaves_on_a_host_that_is_lost_has_left(outcome: Outcome, coordinator: Any) -> None:
    process = process_in(2)
    assert outcome.note(process, 2, ended(2, lost="ssh ended")) is How.FAILED
    coordinator.leaving = frozenset({2})
    assert not outcome.has_left_unseen()  # it is in the world still
    coordinator.world = first_world(enumerate("aa"))
    assert outcome.has_left_unseen()
    assert outcome.left == {2: "b"}
    assert not outcome.has_left_unseen()


def test_who_was_cut_off_or_sent_away_has_not_left(outcome: Outcome, coordinator: Any) -> None:
    coordinator.world = first_world(enumerate("a"))
    outcome.note(process_in(1), 1, ended(1, lost="ssh ended"))
    assert not outcome.has_left_unseen()
    coordinator.leaving = frozenset({1, 2})
    outcome.take_back([1], [1])  # its agent will tell
    assert not outcome.has_left_unseen()
    away = process_in(2)
    away.sent_away = True
    outcome.note(away, 2, ended(2, lost="ssh ended"))
    assert outcome.has_left_unseen()
    assert outcome.left == {}
