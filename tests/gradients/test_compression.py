"""What ``compression=`` takes: compressors of our shape, and of Horovod's."""

from __future__ import annotations

import numpy as np
import pytest
from compressors import SignsWithFeedback

from kolovod.errors import InvalidArgumentError
from kolovod.gradients.compression import (
    NOTHING,
    Compression,
    Compressor,
    Payload,
    adapted,
    element_bytes,
)


class Halving:
    """As users of Horovod write them."""

    @staticmethod
    def compress(tensor):
        return tensor / 2, "context"

    @staticmethod
    def decompress(tensor, context):
        assert context == "context"
        return tensor * 2


class Counting(Halving):
    """An object with the two methods is as good."""

    calls = 0

    def compress(self, tensor):
        self.calls += 1
        return tensor, None

    def decompress(self, tensor, context):
        return tensor


def test_nothing_is_nothing():
    assert adapted(Compression.none) is NOTHING
    values = np.ones(3)
    payload = NOTHING.compress("key", values)
    assert payload.tensors[0] is values
    assert NOTHING.decompress("key", payload, [values]) is values


def test_horovods_shape():
    compressor = adapted(Halving)
    payload = compressor.compress("key", np.ones(3))
    assert payload.verb == "allreduce"
    assert payload.tensors[0].tolist() == [0.5] * 3
    assert compressor.decompress("key", payload, payload.tensors).tolist() == [1.0] * 3
    counting = Counting()
    adapted(counting).compress("key", 1)
    assert counting.calls == 1


@pytest.mark.parametrize("compression", ["fp16", None, Payload, Compression])
def test_what_is_no_compressor(compression):
    with pytest.raises(
        InvalidArgumentError, match=r"give Compression.none, .fp16, .bf16, .int8 or"
    ):
        adapted(compression)


def test_a_class_instead_of_an_object():
    with pytest.raises(InvalidArgumentError, match=r"the class SignsWithFeedback: give an object"):
        adapted(SignsWithFeedback)


def test_state():
    assert NOTHING.state_dict() == {}
    NOTHING.load_state_dict({})
    with pytest.raises(InvalidArgumentError, match=r"Stateless keeps no state, .* layer\.weight"):
        NOTHING.load_state_dict({"layer.weight": 1})
    first, second = SignsWithFeedback(np.asarray), SignsWithFeedback(np.asarray)
    values = np.float32([1, 2, 3, 4])
    first.compress("key", values)
    second.load_state_dict(first.state_dict())
    one, other = (compressor.compress("key", values) for compressor in (first, second))
    assert one.tensors[1].tolist() == other.tensors[1].tolist()


def test_a_compressor_must_have_both_halves():
    class Half(Compressor):
        def compress(self, key, tensor):
            return Payload([tensor])

    with pytest.raises(TypeError, match="decompress"):
        Half()


@pytest.mark.parametrize(
    ("dtype", "count"), [("float64", 8), ("bfloat16", 2), ("float8_e4m3fn", 1), ("bool", 1)]
)
def test_bytes_of_an_element(dtype, count):
    assert element_bytes(dtype) == count
