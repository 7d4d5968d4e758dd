"""The choice of a compression: a pure function of a clock and of links."""

from __future__ import annotations

import pytest

from kolovod.core.ops import Adasum, Average, Sum
from kolovod.errors import InvalidArgumentError
from kolovod.gradients.choosing import STEPS, Choice
from kolovod.gradients.compression import (
    NOTHING,
    Auto,
    Compression,
    InBlocks,
    by_setting,
    choices_of,
)
from kolovod.gradients.spec import ReduceSpec

MB = 1_000_000
NAMES = ("none", "bf16", "int8", "int4")


class Training:
    """Steps whose backward goes on for a time after the first bucket has left."""

    def __init__(self, names=NAMES):
        self.decisions = []
        self.now_ns = 0
        self.choice = Choice(names, self.decisions.append, lambda: self.now_ns)
        self.place = 0

    def steps(self, count, hidden_ms, rate, hosts=2, all_bytes=MB):
        """The names of what was taken after each step."""
        taken = []
        for _ in range(count):
            self.choice.bucket_leaves()
            self.now_ns += int(hidden_ms * 1e6 / 2)
            self.choice.bucket_leaves()  # another bucket: backward began with the first
            self.now_ns += int(hidden_ms * 1e6 / 2)
            self.choice.backward_ends()
            self.now_ns += 10**9  # whatever a step does besides
            self.place = self.choice.wanted(self.place, rate, all_bytes, hosts)
            taken.append(NAMES[self.place])
        return taken


@pytest.mark.parametrize(
    ("hidden_ms", "hosts", "wanted"),
    [  # a megabyte at 10 MB/s: 100 ms between 2 hosts, 150 among 4
        (120, 2, "none"),
        (92, 2, "none"),  # within a tenth
        (60, 2, "bf16"),
        (30, 2, "int8"),
        (15, 2, "int4"),
        (5, 2, "int4"),  # nothing hides it
        (120, 4, "bf16"),
        (0, 1, "none"),
    ],
)
def test_the_least_lossy_one_that_hides_is_taken(hidden_ms, hosts, wanted):
    training = Training()
    taken = training.steps(4 * STEPS, hidden_ms, rate=10.0, hosts=hosts)
    assert taken[: STEPS - 1] == ["none"] * (STEPS - 1)
    assert set(taken[STEPS - 1 :]) == {wanted}


def test_it_comes_back_when_the_link_carries_more_or_backward_takes_longer():
    training = Training()
    assert training.steps(20, 30, rate=10.0)[-1] == "int8"
    assert training.steps(20, 55, rate=10.0)[-1] == "int8"  # bf16 would take 50 ms: too close
    assert training.steps(20, 70, rate=10.0)[-1] == "bf16"
    assert training.steps(20, 70, rate=1000.0)[-1] == "none"
    assert [each["compression"] for each in training.decisions] == ["int8", "bf16", "none"]
    assert training.decisions[0]["why"] == (
        "25.4 ms between hosts, 100.0 with none, beside 30.0 ms of backward"
    )


def test_it_goes_no_further_than_it_may():
    assert set(Training(NAMES[:2]).steps(30, 1, rate=10.0)[STEPS:]) == {"bf16"}


def test_steps_without_buckets_that_left_early_say_nothing():
    training = Training()
    for _ in range(5 * STEPS):
        training.choice.backward_ends()
        assert training.choice.wanted(0, 10.0, MB, 2) == 0
    assert training.decisions == []


def test_choices_by_name():
    auto = by_setting("auto:int8")
    assert isinstance(auto, Auto)
    assert repr(auto) == "Compression.auto('int8')"
    names = [name for name, _ in choices_of(Compression.auto("int4", exclude=["head.*"]))]
    assert names == ["none", "bf16", "int8", "int4"]
    last = choices_of(Compression.auto("int4", exclude=["head.*"]))[-1][1]
    assert isinstance(last, InBlocks)
    assert last.blocks.exclude == ("head.*",)
    assert repr(by_setting("int8")) == "Compression.int8"
    assert by_setting("none") is Compression.none
    with pytest.raises(InvalidArgumentError, match=r"auto\('int2'\): expected one of fp16, bf16"):
        Compression.auto("int2")


def checked(compression, op=Average, *, may_choose=False):
    ops = (Average, Sum, Adasum)
    return ReduceSpec.checked(compression, op, 1.0, None, ops, may_choose=may_choose)


def test_the_setting_counts_where_a_script_says_nothing(monkeypatch):
    monkeypatch.setenv("KOLOVOD_COMPRESSION", "int8")
    found = checked(Compression.none).compressor
    assert isinstance(found, InBlocks)
    assert repr(found.blocks) == "Compression.int8"
    assert checked(Compression.fp16).compressor.given is Compression.fp16
    assert checked(Compression.none, Adasum).compressor is NOTHING  # which has none
    assert checked(NOTHING).compressor is NOTHING  # DiLoCo's, say
    monkeypatch.setenv("KOLOVOD_COMPRESSION", "int2")
    with pytest.raises(InvalidArgumentError, match="KOLOVOD_COMPRESSION='int2': expected one of"):
        checked(Compression.none)


def test_who_cannot_choose_says_so(monkeypatch):
    spec = checked(Compression.auto("bf16"), may_choose=True)
    assert spec.compressor is NOTHING
    assert [name for name, _ in spec.choices] == ["none", "bf16"]
    monkeypatch.setenv("KOLOVOD_COMPRESSION", "auto:int8")
    assert len(checked(Compression.none, may_choose=True).choices) == 3
    with pytest.raises(InvalidArgumentError, match=r"give Compression\.int8"):
        checked(Compression.none)
    with pytest.raises(InvalidArgumentError, match="only PyTorch's DistributedOptimizer"):
        checked(Compression.auto("int4"))
