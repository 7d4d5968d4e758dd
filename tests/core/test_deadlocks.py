"""Ranks that wait for different operations get one error that says where each waits, soon."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
import threading
import time

import numpy as np
import pytest
from forked import run_ranks
from waiting import until

import kolovod
from kolovod.core import deadlocks
from kolovod.core import world as worlds
from kolovod.core.deadlocks import _stands_for_another, bounded, stands_for
from kolovod.core.standings import Scope, Standing, find_deadlock, text_of
from kolovod.errors import KolovodError, LateRankError, MismatchError

SOON_S = 30.0  # a second is meant; a deadlock that is not found lasts for ever

# What ranks say: (buckets begun, names pending), of the world


def said(*standings, scope="", members=None, joined=()):
    found = {}
    for rank, standing in enumerate(standings):
        if standing is None:
            continue
        buckets, names = standing
        scopes = {scope: Scope(members, buckets, rank in joined)}
        found[rank] = Standing(scopes, frozenset((scope, n) for n in names), f"in {names}")
    return found


CASES = {
    "each waits for another": (said((5, ["a"]), (5, ["b"])), [0, 1]),
    "all wait for one": (said((5, ["a"]), (5, ["a"])), []),
    "one may still come": (said((5, ["a"]), None), []),
    "of three, one may still come to both": (said((5, ["a"]), (5, ["b"]), None), [0, 1]),
    "two for one that waits for what they lack": (
        said((5, ["a"]), (5, ["a"]), (5, ["b"])),
        [0, 1, 2],
    ),
    "what one has said is old": (said((5, ["a"]), (4, ["b"])), []),
    "more is pending than what is waited for": (said((5, ["a", "b"]), (5, ["b"])), []),
    "both have more pending": (said((5, ["a", "c"]), (5, ["b", "c"])), []),
    "in a ring": (said((1, ["a", "b"]), (1, ["b", "c"]), (1, ["c", "a"])), [0, 1, 2]),
    "who has joined gives zeros": (said((5, ["a"]), (5, ["join"]), joined=[1]), []),
    "joined, and two that differ": (
        said((5, ["a"]), (5, ["join"]), (5, ["b"]), joined=[1]),
        [0, 1, 2],
    ),
    "who is not of the set is not missed": (
        said((5, ["a"]), None, (5, ["a"]), scope="s", members=(0, 2)),
        [],
    ),
    "of a set": (said((5, ["a"]), None, (5, ["b"]), scope="s", members=(0, 2)), [0, 2]),
}


@pytest.mark.parametrize("case", CASES)
def test_who_can_never_go_on(case):
    standings, stuck = CASES[case]
    assert find_deadlock(standings, 3) == stuck


def test_between_two_sets():
    """One rank waits in the world for another, which waits for it in a set."""
    world, both = Scope(None, 7, False), Scope((0, 1), 3, False)
    scopes = {"": world, "s": both}
    standings = {
        0: Standing(scopes, frozenset({("", "a")}), "x"),
        1: Standing(scopes, frozenset({("s", "b")}), "y"),
    }
    assert find_deadlock(standings, 2) == [0, 1]
    text = text_of(standings, [0, 1])
    assert "rank 0 in x; rank 1 in y." in text


def test_many_ranks_at_one_place_are_told_together():
    standings = said((5, ["a"]), (5, ["b"]), (5, ["a"]))
    assert "ranks 0, 2 in in ['a']; rank 1 in in ['b']" in text_of(standings, [0, 1, 2])


# On real ranks


def caught(call):
    began_s = time.monotonic()
    with pytest.raises(MismatchError, match="wait for different operations") as error:
        call()
    assert time.monotonic() - began_s < SOON_S
    return str(error.value)


def places(text):
    """Which ranks wait in which operation."""
    text = text.partition("complete: ")[2].partition(". See")[0]
    return {
        who: re.sub(r" at .*", "", where)
        for who, where in re.findall(r"(ranks? [\d, ]+) in ([^;]*)", text)
    }


def names_differ(rank):
    kolovod.init()
    kolovod.allreduce(np.ones(3), name="before")
    text = caught(lambda: kolovod.allreduce(np.ones(3), name=f"loss of {min(rank, 1)}"))
    with pytest.raises(MismatchError):  # the world is over
        kolovod.barrier()
    return text


@pytest.mark.parametrize(("size", "hosts"), [(2, ()), (4, ()), (4, ("a", "a", "b", "c"))])
def test_names_differ(size, hosts):
    others = "rank 1" if size == 2 else "ranks 1, 2, 3"
    for text in run_ranks(size, names_differ, hosts=hosts):
        assert places(text) == {
            "rank 0": "allreduce 'loss of 0'",
            others: "allreduce 'loss of 1'",
        }
        assert "rank 0 in allreduce 'loss of 0' at test_deadlocks.py:" in text


def verbs_differ(rank):
    kolovod.init()
    x = np.ones(2)
    calls = [
        lambda: kolovod.broadcast(x, name="model"),
        lambda: kolovod.barrier(name="epoch"),
        lambda: kolovod.allgather_object(rank, name="facts"),
        lambda: kolovod.join(),
    ]
    return caught(calls[rank])


def test_verbs_differ():
    for text in run_ranks(4, verbs_differ):
        assert {k: v.split()[0] for k, v in places(text).items()} == {
            "rank 0": "broadcast",
            "rank 1": "barrier",
            "rank 2": "allgather",
            "rank 3": "join",
        }


def late_data(rank):
    """What rank 0 could tell the others of its waits, while an operation comes and goes."""
    kolovod.init()
    engine = worlds.current().engine
    x = np.ones(1 << 25, np.float32)
    if rank == 1:
        time.sleep(0.5)
    handle = kolovod.allreduce_async(x, name="large")
    found = []
    while not kolovod.poll(handle):
        _, is_complete, pending = engine.standing()
        state = is_complete, bool(pending)
        if found[-1:] != [state]:
            found.append(state)
    handle.wait()
    return found


@pytest.mark.slow
def test_what_has_begun_waits_for_no_rank():
    """Its data may only be late, on one rank later than on another that waits for the next one."""
    found, _ = run_ranks(2, late_data)
    assert found[0] == (True, True)  # rank 1 has not asked for it
    assert (False, True) in found


def one_async(rank):
    kolovod.init()
    left = kolovod.allreduce_async(np.ones(2), name=f"left {rank}")
    text = caught(lambda: kolovod.allreduce_async(np.ones(2), name=f"last {rank}").wait())
    with pytest.raises(MismatchError):
        left.wait()
    return text


def test_handles_that_are_waited_for():
    for text in run_ranks(2, one_async):
        assert places(text) == {"rank 0": "allreduce 'last 0'", "rank 1": "allreduce 'last 1'"}


def in_a_set(rank):
    kolovod.init()
    pair = kolovod.add_process_set([0, 2])
    if rank == 1:
        time.sleep(0.1)
        return caught(lambda: kolovod.allreduce(np.ones(1), name="world"))
    if rank == 0:
        return caught(lambda: kolovod.allreduce(np.ones(1), name="pair", process_set=pair))
    return caught(lambda: kolovod.allreduce(np.ones(1), name="world"))


def test_a_set_and_the_world():
    for text in run_ranks(3, in_a_set):
        assert places(text) == {
            "rank 0": "allreduce 'pair' of process set [0, 2]",
            "rank 1": "allreduce 'world'",
            "rank 2": "allreduce 'world'",
        }


def nothing_is_wrong(rank):
    """Waits of two seconds, each of which ends: a rank that computes, threads, a signal handler."""
    kolovod.init()
    x = np.ones(1)
    results = []

    # One rank computes, and two wait for it in different operations.
    if rank == 2:
        time.sleep(2)
        results += [kolovod.allreduce(x, name="a", op=kolovod.Sum)]
        results += [kolovod.allreduce(x, name="b", op=kolovod.Sum)]
    else:
        names = ["a", "b"] if rank else ["b", "a"]
        handles = [kolovod.allreduce_async(x, name=n, op=kolovod.Sum) for n in names]
        results += [handle.wait() for handle in handles]

    # Two threads of one rank wait for what another's two threads come to in the other order.
    def both(name, delay_s):
        time.sleep(delay_s)
        results.append(kolovod.allreduce(x, name=name, op=kolovod.Sum))

    threads = [
        threading.Thread(target=both, args=(name, delay_s), daemon=True)
        for name, delay_s in (("c", 2.0 * (rank == 0)), ("d", 2.0 * (rank != 0)))
    ]
    [thread.start() for thread in threads]
    results.append(kolovod.allreduce(x, name="e", op=kolovod.Sum))
    [thread.join() for thread in threads]

    # A handler waits for the others', who get their signal later, and wait in the script meanwhile.
    signal.signal(
        signal.SIGUSR1,
        lambda *_: results.append(kolovod.allreduce(x, name="handler", op=kolovod.Sum)),
    )
    kolovod.barrier()
    timer = threading.Timer(
        2.0 * (rank > 0), lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
    )
    timer.start()
    if rank == 1:
        timer.join()
    results.append(kolovod.allreduce(x, name="f", op=kolovod.Sum))
    timer.join()
    return [float(result[0]) for result in results]


@pytest.mark.slow
def test_what_goes_on_after_a_while_is_no_deadlock():
    assert run_ranks(3, nothing_is_wrong) == [[3.0] * 7] * 3


@pytest.mark.slow
def test_the_setting_leaves_it_to_the_report():
    env = {
        "KOLOVOD_DEADLOCK_CHECK": "0",
        "KOLOVOD_LATE_REPORT_S": "1",
        "KOLOVOD_LATE_FAILURE_S": "2",
    }

    def waits(rank):
        kolovod.init()
        with pytest.raises(LateRankError):
            kolovod.allreduce(np.ones(1), name=f"of {rank}")

    assert run_ranks(2, waits, env=env) == [None] * 2


def bounded_wait(rank):
    """What a timer ends is waited for, and ends as the timer says."""
    kolovod.init()
    engine = kolovod.core.world.current().engine
    if rank == 0:
        timer = threading.Timer(2.0, engine.abort, ["its function has ended"])
        timer.start()
    with bounded() if rank == 0 else contextlib.nullcontext(), pytest.raises(KolovodError) as error:
        kolovod.allreduce(np.ones(1), name=f"of {rank}")
    return str(error.value)


@pytest.mark.slow
def test_what_a_timer_ends_is_no_deadlock():
    for text in run_ranks(2, bounded_wait):
        assert "its function has ended" in text


def shuts_down(rank):
    """While a thread waits that has told so."""
    kolovod.init()
    raised, said = [], []
    sys.unraisablehook = raised.append

    def wait():
        with pytest.raises(KolovodError) as error:
            kolovod.allreduce(np.ones(1), name="late")
        said.append(str(error.value))

    if rank == 1:
        with pytest.raises(KolovodError):  # rank 0 leaves
            kolovod.barrier(name="never")
        return None
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    until(lambda: deadlocks._watch._waits, "the thread tells that it waits")
    kolovod.shutdown()
    thread.join(SOON_S)
    return said, [type(each.exc_value).__name__ for each in raised]


def test_a_wait_that_was_told_ends_with_its_world():
    (said, raised), _ = run_ranks(2, shuts_down)
    assert len(said) == 1
    assert not raised


def in_the_framework(lock):
    lock.acquire()


def at_the_end(name, said, lock):
    try:
        kolovod.allreduce(np.ones(3), name)
    except MismatchError as error:
        said.append(str(error))
    lock.release()


def calls_back(rank, is_known):
    """The main thread waits for a callback, in another thread, that waits for the other rank."""
    kolovod.init()
    if is_known:
        stands_for(at_the_end.__code__, [in_the_framework.__code__])
    lock, said = threading.Lock(), []
    lock.acquire()
    began = time.monotonic()
    thread = threading.Thread(target=at_the_end, args=(f"x{rank}", said, lock), daemon=True)
    thread.start()
    if not is_known:
        threading.Timer(3.0, lock.release).start()  # who is not held up may go on
    in_the_framework(lock)
    return said, time.monotonic() - began


@pytest.mark.slow
def test_a_callback_of_a_framework_stands_for_its_caller():
    for said, after_s in run_ranks(2, calls_back, True):
        (text,) = said
        assert "rank 0 in allreduce 'x0'" in text
        assert after_s < SOON_S
    assert [said for said, _ in run_ranks(2, calls_back, False)] == [[], []]


def test_who_is_in_its_own_callback_stands_for_nobody():
    def caller():
        return callback()

    def callback():
        return _stands_for_another(sys._getframe())

    stands_for(callback.__code__, [caller.__code__])
    assert callback()
    assert not caller()
