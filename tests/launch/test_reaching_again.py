"""When a launcher tries to reach a host again that it has lost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from typing import Any, cast

import pytest
from elastic_steps import until

from kolovod.errors import BootstrapError
from kolovod.launch import lost_hosts
from kolovod.launch.fleet import Fleet
from kolovod.launch.lost_hosts import LostHosts


class Lost:
    """Stands for the fleet: hosts that are lost, until ``reachable`` has them."""

    def __init__(self, *hosts: str) -> None:
        self.hosts = set(hosts)
        self.reachable: set[str] = set()
        self.tried_s: list[float] = []

    def lost(self) -> set[str]:
        return set(self.hosts)

    def connect(self, hosts: Collection[str], is_stopped: Callable[[], bool]) -> bool:
        self.tried_s.append(time.monotonic())
        if not self.reachable.issuperset(hosts):
            raise BootstrapError("it is not there")
        self.hosts.difference_update(hosts)
        return True


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("_LOOK_S", 0.001), ("_FIRST_AGAIN_S", 0.02), ("_AGAIN_S", 0.08)):
        monkeypatch.setattr(lost_hosts, name, seconds)


@pytest.mark.usefixtures("quick")
def test_it_is_tried_at_once_and_then_less_and_less_often() -> None:
    fleet = Lost("b")
    rings: list[Any] = []
    with contextlib.closing(LostHosts(cast("Fleet", fleet), lambda: rings.append(0))) as watched:
        watched.start()
        until(lambda: len(fleet.tried_s) == 5)
        pauses = [b - a for a, b in zip(fleet.tried_s, fleet.tried_s[1:], strict=False)]
        for pause_s, least_s in zip(pauses, (0.02, 0.04, 0.08, 0.08), strict=True):
            assert pause_s >= least_s
        assert watched.reached() == []
        fleet.reachable = {"b"}
        until(lambda: bool(rings))
        assert watched.reached() == ["b"]
        tried = len(fleet.tried_s)
        fleet.hosts = {"b"}  # its agent ends at once: no reason to start one again and again
        until(lambda: len(fleet.tried_s) > tried)
        assert fleet.tried_s[-1] - fleet.tried_s[-2] >= 0.08


@pytest.mark.usefixtures("quick")
def test_what_is_being_reached_is_waited_for_at_the_end() -> None:
    """An agent that is started while the job ends is closed with the others, or it stays behind."""

    class Slow(Lost):
        def connect(self, hosts: Collection[str], is_stopped: Callable[[], bool]) -> bool:
            self.tried_s.append(time.monotonic())
            until(is_stopped)
            time.sleep(0.05)
            self.reachable.update(hosts)
            return True

    fleet = Slow("a")
    watched = LostHosts(cast("Fleet", fleet), lambda: None)
    watched.start()
    until(lambda: bool(fleet.tried_s))
    watched.close()
    assert fleet.reachable == {"a"}
    watched.close()
