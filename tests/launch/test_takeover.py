"""What a launcher that follows another one finds."""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kolovod.errors import BootstrapError
from kolovod.launch import agent_line, fleet, takeover
from kolovod.launch.agent_line import SshOptions
from kolovod.launch.fleet import Fleet
from kolovod.launch.saved_state import Persistence, SavedState, newest


class Agent:
    """Of any host: reached at once, until it is lost."""

    def __init__(self, host: str, *_: Any) -> None:
        self.host, self.lost = host, ""
        self.kept = SavedState([], hosts=["b"], places={"a": 2, "b": 2}).as_json()
        self.running: frozenset[int] = frozenset()

        self.is_closed = False

    def connect(self) -> None:
        """It is there."""

    def close(self) -> None:
        self.is_closed = True


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


def following(hosts: Sequence[str], noted: list[Sequence[str]]) -> Fleet:
    """The fleet of a launcher that follows another one, whose job has been on ``hosts``."""
    persistence = Persistence("job", [], Shown(), noted.append, lambda: hosts, goes_on=True)
    return Fleet(SshOptions(), nothing, persistence=persistence)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("ends", ["it was killed", "it has ended"])
def test_the_job_is_known_elsewhere(monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    noted: list[Sequence[str]] = []
    made: list[str] = []

    def connect(agent: Agent) -> None:
        made.append(agent.host)
        if agent.host == "this host":
            agent.kept = None
            if ends == "it has ended" and made.count("this host") == 1:
                raise BootstrapError("no agent answers")

    monkeypatch.setattr(Agent, "connect", connect)
    found = following(["b"], noted)
    before = takeover.find(found, found._persistence, nothing, nothing, lambda: False)
    assert before is not None
    assert before.hosts == ["b"]
    assert noted == []


@pytest.mark.usefixtures("here")
def test_a_job_that_nobody_knows_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[Sequence[str]] = []
    monkeypatch.setattr(Agent, "connect", lambda agent: setattr(agent, "kept", None))
    found = following(["b"], noted)
    with pytest.raises(BootstrapError, match="no agent that is reached knows of the job"):
        takeover.find(found, found._persistence, nothing, nothing, lambda: False)
    assert noted == [[]]
    assert found.here.is_closed


@pytest.mark.usefixtures("here")
def test_it_sees_that_the_agent_of_its_own_host_ends() -> None:
    """Else it has slots there filled by an agent that is gone, again and again."""
    found = following([], [])
    hosts: Sequence[str] = sorted(found.lost())
    assert takeover.find(found, found._persistence, nothing, nothing, lambda: False) is not None
    assert sorted(found.remote) == ["b"]
    assert (hosts, found.lost()) == ([], set())
    found.here.lost = "its process has ended"
    assert found.lost() == {"a"}


def test_the_last_of_the_copies_counts() -> None:
    one = SavedState(["again"], turn=1, edition=7, hosts=["b"])
    other = SavedState(["again"], turn=2, edition=3, hosts=["c"])
    copies = [None, one.copy_as_json(), other.copy_as_json(), SavedState([], turn=2).as_json()]
    for order in itertools.permutations(copies):
        assert newest(order) == SavedState([], turn=2, edition=3, hosts=["c"])
    assert newest([None]) is None
    assert newest([one.as_json()]) == one


def test_an_agent_is_waited_for_unless_it_was_killed(tmp_path: Path) -> None:
    assert not agent_line._has_ended(tmp_path / "removed")
    assert agent_line._has_ended(tmp_path)
    holder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    assert not agent_line._has_ended(tmp_path)
    os.close(holder)
    assert agent_line._has_ended(tmp_path)
