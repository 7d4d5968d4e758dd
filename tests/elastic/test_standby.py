"""A member that takes the coordinator's part: it ends meanwhile, or cannot look around."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from waiting import until

from kolovod.coordination.consensus import NOTHING
from kolovod.coordination.coordinator_state import CoordinatorState, first_world
from kolovod.coordination.membership import Policy
from kolovod.elastic import standby as standby_module
from kolovod.elastic.standby import Known, Standby
from kolovod.net.channel import new_secret

SECRET = new_secret()
WORLD = first_world([(0, "a"), (1, "b")])
KNOWN = Known(0, NOTHING.told(WORLD), ())


def test_who_ends_meanwhile_does_not_become_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its members would stay with a process that has left the job."""
    threads = set(threading.enumerate())
    standby = Standby("127.0.0.1:1", SECRET, lambda: KNOWN)
    made: list[Any] = []

    class ActingCoordinator(standby_module._ActingCoordinator):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)
            standby.close()

    monkeypatch.setattr(standby_module, "_ActingCoordinator", ActingCoordinator)
    with pytest.raises(ConnectionError, match="this process ends"):
        standby._become_coordinator(KNOWN, frozenset(), 0.0)
    assert standby._acting is None
    assert made[0]._closed.is_set()
    until(lambda: set(threading.enumerate()) <= threads)


def test_who_cannot_look_around_tries_again_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Out of files, say: two coordinators would never find each other if it gave up."""
    monkeypatch.setattr(standby_module, "_LOOK_S", 0.01)
    looks = []

    def look_around(_: Any) -> bool:
        looks.append(1)
        if len(looks) < 4:
            raise OSError(24, "Too many open files")
        return False

    given = (0, CoordinatorState(WORLD), Policy(), SECRET, ["127.0.0.1"], {}, 0.0, look_around)
    acting = standby_module._ActingCoordinator(*given)
    try:
        acting.start()
        until(lambda: len(looks) == 4 and not acting._thread.is_alive())
    finally:
        acting.close()
    assert capfd.readouterr().err.count("Too many open files") == 1
