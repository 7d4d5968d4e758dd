"""kolovod.launch.output: bytes in any pieces become whole lines."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kolovod.launch.output import LineSplitter


@given(st.text(alphabet="ab\r\né↻", max_size=40), st.lists(st.integers(0, 80), max_size=6))
def test_lines_do_not_depend_on_where_reads_cut(text: str, cuts: list[int]) -> None:
    data = text.encode()
    whole = LineSplitter().feed(data, final=True)
    splitter = LineSplitter()
    joined: list[str] = []
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]
    for piece, is_last in [*((piece, False) for piece in pieces), (b"", True)]:
        lines = splitter.feed(piece, final=is_last)
        if splitter.continues:
            joined[-1] += lines.pop(0)
        joined += lines
    assert joined == whole
    assert "".join(whole).rstrip("\n") == text.rstrip("\n")


def test_carriage_returns_end_lines_and_bad_bytes_are_marked() -> None:
    lines = LineSplitter().feed(b"10%\r20%\r\nend\xff\nrest", final=True)
    assert lines == ["10%\r", "20%\r\n", "end�\n", "rest\n"]


def test_an_endless_line_is_cut() -> None:
    splitter = LineSplitter()
    lines = [line for _ in range(40) for line in splitter.feed(b"x" * 10_000)]
    assert 1 <= len(lines) <= 6
    assert all(len(line) <= 100_000 for line in lines)
