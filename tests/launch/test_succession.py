"""What a launcher that follows another one finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kolovod.launch import agent_line, fleet, succession
from kolovod.launch.agent_line import SshOptions
from kolovod.launch.fleet import Fleet
from kolovod.launch.keeping import Keeping, Kept


class Agent:
    """Of any host: reached at once, until it is lost."""

    def __init__(self, host: str, *_: Any) -> None:
        self.host, self.lost = host, ""
        self.kept = Kept([], hosts=["b"], places={"a": 2, "b": 2}).as_json()
        self.running: frozenset[int] = frozenset()

    def connect(self) -> None:
        """It is there."""


class Shown:
    """Nobody looks."""

    def mark(self) -> int:
        return 0

    def is_shown(self, mark: int) -> bool:
        return True


def nothing(*_: Any, **__: Any) -> None:
    return None


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], bool]:
    def is_here(host: str) -> bool:
        return host == "a"

    monkeypatch.setattr(fleet, "is_this_host", is_here)
    monkeypatch.setattr(fleet, "RemoteRanks", Agent)
    monkeypatch.setattr(agent_line.LocalLine, "__init__", nothing)
    return is_here


@pytest.mark.usefixtures("here")
def test_it_sees_that_the_agent_of_its_own_host_ends() -> None:
    """Else it has slots there filled by an agent that is gone, again and again."""
    found = Fleet(
        SshOptions(), nothing, keeping=Keeping("job", [], Shown(), lambda hosts: None, goes_on=True)
    )
    hosts: Sequence[str] = sorted(found.lost())
    assert succession.find(found, found._keeping, nothing, nothing, lambda: False) is not None
    assert sorted(found.remote) == ["b"]
    assert (hosts, found.lost()) == ([], set())
    found.here.lost = "its process has ended"
    assert found.lost() == {"a"}
