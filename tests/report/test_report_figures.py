"""What a report says of a timeline: its figures are those of ``kolovod timeline`` and ``plan``."""

from __future__ import annotations

import random
from typing import Any

import planned
import pytest

from kolovod.core.spans import OPTIMIZER_STEP, WAIT, WAIT_FOR_GRADIENTS, Span
from kolovod.observe.reading import of_ranks
from kolovod.observe.recorder import Batch
from kolovod.observe.summary import share, summarize, text
from kolovod.observe.trace import NEGOTIATE, Trace
from kolovod.planning.asked import asked
from kolovod.report.anatomy import slices
from kolovod.report.figures import Figures, figures
from kolovod.report.lanes import Bar, Lane, lanes, payload, thinned

MS = 1_000_000


def of(events: list[dict[str, Any]], hosts: str = "", link: str = "") -> Figures:
    return figures("t.json", events, asked(hosts, link))


def uneven(steps: int = 12) -> list[dict[str, Any]]:
    """Ranks of which one is late, with communication that is partly hidden."""
    return planned.events(("a", "a", "b"), steps=steps, slower_ms=(0.0, 3.0, 7.0))


def test_the_parts_of_a_step_by_hand() -> None:
    # Both compute 40 ms; rank 1 submits 5 ms later, at 25 and 45; each bucket takes 10 ms.
    first, second = of(planned.events(slower_ms=(0.0, 5.0))).anatomies
    assert first.share("carried", "ranks") == pytest.approx(15 / 55, abs=1e-3)
    assert first.share("carried") == pytest.approx(10 / 55, abs=1e-3)
    assert first.share("ranks") == pytest.approx(5 / 55, abs=1e-3)
    assert first.share("hidden") == pytest.approx(10 / 55, abs=1e-3)
    assert second.share("carried") == pytest.approx(10 / 55, abs=1e-3)
    assert second.share("ranks") == pytest.approx(0, abs=1e-3)


def test_parts_agree_with_the_summary_and_add_up() -> None:
    events = uneven()
    seen = of(events)
    for rank, parts in zip(summarize(events).ranks, seen.anatomies, strict=True):
        assert parts.window_us == pytest.approx(rank.window_us)
        assert parts.parts["carried"] + parts.parts["ranks"] == pytest.approx(rank.exposed_us)
        assert parts.parts["hidden"] == pytest.approx(rank.hidden_us)


def test_what_the_script_marks_is_a_part_and_what_waits_in_it_is_not() -> None:
    def span(name: str, start: int, end: int) -> Span:
        return (name, "MainThread", start * MS, end * MS, ())

    spans = []
    for step in range(0, 1000, 100):
        spans += [span("forward", step, step + 30), span(WAIT, step + 10, step + 30)]
        spans += [span("backward", step + 30, step + 70)]
        spans += [span(WAIT_FOR_GRADIENTS, step + 70, step + 80)]
        spans += [span(OPTIMIZER_STEP, step + 80, step + 100)]
    seen = of(Trace(0, 0).add(0, "h", Batch([], spans)))
    (parts,) = seen.anatomies
    shares = {name: round(parts.share(name), 6) for name in parts.parts}
    assert shares == {
        "marked": 0.5, "rest": 0, "optimizer": 0.2, "hidden": 0, "carried": 0, "ranks": 0.3
    }  # fmt: skip
    assert parts.blocking == pytest.approx(0.2)
    assert "of its own" in seen.advice[0].title
    assert "waits 20% of the time" in seen.advice[0].reasons[0]


@pytest.mark.parametrize("most", [3, 7, 200])
def test_steps_add_up_to_the_summary(most: int) -> None:
    events = uneven(steps=20)
    ranks = summarize(events).ranks
    found, are_steps = slices(of_ranks(events).ranks, most)
    assert are_steps
    assert len(found) <= most
    assert (found[0].first, found[-1].last) == (3, 20)
    times = [each.last - each.first + 1 for each in found]
    waited = sum((s.carried_us + s.ranks_us) * n for s, n in zip(found, times, strict=True))
    hidden = sum(s.hidden_us * n for s, n in zip(found, times, strict=True))
    # The ranks' windows end within microseconds of each other.
    assert waited == pytest.approx(sum(r.exposed_us for r in ranks) / len(ranks), rel=1e-3)
    assert hidden == pytest.approx(sum(r.hidden_us for r in ranks) / len(ranks), rel=1e-3)
    for rank in ranks:
        held = sum(s.held_up[rank.rank] * (s.end_us - s.start_us) for s in found)
        assert held == pytest.approx(rank.held_up_us, rel=1e-3, abs=5)
    assert found[0].held_up[2] > 0.05 > found[0].held_up[0]


def test_steps_that_nobody_tells_are_counted_by_an_operation() -> None:
    told = planned.events(slower_ms=(0.0, 5.0))
    events = [e for e in told if e["name"] != OPTIMIZER_STEP]
    seen, summary = of(events), summarize(events)
    assert seen.are_steps
    assert seen.summary.counted_by == summary.counted_by == "allreduce.g0"
    for rank, as_told in zip(summary.ranks, summarize(told).ranks, strict=True):
        assert rank.steps in (as_told.steps, as_told.steps - 1)
        assert rank.step_us == pytest.approx(as_told.step_us)
    assert "where steps end: they are counted by allreduce.g0." in text(summary)
    assert "counted by" not in text(summarize(told))
    assert "0 optimizer steps" in seen.no_plan  # whose steps have to begin where they do


def test_without_steps_the_time_is_cut_in_equal_parts() -> None:
    without = (OPTIMIZER_STEP, NEGOTIATE)
    events = [e for e in planned.events() if not e["name"].startswith(without)]
    seen = of(events)
    assert not seen.are_steps
    assert len(seen.slices) == 100
    assert seen.lanes["step"] is None
    assert seen.plan is None
    assert "0 optimizer steps" in seen.no_plan
    assert "Record where steps end" in [each.title for each in seen.advice]


def test_the_late_rank_comes_first_with_its_figures() -> None:
    events = planned.events(("a", "a", "b"), slower_ms=(0.0, 0.0, 30.0), carried_ms=1.0)
    seen = of(events)
    first = seen.advice[0]
    assert first.title == "Find out why rank 2 on b is late"
    late = summarize(events).ranks[2]
    assert f"{share(late.held_up_us, late.window_us):.0%}" in first.reasons[0]
    assert f"{late.last} of {seen.summary.operations} operations" in first.reasons[1]
    assert "computes" in first.reasons[2]
    # 40, 40 and 70 ms for as many samples: 70 / (2/40 + 1/70) / 70 and so on.
    assert "rank 2 would have 22% of them instead of 33%" in first.reasons[3]
    assert "the longest computing would be 67% of today's" in first.reasons[3]
    gains = [each.gain for each in seen.advice]
    assert gains == sorted(gains, reverse=True)


def test_a_slow_link_is_what_to_look_at_and_a_fast_run_needs_nothing() -> None:
    machines = {"machines": ("m", "n")}
    slow = of(planned.events(carried_ms=60.0, at_ms=(20.0, 39.0), **machines))  # type: ignore[arg-type]
    assert slow.advice[0].title == "Send less between hosts, or over faster links"
    assert any("compression=" in reason for reason in slow.advice[0].reasons)
    fast = of(planned.events(carried_ms=0.2, at_ms=(20.0, 30.0), steps=20, **machines))  # type: ignore[arg-type]
    assert [each.title for each in fast.advice] == [
        "Leave communication as it is: it holds the ranks up little"
    ]


def test_few_steps_and_lost_operations_are_said() -> None:
    events = planned.events(steps=6)
    lost = Trace(0, 0)
    lost.add(0, "a", Batch([], []))
    events += [e for e in lost.add(0, "a", Batch([], [], 5)) if e["name"] == "operations not shown"]
    titles = [each.title for each in of(events).advice]
    assert titles[-2:] == ["Record more steps", "Take the counts with care"]


def test_operations_and_buckets() -> None:
    seen = of(planned.events(slower_ms=(0.0, 5.0)))
    rows = {row.name: row for row in seen.operations}
    assert set(rows) == {"allreduce.g0", "allreduce.g1"}
    one = rows["allreduce.g0"]
    assert (one.verb, one.dtype, one.count, one.bytes) == ("allreduce", "float32", 10, 10 << 20)
    assert one.carried_us == pytest.approx(100_000)
    assert one.waited_us == pytest.approx(2_500, rel=1e-3)  # 5 ms on one rank, 0 on the other
    assert (one.last, one.last_share) == (1, 1.0)
    (bucket,) = seen.buckets
    assert (bucket.size, bucket.count, bucket.bytes) == ("64 KiB to 1 MiB", 20, 20 << 20)
    assert bucket.bytes_per_s == pytest.approx((1 << 20) / 0.01)
    assert [(host.host, host.ranks) for host in seen.hosts] == [("a", (0,)), ("b", (1,))]


def test_the_estimate_is_that_of_plan_or_says_why_not() -> None:
    assert [row.hosts for row in of(planned.events(), hosts="2,5").plan.rows] == [2, 5]  # type: ignore[union-attr]
    here = of(planned.events(("a", "a"), link=None))
    assert here.plan is None
    assert "--link 10G" in here.no_plan
    assert here.advice  # the run itself can be modelled
    assert of(planned.events(("a", "a"), link=None), link="1G").plan is not None


# Lanes ------------------------------------------------------------------------------------------


def test_events_of_a_row_do_not_overlap_and_inner_ones_are_below() -> None:
    def span(name: str, start: int, end: int) -> Span:
        return (name, "MainThread", start * MS, end * MS, ())

    spans = [span("b", 10, 20), span("a", 0, 100), span("c", 30, 40), span("d", 12, 14)]
    events = Trace(0, 0).add(0, "h", Batch([], spans))
    rows = lanes(events, of_ranks(events).ranks)
    assert [[bar.name for bar in row.bars] for row in rows] == [["a"], ["b", "c"], ["d"]]
    for row in lanes(uneven(), of_ranks(uneven()).ranks):
        for one, other in zip(row.bars, row.bars[1:], strict=False):
            assert one.end_us <= other.start_us


def test_a_bucket_names_its_operations() -> None:
    seen = of(planned.events())
    row = next(row for row in seen.lanes["rows"] if row["label"] == "carried")
    assert seen.lanes["texts"][row["members"][0]] == "allreduce.g0"
    assert row["bytes"][0] == 1 << 20


def test_the_payload_is_the_lanes() -> None:
    events = uneven()
    found = lanes(events, of_ranks(events).ranks)
    data = payload(found, {0: "a"}, (0.0, 1.0), None)
    for lane, row in zip(found, data["rows"], strict=True):
        at = data["begin"]
        for bar, more, lasts, name in zip(
            lane.bars, row["starts"], row["durations"], row["names"], strict=True
        ):
            at += more
            assert at == round(1000 * bar.start_us)
            assert lasts == round(1000 * bar.duration_us)
            assert data["texts"][name] == bar.name


def test_thinning_keeps_what_is_near_and_what_is_long() -> None:
    random.seed(3)
    bars, at = [], 0.0
    for _ in range(5000):
        lasts = random.uniform(1, 100)
        bars.append(Bar(at, at + lasts, "x", "own"))
        at += lasts + 1
    lane = Lane(0, "script", "script", bars)
    kept, none = thinned([lane], (0.0, 1.0), most=5000)
    assert none is None
    assert kept == [lane]
    middle = at / 2
    kept, told = thinned([lane], (middle - 50, middle + 50), most=1000)
    assert told is not None
    assert told.events == 5000
    assert told.shown == len(kept[0].bars) <= 1000
    assert told.shown > 900
    begin, end = told.whole
    near = [bar for bar in bars if begin < bar.start_us and bar.end_us < end]
    assert len(near) > 400
    assert set(near) <= set(kept[0].bars)
    longest = [bar for bar in bars if bar.duration_us > told.least_us]
    assert set(longest) <= set(kept[0].bars)
    assert set(kept[0].bars) == set(near) | set(longest)
