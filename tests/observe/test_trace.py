"""What timelines are made of: events, the file, clocks, the summary. No world, no clock."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from kolovod.core.spans import CHOSEN, OPTIMIZER_STEP, WAIT, WAIT_FOR_GRADIENTS, Span, SpanLog
from kolovod.errors import InvalidArgumentError
from kolovod.observe.collector import Clock
from kolovod.observe.recorder import Batch, Operation
from kolovod.observe.summary import read, summarize, text
from kolovod.observe.trace import Trace
from kolovod.observe.trace_file import TraceFile

MS = 1_000_000
START = 5_000 * MS


def operation(
    name: str, bucket: int, submitted: int, started: int, ended: int, **changes: Any
) -> Operation:
    """Times in ms after the start."""
    facts = {"where": "", "verb": "allreduce", "dtype": "float32", "tensors": 1, "bytes": 8}
    facts = {**facts, "ok": True, **changes}
    return (
        facts["where"],
        name,
        facts["verb"],
        facts["dtype"],
        facts["tensors"],
        facts["bytes"],
        bucket,
        facts["ok"],
        *(START + ms * MS if ms else 0 for ms in (submitted, started, ended)),
    )


def span(name: str, start: int, end: int) -> Span:
    return (name, "MainThread", START + start * MS, START + end * MS, ())


def slices(events: list[dict[str, Any]], name: str) -> list[tuple[int, int, float, float]]:
    return [(e["pid"], e["tid"], e["ts"], e["dur"]) for e in events if e["name"] == name]


def test_an_operation_is_its_negotiation_and_then_itself() -> None:
    trace = Trace(START, 123_000)
    assert trace.opening()[0]["args"]["start_time_since_epoch_in_micros"] == 123
    events = trace.add(2, "h", Batch([operation("a", 1, 1, 3, 7)]))
    ((pid, row, ts, dur),) = slices(events, "NEGOTIATE_ALLREDUCE")
    assert (pid, ts, dur) == (3, 1000.0, 2000.0)
    assert (3, row, 3000.0, 4000.0) in slices(events, "ALLREDUCE")
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names[row] == "allreduce.a"
    assert "buckets" in names.values()
    assert not trace.add(2, "h", Batch([operation("old", 1, -5, -4, -3)]))
    under_way = trace.add(2, "h", Batch([operation("b", 2, -5, -4, 3)], [span("s", -5, 2)]))
    assert [(ts, dur) for *_, ts, dur in slices(under_way, "s")] == [(0, 2000)]
    assert (0, 3000) in [(ts, dur) for *_, ts, dur in slices(under_way, "ALLREDUCE")]


@pytest.mark.parametrize(
    ("name", "verb", "where", "label"),
    [
        ("loss", "allreduce", "", "allreduce.loss"),
        ("allreduce.loss", "allreduce", "", "allreduce.loss"),
        ("unnamed.17", "allgather", "", "allgather.noname"),
        ("allreduce.noname.3", "allreduce", "", "allreduce.noname"),
        ("loss", "allreduce", " in set 4", "allreduce.loss in set 4"),
    ],
)
def test_labels(name: str, verb: str, where: str, label: str) -> None:
    done = operation(name, 1, 1, 2, 3, verb=verb, where=where)
    events = Trace(START, 0).add(0, "h", Batch([done]))
    assert label in {e["args"]["name"] for e in events if e["name"] == "thread_name"}


def test_operations_that_overlap_have_rows_of_their_own() -> None:
    done = [operation(f"unnamed.{i}", 1, i, 10, 11) for i in range(1, 4)]
    done.append(operation("unnamed.9", 2, 12, 13, 14))
    events = Trace(START, 0).add(0, "h", Batch(done))
    rows = [row for _, row, _, _ in slices(events, "NEGOTIATE_ALLREDUCE")]
    assert len(set(rows[:3])) == 3
    assert rows[3] == rows[0]


def test_names_that_never_end_share_a_row() -> None:
    trace = Trace(START, 0)
    done = [operation(f"step{i}", i, i, i, i + 1) for i in range(1, 2001)]
    events = trace.add(0, "h", Batch(done))
    labels = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert "other operations" in labels
    assert len(labels) <= 1002
    assert len(slices(events, "NEGOTIATE_ALLREDUCE")) == 2000


def test_failed_operations_and_those_that_never_started() -> None:
    failed = operation("a", 1, 1, 2, 3, ok=False)
    never = operation("b", 0, 1, 0, 3, ok=False)
    events = Trace(START, 0).add(0, "h", Batch([failed, never]))
    (carried,) = (e for e in events if e["name"] == "ALLREDUCE" and "ok" in e["args"])
    assert carried["args"]["ok"] is False
    assert len(slices(events, "NEGOTIATE_ALLREDUCE")) == 2


def test_cycles_are_marked_once_a_bucket() -> None:
    trace = Trace(START, 0, mark_cycles=True)
    done = [operation(name, bucket, 1, 2, 3) for bucket in (1, 2) for name in "ab"]
    marks = [e for e in trace.add(0, "h", Batch(done)) if e["name"] == "CYCLE_START"]
    assert [(mark["ph"], mark["s"]) for mark in marks] == [("i", "g")] * 2
    assert not [e for e in trace.add(1, "h", Batch(done)) if e["name"] == "CYCLE_START"]


# The file ---------------------------------------------------------------------------------------


def test_the_file_is_whole_after_every_append(tmp_path: Path) -> None:
    rng = random.Random(1)
    path = tmp_path / "t.json"
    file = TraceFile(str(path), [{"n": -1}])
    written: list[dict[str, Any]] = [{"n": -1}]
    for n in range(60):
        more = [
            {"n": n, "x": '\u0161"\\\n' * rng.randrange(rng.choice((3, 900)))}
            for _ in range(rng.choice((0, 1, 40)))
        ]
        file.append(more)
        written += more
        assert json.loads(path.read_text()) == written
    file.close()
    file.append([{"n": "late"}])
    assert json.loads(path.read_text()) == written


def test_a_file_whose_last_event_is_half_there_is_read(tmp_path: Path) -> None:
    """As of a process that was killed while a write went from one page to the next."""
    path = tmp_path / "timeline.json"
    file = TraceFile(str(path), [{"n": 0}])
    file.append([{"n": n} for n in range(1, 6)])
    file.close()
    whole = path.read_bytes()
    first = whole.index(b",\n") + 2
    for end in range(first, len(whole) + 1):
        path.write_bytes(whole[:end])
        events = read(path)
        assert events == [{"n": n} for n in range(len(events))]
        assert len(events) == 6 if b"]" in whole[:end] else len(events) < 6
    path.write_bytes(whole[: first - 3])
    with pytest.raises(InvalidArgumentError, match="is no timeline"):
        read(path)


def test_a_disk_that_was_full_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.json"
    pwrite = os.pwrite

    def full(fd: int, data: bytes, offset: int) -> int:
        return pwrite(fd, data, offset) if len(data) <= 4 else 1

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(InvalidArgumentError, match="1 of"):
        TraceFile(str(path), [{"n": 0}])
    assert json.loads(path.read_text()) == []


def test_a_full_disk_ends_it_in_good_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    file = TraceFile(str(path), [{"n": 0}])
    file.append([{"n": 1}])
    pwrite = os.pwrite

    def full(fd: int, data: bytes, offset: int) -> int:
        if len(data) <= 10:
            return pwrite(fd, data, offset)
        pwrite(fd, data[: len(data) // 2], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    file.append([{"n": 2}])
    monkeypatch.undo()
    assert "No space left" in file.failure
    file.append([{"n": 3}])
    assert json.loads(path.read_text()) == [{"n": 0}, {"n": 1}]
    file.close()


# Clocks and spans -------------------------------------------------------------------------------


def test_a_clock_believes_the_fastest_answers() -> None:
    rng = random.Random(2)
    clock = Clock(is_same=False)
    assert clock.offset_ns == 0
    offset, now = -7_000_000_000, 10_000_000_000
    for _ in range(50):
        there, back = (50_000 + int(rng.expovariate(1 / 2e6)) for _ in range(2))
        clock.asked(now, now + there + offset, now + there + back)
        now += 50_000_000
    assert abs(clock.offset_ns - offset) < 500_000
    same = Clock(is_same=True)
    same.asked(0, 5, 2)
    assert same.offset_ns == 0


def test_batches_are_shifted_but_for_what_never_happened() -> None:
    batch = Batch([operation("a", 0, 1, 0, 3)], [span("s", 1, 2)], 4).shifted(2 * MS)
    assert batch.operations[0][8:] == (START + 3 * MS, 0, START + 5 * MS)
    assert batch.spans[0][2:4] == (START + 3 * MS, START + 4 * MS)
    assert batch.lost == 4


def test_spans_that_nobody_takes_are_bounded() -> None:
    log = SpanLog()
    log.add("before", 1, 2)
    reader, other = log.open(), log.open()
    for _ in range(100_010):
        log.add("x" * 300, 1, 2)
    taken = reader.take(7)
    assert len(taken) == 7
    assert len(taken[0][0]) == 100
    assert len(reader.take()) == 100_000 - 7
    assert reader.take() == []
    reader.close()
    log.add("later", 1, 2)
    assert log.on
    assert reader.take() == []
    assert other.take()[-1][0] == "later"
    other.close()
    assert not log.on


# The summary ------------------------------------------------------------------------------------


def steps(waits: tuple[int, int], *, hidden: int = 0) -> list[dict[str, Any]]:
    """Ten steps of 100 ms on two ranks, each of which waits so long at the end of a step.

    The bucket is carried in the last 10 ms, and ``hidden`` ms of another one before.
    """
    trace = Trace(START, 0)
    events = trace.opening()
    for rank, wait in enumerate(waits):
        spans, operations = [], []
        for step in range(10):
            end = 100 * (step + 1)
            spans.append(span(WAIT_FOR_GRADIENTS, end - wait - 1, end - 1))
            spans.append(span(WAIT, end - 3, end - 1))  # within the other
            spans.append(span(OPTIMIZER_STEP, end - 1, end))
            ready = end - wait - 1
            operations.append(operation("g", 2 * step + 2, ready, end - 11, end - 1))
            if hidden:
                early = end - 60
                operations.insert(
                    -1, operation("f", 2 * step + 1, early, early, early + hidden, bytes=40)
                )
        events += trace.add(rank, f"host{rank}", Batch(operations, spans))
    return events


def test_shares() -> None:
    summary = summarize(steps((20, 10), hidden=5))
    first, second = summary.ranks
    assert (first.rank, first.host, first.steps) == (0, "host0", 8)
    assert first.step_us == pytest.approx(100_000)
    assert first.exposed_us / first.window_us == pytest.approx(0.20)
    assert second.exposed_us / second.window_us == pytest.approx(0.10)
    assert second.communication_us / second.window_us == pytest.approx(0.15)
    assert second.hidden_us / second.communication_us == pytest.approx(5 / 15)
    # From its own wait's begin rank 0 waits for rank 1, 10 ms of every 100.
    assert second.held_up_us / second.window_us == pytest.approx(0.10)
    assert first.held_up_us == 0
    assert summary.operations == 20
    assert summary.bytes == 10 * 48


def test_the_straggler_is_named() -> None:
    assert "Straggler: rank 1 on host1 held up others 20%" in text(summarize(steps((30, 10))))
    assert "No straggler" in text(summarize(steps((12, 10))))


def test_small_batches_are_told() -> None:
    assert "Batches are large enough: the fastest ranks wait 3%" in text(summarize(steps((3, 3))))
    shown = text(summarize(steps((40, 40), hidden=15)))
    # 60 % compute; twice that hides 15 ms more of the 40: 120 of 145.
    assert "compute 60% of the time. With batches 2 times as large, 83%" in shown


def test_choices_are_told() -> None:
    trace = Trace(START, 0)
    chosen = [
        span(CHOSEN + what, at, at) for at, what in ((2500, "256 KiB: so"), (900, "1 MiB: a"))
    ]
    events = trace.opening()
    events += trace.add(0, "h", Batch([operation("a", 1, 500, 600, 700)], chosen))
    summary = summarize(events)
    assert summary.choices == [
        (pytest.approx(0.4), "1 MiB: a"),
        (pytest.approx(2.0), "256 KiB: so"),
    ]
    assert "Chosen after 0.4 s: 1 MiB: a.\nChosen after 2.0 s: 256 KiB: so." in text(summary)


def test_operations_that_were_not_read_are_told() -> None:
    trace = Trace(START, 0)
    batch = Batch([operation("a", 1, 1, 2, 3)], [], 17)
    summary = summarize([*trace.opening(), *trace.add(0, "h", batch)])
    assert summary.lost == 17
    assert "17 operations are not shown" in text(summary)


def test_ranks_whose_lanes_differ_are_compared_all_the_same() -> None:
    """Which row an unnamed operation gets depends on what overlaps, which differs by rank."""
    trace = Trace(START, 0)
    events = trace.opening()
    overlapping = [operation("unnamed.1", 1, 1, 5, 6), operation("unnamed.2", 1, 2, 5, 6)]
    one_by_one = [operation("unnamed.1", 1, 1, 5, 6), operation("unnamed.2", 1, 6, 6, 7)]
    events += trace.add(0, "h", Batch(overlapping))
    events += trace.add(1, "h", Batch(one_by_one))
    assert summarize(events).operations == 2
