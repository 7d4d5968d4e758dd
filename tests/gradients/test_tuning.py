"""Trials of bucket sizes: a pure function of a clock."""

from __future__ import annotations

import json

import pytest

from kolovod.gradients import plan, tuning
from kolovod.gradients.tuning import STEPS_EACH, WARM_UP_STEPS, BucketTrials

KIB = 1 << 10


def run(start, step_ms, steps=200, on_device=False):
    """``step_ms``: by size. Returns the sizes of all steps, and the decisions."""
    now_ns = [0]
    decisions = []
    trials = BucketTrials(decisions.append, lambda: now_ns[0], on_device=on_device)
    size, sizes = start, []
    for step in range(steps):
        sizes.append(size)
        # Some steps take long, whatever the size: medians are told apart all the same.
        now_ns[0] += int(1e6 * (step_ms[size] + (100 if step % 7 == 0 else 0)))
        size = trials.next_bytes(size)
    assert trials.is_over
    return sizes, decisions


@pytest.mark.parametrize(
    ("start", "step_ms", "tried", "chosen"),
    [
        # The rule was right: larger ones are slower, and smaller ones.
        (512, {512: 10.0, 2048: 12.0, 128: 11.0}, [[512, 2048], [512, 128]], 512),
        (512, {512: 10.0, 2048: 12.0, 128: 9.0}, [[512, 2048], [512, 128]], 128),
        (256, {256: 10.0, 1024: 9.0, 4096: 8.0}, [[256, 1024], [1024, 4096]], 4096),
        (256, {256: 10.0, 1024: 9.0, 4096: 9.5}, [[256, 1024], [1024, 4096]], 1024),
        # A little faster is noise.
        (512, {512: 10.0, 2048: 9.9, 128: 9.9}, [[512, 2048], [512, 128]], 512),
        # At the ends of the range there is one trial.
        (128, {128: 10.0, 512: 11.0}, [[128, 512]], 128),
        (4096, {4096: 10.0, 1024: 9.0}, [[4096, 1024]], 1024),
        (2048, {2048: 10.0, 512: 9.0}, [[2048, 512]], 512),
    ],
)
def test_the_faster_size_is_kept(start, step_ms, tried, chosen):
    sizes, decisions = run(start * KIB, {size * KIB: ms for size, ms in step_ms.items()})
    assert [[b // KIB for b in d["bucket_bytes"]] for d in decisions] == tried
    assert decisions[-1]["chosen"] == chosen * KIB
    assert set(sizes[-50:]) == {chosen * KIB}
    assert set(sizes[: WARM_UP_STEPS + 1]) == {start * KIB}
    for first, second in tried:  # by turns
        assert min(sizes.count(first * KIB), sizes.count(second * KIB)) >= STEPS_EACH
    begin = WARM_UP_STEPS + 1
    pair = sizes[begin : begin + 2 * STEPS_EACH]
    if start * 4 <= plan.MOST_BUCKET_BYTES // KIB:
        assert pair == [start * KIB, 4 * start * KIB] * STEPS_EACH


def test_larger_ones_are_tried_of_gradients_on_a_gpu():
    times = {8192: 10.0, 32768: 9.0, 2048: 8.0}
    sizes, decisions = run(8192 * KIB, {b * KIB: ms for b, ms in times.items()}, on_device=True)
    assert [d["bucket_bytes"] for d in decisions] == [[8192 * KIB, 32768 * KIB]]
    assert sizes[-1] == 32768 * KIB


def test_the_log_has_a_line_for_each_decision(tmp_path):
    path = tmp_path / "tune.log"
    log = tuning.log_to(str(path), 3)
    log({"chosen": 1})
    log({"chosen": 2})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"optimizer": 3, "chosen": 1},
        {"optimizer": 3, "chosen": 2},
    ]
    with pytest.raises(ValueError, match="KOLOVOD_AUTOTUNE_LOG_FILE"):
        tuning.log_to(str(tmp_path / "no" / "file"), 3)({})
    assert tuning.asked_for(0, on_device=False) is None  # there is no world
