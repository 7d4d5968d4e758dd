"""The verbs that are one function of the engine's module: what they take, and what they pass on.

Results and errors of both ways are compared by the tests that use ``kolovod`` in processes and
``loopback`` in threads alike (tests/support/worlds.py); here is which way is gone, and that nothing
is lost on it.
"""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import sys
import weakref

import numpy as np
import pytest

import kolovod
from kolovod import _native
from kolovod.core import spans
from kolovod.core.collectives import Collectives
from kolovod.core.handles import Handle, held_buffers
from kolovod.core.numpy_frontend import NumpyFrontend, let_engine_read
from kolovod.core.ops import Adasum, Average, Max, Sum
from kolovod.core.short_verbs import _FORMS, ShortVerbs
from kolovod.core.submission import Submitter
from kolovod.errors import (
    DuplicateNameError,
    InvalidArgumentError,
    MismatchError,
    NotInitializedError,
)
from kolovod.testing.loopback import loopback

SHORT = sorted(_FORMS)
OF_ARRAYS = [name for name in SHORT if name != "barrier"]
OF_ROWS = ["allgather", "alltoall", "reducescatter"]


class Whole(Exception):
    """The verb for all cases was called."""


class Refusing(Collectives):
    """Collectives whose verbs for all cases raise, but for their engine."""

    new = in_place = start_new = start_in_place = None


def refusing(world):
    """The short verbs of a rank, and nothing behind them."""
    held_buffers.sweep()
    collectives = Refusing(NumpyFrontend(), world)
    for name in SHORT:
        setattr(collectives, name, with_signature(getattr(Collectives, name), collectives))
    return ShortVerbs(collectives, __name__)


def with_signature(function, collectives):
    def whole(*args, **keywords):
        raise Whole(args, keywords)

    whole.__signature__ = inspect.signature(function.__get__(collectives))
    return whole


@pytest.fixture
def alone():
    """The short verbs of a world of one rank."""
    with loopback(1) as world:
        yield refusing(world.collectives[0].world)


def done(result):
    if isinstance(result, tuple):  # with the rows of each rank
        return result[0]
    return result.wait() if isinstance(result, Handle) else result


@pytest.mark.parametrize("name", OF_ARRAYS)
@pytest.mark.parametrize("dtype", [name for name in _native.DTYPES if name != "bfloat16"])
def test_plain_arrays_of_all_dtypes_go_the_short_way(alone, name, dtype):
    for shape in [(), (0,), (3,), (2, 3), (2, 0, 3), (600, 2), (5000, 2)]:
        if name in OF_ROWS and (0 in shape[1:] or not shape):
            continue
        array = np.ones(shape, dtype)
        extra = {"op": Sum} if "reduce" in name else {}
        result = done(getattr(alone, name)(array, **extra))
        assert (result is array) == name.endswith("_")
        assert result.shape == shape
        assert result.dtype == array.dtype
        assert (result == 1).all()


@pytest.mark.parametrize("name", OF_ROWS)
def test_what_has_no_bytes_in_its_rows_is_for_the_whole_verb(alone, name):
    for shape in [(), (2, 0), (0, 0)]:
        with pytest.raises(Whole):
            getattr(alone, name)(np.ones(shape))


@pytest.mark.parametrize("size", [2, 3])
def test_rows_of_all_ranks(size):
    with loopback(size) as world:

        def work(kv):
            rank, verbs = kv.world().rank, refusing(kv.world)
            for rows in (1, 4, 1000):  # the last are not copied
                mine = np.arange(rows * (rank + 1) * 3, dtype=np.int64).reshape(-1, 3) + rank
                whole = kv.allgather(mine, "whole")
                short = verbs.allgather(mine, "short")
                assert short.dtype == np.int64
                assert np.array_equal(short, whole)
                assert short.flags.writeable
                same = np.arange(rows * 3.0).reshape(-1, 3) * (rank + 1)
                whole = kv.reducescatter(same, "whole", Sum, 0.5, 3.0)
                short = verbs.reducescatter(same, "short", Sum, 0.5, 3.0)
                assert np.array_equal(short, whole)
            assert verbs.allgather(np.ones(0)).shape == (0,)

        world.run(work)


@pytest.mark.parametrize("size", [2, 3])
def test_rows_for_all_ranks(size):
    with loopback(size) as world:

        def work(kv):
            rank, verbs = kv.world().rank, refusing(kv.world)
            for rows in (1, 4, 1000):  # the last are not copied
                mine = np.arange(rows * size * 3, dtype=np.int64).reshape(-1, 3) + rank
                for splits in (None, [rows] * size, [rows, *[0] * (size - 1)]):
                    whole, received = kv.alltoall(mine, splits, "whole")
                    short, also_received = verbs.alltoall(mine, splits, "short")
                    assert np.array_equal(short, whole)
                    assert short.dtype == np.int64
                    assert received == also_received
                    assert type(also_received) is list
            assert verbs.alltoall(np.ones(0))[1] == [0] * size

        world.run(work)


def test_other_splits_are_for_the_whole_verb():
    with loopback(2) as world:

        def work(kv):
            verbs = refusing(kv.world)
            four, odd = np.ones(4), np.ones(3)
            for splits in [
                (2, 2),
                np.array([2, 2]),
                [2.0, 2],
                [np.int64(2), 2],
                [-1, 5],
                [True, 1],
            ]:
                with pytest.raises(Whole):
                    verbs.alltoall(four, splits)
            with pytest.raises(Whole):
                verbs.alltoall(odd)
            for splits in [[], [4], [1, 2, 1], [4, 1]]:
                with pytest.raises(InvalidArgumentError, match=r"alltoall|splits") as short:
                    verbs.alltoall(four, splits, "n")
                with pytest.raises(InvalidArgumentError) as whole:
                    kv.alltoall(four, splits, "n")
                assert str(short.value) == str(whole.value)

        world.run(work)


def test_arguments_come_by_place_or_by_name(alone):
    array = np.ones(3)
    assert alone.allreduce(array, "n", Sum, 2.0, 3.0).tolist() == [6, 6, 6]
    assert alone.allreduce(
        array, postscale_factor=3.0, op=Sum, name=None, prescale_factor=2.0
    ).tolist() == [6, 6, 6]
    assert alone.allreduce(tensor=array, process_set=None, compression=None).tolist() == [1, 1, 1]
    assert alone.broadcast(array, name="n", root_rank=0).tolist() == [1, 1, 1]
    assert alone.barrier() is None
    assert alone.barrier("b", process_set=None) is None


def with_flag(name, value):
    array = np.ones(3)
    setattr(array.flags, name, value)
    return array


class Kind(np.ndarray):
    """A kind of array."""


@pytest.mark.parametrize(
    "array",
    [
        pytest.param(np.ones((2, 3)).T, id="columns first"),
        pytest.param(np.ones(9)[::2], id="with gaps"),
        pytest.param(np.ones(3, ">f4"), id="other byte order"),
        pytest.param(np.zeros(25, "i1")[1:].view("i8"), id="not aligned"),
        pytest.param(np.ones(3).view(Kind), id="subclass"),
        pytest.param(np.ma.masked_array(np.ones(3)), id="mask"),
        pytest.param(np.ones(3, complex), id="complex"),
        pytest.param(np.array(["a"]), id="no numbers"),
        pytest.param(np.float32(3), id="scalar"),
        pytest.param(3, id="number"),
        pytest.param([1.0], id="list"),
        pytest.param(None, id="nothing"),
    ],
)
@pytest.mark.parametrize("name", OF_ARRAYS)
def test_other_tensors_are_for_the_whole_verb(alone, name, array):
    with pytest.raises(Whole) as caught:
        getattr(alone, name)(array, name="n")
    args, keywords = caught.value.args
    assert args[0] is array
    assert keywords == {"name": "n"}


@pytest.mark.parametrize("name", OF_ARRAYS)
def test_arrays_that_must_not_be_written_are_read_only(alone, name):
    for array in [with_flag("writeable", False), with_flag("_warn_on_write", True)]:
        if name.endswith("_"):
            with pytest.raises(Whole):
                getattr(alone, name)(array)
        else:
            assert done(getattr(alone, name)(array)).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "further",
    [
        {"op": Adasum},
        {"op": 77},
        {"op": "Sum"},
        {"op": None},
        {"op": 1 << 70},
        {"name": 7},
        {"name": "\ud800"},
        {"prescale_factor": "2"},
        {"prescale_factor": 2},
        {"postscale_factor": None},
        {"process_set": "all"},
        {"compression": "int8"},
        {"unknown": 1},
        {"tensor": 1},
    ],
)
def test_other_arguments_are_for_the_whole_verb(alone, further):
    array = np.ones(3)
    with pytest.raises(Whole) as caught:
        alone.allreduce_(array, **further)
    assert caught.value.args == ((array,), further)


def test_too_few_and_too_many_are_for_the_whole_verb(alone):
    for args in [(), (np.ones(3), *range(9))]:
        with pytest.raises(Whole) as caught:
            alone.allreduce(*args)
        assert caught.value.args == (args, {})
    for root in [-1, 1 << 40, "0", None]:
        with pytest.raises(Whole):
            alone.broadcast(np.ones(3), root)


def test_who_asks_for_spans_gets_those_of_the_whole_verb(alone):
    reader = spans.log.open()
    try:
        with pytest.raises(Whole):
            alone.barrier()
    finally:
        reader.close()
    alone.barrier()


def test_buffers_that_are_kept_are_let_go_of_first(alone):
    class Engine:
        def release(self, number):
            return False

    entry = (Engine(), 1, None)
    held_buffers.kept.append(entry)
    try:
        with pytest.raises(Whole):
            alone.barrier()
    finally:
        held_buffers.kept.remove(entry)
    alone.barrier()


def test_a_world_without_an_engine_is_for_the_whole_verb():
    with pytest.raises(Whole):
        refusing(lambda: object()).barrier()


@pytest.mark.parametrize("error", [NotInitializedError, KeyboardInterrupt])
def test_what_is_raised_while_it_looks_is_heard(error):
    def world():
        raise error

    for call in (lambda verbs: verbs.barrier(), lambda verbs: verbs.allreduce(np.ones(3))):
        with pytest.raises(error):
            call(refusing(world))


def test_errors_of_the_engine_are_the_public_ones():
    with loopback(2) as world:

        def work(kv):
            verbs = refusing(kv.world)
            with pytest.raises(MismatchError, match="rank 1 has") as caught:
                verbs.allreduce_(np.ones(3 + kv.world().rank), "x")
            assert caught.value.__suppress_context__
            with pytest.raises(InvalidArgumentError, match="root rank 5 is not in"):
                verbs.broadcast(np.ones(3), 5, "y")
            handle = verbs.allreduce_async(np.ones(2), "z", Max)
            if kv.world().rank == 0:
                with pytest.raises(DuplicateNameError, match="'z' is already pending"):
                    verbs.allreduce(np.ones(2), "z", Max)
            kv.barrier()
            assert handle.wait().tolist() == [1, 1]
            assert verbs.allreduce(np.full(2, kv.world().rank), "w", Average).tolist() == [0, 0]

        world.run(work)


def test_an_array_that_is_reduced_cannot_be_resized():
    with loopback(2) as world:

        def work(kv):
            verbs = refusing(kv.world)
            array = np.ones(2)
            if kv.world().rank == 0:
                handle = verbs.allreduce_async_(array, "x", Sum)
                with pytest.raises(ValueError, match="resize"):
                    array.resize(1000, refcheck=True)
                kv.barrier()
            else:
                kv.barrier()
                handle = verbs.allreduce_async_(array, "x", Sum)
            assert handle.wait() is array
            assert array.tolist() == [2, 2]

        world.run(work)


def test_arrays_of_dropped_handles_live_until_the_operation_is_complete():
    with loopback(2) as world:

        def work(kv):
            verbs = refusing(kv.world)
            if kv.world().rank == 1:
                kv.barrier()
                return kv.allreduce(np.ones(2), "x", Sum).tolist()
            array = np.ones(2)
            watch = weakref.ref(array)
            handle = verbs.allreduce_async_(array, "x", Sum)
            del array, handle
            gc.collect()
            assert watch() is not None
            kv.barrier()
            kv.barrier("the other has waited")
            return None

        def other(kv):
            result = work(kv)
            if kv.world().rank == 1:
                kv.barrier("the other has waited")
            return result

        assert world.run(other)[1] == [2, 2]


def test_nothing_is_left_behind(alone):
    array = np.ones(3)
    before = references(array)
    for name in OF_ARRAYS:
        for _ in range(500):
            done(getattr(alone, name)(array, name="n"))
    for _ in range(500):
        alone.barrier()
        with pytest.raises(InvalidArgumentError):
            alone.broadcast(array, 5)
        with pytest.raises(Whole):
            alone.allreduce(array, op=77)
    gc.collect()
    after = references(array)
    assert after[:-1] == before[:-1]
    assert abs(after[-1] - before[-1]) < 250  # others refer to None, too


def references(array):
    objects = (array, np.empty, array.dtype, InvalidArgumentError, None)
    return [sys.getrefcount(each) for each in objects]


@pytest.mark.parametrize("name", SHORT)
def test_they_look_like_functions(name):
    verb = getattr(kolovod, name)
    assert isinstance(verb, _native.ShortVerb)
    assert inspect.signature(verb) == inspect.signature(
        getattr(Collectives(NumpyFrontend(), None), name)
    )
    assert verb.__doc__ == getattr(Collectives, name).__doc__
    assert (verb.__name__, verb.__module__) == (name, "kolovod.numpy")
    assert inspect.isroutine(verb)
    assert pickle.loads(pickle.dumps(verb)) is verb
    assert copy.deepcopy(verb) is verb
    assert repr(verb) == f"<verb {name}>"
    assert weakref.ref(verb)() is verb

    class User:
        reduce = verb

    assert User().reduce is verb


def test_there_are_none_where_all_submissions_are_watched(monkeypatch):
    monkeypatch.setattr(Submitter, "takes_all", True)
    collectives = Collectives(NumpyFrontend(), None)
    for name in SHORT:
        assert getattr(ShortVerbs(collectives, __name__), name) == getattr(collectives, name)


def test_they_are_garbage_like_others():
    with loopback(1) as world:
        verbs = refusing(world.collectives[0].world)
        verbs.allreduce.itself = verbs.allreduce
        watch = weakref.ref(verbs.allreduce)
        del verbs
        gc.collect()
        assert watch() is None


def test_wrong_facts_about_arrays_switch_it_off():
    array = np.ones(3)
    facts = (array, 0, (3,), array.ctypes.data, True, True)
    number = _native.DTYPES["float64"]
    dtypes = {array.dtype: number}
    right = (array, number, *facts[2:])
    wrong = [
        (array, number + 1, *right[2:]),
        (*right[:2], (4,), *right[3:]),
        (*right[:2], (3, 1), *right[3:]),
        (*right[:3], right[3] + 8, *right[4:]),
        (*right[:4], False, True),
        (*right[:4], True, False),
        (),
    ]
    try:
        for sample in wrong:
            assert not _native.use_numpy(np.ndarray, dtypes, np.empty, [right, sample])
        assert not _native.use_numpy(np.ndarray, dtypes, np.empty, [])
        with loopback(1) as world, pytest.raises(Whole):
            refusing(world.collectives[0].world).allreduce(array)
        assert _native.use_numpy(np.ndarray, dtypes, np.empty, [right])
    finally:
        assert let_engine_read()
