"""Asynchronous operations: poll, wait with a timeout, the result once, buffers that stay alive."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
import weakref

import numpy as np
import pytest
from forked import run_ranks

from kolovod.core.handles import Handle, held_buffers
from kolovod.core.ops import Max, Sum
from kolovod.core.world import current
from kolovod.errors import (
    InvalidArgumentError,
    RankLeftError,
    RankLostError,
    ShutDownError,
    WaitTimeoutError,
)
from kolovod.testing.loopback import loopback


class Watched(np.ndarray):
    """An array that can be watched by a weak reference."""


def watched(count):
    return np.ones(count).view(Watched)


def test_poll_becomes_true_and_the_result_comes_once():
    with loopback(2) as world:

        def work(kv):
            handle = kv.allreduce_async(np.ones(2), "x", Sum)
            deadline = time.monotonic() + 20
            while not handle.poll():
                assert time.monotonic() < deadline
                time.sleep(0.001)
            assert kv.poll(handle)
            assert kv.synchronize(handle).tolist() == [2, 2]
            assert handle.poll()
            with pytest.raises(InvalidArgumentError, match="waited for before"):
                handle.wait()

        world.run(work)


def test_wait_times_out_and_may_be_repeated():
    with loopback(2) as world:

        def work(kv):
            if kv.world().rank == 1:
                kv.barrier("timed out")
                return kv.allreduce(np.ones(2), "x", Sum).tolist()
            handle = kv.allreduce_async(np.ones(2), "x", Sum)
            for timeout_s in (0, 0.05):
                with pytest.raises(WaitTimeoutError, match="'x' is not complete"):
                    handle.wait(timeout_s)
            assert not handle.poll()
            kv.barrier("timed out")
            return handle.wait(20).tolist()

        assert world.run(work) == [[2, 2], [2, 2]]


@pytest.mark.parametrize("timeout_s", [-1, float("nan")])
def test_bad_timeout(timeout_s):
    with loopback(1) as world:
        handle = world.collectives[0].allreduce_async(np.ones(2))
        with pytest.raises(InvalidArgumentError, match="timeout_s is"):
            handle.wait(timeout_s)
        assert handle.wait().tolist() == [1, 1]


def test_buffers_outlive_a_dropped_handle_until_the_operation_is_complete():
    with loopback(2) as world:

        def work(kv):
            if kv.world().rank == 1:
                kv.barrier("dropped")
                kv.allreduce(np.ones(1000), "x", Sum)
                kv.barrier("done")
                return True
            array = watched(1000)
            alive = weakref.ref(array)
            handle = kv.allreduce_async_(array, "x", Sum)
            del array, handle
            gc.collect()
            still_alive = alive() is not None
            kv.barrier("dropped")
            kv.barrier("done")
            deadline = time.monotonic() + 20
            while alive() is not None and time.monotonic() < deadline:
                time.sleep(0.001)
                kv.allreduce_async(1.0, f"lets go of buffers {time.monotonic()}")
            gc.collect()
            return still_alive and alive() is None

        assert world.run(work) == [True, True]


def test_buffers_are_released_by_wait():
    with loopback(1) as world:
        kv = world.collectives[0]
        array = watched(10)
        alive = weakref.ref(array)
        handle = kv.allreduce_async(array)
        del array
        assert alive() is not None
        handle.wait()
        gc.collect()
        assert alive() is None


def test_one_of_several_threads_gets_the_result():
    with loopback(2) as world:

        def work(kv):
            for turn in range(50):
                handle = kv.allreduce_async(np.ones(2), f"t{turn % 3}", Sum)
                answers = []

                def wait(handle=handle, answers=answers):
                    try:
                        answers.append(handle.wait(timeout_s=60).tolist())
                    except InvalidArgumentError as error:
                        answers.append(str(error))

                threads = [threading.Thread(target=wait) for _ in range(3)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                assert answers.count([2, 2]) == 1

        world.run(work)


def test_poll_and_wait_while_another_thread_takes_the_result():
    with loopback(1) as world:
        kv = world.collectives[0]
        engine = kv.world().engine

        def released(number):
            """An operation that is over, of which another handle has given the result."""
            handle = Handle(engine, number, None, "the result", None)
            while not engine.release(number):
                time.sleep(0.001)
            return handle

        first = kv.allreduce_async(np.ones(2), "x")
        number = int(repr(first).split()[-1][:-1])
        with pytest.raises(InvalidArgumentError, match=f"handle {number} is unknown"):
            released(number).poll()
        assert first.poll.__self__ is first
        taken = []

        def finish(engine, number):
            taken.append(handle.poll())  # as another thread may while a result is made
            with pytest.raises(InvalidArgumentError, match="waited for before"):
                handle.wait()
            return "made"

        second = kv.allreduce_async(np.ones(2), "y")
        number = int(repr(second).split()[-1][:-1])
        handle = Handle(engine, number, None, None, finish)
        assert handle.wait() == "made"
        assert taken == [True]
        assert repr(handle) == "<kolovod Handle used>"


def test_an_error_while_the_result_is_made_lets_go_of_the_buffers():
    with loopback(1) as world:
        kv = world.collectives[0]
        second = kv.allreduce_async(np.ones(2), "y")
        array = watched(2)
        alive = weakref.ref(array)

        def finish(engine, number):
            raise LookupError("no room")

        number = int(repr(second).split()[-1][:-1])
        handle = Handle(kv.world().engine, number, array, None, finish)
        del array
        with pytest.raises(LookupError, match="no room"):
            handle.wait()
        assert alive() is None
        with pytest.raises(InvalidArgumentError, match="waited for before"):
            handle.wait()


def test_a_handle_in_a_circle_is_collected_and_its_buffers_are_kept():
    with loopback(2) as world:

        def work(kv):
            if kv.world().rank == 1:
                kv.barrier("collected")
                return kv.allreduce(np.ones(3), "x", Sum).tolist()
            array = watched(3)
            array.circle = circle = [kv.allreduce_async_(array, "x", Sum), array]
            handle = weakref.ref(circle[0])
            engine = kv.world().engine
            del circle, array
            gc.collect()
            (held,) = [buffers for kept, _, buffers in held_buffers.kept if kept is engine]
            # What is in a circle with buffers that stay is not cleared either.
            found = handle() is None, type(held[0]) is Watched, held[0].circle[1] is held[0]
            del held
            kv.barrier("collected")
            return found

        assert world.run(work)[0] == (True, True, True)


def test_a_wrong_use_is_a_type_error():
    with loopback(1) as world:
        handle = world.collectives[0].allreduce_async(np.ones(2))
        for arguments, keywords in (((1, 2), {}), ((), {"timeout": 1}), ((1,), {"timeout_s": 1})):
            with pytest.raises(TypeError, match="takes one argument at most, timeout_s"):
                handle.wait(*arguments, **keywords)
        with pytest.raises(TypeError):
            handle.wait("soon")
        with pytest.raises(TypeError, match="need engine, number, buffers"):
            Handle(object(), 1, None, None, None)
        assert handle.wait(timeout_s=None).tolist() == [1, 1]


def test_handles_hold_on_to_nothing_afterwards():
    with loopback(1) as world:
        kv = world.collectives[0]
        array = np.ones(2)
        kv.allreduce_async_(array).wait()
        before = sys.getrefcount(array), sys.getrefcount(Handle), sys.getrefcount(kv.world().engine)
        for _ in range(100):
            kv.allreduce_async_(array).wait()
            kv.allreduce_async_(array)
        while held_buffers:
            held_buffers.sweep()
        after = sys.getrefcount(array), sys.getrefcount(Handle), sys.getrefcount(kv.world().engine)
        assert after == before


def test_a_short_timeout_lasts_as_long_as_it_says_while_others_wait_too():
    with loopback(2) as world:

        def work(kv):
            stop = threading.Event()

            def until_all_stop(name):
                rounds = 0
                while kv.allreduce(np.array([not stop.is_set()], "i4"), name, Max)[0]:
                    rounds += 1
                return rounds

            threads = [threading.Thread(target=until_all_stop, args=(n,)) for n in ("a", "b")]
            for thread in threads:
                thread.start()
            never = kv.allreduce_async(np.ones(1), f"only on rank {kv.world().rank}")
            for _ in range(30):
                begin = time.monotonic()
                with pytest.raises(WaitTimeoutError):
                    never.wait(timeout_s=0.01)
                assert time.monotonic() - begin >= 0.01
            stop.set()
            for thread in threads:
                thread.join()

        world.run(work)


def test_many_threads_may_submit_and_wait():
    with loopback(2) as world:

        def work(kv):
            failures = []

            def body(thread):
                try:
                    for i in range(30):
                        handle = kv.allreduce_async(np.full(5, i), f"{thread}.{i}", Sum)
                        assert handle.wait().tolist() == [2 * i] * 5
                        blocking = kv.allreduce(np.full(5, i), f"{thread}.{i}.again", Sum)
                        assert blocking.tolist() == [2 * i] * 5
                except BaseException as error:
                    failures.append(error)

            threads = [threading.Thread(target=body, args=(t,), daemon=True) for t in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
                assert not thread.is_alive()
            assert failures == []

        world.run(work)


def test_shutdown_fails_what_is_pending_here():
    with loopback(2) as world:
        kv = world.collectives[0]
        handle = kv.allreduce_async(np.ones(2), "never")
        world.ranks[0].engine.shutdown()
        assert handle.poll()
        with pytest.raises(ShutDownError, match="never"):
            handle.wait()


def test_a_rank_that_left_is_named_and_earlier_operations_complete():
    with loopback(2) as world:

        def work(kv):
            if kv.world().rank == 1:
                kv.allreduce(np.ones(2), "together", Sum)
                kv.world().engine.shutdown()
                return
            assert kv.allreduce(np.ones(2), "together", Sum).tolist() == [2, 2]
            with pytest.raises(RankLeftError) as caught:
                kv.allreduce(np.ones(2), "alone")
            assert caught.value.rank == 1

        world.run(work)


def test_a_killed_rank_fails_pending_and_later_operations_of_all_others():
    submitted = threading.Barrier(3, timeout=60)
    with loopback(3) as world:

        def work(kv):
            if kv.world().rank == 2:
                submitted.wait()
                world.kill(2)
                return
            handle = kv.allreduce_async(np.ones(2), "pending")
            submitted.wait()
            for attempt in (handle.wait, lambda: kv.allreduce(np.ones(2), "later")):
                with pytest.raises(RankLostError) as caught:
                    attempt()
                assert caught.value.rank == 2

        world.run(work)


def test_a_slow_rank_is_waited_for():
    with loopback(2) as world:
        world.delay(1, 0.05)
        started = time.monotonic()
        assert world.run(lambda kv: kv.allreduce(1.0, "slow", Sum).item()) == [2.0, 2.0]
        assert time.monotonic() - started >= 0.05


def test_a_lost_announcement_is_a_timeout_not_a_hang():
    with loopback(2) as world:
        world.drop(1, 1)

        def work(kv):
            with pytest.raises(WaitTimeoutError):
                kv.allreduce_async(np.ones(2), "lost").wait(0.2)
            return kv.allreduce(1.0, "next", Sum).item()

        assert world.run(work) == [2.0, 2.0]


def test_an_array_that_is_on_its_way_is_not_resized():
    """NumPy frees what it had, whoever else refers to it, if it is told not to look."""

    def rank(kv):
        array = np.ones(8)
        handle = kv.allreduce_async_(array, name="x", op=Sum)
        with pytest.raises(ValueError, match="cannot resize"):
            array.resize(1 << 20, refcheck=False)
        assert handle.wait() is array
        assert array.tolist() == [2.0] * 8
        del handle
        array.resize(16, refcheck=False)

    with loopback(2) as world:
        world.run(rank)


class Interrupt(Exception):
    """Raised by a signal handler."""


def interrupted_in_a_verb(rank, is_short):
    import kolovod as kv

    kv.init()
    verbs = kv if is_short else kv.numpy.collectives
    array = np.ones(2)
    if rank == 1:
        kv.recv(np.zeros(1), 0)  # until rank 0 has been interrupted
        return kv.allreduce(array, "late", Sum).tolist()

    def handler(*_):
        raise Interrupt

    def interrupt_once_submitted():
        while current().engine.pending() == 0:
            time.sleep(0.001)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    signal.signal(signal.SIGUSR1, handler)
    thread = threading.Thread(target=interrupt_once_submitted, daemon=True)
    thread.start()
    with pytest.raises(Interrupt):
        verbs.allreduce_(array, "late", Sum)
    thread.join()
    watch = [kept if isinstance(kept, tuple) else (kept,) for _, _, kept in held_buffers.kept]
    kv.send(np.zeros(1), 1)
    deadline = time.monotonic() + 20
    while held_buffers:
        assert time.monotonic() < deadline
        held_buffers.sweep()
        time.sleep(0.001)
    return [any(each is array for each in kept) for kept in watch], array.tolist()


@pytest.mark.parametrize("is_short", [True, False])
def test_what_an_interrupted_verb_works_on_is_kept_until_it_is_complete(is_short):
    assert run_ranks(2, interrupted_in_a_verb, is_short) == [([True], [2, 2]), [2, 2]]


TENSOR = (0, (1,), 0, 0)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((0, "x", [TENSOR]), ValueError, "arguments"),
        ((99, "x", [], 0, 1.0, 1.0, 0, True), ValueError, "verb"),
        ((0, "x", [], 99, 1.0, 1.0, 0, True), ValueError, "op"),
        ((0, 1, [], 0, 1.0, 1.0, 0, True), TypeError, "str"),
        ((0, "\ud800", [], 0, 1.0, 1.0, 0, True), ValueError, "surrogates"),
        ((0, "x", [TENSOR], 0, "1", 1.0, 0, True), TypeError, "number"),
        ((0, "x", [TENSOR], 0, 1.0, 1.0, 1 << 40, True), ValueError, "root"),
        ((0, "x", 5, 0, 1.0, 1.0, 0, True), TypeError, "iterable"),
        ((0, "x", [(0, (1,), 0)], 0, 1.0, 1.0, 0, True), ValueError, "tensor"),
        ((0, "x", [(0, (-1,), 0, 0)], 0, 1.0, 1.0, 0, True), ValueError, "negative"),
        ((0, "x", [(0, (1.5,), 0, 0)], 0, 1.0, 1.0, 0, True), TypeError, "integer"),
        ((0, "x", [(99, (1,), 0, 0)], 0, 1.0, 1.0, 0, True), ValueError, "dtype"),
        ((4, "x", [TENSOR], 0, 1.0, 1.0, 0, True, ["a"]), TypeError, "splits"),
        ((2, "x", [TENSOR], 0, 1.0, 1.0, 0, True, (), (4, 4)), ValueError, "out_bytes"),
    ],
)
def test_what_the_engine_cannot_take_is_refused(arguments, error, match):
    with loopback(1) as world:

        def work(kv):
            with pytest.raises(error, match=match):
                kv.world().engine.submit(*arguments)
            assert kv.allreduce(np.ones(1), "x", Sum).tolist() == [1]

        world.run(work)
