"""kolovod.coordination.leaving: signals that tell a process to leave, and the script's own."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from kolovod.coordination.leaving import LEAVING, leaving_by_signals


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    """What the signals do stays as it was."""
    before = {number: signal.getsignal(number) for number in (*LEAVING, signal.SIGHUP)}
    for number in before:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_its_handlers_are_gone_afterwards() -> None:
    heard: list[str] = []
    with leaving_by_signals(lambda: heard.append("leave")):
        for number in LEAVING:
            signal.raise_signal(number)
    assert heard == ["leave"] * len(LEAVING)
    for number in (*LEAVING, signal.SIGHUP):
        assert signal.getsignal(number) is signal.SIG_DFL


@pytest.mark.parametrize("number", [*LEAVING, signal.SIGHUP])
def test_a_handler_that_the_script_installs_meanwhile_stays(number: signal.Signals) -> None:
    def own(number: int, frame: Any) -> None:
        pass

    with leaving_by_signals(lambda: None):
        signal.raise_signal(LEAVING[0])  # from now on SIGHUP is heard as well
        signal.signal(number, own)
    assert signal.getsignal(number) is own
