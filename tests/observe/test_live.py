"""What ranks show to who watches them, and what is made of it."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import run_ranks
from waiting import until

import kolovod as kv
from kolovod.core import spans
from kolovod.core.spans import OPTIMIZER_STEP, WAIT, Span
from kolovod.observe.live import showing
from kolovod.observe.live.page import Page, PageReader, PageUnavailableError
from kolovod.observe.live.picture import Picture, Watched, picture
from kolovod.observe.live.watching import RankWatch, Seen
from kolovod.observe.live.window import Look, Pending, Window, late_ranks, steps_of, worlds_said
from kolovod.observe.recorder import Operation

MS = 1_000_000
DEADLINE_S = 60.0
GONE = ("it is in no world", "it has ended")


@pytest.fixture
def page() -> Any:
    made = Page()
    yield made
    made.close()


def test_a_page_is_read_by_its_process_number(page: Page) -> None:
    page.write(['{"a": ', "1}"])
    reader = PageReader(os.getpid())
    assert reader.read() == {"a": 1}
    assert not page.is_watched(0)
    reader.ring()
    reader.ring()
    assert page.is_watched(10)
    assert not page.is_watched(0)
    reader.close()


def test_a_page_that_is_written_meanwhile_is_read_whole(page: Page) -> None:
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            page.write([json.dumps({"all": [number] * (number % 3_000)})])

    page.write(['{"all": []}'])
    thread = threading.Thread(target=write)
    thread.start()
    try:
        reader = PageReader(os.getpid())
        for _ in range(300):
            assert len(set(until(lambda: whole(reader))["all"])) <= 1
        reader.close()
    finally:
        stop.set()
        thread.join()


def whole(reader: PageReader) -> dict[str, Any]:
    """What it shows; nothing if who writes it has stood still in the middle for so many tries."""
    with contextlib.suppress(PageUnavailableError):
        return reader.read()
    return {}


def test_what_a_page_does_not_hold(page: Page) -> None:
    page.write(['{"a": 1}'])
    assert not page.write(['"', "x" * (9 << 20), '"'])
    reader = PageReader(os.getpid())
    assert reader.read() == {"a": 1}
    os.pwrite(page._fd, b"x", 30)
    os.pwrite(page._fd, b"KOLOLIV1\xff", 0)
    with pytest.raises(PageUnavailableError, match="not whole"):
        reader.read()
    os.pwrite(page._fd, b"KOLOLIV9", 0)
    with pytest.raises(PageUnavailableError, match="another version"):
        reader.read()
    reader.close()


def test_who_shows_nothing_says_why(tmp_path: Path) -> None:
    with pytest.raises(PageUnavailableError, match="has ended"):
        PageReader(1, proc=tmp_path)
    (tmp_path / "1" / "fd").mkdir(parents=True)
    ids = "\t".join([str(os.geteuid())] * 4)
    (tmp_path / "1" / "status").write_text(f"Uid:\t{ids}\nGid:\t{ids}\n")
    with pytest.raises(PageUnavailableError, match=r"has not called kolovod\.init"):
        PageReader(1, proc=tmp_path)
    watch = RankWatch([1], proc=tmp_path)
    watch.look()
    assert "kolovod.init" in watch.problem


# Real ranks ---------------------------------------------------------------------------------------


def step(watch: RankWatch | None, has_seen_enough: Callable[[], bool]) -> None:
    """Steps of both ranks, until rank 0 has seen enough."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        time.sleep(0.01)
        handle = kv.allreduce_async(np.ones(2_000, np.float32), name="gradient")
        with spans.span(OPTIMIZER_STEP):
            handle.wait()
        enough = watch is not None and (has_seen_enough() or time.monotonic() > deadline)
        if kv.allreduce(np.array([float(enough)]), name="enough", op=kv.Max)[0]:
            return


def watched_of(watch: RankWatch, number: int) -> Watched:
    return Watched(number, watch.pid, "S", 0.5, 1, 0.0, watch.window, watch.seen, watch.problem)


def watch_both(rank: int) -> tuple[list[Any], bool, bool]:
    showing.LEASE_S = 2.0  # of 5
    kv.init()
    pids = [int(pid) for pid in kv.allgather(np.array([os.getpid()]))]
    watches = [RankWatch([pid]) for pid in pids]
    found: list[Picture] = []
    begun: list[bool] = []
    open_log = spans.log.open

    def note_and_open() -> spans.SpanReader:
        begun.append(True)
        return open_log()

    def look() -> bool:
        for watch in watches:
            watch.look()
        found.append(picture([watched_of(each, n) for n, each in enumerate(watches)]))
        return all(each.steps is not None and each.steps.is_told for each in found[-1].ranks)

    idle = not spans.log.on
    spans.log.open = note_and_open  # type: ignore[method-assign]
    step(watches[0] if rank == 0 else None, look)
    for watch in watches:
        watch.close()
    if rank == 0:
        deadline = time.monotonic() + DEADLINE_S
        while spans.log.on and time.monotonic() < deadline:
            time.sleep(0.1)
    ended = not spans.log.on
    kv.barrier()
    kv.shutdown()
    problems = []
    if rank == 0:
        deadline = time.monotonic() + DEADLINE_S
        while not watches[1].problem.startswith(GONE) and time.monotonic() < deadline:
            time.sleep(0.1)
            watches[1].look()
        watches[1].close()
        problems = [watches[1].problem]
        return [found[-1], problems], idle and bool(begun), ended
    return [], True, True


@pytest.mark.slow
def test_ranks_show_what_they_do_while_somebody_watches() -> None:
    (said, began, ended), _ = run_ranks(2, watch_both)
    seen, problems = said
    assert began
    assert ended
    assert (seen.size, seen.hosts, seen.backend) == (2, ("localhost",), "native")
    assert [each.rank for each in seen.ranks] == [0, 1]
    for each in seen.ranks:
        assert each.problem == ""
        assert 0 < each.steps.fast_us <= each.steps.median_us <= each.steps.slow_us
        assert 0 <= each.waiting <= 1
        assert each.compute == pytest.approx(1 - each.waiting)
    assert seen.bytes_per_s > 0
    assert "float32" in seen.dtypes
    assert problems[0].startswith(GONE)


def leave_while_watched(rank: int) -> bool:
    kv.init()
    reader = PageReader(os.getpid())
    reader.ring()
    deadline = time.monotonic() + DEADLINE_S
    while not spans.log.on and time.monotonic() < deadline:
        time.sleep(0.01)
    reader.close()
    time.sleep(0.1)  # it waits for the next ring then, which is that of the end
    leaving = threading.Thread(target=kv.shutdown, daemon=True)
    leaving.start()
    leaving.join(DEADLINE_S)
    return not leaving.is_alive()


def test_a_world_ends_while_somebody_watches() -> None:
    """Nobody rings again: who watched has gone."""
    assert run_ranks(2, leave_while_watched) == [True, True]


# What is made of it -------------------------------------------------------------------------------


def operation(name: str, bucket: int, at_ms: float, took_ms: float = 1.0) -> Operation:
    start = int(at_ms * MS)
    end = int((at_ms + took_ms) * MS)
    return ("", name, "allreduce", "float32", 1, 4000, bucket, True, start, start, end)


def span(name: str, start_ms: float, end_ms: float) -> Span:
    return (name, "MainThread", int(start_ms * MS), int(end_ms * MS), ())


def test_steps_are_counted_by_the_optimizer_or_by_names_that_come_again() -> None:
    told, counted, once = Window(), Window(), Window()
    told.add([], [span(OPTIMIZER_STEP, 10 * i, 10 * i + 1) for i in range(11)], 0)
    found = steps_of(told.events("a"))
    assert found is not None
    assert (found.is_told, found.per_s, found.median_us) == (True, 100, 10_000)
    names = [("first", 0.0), ("second", 1.0), ("third", 2.0)]
    counted.add(
        [operation(n, 3 * i + k, 20 * i + at) for i in range(6) for k, (n, at) in enumerate(names)]
        + [operation("metric", 100, 500)], [], 0,
    )  # fmt: skip
    found = steps_of(counted.events("a"))
    assert found is not None
    assert (found.is_told, found.per_s, found.slow_us) == (False, 50, 20_000)
    once.add([operation("metric", 1, 5)], [], 0)
    assert steps_of(once.events("a")) is None


def test_what_is_older_than_the_window_is_forgotten() -> None:
    window = Window()
    window.add(
        [operation("a", 1, 0), operation("b", 2, 10)], [span(WAIT, 0, 1), span(WAIT, 9, 12)], 3
    )
    window.forget(5 * MS)
    events = window.events("a")
    assert [key[2] for key in events.submitted] == ["allreduce.b"]
    assert events.waits == [(9000, 12_000)]
    assert (events.first, events.last) == (9000, 12_000)
    assert window.lost == 3


def test_who_is_late() -> None:
    waits = [Pending("", "gradient", "allreduce", 0)]

    def looks(*rows: tuple[int, list[Pending]]) -> dict[int, Look]:
        return {rank: Look(at_ms * MS, pending) for rank, (at_ms, pending) in enumerate(rows)}

    found = late_ranks(looks((3000, waits), (2900, waits), (2900, [])), {})
    assert found == {2: ("allreduce.gradient", 3.0)}
    # Who was looked at later may have come to it by then, and so the look before that counts.
    later = looks((3000, waits), (2900, waits), (3100, []))
    assert late_ranks(later, {}) == {}
    assert late_ranks(later, {2: Look(2500 * MS, [])}) == found
    assert late_ranks(later, {2: Look(2500 * MS, waits)}) == {}
    assert late_ranks(looks((3000, waits), (2900, waits), (2900, waits)), {}) == {}
    assert late_ranks(looks((900, waits), (900, [])), {}) == {}
    in_a_set = [Pending(" in set 1", "x", "allreduce", 0)]
    assert late_ranks(looks((9000, in_a_set), (9000, [])), {}) == {}


def test_worlds_are_told_as_events() -> None:
    worlds = [{"epoch": 1, "size": 4}, {"epoch": 2, "size": 3}, {"epoch": 3, "size": 5}]
    assert worlds_said(worlds) == ["epoch 2: 3 ranks, 1 fewer", "epoch 3: 5 ranks, 2 more"]


def trained(*waits_ms: float, host: str = "a", mask: str = "3", written: float = 0.0, rank: int = 0,
            size: int = 2) -> Watched:  # fmt: skip
    """Steps of 10 ms, in which a rank waits so long."""
    window, wait = Window(), waits_ms[0]
    for i in range(20):
        end = 10.0 * (i + 1)
        window.add(
            [operation("gradient", i + 1, end - wait - 1, wait)],
            [span(WAIT, end - wait - 0.5, end - 0.5), span(OPTIMIZER_STEP, end - 0.5, end)],
            0,
        )
    facts = {
        "rank": rank, "size": size, "epoch": 1, "host": host, "hosts": [host] * size, "worlds": [],
        "backend": "native", "at_ns": 200 * MS, "whereabouts": ["m", 2, mask],
        "stats": {"link_bytes_per_us": 1000},
    }  # fmt: skip
    seen = Seen(facts, sent_bytes_per_s={1 - rank: 5e8} if size == 2 else {})
    return Watched(rank, 100 + rank, "S", 1.0, 1 << 30, written, window, seen, "")


def test_what_ranks_have_found_wrong_is_shown_once() -> None:
    ranks = [trained(0.1, mask="3"), trained(0.1, mask="3", rank=1)]
    for each in ranks:
        each.seen.facts["notices"] = ["gradients of rank 1 are not finite", "x" * 10_000]
    assert picture(ranks).warnings == ["gradients of rank 1 are not finite", "x" * 500]


def test_warnings_name_the_cause_and_the_way_out() -> None:
    slow = [trained(0.2, written=50e6), trained(6.0, rank=1)]
    said = "\n".join(picture(slow).warnings)
    assert "Straggler: rank 0 on a" in said
    assert "Rank 0 writes files (50 MB/s)" in said
    assert "core" not in said
    said = "\n".join(
        picture([trained(3.0, mask="1"), trained(3.0, mask="1", rank=1)], 0.01).warnings
    )
    assert "Ranks 0, 1 share 1 processor core(s)" in said
    assert "Memory: 1% of this host's is left" in said
    assert "Batches may be too small" in said
    four = [
        trained(waits, host=host, rank=rank, mask="f", size=4)
        for rank, (waits, host) in enumerate([(0.1, "b"), (0.2, "b"), (6.0, "a"), (6.0, "a")])
    ]
    shown = picture(four)
    assert not any("Host a" in each for each in shown.warnings)
    calm = picture([trained(0.1, mask="3"), trained(0.1, mask="3", rank=1)])
    assert calm.warnings == []
    assert calm.links[0].bytes_per_s == pytest.approx(1e9)
    assert calm.links[0].measured_bytes_per_s == 1e9


def test_a_rank_that_shows_nothing_is_there_with_its_reason() -> None:
    nothing = Watched(1, 7, "T", 0.0, 1, 0.0, Window(), Seen(), "it has ended")
    shown = picture([trained(1.0), nothing])
    assert [each.rank for each in shown.ranks] == [0, None]
    assert shown.ranks[1].problem == "it is stopped (SIGSTOP)"
    assert shown.ranks[1].compute is None
    json.dumps(shown.as_json())
    assert picture([]).size == 0
