"""Looking for a job at all doors: hosts are addresses of the loopback interface here."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from ports import reserve_port
from waiting import until

from kolovod.elastic import doors as doors_module
from kolovod.elastic.door import Door, Facts, Place
from kolovod.elastic.doors import Doors
from kolovod.net.channel import new_secret
from kolovod.rendezvous.external.address_exchange import RefusedError

MOST = 40
LIMIT_S = 30.0


def host_of(rank: int) -> str:
    return f"127.0.7.{rank + 1}"


@pytest.fixture(name="place")
def made_place() -> Place:
    return Place("", host_of(0), reserve_port(), new_secret(), MOST)


@pytest.fixture(name="open_doors")
def made_open_doors(place: Place) -> Iterator[dict[int, Door]]:
    """Of members, which say that the coordinator is the member itself."""
    doors: dict[int, Door] = {}
    with ExitStack() as cleanup:
        for rank in (0, 37):
            door = place.take([host_of(rank)])
            assert door is not None
            cleanup.callback(door.close)
            doors[rank] = door
        yield doors


@pytest.fixture(name="patience")
def made_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is there is heard, though this machine has much to do."""
    monkeypatch.setattr(doors_module, "_ANSWER_S", LIMIT_S)
    monkeypatch.setattr(doors_module, "_ROUND_S", LIMIT_S)
    monkeypatch.setattr("kolovod.elastic.door._KNOCK_S", LIMIT_S)


@pytest.fixture(name="impatience")
def made_impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody answers, however long it is waited."""
    monkeypatch.setattr(doors_module, "_ANSWER_S", 0.2)
    monkeypatch.setattr(doors_module, "_ROUND_S", 0.5)


def facts(rank: int) -> Facts:
    return Facts(f"{host_of(rank)}:4000", job="job")


@pytest.mark.usefixtures("patience")
def test_one_member_anywhere_is_enough(place: Place, open_doors: dict[int, Door]) -> None:
    open_doors[37].tell(facts(37))
    open_doors[0].close()
    assert Doors(place, host_of, 0, "a").look_at_all() == facts(37)


@pytest.mark.slow
@pytest.mark.usefixtures("impatience")
def test_nobody_belongs_to_the_job(place: Place, open_doors: dict[int, Door]) -> None:
    """There is a door, where a rank 0 waits for others; and names that stand for nothing."""
    assert Doors(place, host_of, 5, "a").look_at_some(first=True) is None
    open_doors[0].close()
    nowhere = Doors(place, lambda rank: f"rank-{rank}.invalid", 5, "a")
    assert nowhere.look_at_all() is None


def test_a_few_are_asked_again_and_again_until_one_of_them_knows(
    place: Place, open_doors: dict[int, Door]
) -> None:
    open_doors[37].tell(facts(37))
    looking = Doors(place, host_of, 5, "a")
    assert until(lambda: looking.look_at_some(first=False)) == facts(37)


@pytest.mark.usefixtures("patience")
def test_another_jobs_secret_is_nobody_and_a_rank_too_many_is_refused(
    place: Place, open_doors: dict[int, Door]
) -> None:
    open_doors[37].tell(facts(37))
    other = Place("", place.host, place.port, new_secret(), MOST)
    assert Doors(other, host_of, 0, "a").look_at_all() is None
    more = Place("", place.host, place.port, place.secret, MOST + 1)
    with pytest.raises(RefusedError, match=f"there is no rank {MOST} to come"):
        Doors(more, host_of, MOST, "a").look_at_all()


@pytest.mark.usefixtures("patience")
def test_who_waits_for_all_ranks_finds_the_job_by_looking(
    place: Place, open_doors: dict[int, Door]
) -> None:
    """As rank 0, started again: and tells it to those that have come to its door meanwhile."""
    open_doors[37].tell(facts(37))
    told: list[Facts] = []

    def come() -> None:
        told.append(place.knock(2, "c", time.monotonic() + LIMIT_S))

    waiting = threading.Thread(target=come)
    waiting.start()
    looking = Doors(place, host_of, 0, "a")
    assert open_doors[0].gather(4, "a", LIMIT_S, looking.look_at_all) == facts(37)
    waiting.join(LIMIT_S)
    assert told == [facts(37)]
