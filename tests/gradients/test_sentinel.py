"""What ranks say of each other's facts, combined by Max, and the message that follows."""

from __future__ import annotations

import numpy as np
import pytest

from kolovod.errors import MismatchError
from kolovod.gradients import sentinel
from kolovod.gradients.sentinel import OPTIONS, STEPS, WEIGHTS, Facts, Like

LIKE = Like("SGD", [0, 1, 2])


def combined(*ranks):
    """All ranks' bytes by Max; each gives a fact by kind."""
    said = np.zeros((len(ranks), sentinel.BYTES), np.uint8)
    for row, facts in zip(said, ranks, strict=True):
        for kind, text in facts.items():
            hashed = None if text is None else sentinel.digest(text)
            place, mine = sentinel.said_of(kind, hashed)
            row[place] = np.frombuffer(mine, np.uint8)
    return bytearray(said.max(axis=0).tobytes())


def test_equal_facts_are_equal_and_nobody_has_to_say_one():
    facts = {STEPS: "3", WEIGHTS: "abc"}
    assert sentinel.which_differ(combined(facts, facts, facts)) == []
    assert sentinel.which_differ(combined(facts, {}, facts)) == []
    assert sentinel.which_differ(combined({}, {})) == []
    assert sentinel.which_differ(combined({STEPS: None}, {STEPS: "3"})) == []


@pytest.mark.parametrize("odd", range(3))
def test_every_difference_is_seen(odd):
    for number in range(500):
        ranks = [{OPTIONS: "x", WEIGHTS: "y"} for _ in range(3)]
        ranks[odd] = {OPTIONS: f"x{number}", WEIGHTS: "y"}
        assert sentinel.which_differ(combined(*ranks)) == [OPTIONS]
    ranks[odd][WEIGHTS] = "z"
    assert sentinel.which_differ(combined(*ranks)) == [OPTIONS, WEIGHTS]


def facts(steps=4, rate=0.1, **weights):
    return Facts(steps, {"a": {"lr": rate, "momentum": 0.9}}, list(weights.items()))


MESSAGES = {
    "steps": (
        [STEPS, WEIGHTS],
        [facts(), facts(5), facts(5)],
        "step 5 of SGD: rank 0 has taken 4 steps, ranks 1, 2 have taken 5 steps. All ranks must",
    ),
    "rate": (
        [OPTIONS],
        [facts(), facts(rate=1e-07), facts()],
        "option 'lr' of the parameters from 'a' on: ranks 0, 2 have 0.1, rank 1 has 1e-07. ",
    ),
    "one rank's weights": (
        [WEIGHTS],
        [facts(a=1, b=2), facts(a=1, b=3), facts(a=1, b=2)],
        "parameter 'b': rank 1 has other values than ranks 0, 2. They were equal before",
    ),
    "all weights": (
        [WEIGHTS],
        [facts(0, a=1, b=2), facts(0, a=2, b=3), facts(0, a=3, b=2)],
        "step 1 of SGD: parameter 'a' and 1 other(s): each rank has values of its own. Begin with "
        "the same parameters: broadcast_parameters",
    ),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_messages(case):
    kinds, said, text = MESSAGES[case]
    assert text in sentinel.text_of(kinds, said, LIKE)


def test_it_is_said_by_one_rank_or_an_error_on_all(capsys):
    sentinel.tell("different", is_first=False)
    assert capsys.readouterr().err == ""
    sentinel.tell("different", is_first=True)
    assert "kolovod: different (this is said once" in capsys.readouterr().err
    sentinel.use("error")
    try:
        for is_first in (True, False):
            with pytest.raises(MismatchError, match=r"different \(KOLOVOD_SENTINEL=error\)"):
                sentinel.tell("different", is_first=is_first)
    finally:
        sentinel.use(None)
