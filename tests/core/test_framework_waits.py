"""Whether a process's threads have come to rest, and what ranks may conclude from that."""

from __future__ import annotations

import ctypes
import re
import threading
import time
import weakref

import pytest
from forked import run_ranks

from kolovod.core import framework_waits
from kolovod.core.framework_waits import _LOOKS, Looks, _Code
from kolovod.core.standings import Scope, Standing, decode, encode, find_deadlock

# What ranks conclude ------------------------------------------------------------------------------


def standing(name: str, *, within_framework: bool = False, at_rest: bool = True) -> Standing:
    """Of a rank that waits for one operation."""
    pending = frozenset({("", name)})
    scopes = {"": Scope(None, 5, False)}
    return Standing(scopes, pending, "x", within_framework=within_framework, at_rest=at_rest)


IN_GRAPH = {"within_framework": True}
BUSY = {"at_rest": False}  # it waits in a call of ours, and its framework's threads run

CASES = {
    "two graphs": ([standing("a", **IN_GRAPH), standing("b", **IN_GRAPH)], [0, 1]),
    "two graphs in one operation": ([standing("a", **IN_GRAPH), standing("a", **IN_GRAPH)], []),
    "a graph and a call": ([standing("a", **IN_GRAPH), standing("b")], [0, 1]),
    "a graph, and a call beside one that runs": (
        [standing("a", **IN_GRAPH), standing("b", **BUSY)],
        [],
    ),
    "two calls beside graphs that run": ([standing("a", **BUSY), standing("b", **BUSY)], [0, 1]),
    "two graphs at rest, a third rank whose graph runs": (
        [standing("a", **IN_GRAPH), standing("b", **IN_GRAPH), standing("c", **BUSY)],
        [0, 1],
    ),
    "a graph waits for what only the rank with one that runs lacks": (
        [standing("a", **IN_GRAPH), standing("a"), standing("b", **BUSY)],
        [],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_who_can_never_go_on(case):
    standings, stuck = CASES[case]
    assert find_deadlock(dict(enumerate(standings)), len(standings)) == stuck


@pytest.mark.parametrize("facts", [IN_GRAPH, BUSY, {}])
def test_what_is_said_is_read(facts):
    said = standing("a", **facts)
    assert decode(encode(said)) == said


# What a process's threads do ----------------------------------------------------------------------


def native_thread(function, argument=None):
    """A thread that Python does not know runs a function of the C library's, or a callback."""
    started = ctypes.c_ulong()
    create = ctypes.CDLL(None).pthread_create
    address = ctypes.cast(function, ctypes.c_void_p)
    assert create(ctypes.byref(started), None, address, ctypes.c_void_p(argument)) == 0


def nothing():
    """No other thread."""


def waits_outside():
    native_thread(ctypes.CDLL(None).pause)


def sleeps():
    native_thread(ctypes.CDLL(None).sleep, 1000)


def ends_soon():
    native_thread(ctypes.CDLL(None).usleep, 200_000)


_kept = []


def calls_back():
    """A thread of a framework's is in Python, where it waits."""
    reached = threading.Event()

    def callback(_):
        reached.set()
        threading.Lock().acquire()
        while True:
            threading.Event().wait()

    kind = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
    _kept.append(kind(callback))
    native_thread(_kept[-1])
    assert reached.wait(10)


def has_device():
    framework_waits._HARMLESS = re.compile("none")
    _kept.append(open("/dev/null"))  # noqa: SIM115


def library_of_python():
    """Where the code of the interpreter is, which stands for a framework's."""
    address = ctypes.cast(ctypes.pythonapi.PyLong_FromLong, ctypes.c_void_p).value
    return _Code().file_of(address)


def rest(rank, begin, library):
    """Whether the process comes to rest, and its main thread is held up, after ``begin()``."""
    looks = Looks()
    looks.libraries = (library or library_of_python(),)
    begin()
    gate, said = threading.Lock(), []
    gate.acquire()

    def look():
        def has_slept():
            held = looks.look(())
            said[:] = [looks.at_rest, threading.main_thread().ident in held]
            return looks.at_rest

        ticks = 0
        while ticks < 3 * _LOOKS and not has_slept():
            ticks += 1
            time.sleep(0.05)
        gate.release()

    threading.Thread(target=look, daemon=True).start()
    gate.acquire()
    return said


RESTS = {nothing: True, sleeps: True, ends_soon: True}
RESTS |= dict.fromkeys((waits_outside, calls_back, has_device), False)


@pytest.mark.parametrize("begin", RESTS)
def test_who_may_carry_on(begin):
    ((at_rest, is_held),) = run_ranks(1, rest, begin, None)
    assert at_rest == RESTS[begin]
    assert is_held or begin is calls_back


def counts(rank):
    """How many looks have counted, while a thread ends."""
    looks, found = Looks(), []
    ends_soon()
    while len(found) < 2 * _LOOKS and 0 not in found:
        looks.look(())
        found.append(looks._count)
        time.sleep(0.05)
    return found


def test_a_thread_that_ends_has_moved():
    ((*before, last),) = run_ranks(1, counts)
    assert before == [*range(1, len(before) + 1)]
    assert last == 0


def test_who_sleeps_elsewhere_is_not_held_up_by_the_framework():
    assert run_ranks(1, rest, nothing, "/of/no/framework") == [[True, False]]


def outlives_its_function(rank):
    """Whether what a function named is still there, during a look, when the function is left."""
    looks, gate, is_left = Looks(), threading.Lock(), threading.Event()
    gate.acquire()

    def let_on(number):
        gate.release()
        assert is_left.wait(30)

    framework_waits._call_of = let_on

    def look():
        while not is_left.is_set():  # until one finds the function asleep
            looks.look(())
            time.sleep(0.01)

    def waiting():
        tensor = threading.Event()
        threading.Thread(target=look, daemon=True).start()
        gate.acquire()
        return weakref.ref(tensor)

    is_there = waiting()() is not None
    is_left.set()
    return is_there


def test_a_look_keeps_nothing_of_the_script_alive():
    assert run_ranks(1, outlives_its_function) == [False]
