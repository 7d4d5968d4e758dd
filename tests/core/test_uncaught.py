"""kolovod.core.uncaught: an exception on one rank is named on all others, and nobody hangs."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest
from waiting import until

from kolovod import _native, blame
from kolovod.core.uncaught import Watch, first_line, let_threads_out
from kolovod.testing.loopback import loopback

# --- the line ---


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("loss is nan"), "ValueError: loss is nan"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (KeyError("x"), "KeyError: 'x'"),
        (ValueError("first\nsecond"), "ValueError: first"),
        (ValueError("\n\n  first  \n"), "ValueError: first"),
        (ValueError("   "), "ValueError"),
        (ValueError("a\tb\x00c\x1b[31md\x7f"), r"ValueError: a\tb\x00c\x1b[31md\x7f"),
        (ValueError("a \udcff b \u202e c"), r"ValueError: a \udcff b \u202e c"),
        (ValueError("žetva"), "ValueError: žetva"),
        (Unprintable(), f"{__name__}.Unprintable"),
    ],
)
def test_an_exception_in_one_line(error, line):
    assert first_line(error) == line


def test_the_line_is_short():
    assert first_line(ValueError("x" * 10**6)) == "ValueError: " + "x" * 288 + "..."
    assert len(first_line(ValueError("€" * 10**6)).encode()) <= 500
    assert len(first_line(ValueError("\udc80" * 10**6)).encode()) <= 500
    assert first_line(ValueError("€" * 10**6)).startswith("ValueError: €€€")


# --- the hooks ---


class Seen(list):
    """A hook that keeps what it was called with."""

    def __call__(self, *arguments):
        self.append(arguments)


@pytest.fixture
def shown(monkeypatch):
    """Hooks of somebody else, in place before ours."""
    of_main, of_thread = Seen(), Seen()
    monkeypatch.setattr(sys, "excepthook", of_main)
    monkeypatch.setattr(threading, "excepthook", of_thread)
    monkeypatch.setattr(sys, "last_value", None, raising=False)  # and put back what was there
    return of_main, of_thread


def raised(error):
    """What the interpreter does with an exception that nobody caught."""
    sys.last_value = error
    sys.excepthook(type(error), error, None)


def raised_in_thread(error, name="loader"):
    def work():
        raise error

    thread = threading.Thread(target=work, name=name)
    thread.start()
    thread.join()


def test_ours_call_the_former_ones_and_go_away(shown):
    told = []
    watch = Watch(told.append)
    error = ValueError("x")
    raised(error)
    assert told == ["ValueError: x"]
    assert shown[0] == [(ValueError, error, None)]
    watch.end()
    assert (sys.excepthook, threading.excepthook) == shown
    raised(ValueError("y"))
    assert told == ["ValueError: x"]


def test_a_hook_that_came_after_ours_stays_and_ours_do_nothing(shown):
    told, theirs = [], Seen()
    first = Watch(told.append)
    ours = sys.excepthook
    sys.excepthook = lambda *args: (theirs(*args), ours(*args))
    first.end()
    raised(ValueError("between worlds"))
    assert (told, len(theirs), len(shown[0])) == ([], 1, 1)
    second = Watch(told.append)  # on top of theirs, which calls the first one's
    raised(ValueError("x"))
    assert (told, len(theirs), len(shown[0])) == (["ValueError: x"], 2, 2)
    second.end()


def test_a_hook_that_does_not_call_ours_is_no_loss(shown):
    told = []
    watch = Watch(told.append)
    sys.excepthook = Seen()
    raised(ValueError("x"))
    assert told == []
    watch.tell_at_exit(pending=0)
    assert told == ["ValueError: x"]
    watch.end()


def test_what_was_raised_before_the_world_does_not_end_it(shown):
    told = []
    sys.last_value = ValueError("old")
    watch = Watch(told.append)
    sys.excepthook = Seen()
    watch.tell_at_exit(pending=0)
    assert told == []
    watch.end()


@pytest.mark.parametrize("mark", ["ps1", "tests of somebody"])
def test_where_the_interpreter_goes_on_nobody_is_told(mark, shown, monkeypatch):
    told = []
    watch = Watch(told.append)
    if mark == "ps1":
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
        raised(ValueError("x"))
    else:  # pytest keeps an error there that it has caught
        sys.last_value = ValueError("x")
    watch.tell_at_exit(pending=1)
    assert told == []
    watch.end()


def test_a_former_hook_that_waits_delays_the_others_little(shown, monkeypatch):
    told, told_at = [], []

    def debugger(*_):
        deadline = time.monotonic() + 30
        while not told and time.monotonic() < deadline:
            time.sleep(0.01)
        told_at.append(list(told))

    monkeypatch.setattr(sys, "excepthook", debugger)
    watch = Watch(told.append)
    raised(ValueError("x"))
    watch.end()
    assert sys.excepthook is debugger
    assert told_at == [["ValueError: x"]]  # while the hook still ran
    assert told == ["ValueError: x"]


def test_a_former_hook_that_raises_keeps_nobody_from_being_told(shown):
    def broken(*_):
        raise RuntimeError("of the hook")

    told = []
    sys.excepthook = broken
    watch = Watch(told.append)
    with pytest.raises(RuntimeError, match="of the hook"):
        raised(ValueError("x"))
    assert told == ["ValueError: x"]
    watch.end()


def test_a_thread_that_is_not_the_worlds_matters_only_if_it_left_operations(shown):
    told = []
    watch = Watch(told.append)
    raised_in_thread(ValueError("x"))
    assert len(shown[1]) == 1
    watch.tell_at_exit(pending=0)
    assert told == []
    watch.tell_at_exit(pending=2)
    assert told == ["ValueError: x in its thread 'loader'"]
    watch.end()


def test_the_thread_that_formed_the_world_ends_it(shown):
    told, watches = [], []

    def train():
        watches.append(Watch(told.append))
        raise ValueError("loss is nan")

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert told == ["ValueError: loss is nan"]
    assert len(shown[1]) == 1
    watches[0].end()


def test_a_thread_that_exits_is_no_failure(shown):
    told, watches = [], []

    def train():
        watches.append(Watch(told.append))
        sys.exit(3)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert told == []
    watches[0].end()


@pytest.mark.parametrize(
    ("place", "blamed"),
    [
        ("rank 0 on host a (pid 17)", 2),
        ("rank 0 on host a (pid 17, launched as rank 2)", 2),
        ("rank 1 on host a (pid 18, launched as rank 4)", None),  # this one
    ],
)
def test_the_rank_that_a_frameworks_error_names_is_blamed(place, blamed, shown, monkeypatch):
    fd, value = blame.new_file()
    monkeypatch.setenv(blame.VARIABLE, value)
    monkeypatch.setattr(blame, "_own", 1)
    monkeypatch.setattr(blame, "_members", (2, 4))
    watch = Watch([].append)
    raised(RuntimeError(f"AbortedError: {place} aborted: ValueError: loss is nan"))
    watch.end()
    assert blame.read(fd) == blamed
    os.close(fd)


def test_at_the_end_also_a_thread_that_waits_in_an_engine_is_let_out(monkeypatch):
    monkeypatch.setattr("kolovod.core.uncaught._OUT_OF_ENGINE_S", 60.0)
    let_threads_out()  # there is none
    with loopback(2) as world:
        first, second = world.collectives
        inside = threading.Thread(target=lambda: first.barrier("x"), daemon=True)
        inside.start()
        until(_native.calls_under_way, "it waits in the engine")
        ending = threading.Thread(target=let_threads_out, daemon=True)
        ending.start()
        ending.join(0.3)
        assert ending.is_alive()
        pid = os.fork()
        if pid == 0:  # has no other thread, so there is nothing to wait for
            os._exit(_native.calls_under_way())
        assert os.waitpid(pid, 0)[1] == 0
        second.barrier("x")
        inside.join(30)
        ending.join(30)
        assert not ending.is_alive()
