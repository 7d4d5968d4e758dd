"""When training that seldom communicates does so: every fragment in turn, never in the warm-up."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kolovod.errors import InvalidArgumentError
from kolovod.gradients.periodic import Schedule, checked_number, checksum


@pytest.mark.parametrize(("every", "warm", "delay"), [(1, 0, 0), (4, 3, 1), (7, 2, 6), (10, 0, 3)])
def test_turns(every, warm, delay):
    schedule = Schedule.checked(every, warm, delay)
    for fragments in range(1, min(every, 4) + 1):
        sent = {
            f: [step for step in range(1, 60) if schedule.sends(step, f, fragments)]
            for f in range(fragments)
        }
        for steps in sent.values():
            assert warm < steps[0] <= warm + every
            assert {after - before for before, after in itertools.pairwise(steps)} <= {every}
        assert sent[fragments - 1][0] == warm + every  # the last one ends a period
        firsts = [steps[0] for steps in sent.values()]
        assert firsts == sorted(set(firsts))  # one at a time
        for f, steps in sent.items():
            applied = [
                step for step in range(1, 60 + delay) if schedule.applies(step, f, fragments)
            ]
            assert applied == [step + delay for step in steps]
            arrays = schedule.sends(np.arange(60), f, fragments)  # as frameworks ask
            assert np.flatnonzero(arrays).tolist() == steps
    assert [step for step in range(60) if schedule.warms_up(step)] == list(range(warm))
    assert [step for step in range(60) if schedule.begins(step)] == [warm]


def test_fragments_and_shares():
    schedule = Schedule.checked(4, 0, 2)
    assert schedule.cut(3, 7) == [[0, 3, 6], [1, 4], [2, 5]]
    assert schedule.share(None) == 0.5
    assert Schedule.checked(4).share(None) == 0
    assert schedule.share(1) == 1
    for wrong in (True, 0, 5, 2.0):
        with pytest.raises(InvalidArgumentError, match=rf"fragments is {wrong}: "):
            schedule.cut(wrong, 7)
    with pytest.raises(InvalidArgumentError, match="5 fragments cannot take turns in 4 steps"):
        schedule.check_turns(5)
    with pytest.raises(InvalidArgumentError, match="fragment_sync_delay is 4: it must be less"):
        Schedule.checked(4, 0, 4)
    for wrong in (float("nan"), None, -0.1):
        with pytest.raises(InvalidArgumentError, match="rate is"):
            checked_number("rate", wrong, 0, 1)


def test_a_checksum_is_of_bits():
    values = np.arange(6.0).reshape(2, 3)
    assert checksum(values) == checksum(values.copy())
    assert checksum(values.T) == checksum(np.ascontiguousarray(values.T)) != checksum(values)
    assert checksum(np.float64(0.0)) != checksum(np.float64(-0.0))
