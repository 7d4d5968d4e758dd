"""Looking for a job at all join endpoints: hosts are addresses of the loopback interface here."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from ports import reserve_port
from waiting import until

from kolovod.elastic import join_endpoints as endpoints_module
from kolovod.elastic.join_endpoint import Facts, JoinEndpoint, JoinServer
from kolovod.elastic.join_endpoints import JoinEndpoints
from kolovod.net.channel import new_secret
from kolovod.rendezvous.external.address_exchange import RefusedError

MOST = 40
LIMIT_S = 30.0


def host_of(rank: int) -> str:
    return f"127.0.7.{rank + 1}"


@pytest.fixture(name="place")
def made_place() -> JoinEndpoint:
    return JoinEndpoint("", host_of(0), reserve_port(), new_secret(), MOST)


@pytest.fixture(name="open_endpoints")
def made_open_endpoints(place: JoinEndpoint) -> Iterator[dict[int, JoinServer]]:
    """Of members, which say that the coordinator is the member itself."""
    endpoints: dict[int, JoinServer] = {}
    with ExitStack() as cleanup:
        for rank in (0, 37):
            endpoint = place.take([host_of(rank)])
            assert endpoint is not None
            cleanup.callback(endpoint.close)
            endpoints[rank] = endpoint
        yield endpoints


@pytest.fixture(name="patience")
def made_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is there is heard, though this machine has much to do."""
    monkeypatch.setattr(endpoints_module, "_ANSWER_S", LIMIT_S)
    monkeypatch.setattr(endpoints_module, "_ROUND_S", LIMIT_S)
    monkeypatch.setattr("kolovod.elastic.join_endpoint._DISCOVER_S", LIMIT_S)


@pytest.fixture(name="impatience")
def made_impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody answers, however long it is waited."""
    monkeypatch.setattr(endpoints_module, "_ANSWER_S", 0.2)
    monkeypatch.setattr(endpoints_module, "_ROUND_S", 0.5)


def facts(rank: int) -> Facts:
    return Facts(f"{host_of(rank)}:4000", job="job")


@pytest.mark.usefixtures("patience")
def test_one_member_anywhere_is_enough(
    place: JoinEndpoint, open_endpoints: dict[int, JoinServer]
) -> None:
    open_endpoints[37].tell(facts(37))
    open_endpoints[0].close()
    assert JoinEndpoints(place, host_of, 0, "a").look_at_all() == facts(37)


@pytest.mark.slow
@pytest.mark.usefixtures("impatience")
def test_nobody_belongs_to_the_job(
    place: JoinEndpoint, open_endpoints: dict[int, JoinServer]
) -> None:
    """At one join endpoint a rank 0 waits for others; other names stand for nothing."""
    assert JoinEndpoints(place, host_of, 5, "a").look_at_some(first=True) is None
    open_endpoints[0].close()
    nowhere = JoinEndpoints(place, lambda rank: f"rank-{rank}.invalid", 5, "a")
    assert nowhere.look_at_all() is None


def test_a_few_are_asked_again_and_again_until_one_of_them_knows(
    place: JoinEndpoint, open_endpoints: dict[int, JoinServer]
) -> None:
    open_endpoints[37].tell(facts(37))
    looking = JoinEndpoints(place, host_of, 5, "a")
    assert until(lambda: looking.look_at_some(first=False)) == facts(37)


@pytest.mark.usefixtures("patience")
def test_another_jobs_secret_is_nobody_and_a_rank_too_many_is_refused(
    place: JoinEndpoint, open_endpoints: dict[int, JoinServer]
) -> None:
    open_endpoints[37].tell(facts(37))
    other = JoinEndpoint("", place.host, place.port, new_secret(), MOST)
    assert JoinEndpoints(other, host_of, 0, "a").look_at_all() is None
    more = JoinEndpoint("", place.host, place.port, place.secret, MOST + 1)
    with pytest.raises(RefusedError, match=f"there is no rank {MOST} to come"):
        JoinEndpoints(more, host_of, MOST, "a").look_at_all()


@pytest.mark.usefixtures("patience")
def test_who_waits_for_all_ranks_finds_the_job_by_looking(
    place: JoinEndpoint, open_endpoints: dict[int, JoinServer]
) -> None:
    """As rank 0, started again: it tells those that have come to its own meanwhile."""
    open_endpoints[37].tell(facts(37))
    told: list[Facts] = []

    def come() -> None:
        told.append(place.discover(2, "c", time.monotonic() + LIMIT_S))

    waiting = threading.Thread(target=come)
    waiting.start()
    looking = JoinEndpoints(place, host_of, 0, "a")
    assert open_endpoints[0].gather(4, "a", LIMIT_S, looking.look_at_all) == facts(37)
    waiting.join(LIMIT_S)
    assert told == [facts(37)]
