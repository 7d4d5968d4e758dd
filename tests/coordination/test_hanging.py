"""Which members hang, by what the others say of a world that has failed; and the limit itself."""

from __future__ import annotations

import pytest

from kolovod.coordination.hanging import Hanging
from kolovod.launch.elastic_options import late_failure_of


class Watch:
    """Of members 0 to 2, in the world of epoch 5."""

    def __init__(self) -> None:
        self.told: list[tuple[int, str]] = []
        self.now_s = 0.0
        self.hanging = Hanging(lambda number, reason: self.told.append((number, reason)), 10.0)

    def waited(self, number: int, late: int | None, now_s: float, epoch: int = 5) -> None:
        self.hanging.note(epoch, number, late, f"{number} has waited", now_s)

    def told_by(
        self,
        now_s: float,
        ended: tuple[int, ...] = (),
        present: tuple[int, ...] = (0, 1, 2),
    ) -> list[tuple[int, str]]:
        while self.now_s < now_s:  # a coordinator asks several times a second
            self.now_s = min(self.now_s + 0.5, now_s)
            self.hanging.tell(ended, present, self.now_s)
        return self.told


@pytest.fixture
def watch() -> Watch:
    return Watch()


def test_who_does_not_notice_is_told_once_after_a_grace(watch: Watch) -> None:
    watch.waited(0, 1, 10.0)
    watch.waited(2, 1, 10.5)
    assert watch.told_by(11.9) == []
    assert watch.told_by(12.0) == [(1, "0 has waited")]
    watch.waited(0, 1, 13.0, epoch=6)  # a world that formed with it all the same
    assert watch.told_by(20.0) == [(1, "0 has waited")]


@pytest.mark.parametrize("late", [None, 0])
def test_who_notices_was_only_slow(watch: Watch, late: int | None) -> None:
    """Also if it has waited for one that waited for it: both are alive."""
    watch.waited(0, 1, 10.0)
    watch.waited(1, late, 11.9)
    assert watch.told_by(20.0) == []
    watch.waited(0, 1, 30.0, epoch=6)  # it may hang in the next world
    assert watch.told_by(32.0) == [(1, "0 has waited")]


def test_what_was_noticed_of_an_earlier_world_does_not_count(watch: Watch) -> None:
    watch.waited(1, None, 9.0, epoch=4)
    watch.waited(0, 1, 10.0)
    assert watch.told_by(12.0) == [(1, "0 has waited")]


ALL = (0, 1, 2)
OWES = (2, "it has not noticed that its world is over: 0 has waited")


def test_who_keeps_the_next_world_waiting_hangs_whoever_was_blamed_for_the_last(
    watch: Watch,
) -> None:
    """0 has waited for 1 on its host, which has waited for 2 on another one."""
    watch.hanging.note(5, 0, 1, "0 has waited", 10.0, ALL)
    watch.waited(1, None, 10.1)
    assert watch.told_by(19.9, present=ALL) == []
    assert watch.told_by(20.0, present=ALL) == [OWES]
    assert watch.told_by(21.0, present=ALL) == [OWES]


def test_worlds_that_form_with_it_are_no_sign_that_it_lives(watch: Watch) -> None:
    watch.hanging.note(5, 0, None, "0 has waited", 10.0, ALL)
    watch.hanging.note(6, 1, None, "2 has not come", 15.0, ALL)
    watch.hanging.see(5, 2)
    watch.hanging.see(7, 0)
    watch.hanging.see(7, 1)
    assert watch.told_by(20.0, present=ALL) == [OWES]


@pytest.mark.parametrize("late", [None, 2])
def test_who_was_cut_off_has_all_the_time_to_say_in_which_world_it_is(
    watch: Watch, late: int | None
) -> None:
    """The launcher was, rather; when it sees the others again all of them have gone on."""
    watch.hanging.note(5, 0, late, "0 has waited", 10.0, ALL)
    watch.waited(1, None, 10.1)
    assert watch.told_by(30.0, present=(0, 1)) == []
    assert watch.told_by(30.1, present=ALL) == []
    watch.hanging.see(6, 2)
    assert watch.told_by(60.0, present=ALL) == []


@pytest.mark.parametrize("late", [None, 2])
def test_a_coordinator_that_was_stopped_hears_first_what_was_said_meanwhile(
    watch: Watch, late: int | None
) -> None:
    watch.hanging.note(5, 0, late, "0 has waited", 10.0, ALL)
    watch.waited(1, None, 10.1)
    watch.told_by(10.5)
    watch.now_s = 40.0
    watch.hanging.tell((), ALL, watch.now_s)
    watch.hanging.see(6, 2)
    assert watch.told_by(80.0) == []


@pytest.mark.parametrize("ended", [False, True])
def test_who_is_in_the_next_world_or_has_ended_does_not_hang(watch: Watch, ended: bool) -> None:
    watch.hanging.note(5, 0, None, "0 has waited", 10.0, ALL)
    watch.waited(1, None, 10.1)
    if not ended:
        watch.hanging.see(6, 2)
    assert watch.told_by(30.0, ended=(2,) if ended else (), present=(*ALL, 3)) == []


@pytest.mark.parametrize(("limit_s", "grace_s"), [(0.2, 0.5), (1.0, 0.5), (3.0, 1.5), (600.0, 2.0)])
def test_the_grace_is_shorter_where_others_wait_shortly(limit_s: float, grace_s: float) -> None:
    told: list[int] = []
    hanging = Hanging(lambda number, _: told.append(number), limit_s)
    hanging.note(5, 0, 1, "rank 1 does not answer", 0.0)
    for tick in range(30):  # a coordinator asks often
        hanging.tell((), (0, 1), tick / 10)
        assert told == [1] * (tick / 10 >= grace_s)


def test_who_owes_an_answer_has_the_limit_for_it(watch: Watch) -> None:
    watch.hanging.expect([1, 2], 0.0)
    for tick in range(30):
        watch.hanging.expect([2] if tick == 15 else [1, 2], tick / 2)
        watch.told_by(tick / 2)
        late = [] if tick < 20 else [2]  # the time of 1 has begun anew
        assert [number for number, _ in watch.told] == late
    assert watch.told[0][1].startswith("it does not answer")


def test_who_answers_and_is_asked_again_has_all_the_time_anew(watch: Watch) -> None:
    for tick in range(60):
        if tick % 10 == 9:
            watch.hanging.hear(1)
        watch.hanging.expect([1], tick / 2)
        assert watch.told_by(tick / 2) == []


def test_a_coordinator_that_was_stopped_itself_expects_answers_anew() -> None:
    told: list[int] = []
    hanging = Hanging(lambda number, _: told.append(number), 10.0)
    for now_s in (0.0, 0.5, 20.0, 20.5):
        hanging.expect([1], now_s)
        hanging.tell((), (1,), now_s)
    assert told == []


def test_without_a_limit_nobody_is_killed_for_the_next_world() -> None:
    told: list[int] = []
    hanging = Hanging(lambda number, _: told.append(number))
    hanging.note(5, 0, None, "a rank is lost", 1.0, (0, 1))
    for now_s in range(10_000):
        hanging.tell((), (0, 1), float(now_s))
    assert told == []


def test_who_has_ended_is_not_told(watch: Watch) -> None:
    watch.waited(0, 1, 10.0)
    assert watch.told_by(12.0, ended=(1,)) == []


def test_a_world_that_failed_for_another_reason_accuses_nobody(watch: Watch) -> None:
    watch.waited(0, None, 10.0)
    assert watch.told_by(100.0) == []


def test_the_limit_of_elastic_jobs_is_the_users_if_they_have_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("KOLOVOD_LATE_FAILURE_S", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")
    for name in (*names, "HOROVOD_STALL_CHECK_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    assert late_failure_of({}) == {"KOLOVOD_LATE_FAILURE_S": "600"}
    assert late_failure_of({"KOLOVOD_LATE_FAILURE_S": "0"}) == {}
    assert late_failure_of({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "30"}) == {}
    monkeypatch.setenv("HOROVOD_STALL_CHECK_DISABLE", "1")
    assert late_failure_of({}) == {}
