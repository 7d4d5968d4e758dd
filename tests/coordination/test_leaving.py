"""kolovod.coordination.leaving: signals that tell a process to leave, and the script's own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kolovod.coordination.leaving import LEAVING, leaving_by_signals

HEARS = """
import os, time
from kolovod.coordination.leaving import leaving_by_signals

def leave():
    sum(range(10_000))  # as long as it takes to tell the others

with leaving_by_signals(leave):
    print("hears", flush=True)
    end = time.monotonic() + 1
    while time.monotonic() < end:
        sum(range(100))
    print("left", flush=True)
    os._exit(0)
"""


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


def test_signals_that_come_again_and_again_are_heard_once() -> None:
    """As a launcher and agents may send them: the handler is not called within itself for ever."""
    child = subprocess.Popen([sys.executable, "-c", HEARS], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "hears\n"
    while child.poll() is None:
        child.send_signal(signal.SIGTERM)
        time.sleep(1e-5)
    assert child.returncode == 0
    assert child.stdout.read() == "left\n"
