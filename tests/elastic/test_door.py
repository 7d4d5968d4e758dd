"""The door of a job that others start: who comes there, and what each is told. Threads as ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from elastic_steps import until
from ports import reserve_port

from kolovod.elastic.door import Door, Facts, Place
from kolovod.errors import AuthenticationError, StartTimeoutError
from kolovod.net.channel import new_secret
from kolovod.rendezvous.external.address_exchange import RefusedError

LIMIT_S = 30.0
COORDINATOR = Facts("10.0.0.2:4000", "secret of the job", "job")


class Ranks:
    """Who knocks."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._pool = ThreadPoolExecutor(8)

    def knock(self, rank: int, limit_s: float = LIMIT_S, own: Facts | None = None) -> Future[Facts]:
        by = time.monotonic() + limit_s
        return self._pool.submit(self.place.knock, rank, f"host{rank}", by, own)

    def close(self) -> None:
        self._pool.shutdown()


@pytest.fixture(autouse=True)
def made_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is there is reached, though this machine has much to do."""
    monkeypatch.setattr("kolovod.elastic.door._KNOCK_S", LIMIT_S)


@pytest.fixture(name="ranks", params=["one host", "hosts"])
def made_ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    name = f"kolovod-test-{os.getpid()}" if request.param == "one host" else ""
    port = 0 if name else reserve_port()
    ranks = Ranks(Place(name, "127.0.0.1", port, "" if name else new_secret(), 4))
    yield ranks
    ranks.close()


@pytest.fixture(name="door")
def made_door(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    monkeypatch.setattr("kolovod.elastic.door._LATE_KNOCK_S", 0.3)
    door = ranks.place.take(["127.0.0.1"])
    assert door is not None
    yield door
    door.close()


def test_those_that_a_job_begins_with_are_told_who_they_are(ranks: Ranks, door: Door) -> None:
    waiting = [ranks.knock(rank) for rank in (2, 1, 3)]
    until(lambda: len(door._callers) == 3)
    facts = door.gather(3, "host0", LIMIT_S)
    assert facts.hosts == ("host0", "host1", "host2")
    assert not any(future.done() for future in waiting)
    door.tell(COORDINATOR._replace(hosts=facts.hosts))
    begun = COORDINATOR._replace(hosts=facts.hosts)
    assert [future.result(LIMIT_S) for future in waiting] == [begun, begun, COORDINATOR]
    assert ranks.knock(1).result(LIMIT_S) == COORDINATOR  # another process
    assert ranks.knock(0).result(LIMIT_S) == COORDINATOR


def test_there_is_one_door(ranks: Ranks, door: Door) -> None:
    assert ranks.place.take(["127.0.0.1"]) is None
    door.close()
    again = ranks.place.take(["127.0.0.1"])
    assert again is not None
    again.close()


def test_who_has_gone_away_is_missing(ranks: Ranks, door: Door) -> None:
    ranks.knock(2)
    with pytest.raises(Exception, match="cannot reach rank 0"):
        ranks.knock(1, limit_s=0.2).result(LIMIT_S)
    until(lambda: list(door._callers) == [2])
    with pytest.raises(StartTimeoutError, match=r"rank 1 did not come within 0\.1 s.* all 3"):
        door.gather(3, "host0", 0.1)
    door.tell(COORDINATOR)


def test_of_two_with_one_rank_the_later_one_counts(ranks: Ranks, door: Door) -> None:
    first = ranks.knock(1)
    until(lambda: len(door._callers) == 1)
    second = ranks.knock(1)
    with pytest.raises(RefusedError, match="another process has come as rank 1, on host host1"):
        first.result(LIMIT_S)
    door.tell(door.gather(2, "host0", LIMIT_S)._replace(coordinator="here:1"))
    assert second.result(LIMIT_S).hosts == ("host0", "host1")


def test_a_coordinator_that_comes_is_passed_on_at_once(ranks: Ranks, door: Door) -> None:
    """Rank 0 was started again, and does not know that there is a job; nor do others."""
    waiting = ranks.knock(1)
    until(lambda: len(door._callers) == 1)
    ranks.knock(2, own=COORDINATOR).result(LIMIT_S)
    assert waiting.result(LIMIT_S) == COORDINATOR
    assert door.gather(3, "host0", LIMIT_S) == COORDINATOR
    later = COORDINATOR._replace(coordinator="10.0.0.3:5000")
    ranks.knock(3, own=later).result(LIMIT_S)
    assert door.told == later
    assert ranks.knock(1).result(LIMIT_S) == later
    door.tell(COORDINATOR._replace(coordinator="own:1"))  # it is a member now
    ranks.knock(3, own=later).result(LIMIT_S)
    assert ranks.knock(1).result(LIMIT_S).coordinator == "own:1"


def test_a_coordinator_is_waited_for_where_a_job_may_go_on_without_the_first_ranks(
    ranks: Ranks, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kolovod.elastic.door._LATE_KNOCK_S", LIMIT_S)  # it comes when it can
    waiting = ranks.knock(1)
    until(lambda: len(door._callers) == 1)
    begun = ranks._pool.submit(door.gather, 2, "host0", LIMIT_S)
    ranks.knock(3, own=COORDINATOR).result(LIMIT_S)
    assert begun.result(LIMIT_S) == waiting.result(LIMIT_S) == COORDINATOR


def test_a_coordinator_that_comes_when_the_job_has_begun_is_too_late(
    ranks: Ranks, door: Door
) -> None:
    waiting = ranks.knock(1)
    facts = door.gather(2, "host0", LIMIT_S)
    ranks.knock(3, own=COORDINATOR).result(LIMIT_S)
    door.tell(facts._replace(coordinator="here:1"))
    assert waiting.result(LIMIT_S) == Facts("here:1", hosts=("host0", "host1"))


def test_rank_0_is_one_process(ranks: Ranks, door: Door) -> None:
    with pytest.raises(RefusedError, match=rf"as rank 0 \(pid {os.getpid()}\)"):
        ranks.knock(0).result(LIMIT_S)


def test_who_has_no_place_in_the_job_is_told_so(ranks: Ranks, door: Door) -> None:
    with pytest.raises(RefusedError, match="there is no rank 4 to come: the job has at most 4"):
        ranks.knock(4).result(LIMIT_S)


def test_strangers_are_refused() -> None:
    """Between hosts, where it is the secret that counts."""
    port = reserve_port()
    door = Place("", "127.0.0.1", port, new_secret(), 4).take(["127.0.0.1"])
    assert door is not None
    stranger = Ranks(Place("", "127.0.0.1", port, new_secret(), 4))
    with pytest.raises(AuthenticationError):
        stranger.knock(1).result(LIMIT_S)
    stranger.close()
    assert door.told is None
    door.close()
