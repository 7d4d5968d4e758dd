"""Ranks that are killed while they train, and those who go on."""

from __future__ import annotations

import os
import signal
import threading

import kolovod
from kolovod.errors import CollectiveAbortedError


class Survivors:
    """Finds the next world where everybody knows who is left."""

    wants_change, leaves = False, False
    has_state = True
    has_failed = False

    def __init__(self, alive: list[int]) -> None:
        self.alive = alive
        self.times = 0

    def reform(self, error: CollectiveAbortedError) -> None:
        self.times += 1
        assert self.times < 20, error
        kolovod.shutdown()
        kolovod.init(comm=self.alive)


class NoLoss:
    """Where no rank is lost."""

    wants_change, leaves, has_state, has_failed = False, False, True, False

    def reform(self, error: CollectiveAbortedError) -> None:
        raise error


def kill_soon(delay_s: float) -> None:
    """End this process by SIGKILL, whatever it is at then."""
    threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
