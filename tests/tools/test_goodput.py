"""bench/goodput.py: what it draws, and what it makes of the notes of ranks."""

from __future__ import annotations

import argparse
from pathlib import Path

import goodput
import goodput_timeline as timeline
import pytest
from goodput_timeline import Step

HOSTS = ("a", "b", "c", "d")
S = 1_000_000_000
NP = 8


def steps(*rows: tuple[float, int]) -> list[Step]:
    """By second and size."""
    return [Step(int(at_s * S), number, size) for number, (at_s, size) in enumerate(rows)]


def back_s(*rows: tuple[float, int], until_s: float = 10.0) -> float | None:
    return timeline.back_s(steps(*rows), 0, int(until_s * S), NP)


STEADY = [(0.25 * i, NP) for i in range(1, 40)]


def test_a_fault_that_costs_no_step_costs_no_time() -> None:
    assert back_s(*STEADY) == 0


def test_all_are_back_with_the_first_step_of_all_that_others_follow() -> None:
    lost = [(at_s, 7 if 1 < at_s < 3 else NP) for at_s, _ in STEADY]
    assert back_s(*lost) == 3
    twice = [(at_s, 7 if 1 < at_s < 3 or at_s == 4 else NP) for at_s, _ in STEADY]
    assert back_s(*twice) == 4.25


def test_a_pause_counts_as_does_what_comes_after_the_next_fault() -> None:
    assert back_s(*[row for row in STEADY if not 1 < row[0] < 3]) == 3
    assert back_s(*[row for row in STEADY if row[0] < 8]) is None
    assert back_s(*STEADY, (10.1, 3)) == 0
    assert back_s(until_s=2.0) is None


def test_samples_are_those_of_the_ranks_that_took_part() -> None:
    made = steps((0.5, 8), (1.0, 7), (1.5, 8), (2.0, 8))
    assert timeline.samples_per_s(made, S, 2 * S) == 15


def test_a_step_counts_once_and_when_its_last_rank_has_made_it(tmp_path: Path) -> None:
    (tmp_path / "0.1").write_text("10 1 2 0 5 9\n20 2 2 0 5 9\n70 2 1 0 6 9\n80 3 1 0 6")
    (tmp_path / "1.1").write_text("15 1 2 1 5 9\n25 2 2 1 5 9\n")
    assert timeline.read(tmp_path) == [Step(15, 1, 2), Step(70, 2, 1)]


def test_a_seed_draws_the_same() -> None:
    drawn = []
    for _ in range(2):
        drawing = goodput.Drawing(3, HOSTS, NP, goodput.KINDS)
        drawn.append([drawing.draw() for _ in range(180)])
    assert drawn[0] == drawn[1]
    assert {fault.kind for fault in drawn[0]} == set(goodput.KINDS)
    assert {fault.slot for fault in drawn[0] if fault.kind == "kill"} == set(range(NP))


@pytest.mark.parametrize("back", [1.5, None])
def test_the_result_says_what_was_reached(back: float | None) -> None:
    turn = {"kind": "link", "lasts_s": 1.0, "back_s": back, "seconds": 10.0, "goodput": 0.9}
    one = {"goodput": 0.98, "seconds": 10.0, "steps": 1000, "calm_samples_per_s": [140.0]}
    found = {"kolovod": {**one, "turns": [turn]}}
    options = argparse.Namespace(seed=1, ranks=NP, hosts=4, every_s=10.0)
    facts = {"date": "2026-11-28", "cpu": "x", "cores": 2, "kernel": "6", "python": "3"}
    text = goodput.markdown(found, options, facts, [0.1, 0.2])
    assert "| goodput | 98.0% | 97% | yes |" in text
    assert ("| 0.50 s | 2 s | yes |" in text) == (back is not None)
    assert ("| never s |" in text) == (back is None)
