"""Operations without a name that ranks call from different lines are refused, with both lines."""

from __future__ import annotations

import functools
import json
import types

import numpy as np
import pytest
from forked import run_ranks

import kolovod
from kolovod.core import call_lines
from kolovod.errors import MismatchError
from kolovod.testing import loopback

ALLREDUCE = functools.partial(kolovod.allreduce, op=kolovod.Sum)


def losses_and_accuracy(count, reduce):
    losses = [reduce(1.0) for _ in range(count)]
    return [*losses, reduce(100.0)]


FIRST, THEN = (
    f"test_call_lines.py:{losses_and_accuracy.__code__.co_firstlineno + n}" for n in (1, 2)
)


def evaluations(counts, reduce):
    for count in counts:
        losses_and_accuracy(count, reduce)


def refused(count, reduce):
    """After ranks have come to both lines."""
    with pytest.raises(MismatchError) as caught:
        evaluations([1, count], reduce)
    return str(caught.value)


def one_more(rank):
    """Rank 0 averages one loss more than the others do, who go on with the accuracy."""
    kolovod.init()
    text = refused(5 - min(rank, 1), lambda value: ALLREDUCE(np.full(1, value)))
    # Nothing is left behind.
    np.testing.assert_equal(ALLREDUCE(np.ones(2)), [kolovod.size()] * 2)
    return text


@pytest.mark.parametrize(("size", "hosts"), [(2, ()), (3, ()), (4, ("a", "a", "b", "b"))])
def test_a_rank_that_calls_one_more(size, hosts):
    for text in run_ranks(size, one_more, hosts=hosts):
        assert "unnamed.7" in text
        assert "the calling line differs: rank 0 calls allreduce at test_call_lines.py:" in text
        first, then = text.split("rank 1 calls allreduce at")
        assert FIRST in first
        assert THEN in then
        assert "KOLOVOD_CALL_LINES=0" in text


def differs(rank):
    kolovod.init()
    texts = []
    for other in (
        lambda: kolovod.broadcast(np.ones(1)),
        lambda: ALLREDUCE(np.ones(2)),
        lambda: kolovod.barrier(),
    ):
        with pytest.raises(MismatchError) as caught:
            ALLREDUCE(np.ones(1)) if rank == 0 else other()
        texts.append(str(caught.value))
    return texts


def test_another_verb_and_another_shape_are_told_with_their_lines():
    for texts in run_ranks(2, differs):
        assert "kind of operation differs" in texts[0]
        assert "rank 0 calls allreduce at test_call_lines.py:" in texts[0]
        assert "rank 1 calls broadcast at test_call_lines.py:" in texts[0]
        assert "shape differs" in texts[1]
        assert "rank 1 calls allreduce at test_call_lines.py:" in texts[1]
        assert "rank 1 calls barrier. " in texts[2]


def average(value):
    """A helper of the script's own: all calls of it are the same line of the engine's caller."""
    return ALLREDUCE(np.full(1, value))


def through_helper(rank):
    kolovod.init()
    return refused(3 - rank, average)


def test_a_helper_of_the_script_is_seen_through():
    for text in run_ranks(2, through_helper):
        assert f", from {FIRST}" in text
        assert f", from {THEN}" in text


def through_helper_at_once(rank):
    """No rank has come to the second line, so only what follows shows that there was one more."""
    kolovod.init()
    with pytest.raises(MismatchError) as caught:
        evaluations([3 - rank] * 2, average)
    return str(caught.value)


def test_one_more_by_a_helper_in_the_beginning_is_found_by_the_next_operation():
    for text in run_ranks(2, through_helper_at_once):
        assert "unnamed.4" in text
        assert f", from {FIRST}" in text
        assert f", from {THEN}" in text


def by_rank(rank):
    """A rank that does what the others do, from a line of its own: to report, for instance."""
    kolovod.init()

    def step(reports):
        return [average(1.0)[0], average(2.0)[0]]

    sums = []
    for i in range(6):
        if rank == 0 and i % 3 == 1:
            sums += step(reports=True)
        else:
            sums += step(reports=False)
    return sums


@pytest.mark.parametrize(("size", "hosts"), [(2, ()), (3, ()), (4, ("a", "a", "b", "b"))])
def test_a_function_may_be_called_from_lines_that_depend_on_the_rank(size, hosts):
    assert run_ranks(size, by_rank, hosts=hosts) == [[1.0 * size, 2.0 * size] * 6] * size


def from_an_elastic_state(rank):
    """Who joins is given the state where it starts, the others give it to it at a commit."""
    kolovod.init()
    kolovod.elastic.share_by(lambda value: isinstance(value, Shared), share)
    state = kolovod.elastic.State(value=Shared())
    if rank == 0:
        state.sync()
    else:
        state.sync()
    return state.value.sums


class Shared:
    sums = 0.0


def share(name, value):
    del name
    value.sums = ALLREDUCE(np.ones(1))[0]
    return value


def test_lines_end_where_an_elastic_job_calls():
    assert run_ranks(2, from_an_elastic_state) == [2.0] * 2


def library(name):
    """A module whose file lies among the libraries."""
    module = types.ModuleType(name)
    code = (
        "def reduced(call):\n    return call()\n\n\ndef wrapped(call):\n    return reduced(call)\n"
    )
    exec(compile(code, f"{json.__file__}/{name}.py", "exec"), module.__dict__)
    return module


def through_library(rank):
    kolovod.init()
    wrapper = library("wrapper")
    # One line, which one rank reaches through more of the library than the other.
    for call in (wrapper.reduced, wrapper.wrapped) if rank else (wrapper.wrapped,) * 2:
        assert call(lambda: ALLREDUCE(np.ones(1)))[0] == 2
    return refused(2 - rank, lambda value: wrapper.reduced(lambda: ALLREDUCE(np.full(1, value))))


def test_a_wrapper_of_a_library_is_seen_through():
    for text in run_ranks(2, through_library):
        assert "the calling line differs" in text
        assert "json" not in text


def every_verb(rank):
    kolovod.init()
    refused = []
    for call in (
        lambda x: kolovod.allreduce(x),
        lambda x: kolovod.allreduce_(x),
        lambda x: kolovod.allreduce_async(x).wait(),
        lambda x: kolovod.grouped_allreduce([x, x]),
        lambda x: kolovod.grouped_allreduce_async([x, x]).wait(),
        lambda x: kolovod.broadcast(x),
        lambda x: kolovod.broadcast_async_(x).wait(),
        lambda x: kolovod.allgather(x),
        lambda x: kolovod.grouped_allgather([x]),
        lambda x: kolovod.alltoall(x),
        lambda x: kolovod.reducescatter(x),
        lambda x: kolovod.broadcast_object("x"),
        lambda x: kolovod.allgather_object("x"),
    ):
        for turn in (0, 1):  # each rank comes to where the other was
            try:
                if rank == turn:
                    call(np.ones(2))
                else:
                    call(np.ones(2))
            except MismatchError as error:
                refused.append((turn, "the calling line differs" in str(error)))
    return refused


def test_every_verb_tells_its_lines():
    assert run_ranks(2, every_verb) == [[(1, True)] * 13] * 2


def in_any_line(rank):
    kolovod.init()
    x = np.full(1, float(rank))
    results = []
    for _ in range(3):  # the second and third time the lines are known
        if rank == 0:
            kolovod.barrier()  # the others wait while this one does something first
            results.append(ALLREDUCE(x, name="same"))
        else:
            results += [ALLREDUCE(x, name="same")] if kolovod.barrier() is None else []
    return [float(result[0]) for result in results]


def test_barriers_and_names_are_called_from_any_line():
    assert run_ranks(3, in_any_line) == [[3.0] * 3] * 3


def test_the_setting_matches_them_by_order_alone():
    results = run_ranks(2, every_verb, env={"KOLOVOD_CALL_LINES": "0"})
    assert results == [[]] * 2


def test_libraries_are_no_script(tmp_path):
    assert not call_lines.is_of_script(json.__file__)
    assert not call_lines.is_of_script(np.__file__)
    assert not call_lines.is_of_script(kolovod.__file__)
    assert not call_lines.is_of_script("<frozen runpy>")
    assert call_lines.is_of_script(str(tmp_path / "train.py"))
    assert call_lines.is_of_script("<string>")
    for generated in ("__autograph_generated_file8x.py", "torchinductor_me/ab/cab.py"):
        assert not call_lines.is_of_script(f"/tmp/{generated}")


def test_ranks_that_are_threads_have_none_though_their_process_was_in_a_world():
    kolovod.init()
    kolovod.shutdown()
    ways = (
        lambda verbs: verbs.allreduce(np.ones(1), op=kolovod.Sum),
        lambda verbs: verbs.allreduce(np.ones(1), op=kolovod.Sum),
    )
    with loopback(2) as world:
        assert world.run(lambda verbs: ways[verbs.world().rank](verbs).item()) == [2.0, 2.0]
