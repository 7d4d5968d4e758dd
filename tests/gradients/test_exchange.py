"""A bucket's way there and back, over verbs that are not there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from compressors import SignsWithFeedback

from kolovod.core.ops import Adasum, Average
from kolovod.errors import InvalidArgumentError
from kolovod.gradients import exchange
from kolovod.gradients.compression import Compression, adapted
from kolovod.gradients.spec import ReduceSpec


class Verbs:
    """Two ranks that have the same."""

    def __init__(self):
        self.calls = []

    def submit(self, verb, name, tensors, codecs):
        assert not any(codecs)
        assert len(codecs) == (len(tensors) if verb == "allreduce" else 0)
        self.calls.append((verb, name, len(tensors)))
        if verb == "allreduce":
            return lambda: tensors
        return lambda: [np.concatenate([tensor, tensor]) for tensor in tensors]


def signs():
    return ReduceSpec(compressor=SignsWithFeedback(np.asarray))


LARGE, SMALL = np.float32([[1, -1], [1, -1]]), np.float32([1, 2, 3])


def test_without_compression_tensors_travel_as_they_are():
    verbs = Verbs()
    gradients = [("a", LARGE), ("b", SMALL)]
    found = exchange.start(ReduceSpec(), "name", gradients, verbs.submit, abs)()
    assert found[0] is LARGE
    assert found[1] is SMALL
    assert verbs.calls == [("allreduce", "name", 2)]


def test_two_verbs_and_what_goes_along():
    verbs, halved = Verbs(), []

    def scaled(total):
        halved.append(total)
        return total / 2

    gradients = [("a", LARGE), ("b", SMALL), ("c", LARGE)]
    flags = np.ones(2)
    found = exchange.start(signs(), "name", gradients, verbs.submit, scaled, [flags])()
    assert verbs.calls == [("allreduce", "name", 2), ("allgather", "name.gathered", 4)]
    for got, wanted in zip(found, [LARGE, SMALL, LARGE, flags], strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert len(halved) == 2


def test_one_verb_has_the_name():
    verbs = Verbs()
    exchange.start(signs(), "name", [("a", LARGE)], verbs.submit, lambda total: total)()
    assert verbs.calls == [("allgather", "name", 2)]


def test_casts_are_the_simplest_case():
    spec = ReduceSpec(compressor=adapted(Compression.fp16))
    sent = []

    def submit(verb, name, tensors, codecs):
        sent.extend(tensors)
        return lambda: tensors

    (found,) = exchange.start(spec, "name", [("a", SMALL)], submit, abs)()
    assert sent[0].dtype == np.float16
    assert found.dtype == np.float32


def test_adasum_does_not_gather():
    spec = replace(signs(), op=Adasum)
    with pytest.raises(InvalidArgumentError, match=r"op Adasum .* SignsWithFeedback"):
        exchange.start(spec, "name", [("a", LARGE)], Verbs().submit, abs)


def test_what_keeps_a_state_is_not_traced():
    exchange.refuse_state(adapted(Compression.bf16), "a program")
    with pytest.raises(InvalidArgumentError, match=r"WithFeedback, .* but a program is traced"):
        exchange.refuse_state(signs().compressor, "a program")


@pytest.mark.parametrize("predivide", [1.0, 3.0, 49.0, 0.1])
def test_predividing_leaves_sums_as_they_are(predivide):
    spec = ReduceSpec.checked(Compression.none, Average, predivide, None, (Average,))
    assert spec.scale == 1.0
    assert spec.scale_of_sum(0.25) == 0.25
