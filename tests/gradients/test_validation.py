"""Optimizers of all front ends refuse the same with the same words."""

from __future__ import annotations

import pytest

from kolovod import ProcessSet
from kolovod.core.objects import Objects
from kolovod.core.ops import Adasum, Average, Max, Sum
from kolovod.errors import InvalidArgumentError
from kolovod.gradients.compression import Compression
from kolovod.gradients.spec import ReduceSpec, checked_passes
from kolovod.testing.loopback import loopback

GOOD = {
    "compression": Compression.fp16,
    "op": Average,
    "gradient_predivide_factor": 2.0,
    "process_set": None,
}
PREDIVIDE = "gradient_predivide_factor"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"op": Max}, "op is <Op.Max: 4>: gradients are combined by Average, Sum or Adasum"),
        ({"op": "sum", PREDIVIDE: 1}, "op is 'sum'"),
        ({"op": Sum}, "gradient_predivide_factor is 2.0: .* only with op Average"),
        ({PREDIVIDE: 0}, "gradient_predivide_factor is 0: give a number above 0"),
        ({PREDIVIDE: float("inf")}, "is inf"),
        ({PREDIVIDE: float("nan")}, "is nan"),
        ({PREDIVIDE: "2"}, "gradient_predivide_factor is '2'"),
        ({PREDIVIDE: None}, "gradient_predivide_factor is None"),
        ({"process_set": 7}, "process_set is 7: give a ProcessSet"),
        ({"compression": "fp16"}, "compression is 'fp16'"),
    ],
)
def test_what_cannot_combine_gradients(change, text):
    with pytest.raises(InvalidArgumentError, match=text):
        ReduceSpec.checked(**GOOD | change, ops=(Average, Sum, Adasum))


def test_what_can():
    ReduceSpec.checked(**GOOD, ops=(Average, Sum))
    ReduceSpec.checked(**GOOD | {PREDIVIDE: 1, "op": Sum}, ops=(Average, Sum))
    ReduceSpec.checked(**GOOD | {"process_set": ProcessSet([0])}, ops=(Average,))
    assert checked_passes(3) == 3


@pytest.mark.parametrize("passes", [0, -1, 1.5, True, "2", None])
def test_passes(passes):
    with pytest.raises(InvalidArgumentError, match=f"backward_passes_per_step is {passes!r}"):
        checked_passes(passes)


def test_verbs_refuse_what_is_no_process_set():
    def work(kv):
        import numpy as np

        for call in (
            lambda: kv.allreduce(np.ones(2), process_set=7),
            lambda: Objects(kv.world).broadcast_object({}, process_set=[0]),
            lambda: Objects(kv.world).allgather_object({}, process_set="all"),
        ):
            with pytest.raises(InvalidArgumentError, match=r"process_set is (7|\[0\]|'all'): give"):
                call()

    with loopback(2) as world:
        world.run(work)
