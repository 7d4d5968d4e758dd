"""The join endpoint of a job that others start: who comes, and what each is told."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from elastic_steps import until
from ports import reserve_port

from kolovod.elastic.join_endpoint import Facts, JoinEndpoint, JoinServer, facts_of
from kolovod.errors import AuthenticationError, BootstrapError, StartTimeoutError
from kolovod.net.channel import new_secret
from kolovod.rendezvous.external.address_exchange import RefusedError

LIMIT_S = 30.0
COORDINATOR = Facts("10.0.0.2:4000", "secret of the job", "job")


class Ranks:
    """Who knocks."""

    def __init__(self, place: JoinEndpoint) -> None:
        self.place = place
        self._pool = ThreadPoolExecutor(8)

    def discover(
        self, rank: int, limit_s: float = LIMIT_S, own: Facts | None = None
    ) -> Future[Facts]:
        by = time.monotonic() + limit_s
        return self._pool.submit(self.place.discover, rank, f"host{rank}", by, own)

    def close(self) -> None:
        self._pool.shutdown()


@pytest.fixture(autouse=True)
def made_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is there is reached, though this machine has much to do."""
    monkeypatch.setattr("kolovod.elastic.join_endpoint._DISCOVER_S", LIMIT_S)


@pytest.fixture(name="ranks", params=["one host", "hosts"])
def made_ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    name = f"kolovod-test-{os.getpid()}" if request.param == "one host" else ""
    port = 0 if name else reserve_port()
    ranks = Ranks(JoinEndpoint(name, "127.0.0.1", port, "" if name else new_secret(), 4))
    yield ranks
    ranks.close()


@pytest.fixture(name="endpoint")
def made_endpoint(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> Iterator[JoinServer]:
    monkeypatch.setattr("kolovod.elastic.join_endpoint._LATE_DISCOVER_S", 0.3)
    endpoint = ranks.place.take(["127.0.0.1"])
    assert endpoint is not None
    yield endpoint
    endpoint.close()


def test_those_that_a_job_begins_with_are_told_who_they_are(
    ranks: Ranks, endpoint: JoinServer
) -> None:
    waiting = [ranks.discover(rank) for rank in (2, 1, 3)]
    until(lambda: len(endpoint._callers) == 3)
    facts = endpoint.gather(3, "host0", LIMIT_S)
    assert facts.hosts == ("host0", "host1", "host2")
    assert not any(future.done() for future in waiting)
    endpoint.tell(COORDINATOR._replace(hosts=facts.hosts))
    begun = COORDINATOR._replace(hosts=facts.hosts)
    assert [future.result(LIMIT_S) for future in waiting] == [begun, begun, COORDINATOR]
    assert ranks.discover(1).result(LIMIT_S) == COORDINATOR  # another process
    assert ranks.discover(0).result(LIMIT_S) == COORDINATOR


def test_there_is_one_endpoint(ranks: Ranks, endpoint: JoinServer) -> None:
    assert ranks.place.take(["127.0.0.1"]) is None
    endpoint.close()
    again = ranks.place.take(["127.0.0.1"])
    assert again is not None
    again.close()


def test_who_has_gone_away_is_missing(ranks: Ranks, endpoint: JoinServer) -> None:
    ranks.discover(2)
    with pytest.raises(Exception, match="cannot reach rank 0"):
        ranks.discover(1, limit_s=0.2).result(LIMIT_S)
    until(lambda: list(endpoint._callers) == [2])
    with pytest.raises(StartTimeoutError, match=r"rank 1 did not come within 0\.1 s.* all 3"):
        endpoint.gather(3, "host0", 0.1)
    endpoint.tell(COORDINATOR)


def test_of_two_with_one_rank_the_later_one_counts(ranks: Ranks, endpoint: JoinServer) -> None:
    first = ranks.discover(1)
    until(lambda: len(endpoint._callers) == 1)
    second = ranks.discover(1)
    with pytest.raises(RefusedError, match="another process has come as rank 1, on host host1"):
        first.result(LIMIT_S)
    endpoint.tell(endpoint.gather(2, "host0", LIMIT_S)._replace(coordinator="here:1"))
    assert second.result(LIMIT_S).hosts == ("host0", "host1")


def test_a_coordinator_that_comes_is_passed_on_at_once(ranks: Ranks, endpoint: JoinServer) -> None:
    """Rank 0 was started again, and does not know that there is a job; nor do others."""
    waiting = ranks.discover(1)
    until(lambda: len(endpoint._callers) == 1)
    ranks.discover(2, own=COORDINATOR).result(LIMIT_S)
    assert waiting.result(LIMIT_S) == COORDINATOR
    assert endpoint.gather(3, "host0", LIMIT_S) == COORDINATOR
    later = COORDINATOR._replace(coordinator="10.0.0.3:5000")
    ranks.discover(3, own=later).result(LIMIT_S)
    assert endpoint.told == later
    assert ranks.discover(1).result(LIMIT_S) == later
    endpoint.tell(COORDINATOR._replace(coordinator="own:1"))  # it is a member now
    ranks.discover(3, own=later).result(LIMIT_S)
    assert ranks.discover(1).result(LIMIT_S).coordinator == "own:1"


def test_a_coordinator_is_waited_for_where_a_job_may_go_on_without_the_first_ranks(
    ranks: Ranks, endpoint: JoinServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kolovod.elastic.join_endpoint._LATE_DISCOVER_S", LIMIT_S
    )  # it comes when it can
    waiting = ranks.discover(1)
    until(lambda: len(endpoint._callers) == 1)
    begun = ranks._pool.submit(endpoint.gather, 2, "host0", LIMIT_S)
    ranks.discover(3, own=COORDINATOR).result(LIMIT_S)
    assert begun.result(LIMIT_S) == waiting.result(LIMIT_S) == COORDINATOR


def test_a_coordinator_that_comes_when_the_job_has_begun_is_too_late(
    ranks: Ranks, endpoint: JoinServer
) -> None:
    waiting = ranks.discover(1)
    facts = endpoint.gather(2, "host0", LIMIT_S)
    ranks.discover(3, own=COORDINATOR).result(LIMIT_S)
    endpoint.tell(facts._replace(coordinator="here:1"))
    assert waiting.result(LIMIT_S) == Facts("here:1", hosts=("host0", "host1"))


def test_rank_0_is_one_process(ranks: Ranks, endpoint: JoinServer) -> None:
    with pytest.raises(RefusedError, match=rf"as rank 0 \(pid {os.getpid()}\)"):
        ranks.discover(0).result(LIMIT_S)


def test_who_has_no_place_in_the_job_is_told_so(ranks: Ranks, endpoint: JoinServer) -> None:
    with pytest.raises(RefusedError, match="there is no rank 4 to come: the job has at most 4"):
        ranks.discover(4).result(LIMIT_S)


def test_strangers_are_refused() -> None:
    """Between hosts, where it is the secret that counts."""
    port = reserve_port()
    endpoint = JoinEndpoint("", "127.0.0.1", port, new_secret(), 4).take(["127.0.0.1"])
    assert endpoint is not None
    stranger = Ranks(JoinEndpoint("", "127.0.0.1", port, new_secret(), 4))
    with pytest.raises(AuthenticationError):
        stranger.discover(1).result(LIMIT_S)
    stranger.close()
    assert endpoint.told is None
    endpoint.close()


@pytest.mark.parametrize(
    ("hosts", "why"),
    [("a", "hosts is 'a'; expected a list"), (["a"] * 65537, "65537 entries; expected at most")],
    ids=["no list", "too long"],
)
def test_hosts_that_cannot_be(hosts: object, why: str) -> None:
    with pytest.raises(BootstrapError, match=why):
        facts_of({"coordinator": "", "secret": "", "job": "", "hosts": hosts})
