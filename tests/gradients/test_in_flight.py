"""Buckets on their way, over an engine that is not there."""

from __future__ import annotations

import pytest

from kolovod.core import handles
from kolovod.errors import InvalidArgumentError
from kolovod.gradients import in_flight
from kolovod.gradients.in_flight import InFlight, handled, staged, submitted
from kolovod.gradients.stager import Queued


class Engine:
    """Notes what is waited for and released; fails where it is told to."""

    def __init__(self, log, fails=()):
        self.log, self.fails = log, fails

    def wait(self, number, timeout_s):
        self.log.append(number)
        if number in self.fails:
            raise RuntimeError(f"number {number} failed")

    def release(self, number):
        self.log.append(-number)
        return True


def flying(numbers, fails=(), late=()):
    log, over = [], []
    flights, engine = InFlight(over.append), Engine(log, fails)
    for number in numbers:
        if number in late:
            queued = Queued((), lambda number=number: number, engine, "buffers")
            queued.run()
            flights.add(staged(queued, number))
        else:
            flights.add(submitted(engine, number, number))
    return flights, log, over


def test_the_last_submitted_is_waited_for_first():
    flights, log, over = flying([1, 2, 3])
    landed = []
    flights.wait_for_all(landed.append)
    assert landed == over == [3, 2, 1]
    assert log == [3, -3, 2, -2, 1, -1]
    assert len(flights) == 0


def test_those_that_were_staged_come_in_their_order():
    flights, _, over = flying([1, 2, 3], late=[1, 2, 3])
    flights.wait_for_all(id)
    assert over == [1, 2, 3]


def test_a_failure_is_raised_when_all_are_over():
    flights, log, over = flying([1, 2, 3], fails=[1, 2])
    landed = []
    with pytest.raises(RuntimeError, match="number 2 failed"):
        flights.wait_for_all(landed.append)
    assert landed == [3]
    assert over == [3, 2, 1]
    assert log == [3, -3, 2, -2, 1, -1]


def test_what_lands_badly_is_let_go_as_well():
    flights, log, _ = flying([1, 2])

    def landed(cargo):
        raise InvalidArgumentError(f"cargo {cargo}")

    with pytest.raises(InvalidArgumentError, match="cargo 2"):
        flights.wait_for_all(landed)
    assert log == [2, -2, 1, -1]


def test_nobody_waits_in_a_world_that_is_gone():
    flights, log, over = flying([1, 2], late=[1])
    flights.discard()
    assert log == [-2, -1]
    assert over == [2, 1]


def test_what_is_on_its_way_outlives_them():
    flights, log, over = flying([1, 2], late=[2])
    del flights
    assert log == [-1, -2]
    assert over == []


def test_buffers_live_until_the_engine_is_done(monkeypatch):
    class Busy(Engine):
        def release(self, number):
            return False

    held_buffers = handles.HeldBuffers()
    monkeypatch.setattr(in_flight, "held_buffers", held_buffers)
    flights = InFlight(id)
    flights.add(submitted(Busy([]), 1, "buffers"))
    assert not held_buffers
    del flights
    assert held_buffers


def test_the_results_of_a_handle():
    class Ready:
        def wait(self):
            return ["result"]

    taken = []
    flights = InFlight(id)
    flights.add(handled(Ready(), taken.append, "cargo"))
    flights.wait_for_all(id)
    assert taken == [["result"]]
