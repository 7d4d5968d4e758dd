"""kolovod.launch.output: bytes in any pieces become whole lines."""

from __future__ import annotations

import io
import itertools
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kolovod.launch.output import LineSplitter, Output, OutputPump


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


@given(
    st.text(alphabet="ab\r\né↻", max_size=40),
    st.lists(st.tuples(st.integers(0, 80), st.booleans()), max_size=6),
)
def test_nothing_is_lost_or_told_twice_where_a_line_is_asked_for_early(
    text: str, cuts: list[tuple[int, bool]]
) -> None:
    data = text.encode()
    asks = dict(cuts)
    splitter = LineSplitter()
    said: list[str] = []
    edges = sorted({0, len(data), *(cut for cut in asks if cut < len(data))})
    for a, b in itertools.pairwise(edges):
        said += splitter.feed(data[a:b])
        if asks.get(b):
            said.append(splitter.begun()[0])
    said += splitter.feed(b"", final=True)
    assert "".join(said).rstrip("\n") == text.rstrip("\n")
    assert text == "" or "".join(said).endswith(("\n", "\r"))


def test_a_question_is_shown_though_its_line_has_no_end() -> None:
    console = io.StringIO()
    output = Output(2, {"stdout": console}, asks=0)
    output.write(0, "stdout", b"hello\n(Pdb) ")
    output.write(1, "stdout", b"others wait ")
    deadline = time.monotonic() + 60
    while "(Pdb)" not in console.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert console.getvalue() == "[0]<stdout>:hello\n[0]<stdout>:(Pdb) "
    output.write(0, "stdout", b"6\n7\n")
    assert console.getvalue().endswith("(Pdb) 6\n[0]<stdout>:7\n")
    assert output.tail(0, "stdout") == "hello\n(Pdb) 6\n7\n"
    output.write(1, "stdout", b"no more\n")
    output.close()
    assert console.getvalue().endswith("7\n[1]<stdout>:others wait no more\n")


def test_what_follows_a_question_has_its_mark_again_if_others_have_written() -> None:
    console = io.StringIO()
    output = Output(2, {"stdout": console}, asks=0)
    output.write(0, "stdout", b"epoch 1: ")
    deadline = time.monotonic() + 60
    while not console.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    output.write(1, "stdout", b"hello\n")
    output.write(0, "stdout", b"loss 0.3\n")
    output.close()
    assert console.getvalue().splitlines() == [
        "[0]<stdout>:epoch 1: ",
        "[1]<stdout>:hello",
        "[0]<stdout>:loss 0.3",
    ]


def test_a_progress_bar_is_no_question() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"\r10%") == ["\r"]
    assert splitter.begun() == ("", False)
    assert splitter.feed(b"\r20%\nname? ") == ["10%\r", "20%\n"]
    assert splitter.begun() == ("name? ", False)


def test_carriage_returns_end_lines_and_bad_bytes_are_marked() -> None:
    lines = LineSplitter().feed(b"10%\r20%\r\nend\xff\nrest", final=True)
    assert lines == ["10%\r", "20%\r\n", "end�\n", "rest\n"]


def test_an_endless_line_is_cut() -> None:
    splitter = LineSplitter()
    lines = [line for _ in range(40) for line in splitter.feed(b"x" * 10_000)]
    assert 1 <= len(lines) <= 6
    assert all(len(line) <= 100_000 for line in lines)


def test_a_file_that_cannot_be_written_is_named_once_and_given_up(tmp_path: Path) -> None:
    full = tmp_path / "rank.0" / "stdout"
    full.parent.mkdir()
    full.symlink_to("/dev/full")
    console, said = io.StringIO(), list[str]()
    output = Output(2, {"stdout": console}, None, tmp_path, said.append)
    for rank in (0, 1, 0):
        output.write(rank, "stdout", b"line\n")
    output.close()
    output.close()
    assert len(said) == 1
    assert said[0].startswith(f"{full} is incomplete: [Errno 28]")
    assert console.getvalue() == "[0]<stdout>:line\n[1]<stdout>:line\n[0]<stdout>:line\n"
    assert (tmp_path / "rank.1" / "stdout").read_bytes() == b"line\n"


class _FailsAtItsEnd(io.BytesIO):
    """As files of NFS may."""

    name = "file 0"

    def close(self) -> None:
        raise OSError(122, "Disk quota exceeded")


def test_a_file_that_cannot_be_closed_is_named_and_the_others_are_closed(tmp_path: Path) -> None:
    def report(text: str) -> None:
        said.append(text)
        raise RuntimeError("a caller's mistake")

    said = list[str]()
    output = Output(2, {"stdout": None}, None, tmp_path, report)
    first, second = output._streams.values()
    first.file = _FailsAtItsEnd()
    file = second.file
    output.close()
    output.close()
    assert said == [
        "file 0 is incomplete: [Errno 122] Disk quota exceeded; the job goes on without it"
    ]
    assert file is not None
    assert file.closed


def test_ranks_that_come_later_have_files_from_then_on(tmp_path: Path) -> None:
    """As many as there may be would take more open files than a process may have."""
    reports: list[str] = []
    console = io.StringIO()
    (tmp_path / "rank.0200").write_text("in the way")
    output = Output(1, {"stdout": console}, folder=tmp_path, report=reports.append, most=5000)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["rank.0000", "rank.0200"]
    for rank in (0, 17, 17, 200):
        output.add(rank)
        output.write(rank, "stdout", f"{rank}\n".encode())
    output.close()
    assert (tmp_path / "rank.0000/stdout").read_text() == "0\n"
    assert (tmp_path / "rank.0017/stdout").read_text() == "17\n17\n"
    assert console.getvalue().count("\n") == 4
    (report,) = reports
    assert "rank.0200" in report
    assert "the job goes on without it" in report


def test_a_pump_that_several_threads_start_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []
    start = threading.Thread.start

    def slowly(thread: threading.Thread) -> None:
        if thread.name == "kolovod output":
            begun.append(thread)
            time.sleep(0.05)  # until the others are there
        start(thread)

    pump = OutputPump(lambda rank, stream, data: None)
    starters = [threading.Thread(target=pump.start) for _ in range(4)]
    monkeypatch.setattr(threading.Thread, "start", slowly)
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join(20)
    pump.finish()
    assert len(begun) == 1
