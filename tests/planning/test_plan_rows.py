"""Predictions: what they compare, why they are extrapolated, what they advise; and how it looks."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from typing import Any

import planned
import pytest

from kolovod.errors import InvalidArgumentError
from kolovod.observe.whereabouts import Whereabouts
from kolovod.planning import drawing, words
from kolovod.planning.changes import parse_change
from kolovod.planning.costs import Link
from kolovod.planning.measured import Measured, measured
from kolovod.planning.plan import make

FAST = {"carried_ms": 0.1, "link": (1e10, 1e-6)}


@pytest.fixture(scope="module")
def seen() -> Measured:
    """Two hosts on machines of their own, whose links carry 1 MiB in 10 ms."""
    return measured(planned.events(machines=("m", "n")))


def test_rows_by_variant_and_hosts(seen: Measured) -> None:
    plan = make(seen, [2, 4, 8], changes=[parse_change("compression=int8")])
    assert [(row.variant, row.hosts, row.ranks) for row in plan.rows] == [
        (name, hosts, hosts) for name in ("as measured", "compression=int8") for hosts in (2, 4, 8)
    ]
    plain, coded = plan.rows[:3], plan.rows[3:]
    for one, other in zip(plain, coded, strict=True):
        assert other.step_s < one.step_s
        assert one.low_s < one.step_s < one.high_s
        assert one.interval[0] < one.efficiency < one.interval[1]
        assert one.efficiency == pytest.approx(one.alone_s / one.step_s)
    assert plain[0].step_s == pytest.approx(seen.step_s, rel=0.05)
    assert [row.efficiency for row in plain] == sorted((r.efficiency for r in plain), reverse=True)


def test_beyond_four_times_it_says_so(seen: Measured) -> None:
    rows = make(seen, [2, 8, 9, 512]).rows
    assert [row.beyond for row in rows[:2]] == ["", ""]
    assert rows[2].beyond == "4.5 times the ranks"
    assert rows[3].beyond == "256 times the ranks"
    widths = [(row.high_s - row.low_s) / row.step_s for row in rows]
    assert widths[0] == pytest.approx(widths[1])
    assert widths[1] < widths[2] < widths[3]
    rate = seen.cluster.link.bytes_per_s
    for times, beyond in ((3.9, ""), (4.1, "4.1 times the rate of the link"), (0.01, "")):
        row = make(seen, [2], link=Link(times * rate, 1e-4)).rows[0]
        assert row.beyond == beyond
    both = make(seen, [16], link=Link(8 * rate, 1e-4)).rows[0]
    assert both.beyond == "8 times the ranks and 8 times the rate of the link"


def test_the_interval_has_the_spread_of_steps_and_what_the_model_missed(seen: Measured) -> None:
    calm = make(seen, [2]).rows[0]
    spread = replace(seen, steps_s=tuple(seen.step_s * (1 + 0.1 * i) for i in range(-2, 3)))
    wild = make(spread, [2]).rows[0]
    assert wild.high_s - wild.low_s > calm.high_s - calm.low_s
    missed = replace(seen, steps_s=tuple(1.5 * each for each in seen.steps_s))
    assert make(missed, [2]).miss == pytest.approx(-1 / 3, abs=0.05)
    far = make(missed, [2]).rows[0]
    assert far.high_s / far.step_s > 1.3


@pytest.mark.parametrize(
    ("changes", "bottleneck", "advice"),
    [
        ({}, "link", "With compression=int4 a step takes"),
        (FAST, "compute", "nothing about communication"),
        ({**FAST, "slower_ms": (0, 12)}, "stragglers", "rank 1 on b computes 13% longer"),
        ({"link": (1e8, 4e-3), "carried_ms": 5, "bytes_": 64 << 10}, "latency", "on their way"),
    ],
)
def test_what_holds_ranks_up(changes: dict[str, Any], bottleneck: str, advice: str) -> None:
    seen = measured(planned.events(machines=("m", "n"), **changes))
    plan = make(seen, [2])
    assert plan.rows[0].bottleneck == bottleneck, plan.rows[0].gains
    assert any(advice in line for line in plan.advice), plan.advice


def test_cores_that_all_hosts_share_are_short() -> None:
    seen = measured(planned.events(at=Whereabouts("m", 2.0, "3"), **FAST))
    two, eight = make(seen, [2, 8]).rows
    assert eight.bottleneck == "cores"
    assert eight.step_s > 3.5 * two.step_s
    plan = make(seen, [8])
    assert any("9 cores in the machine would be enough" in line for line in plan.advice)
    own = make(seen, [8], changes=[parse_change("cores=2")]).rows[-1]
    assert own.step_s == pytest.approx(two.step_s, rel=0.1)


def test_words(seen: Measured) -> None:
    plan = make(seen, [2, 64], link=Link(1.25e9, 1e-4), changes=[parse_change("batch=2")])
    text = words.text(plan)
    assert "Measured: 2 ranks on 2 hosts, 8 steps of 50.0 ms" in text
    assert "Links between hosts (given): 10 Gbit/s, a message takes 100 us." in text
    assert "Cores: 4 on each host." in text
    assert "With batch=2:" in text
    assert text.count("extrapolated") >= 4
    assert "beyond four times what was measured, up to 32 times the ranks" in text
    assert max(map(len, text.splitlines())) < 130
    shared = measured(planned.events())
    assert "all hosts share the 4 of one machine" in words.text(make(shared, [2]))
    unknown = measured(planned.events(at=None))
    assert "does not say how many" in words.text(make(unknown, [2]))
    one = measured(planned.events(("a", "a"), link=None))
    assert "none is needed" in words.text(make(one, [1]))


def test_a_picture(seen: Measured) -> None:
    plan = make(seen, [2, 8, 64], changes=[parse_change("compression=int8")])
    picture = ElementTree.fromstring(drawing.draw(plan))
    name = "{http://www.w3.org/2000/svg}"
    circles = picture.findall(f"{name}circle")
    assert len(circles) == 6
    assert sum("hollow" in (circle.get("class") or "") for circle in circles) == 2
    assert len(picture.findall(f"{name}polyline")) == 2
    heights = [float(circle.get("cy", "")) for circle in circles[:3]]
    assert heights == sorted(heights)  # less efficient the more hosts: further down
    ElementTree.fromstring(drawing.draw(make(seen, [2])))


JUNK = (None, -1, 0, 1e300, 1 << 61, float("nan"), "x", [], {}, True, -1e18)


def test_a_timeline_that_somebody_has_changed_is_refused_or_read() -> None:
    """Whatever is in one place of a file: an InvalidArgumentError, or a plan."""
    rng, read = random.Random(5), 0
    for _ in range(150):
        events = planned.events(steps=6)
        for _ in range(rng.choice((1, 1, 3))):
            event = rng.choice(events)
            facts = event.get("args", event) if rng.random() < 0.5 else event
            facts = facts if isinstance(facts, dict) and facts else event
            facts[rng.choice(sorted(facts))] = rng.choice(JUNK)
        try:
            words.text(make(measured(events), [2, 9], link=Link(1e9, 1e-4)))
            read += 1
        except InvalidArgumentError:
            continue
    assert 10 < read < 150
