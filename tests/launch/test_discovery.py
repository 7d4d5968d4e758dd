"""launch.discovery: the hosts that a user's script prints, asked for again and again."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from waiting import until

from kolovod.errors import HostError
from kolovod.launch import discovery
from kolovod.launch.discovery import Discovery, ask_script, said_by


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "PERIOD_S", 0.01)
    monkeypatch.setattr(discovery, "_AGAIN_S", 0.01)


@pytest.mark.parametrize("answer", [{}, {"a": 2}], ids=["no hosts", "a host"])
def test_an_answer_that_is_not_taken_is_told_again(answer: dict[str, int]) -> None:
    told: list[Mapping[str, int]] = []

    def changed(places: Mapping[str, int]) -> bool:
        told.append(places)
        return len(told) == 3

    asking = Discovery(lambda: answer, changed, print)
    asking.start({"b": 1})
    try:
        until(lambda: len(told) == 3)
    finally:
        asking.close()
    assert told == [answer] * 3


def test_what_a_script_prints() -> None:
    assert ask_script("echo a:2; echo b; echo trouble >&2", 3) == {"a": 2, "b": 3}
    assert ask_script("true") == {}


def test_a_script_that_fails_says_why() -> None:
    with pytest.raises(HostError, match=r"ended with 3: no cloud\n"):
        said_by("echo a; echo asking >&2; echo no cloud >&2; exit 3")


def test_a_script_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_SCRIPT_LIMIT_S", 0.2)
    for command in ("exec sleep 600", "exec >&- 2>&-; exec sleep 600"):
        with pytest.raises(HostError, match=r"has not ended in 0\.2 s"):
            said_by(command)


def test_a_script_that_prints_without_end_is_stopped() -> None:
    with pytest.raises(HostError, match="prints more than 1048576 bytes: have it print lines"):
        said_by("exec yes")


def test_of_errors_the_end_is_kept() -> None:
    with pytest.raises(HostError, match=r"ended with 1: at last\n"):
        said_by("head -c 1000000 /dev/zero | tr '\\0' '\\n' >&2; echo at last >&2; exit 1")
