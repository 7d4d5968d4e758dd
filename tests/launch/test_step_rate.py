"""Steps per second and the slowest rank, as the status line has them."""

from __future__ import annotations

import re

import pytest
from launched import launch_command
from terminal import terminal

from kolovod.launch.step_rate import Seen, StepRateProbe, seen_in
from kolovod.observe.live.picture import Picture, RankPicture, picture
from kolovod.observe.live.window import Steps

SCRIPT = """
import numpy
import kolovod
from kolovod.numpy import allreduce

kolovod.init()
deadline = time.monotonic() + 100
while time.monotonic() < deadline:
    time.sleep(0.02 + 0.05 * kolovod.rank())
    allreduce(numpy.ones(1000, dtype=numpy.float32), name="gradient")
"""


def rank_picture(
    rank: int | None, per_s: float | None, held_up: float | None, late_s: float = 0.0
) -> RankPicture:
    steps = None if per_s is None else Steps(per_s, 1.0, 1.0, 1.0, True)
    return RankPicture(
        number=0, rank=rank, pid=1, host="a", cpu=0.0, memory_bytes=0, steps=steps, compute=None,
        waiting=None, communication=None, hidden=None, last=0, held_up=held_up,
        late="gradient" if late_s else "", late_s=late_s, problem="",
    )  # fmt: skip


def seen(*ranks: RankPicture, hosts: tuple[str, ...] = ("a",)) -> Seen:
    made = Picture(
        size=4, epoch=0, hosts=hosts, backend="", ranks=list(ranks), links=[], bytes_per_s=0.0,
        operations_per_s=0.0, dtypes=(), events=[],
    )  # fmt: skip
    return seen_in(made)


def test_what_is_seen_in_a_picture() -> None:
    assert seen_in(picture([])) == Seen()
    assert seen(rank_picture(None, None, None)) == Seen()
    slow = rank_picture(1, 9.5, 0.4)
    assert seen(rank_picture(0, 10.0, 0.1), slow) == Seen(9.5, 1, 0.4)
    assert seen(rank_picture(0, 10.0, 0.01), rank_picture(1, 9.5, 0.02)) == Seen(9.5)
    assert seen(slow) == Seen(9.5)  # nobody else is here to be held up
    assert seen(slow, rank_picture(0, None, None, 3.0)) == Seen(9.5, 0, 0.0)
    assert not seen(slow, hosts=("a", "b")).is_all


def test_nobody_is_looked_at_before_somebody_asks() -> None:
    def never() -> list[int]:
        raise AssertionError

    step_rate = StepRateProbe(never)
    step_rate.close()
    assert step_rate.now() == Seen()
    step_rate.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), id="plain"),
        pytest.param(("--elastic",), id="elastic", marks=pytest.mark.slow),
    ],
)
def test_in_a_terminal(flags: tuple[str, ...]) -> None:
    with terminal(launch_command(2, SCRIPT, *flags), columns=150) as shown:
        found = re.compile(r"2 ranks up, \d\S* steps/s, slowest: rank 1 \(others wait \d\d% of")
        shown.read_until(lambda: found.search(shown.text) is not None)
        shown.type("\x03")
        assert shown.read_to_end() == 130
