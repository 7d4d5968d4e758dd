"""A step that is sent twice takes from a compressor's state once."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from compressors import ByTurns

from kolovod.core.transaction import forget, use_transaction
from kolovod.gradients.compression import Compression, adapted, payload_of


@pytest.fixture
def ongoing():
    """What stands for the steps of an elastic job."""
    job = SimpleNamespace(is_elastic=True, passed=3, committed=3, recomputes=False)
    use_transaction(job)
    yield job
    use_transaction(None)


def sent(compressor, source, key="w"):
    return float(payload_of(compressor, key, source, source).tensors[0][0])


def test_a_repeated_step_sends_what_it_sent(ongoing):
    compressor, ones = ByTurns(), np.ones(3)
    assert [sent(compressor, ones), sent(compressor, ones), sent(compressor, ones, "v")] == [
        1,
        1,
        1,
    ]
    ongoing.passed += 1
    assert [sent(compressor, ones), sent(compressor, ones)] == [2, 2]
    assert compressor.state_dict() == {"w": 2, "v": 1}


def test_a_gradient_that_was_computed_again_is_another_one(ongoing):
    compressor = ByTurns()
    assert [sent(compressor, np.ones(3)), sent(compressor, np.ones(3))] == [1, 2]
    overwritten = np.ones(3).view(type("Versioned", (np.ndarray,), {"_version": 1}))
    assert sent(compressor, overwritten) == 3
    overwritten._version = 2
    assert sent(compressor, overwritten) == 1


def test_nothing_is_kept_where_no_step_is_repeated():
    compressor, ones = ByTurns(), np.ones(3)
    assert [sent(compressor, ones), sent(compressor, ones)] == [1, 2]


def test_what_is_computed_again_from_a_commit_begins_with_the_state_of_then(ongoing):
    ongoing.recomputes = True
    compressor = ByTurns()
    assert sent(compressor, np.ones(3)) == 1
    ongoing.passed += 1
    assert sent(compressor, np.ones(3)) == 2
    forget()
    assert compressor.state_dict() == {}
    assert sent(compressor, np.ones(3)) == 1
    ongoing.committed = ongoing.passed = ongoing.passed + 1
    assert sent(compressor, np.ones(3)) == 2
    forget()
    assert compressor.state_dict() == {"w": 1}


def test_it_keeps_neither_compressor_nor_gradient_alive(ongoing):
    compressor, ones = ByTurns(), np.ones(3)
    payload_of(compressor, "w", ones, ones)
    alive = weakref.ref(compressor), weakref.ref(ones)
    del compressor, ones
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


def test_arrays_without_weak_references(ongoing):
    class Slotted:
        __slots__ = ()

        def __mul__(self, factor):
            return [factor]

    compressor, one = ByTurns(), Slotted()
    assert [sent(compressor, one), sent(compressor, one)] == [1, 1]


def test_what_keeps_no_state_is_asked_each_time(ongoing):
    compressor, ones = adapted(Compression.none), np.ones(3)
    assert payload_of(compressor, "w", ones, ones).tensors[0] is ones
