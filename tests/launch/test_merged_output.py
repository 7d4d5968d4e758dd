"""``kolovod run --merge-output``: lines that several ranks write are shown once."""

from __future__ import annotations

import io
import re
from functools import partial
from pathlib import Path

import pytest
from launched import launch_command, run_code
from terminal import terminal
from waiting import until

from kolovod.launch.line_merger import WINDOW_S, LineMerger
from kolovod.launch.output import Output

SAME = """
print("loading", flush=True)
print("rank", rank, flush=True)
if rank != 1:
    print("not 1", file=sys.stderr, flush=True)
print("done", flush=True)
go = os.environ.get("GO")
while go is not None and not os.path.exists(go):
    time.sleep(0.01)
"""


@pytest.mark.parametrize("flags", [(), ("--elastic",)], ids=["plain", "elastic"])
def test_of_a_job(flags: tuple[str, ...], tmp_path: Path) -> None:
    """Which files do not notice."""
    ended = run_code(4, SAME, "--merge-output", "--output-dir", str(tmp_path), *flags)
    assert ended.returncode == 0
    _check(ended.stdout.splitlines(), [f"rank {rank}" for rank in range(4)])
    shown = re.findall(r"\[(\S+)\]<stderr>:not 1\n", ended.stderr)
    assert _ranks(shown) == [0, 2, 3]
    for rank in range(4):
        assert (tmp_path / f"rank.{rank}/stdout").read_text() == f"loading\nrank {rank}\ndone\n"


def _check(lines: list[str], own: list[str]) -> None:
    """Processes may begin further apart than lines wait: then some are shown more than once."""
    for text in ("loading", "done"):
        found = [line.partition("]")[0][1:] for line in lines if line.endswith(f">:{text}")]
        assert _ranks(found) == [0, 1, 2, 3]
    assert sorted(line.partition(">:")[2] for line in lines if ">:rank" in line) == own


def _ranks(shown: list[str]) -> list[int]:
    found = []
    for part in ",".join(shown).split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return sorted(found)


def test_in_a_terminal(tmp_path: Path) -> None:
    go = tmp_path / "go"
    command = launch_command(4, SAME, "--merge-output")
    with terminal(command, variables={"GO": str(go)}) as shown:
        shown.read_until(lambda: shown.screen.lines[-1:] != [] and "4 ranks" in shown.text)
        go.touch()
        assert shown.read_to_end() == 0
    _check(
        [each for each in shown.screen.lines if "<stdout>" in each], [f"rank {r}" for r in range(4)]
    )


def output_of(
    size: int, window_s: float = 600.0, **options: object
) -> tuple[Output, io.StringIO, io.StringIO]:
    """``window_s``: how long a line waits for other ranks; longer than a test may stand still."""
    stdout, stderr = io.StringIO(), io.StringIO()
    consoles = {"stdout": stdout, "stderr": stderr}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kolovod.launch.output.LineMerger", partial(LineMerger, window_s))
        output = Output(size, consoles, merges=True, **options)  # type: ignore[arg-type]
    return output, stdout, stderr


def test_streams_are_not_merged_with_each_other() -> None:
    output, stdout, stderr = output_of(2)
    output.write(0, "stdout", b"x\n")
    output.write(1, "stderr", b"x\n")
    output.close()
    assert stdout.getvalue() == "[0]<stdout>:x\n"
    assert stderr.getvalue() == "[1]<stderr>:x\n"


def test_what_waits_comes_by_itself() -> None:
    output, stdout, _ = output_of(8, WINDOW_S)
    for rank in (7, 1, 2, 0, 3):
        output.write(rank, "stdout", b"x\n")

    def shown() -> list[int]:
        """Whose lines: of one that was late itself they are not with the others'."""
        found = re.findall(r"^\[(\S+)\]<stdout>:x$", stdout.getvalue(), re.MULTILINE)
        return _ranks(found) if found else []

    until(lambda: shown() == [0, 1, 2, 3, 7])
    output.close()
    assert shown() == [0, 1, 2, 3, 7]


def test_times_are_those_of_the_first() -> None:
    times = iter(["1", "2", "3", "4"])
    output, stdout, _ = output_of(2, now=lambda: next(times))
    output.write(1, "stdout", b"x\ny\n")
    output.write(0, "stdout", b"x\nz\n")
    output.close()
    assert stdout.getvalue() == "1 [0-1]<stdout>:x\n1 [1]<stdout>:y\n2 [0]<stdout>:z\n"


def test_line_ends_that_reads_cut_in_two_and_bars() -> None:
    output, stdout, _ = output_of(2)
    for rank in (0, 1):
        output.write(rank, "stdout", b"10 %\r20 %\rend\r")
    for rank in (0, 1):
        output.write(rank, "stdout", b"\nnext\n")
    output.close()
    lines = ["10 %\r", "20 %\r", "end\r\n", "next\n"]
    assert stdout.getvalue() == "".join(f"[0-1]<stdout>:{line}" for line in lines)


def test_nobody_waits_for_ranks_that_have_ended() -> None:
    output, stdout, _ = output_of(3)
    output.write(2, "stdout", b"last")
    output.write(2, "stdout", b"")
    output.write(0, "stdout", b"x\n")
    assert stdout.getvalue() == ""
    output.write(1, "stdout", b"x\n")
    output.close()
    assert sorted(stdout.getvalue().splitlines()) == ["[0-1]<stdout>:x", "[2]<stdout>:last"]


def test_a_console_that_is_gone_stops_nobody() -> None:
    output, stdout, _ = output_of(1)
    stdout.close()
    output.write(0, "stdout", b"x\n")
    output.close()
