"""kolovod.launch.line_merger: no line is lost, none invented, each rank's keep their order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kolovod.launch.line_merger import LineMerger, MergedLine, rank_ranges

WINDOW_S = 1.0


def shown(merged: list[MergedLine]) -> list[str]:
    return [f"[{rank_ranges(each.ranks)}]{each.line}" for each in merged]


def merger_of(size: int, most_chars: int = 1 << 20) -> LineMerger:
    merger = LineMerger(WINDOW_S, most_chars)
    for rank in range(size):
        merger.open(rank)
    return merger


@given(
    size=st.integers(1, 5),
    events=st.lists(
        st.tuples(
            st.integers(0, 4),
            st.sampled_from(["a", "b", "c", "", "\r"]),
            st.floats(0, 0.8),
            st.booleans(),
        ),
        max_size=60,
    ),
    most_chars=st.sampled_from([0, 1000, 1 << 20]),
)
def test_no_line_is_lost_nor_invented_and_each_ranks_keep_their_order(
    size: int, events: list[tuple[int, str, float, bool]], most_chars: int
) -> None:
    merger = merger_of(size, most_chars)
    written: dict[int, list[tuple[str, float]]] = {rank: [] for rank in range(size)}
    read: dict[int, list[str]] = {rank: [] for rank in range(size)}
    now_s = 0.0

    def take(merged: list[MergedLine]) -> None:
        for each in merged:
            assert list(each.ranks) == sorted(set(each.ranks))
            for rank in each.ranks:
                line, since_s = written[rank][len(read[rank])]
                assert line == each.line
                assert now_s <= since_s + WINDOW_S + 1e-9
                read[rank].append(each.line)

    for number, line, pause_s, ends in events:
        rank = number % size
        end_s = now_s + pause_s
        while (due_s := merger.due_s()) is not None and due_s <= end_s:
            now_s = due_s
            take(merger.due(now_s))
        now_s = end_s
        written[rank].append((line, now_s))
        take(merger.add(rank, line, now_s))
        if ends:
            take(merger.end(rank))
    take(merger.rest())
    assert {rank: [line for line, _ in lines] for rank, lines in written.items()} == read
    assert merger.due_s() is None


def test_what_all_ranks_write_is_shown_at_once_and_once() -> None:
    merger = merger_of(4)
    for rank in (2, 0, 3):
        assert merger.add(rank, "loading\n", 0.0) == []
    assert shown(merger.add(1, "loading\n", 0.1)) == ["[0-3]loading\n"]
    assert merger.due_s() is None


def test_a_line_of_some_waits_for_the_window_only() -> None:
    merger = merger_of(9)
    for rank in (7, 0, 1, 2, 3):
        merger.add(rank, "warning\n", rank / 100, stamp=str(rank))
    assert merger.due_s() == pytest.approx(0.07 + WINDOW_S)
    assert merger.due(1.0) == []
    (line,) = merger.due(1.08)
    assert line == MergedLine((0, 1, 2, 3, 7), "warning\n", "0")


def test_lines_that_differ_in_between_do_not_keep_others_apart() -> None:
    """As of libraries that print the time or the process before lines that are the same."""
    merger = merger_of(3)
    for rank in range(3):
        for line in (f"pid {rank}", "x", "y", f"took {rank} s", "z"):
            merger.add(rank, line, 0.0)
    heads = ["[0]pid 0", "[1]pid 1", "[2]pid 2", "[0-2]x", "[0-2]y"]
    times = ["[0]took 0 s", "[1]took 1 s", "[2]took 2 s", "[0-2]z"]
    assert shown(merger.due(2.0)) == [*heads, *times]


def test_lines_in_another_order_are_not_merged_at_the_cost_of_others() -> None:
    merger = merger_of(2)
    for rank, line in ((0, "a"), (1, "b"), (0, "b"), (1, "a")):
        merger.add(rank, line, 0.0)
    assert shown(merger.due(2.0)) == ["[0]a", "[0-1]b", "[1]a"]


def test_nobody_waits_for_a_rank_that_has_ended() -> None:
    merger = merger_of(3)
    merger.add(0, "a", 0.0)
    merger.add(1, "a", 0.0)
    merger.add(2, "last", 0.0)
    assert merger.end(2) == []  # its line is still to come
    assert shown(merger.due(2.0)) == ["[0-1]a", "[2]last"]
    merger.add(0, "b", 3.0)
    assert shown(merger.add(1, "b", 3.0)) == ["[0-1]b"]


def test_what_waits_is_bounded() -> None:
    merger = merger_of(2, most_chars=100_000)
    count = sum(len(merger.add(0, f"{number}" * 50, 0.0)) for number in range(5000))
    assert 4000 < count < 5000
    assert len(merger.rest()) == 5000 - count


def test_numbers_in_short() -> None:
    assert rank_ranges((0,)) == "0"
    assert rank_ranges((0, 1, 2, 3, 7, 9, 10)) == "0-3,7,9-10"
