"""What else would be, and how it is said."""

from __future__ import annotations

import math
import re

import pytest

from kolovod.errors import InvalidArgumentError
from kolovod.planning.changes import (
    batched,
    bucketed,
    compressed,
    parse_change,
    parse_hosts,
    parse_link,
)
from kolovod.planning.costs import Cluster, Costs, Link
from kolovod.planning.model import Request, Step

MIB = 1 << 20
STEP = Step(
    0.04,
    (Request(0.01, 4 * MIB, 8), Request(0.02, MIB), Request(0.03, 512, 2)),
    (0.03,),
)
NO_CASTS = Costs(cast_s_per_byte=0.0)


def test_a_codec_is_for_all_but_small_tensors() -> None:
    coded = compressed(STEP, "int8", Costs())
    assert [r.codec for r in coded.requests] == ["int8", "int8", ""]
    assert coded.compute_s == STEP.compute_s
    assert compressed(coded, "none", Costs()) == STEP


def test_casts_halve_and_cost_the_script() -> None:
    half = compressed(compressed(STEP, "int4", NO_CASTS), "bf16", NO_CASTS)
    assert [r.bytes for r in half.requests] == [2 * MIB, MIB // 2, 256]
    assert {(r.dtype, r.codec) for r in half.requests} == {("bfloat16", "")}
    costs = Costs(cast_s_per_byte=1e-9)
    slower = compressed(STEP, "fp16", costs)
    assert slower.compute_s == pytest.approx(0.04 + 1e-9 * STEP.bytes)
    assert slower.requests[0].at_s == pytest.approx(0.01 + 0.5e-9 * 4 * MIB)
    assert slower.waits_s[0] == pytest.approx(0.03 + 0.5e-9 * STEP.bytes)
    assert compressed(half, "bf16", costs) == half  # it is in 16 bits already


def test_buckets_are_cut_at_tensors_and_joined() -> None:
    cut = bucketed(STEP, MIB)
    assert [r.bytes for r in cut.requests] == [MIB] * 5 + [512]
    assert [r.at_s for r in cut.requests][:4] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    assert sum(r.tensors for r in cut.requests) == 11
    joined = bucketed(STEP, 64 * MIB)
    assert [(r.bytes, r.at_s) for r in joined.requests] == [(STEP.bytes, 0.03)]
    waiting = Step(0.04, STEP.requests, (0.015, 0.03))
    assert len(bucketed(waiting, 64 * MIB).requests) == 2
    assert len(bucketed(compressed(STEP, "int8", Costs()), 64 * MIB).requests) == 2


def test_larger_batches_compute_longer() -> None:
    double = batched(STEP, 2.0)
    assert (double.compute_s, double.waits_s) == (0.08, (0.06,))
    assert [r.at_s for r in double.requests] == [0.02, 0.04, 0.06]
    assert double.bytes == STEP.bytes


def test_links_from_text() -> None:
    assert parse_link("10G", 5e-5) == Link(1.25e9, 5e-5)
    assert parse_link("100M+20ms", 5e-5) == Link(12.5e6, 0.02)
    long = parse_link("1.5G+7.5us", 0)
    assert (long.bytes_per_s, long.latency_s) == pytest.approx((187.5e6, 7.5e-6))
    for text in ("", "G", "10 G", "10g", "-1G", "1G+", "1G+20", "1G+-1ms", "0", "1e9", "9999T"):
        with pytest.raises(InvalidArgumentError, match=r"--link .*10G, 100M or 1G\+20ms"):
            parse_link(text, 0)


def test_hosts_from_text() -> None:
    assert parse_hosts("64, 2,8,2") == [2, 8, 64]
    for text in ("", "2,", "two", "0", "2;8", "-1", "999999999"):
        with pytest.raises(InvalidArgumentError, match="--hosts"):
            parse_hosts(text)


def test_changes_from_text() -> None:
    link = Link(1e9, 0)
    assert parse_change("compression=int8").of_step(STEP, Costs()).requests[0].codec == "int8"
    assert len(parse_change("bucket=64MiB").of_step(STEP, Costs()).requests) == 1
    assert parse_change("bucket=512K").of_step(STEP, Costs()) == bucketed(STEP, 512 << 10)
    assert parse_change("batch=1.5").of_step(STEP, Costs()).compute_s == pytest.approx(0.06)
    here = Cluster(4, 1, 2, link, 4)
    assert parse_change("ranks=4").of_cluster(here).ranks_per_host == 4
    own = parse_change("cores=8").of_cluster(here)
    assert (own.cores, own.hosts_per_machine) == (8, 1)
    assert math.isclose(own.link.bytes_per_s, 1e9)


@pytest.mark.parametrize(
    "text",
    [
        "int8", "speed=2", "compression=int2", "bucket=0", "bucket=4QiB", "batch=0", "batch=many",
        "batch=nan", "ranks=0", "ranks=1.5", "cores=-1", "=", "",
    ],
)  # fmt: skip
def test_changes_that_there_are_not(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(f"--what-if {text!r}")):
        parse_change(text)
