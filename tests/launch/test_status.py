"""How a launcher shows its job's progress, in a terminal and elsewhere."""

from __future__ import annotations

import io
import re
import shlex
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from launched import launch_command, run_code
from terminal import Screen, Terminal, terminal
from waiting import until

from kolovod.errors import InvalidArgumentError
from kolovod.launch import status as module
from kolovod.launch.status import status_of
from kolovod.launch.status_facts import StatusFacts
from kolovod.launch.step_rate import Seen

WAIT = "import time; print('begun', flush=True); time.sleep(60)"


def job(
    code: str,
    *flags: str,
    np: int = 2,
    columns: int = 100,
    variables: Mapping[str, str] | None = None,
) -> AbstractContextManager[Terminal]:
    return terminal(launch_command(np, code, *flags), columns, variables)


def until_told(path: Path) -> str:
    """Of a rank's code: wait until the test has seen what it is to see, and touches ``path``."""
    return f"while not os.path.exists({str(path)!r}): time.sleep(0.01)"


def shows(shown: Terminal, text: str) -> bool:
    """On the last line."""
    return bool(shown.screen.lines) and text in shown.screen.lines[-1]


def test_in_words() -> None:
    assert str(StatusFacts(3.0, 4, 4)) == "0:00:03  4 ranks up"
    assert str(StatusFacts(3725.0, 3, 4, Seen(12.345, 2, 0.314))) == (
        "1:02:05  3 of 4 ranks up, 12.3 steps/s, slowest: rank 2 (others wait 31% of the time)"
    )
    assert ", slowest on this host: rank 2 (" in str(
        StatusFacts(0.0, 4, 4, Seen(1.0, 2, 0.1, False))
    )
    assert str(StatusFacts(0.0, 3, 1)) == "0:00:00  1 rank up, 2 to join"


def test_a_line_at_the_foot_of_a_terminal_that_is_gone_at_the_end(tmp_path: Path) -> None:
    go = tmp_path / "go"
    code = f"""
print("first", flush=True)
{until_told(go)}
for number in range(200):
    print(rank, number, flush=number % 10 == 0)
    print(rank, number, file=sys.stderr)
time.sleep(1)
"""
    with job(code) as shown:
        before = shown.settings()
        shown.read_until(lambda: shown.text.count("first") == 2 and shows(shown, "2 ranks up"))
        assert sorted(shown.screen.lines[:-1]) == [f"[{rank}]<stdout>:first" for rank in (0, 1)]
        go.touch()
        assert shown.read_to_end() == 0
        assert shown.settings() == before
    lines = shown.screen.lines
    assert len(lines) == 2 + 800
    for stream in ("stdout", "stderr"):
        for rank in (0, 1):
            start = f"[{rank}]<{stream}>:{rank} "
            own = [line for line in lines if line.startswith(start)]
            assert own == [f"{start}{number}" for number in range(200)]


def test_a_narrow_terminal_cuts_the_line(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with job(f"{until_told(go)}\nprint('x')", columns=20) as shown:
        shown.read_until(lambda: shows(shown, "kolovod:"))
        assert re.fullmatch(r"kolovod: 0:00:\d\d  2", shown.screen.lines[0])
        assert len(shown.screen.lines) == 1
        go.touch()
        assert shown.read_to_end() == 0
    assert sorted(shown.screen.lines) == [f"[{rank}]<stdout>:x" for rank in (0, 1)]


def test_progress_bars_stay_above_it(tmp_path: Path) -> None:
    half, whole = tmp_path / "half", tmp_path / "whole"
    code = rf"""
for percent in range(0, 101, 10):
    sys.stderr.write(f"{{percent:3}} %\r" if percent < 100 else "100 %\n"); sys.stderr.flush()
    if percent == 50:
        {until_told(half)}
    time.sleep(0.05)
    if percent == 90:
        {until_told(whole)}
"""
    with job(code, np=1) as shown:
        shown.read_until(lambda: shown.screen.lines[:1] == ["[0]<stderr>: 50 %"])
        shown.read_until(lambda: shows(shown, "1 rank up"))
        assert len(shown.screen.lines) == 2
        half.touch()
        bar = ["[0]<stderr>: 90 %"]
        shown.read_until(lambda: shown.screen.lines[:1] == bar and shows(shown, "1 rank up"))
        assert len(shown.screen.lines) == 2
        whole.touch()
        assert shown.read_to_end() == 0
    assert shown.screen.lines == ["[0]<stderr>:100 %"]


@pytest.mark.parametrize("flags", [(), ("--elastic",)], ids=["plain", "elastic"])
def test_ctrl_c_leaves_the_terminal_as_it_was(flags: tuple[str, ...]) -> None:
    with job(WAIT, *flags) as shown:
        before = shown.settings()
        shown.read_until(lambda: shown.text.count("begun") == 2 and shows(shown, "2 ranks up"))
        shown.type("\x03")
        assert shown.read_to_end() == 130
        assert shown.settings() == before
    assert "ranks up" not in "\n".join(shown.screen.lines)
    assert any("SIGINT: ending 2 ranks" in line for line in shown.screen.lines)


def test_a_rank_that_is_killed_is_named_below_the_output(tmp_path: Path) -> None:
    go = tmp_path / "go"
    code = f"""
print("begun", flush=True)
{until_told(go)}
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
    with job(code, columns=250) as shown:
        shown.read_until(lambda: shown.text.count("begun") == 2 and shows(shown, "2 ranks up"))
        go.touch()
        assert shown.read_to_end() == 137
    lines = shown.screen.lines
    assert "ranks up" not in "\n".join(lines)
    assert re.match(r"kolovod: rank 1 \(pid \d+\) was killed by signal 9", lines[2])
    assert lines[-1].startswith("kolovod: the first to fail was rank 1")


def test_it_is_gone_while_the_launcher_is_stopped(tmp_path: Path) -> None:
    """By Ctrl-Z, in a shell with job control; and there again after ``fg``."""
    go = tmp_path / "go"
    launcher = shlex.join(launch_command(1, f"{until_told(go)}\nprint('done')"))
    script = f"set -m; {launcher}; echo stopped; read; fg >/dev/null; echo $?"
    with terminal(["bash", "-c", script]) as shown:
        shown.read_until(lambda: shows(shown, "1 rank up"))
        shown.type("\x1a")
        shown.read_until(lambda: shows(shown, "stopped"))
        assert "rank up" not in "\n".join(shown.screen.lines)
        shown.type("\n")
        shown.read_until(lambda: shows(shown, "1 rank up"))
        go.touch()
        assert shown.read_to_end() == 0
    lines = shown.screen.lines
    assert lines[-2:] == ["[0]<stdout>:done", "0"]
    assert "rank up" not in "\n".join(lines)


@pytest.mark.slow
def test_nothing_is_drawn_by_a_job_in_the_background() -> None:
    launcher = shlex.join(launch_command(1, "time.sleep(1.5); print('done')"))
    with terminal(["bash", "-c", f"set -m; {launcher} & wait"]) as shown:
        assert shown.read_to_end() == 0
    assert "[0]<stdout>:done" in shown.text
    assert "rank up" not in shown.text


def test_an_elastic_job_has_it_too(tmp_path: Path) -> None:
    go = tmp_path / "go"
    code = f"print('begun', flush=True)\n{until_told(go)}"
    with job(code, "--elastic", np=3) as shown:
        shown.read_until(lambda: shown.text.count("begun") == 3 and shows(shown, "3 ranks up"))
        go.touch()
        assert shown.read_to_end() == 0
    assert sorted(shown.screen.lines) == [f"[{rank}]<stdout>:begun" for rank in range(3)]


@pytest.mark.parametrize(
    ("flags", "variables"),
    [
        (("--quiet",), {}),
        pytest.param(("--progress", "off"), {}, marks=pytest.mark.slow),
        pytest.param(("--quiet", "--elastic"), {}, marks=pytest.mark.slow),
        pytest.param((), {"TERM": "dumb"}, marks=pytest.mark.slow),
        pytest.param((), {"CI": "true"}, marks=pytest.mark.slow),
    ],
)
def test_where_nobody_wants_it(flags: tuple[str, ...], variables: dict[str, str]) -> None:
    with job("time.sleep(1); print('done')", *flags, np=1, variables=variables) as shown:
        assert shown.read_to_end() == 0
    assert shown.text == "[0]<stdout>:done\r\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), id="plain"),
        pytest.param(("--elastic",), id="elastic", marks=pytest.mark.slow),
    ],
)
def test_plain_lines_elsewhere_if_they_are_asked_for(flags: tuple[str, ...]) -> None:
    code = "time.sleep(3)"
    assert run_code(1, code, *flags).stderr == ""
    lines = run_code(1, code, "--progress", "plain=0.4", *flags).stderr.splitlines()
    # One more may come between the rank's end and the job's.
    up = re.compile(r"kolovod: 0:00:\d\d  (1 rank|0 of 1 ranks) up")
    assert all(up.fullmatch(line) for line in lines), lines
    assert lines[0].endswith("  1 rank up"), lines


def test_quiet_says_errors_only() -> None:
    code = "time.sleep(rank)\nraise SystemExit(3 * rank)"
    ended = run_code(2, code, "--quiet")
    assert ended.returncode == 3
    assert "the first to fail was rank 1" in ended.stderr


@pytest.mark.parametrize("how", ["line", "plain=", "plain=0", "plain=-1", "plain=nan", "auto=1"])
def test_a_wrong_way_is_refused(how: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"--progress {how}: expected auto"):
        status_of(how, None, None, {})
    ended = run_code(1, "pass", "--progress", how)
    assert ended.returncode == 2
    assert f"--progress {how}: expected auto, plain" in ended.stderr


def test_a_plain_line_elsewhere_soon_and_seldom_after_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PLAIN_S", 0.3)
    monkeypatch.setattr(module, "_SELDOM_S", 1.5)
    stream = io.StringIO()
    with status_of("auto", stream, stream, {"TERM": "xterm"}) as status:
        assert status.stderr is stream
        began_s = time.monotonic()
        status.start(lambda: "2 ranks up")
        until(lambda: stream.getvalue().count("\n") >= 2)
    assert time.monotonic() - began_s >= 1.8
    assert stream.getvalue().startswith("kolovod: 2 ranks up\n" * 2)


def test_progress_is_asked_for_shortly_before_it_is_shown() -> None:
    """Since ranks that are looked at note what they do."""
    asked: list[float] = []

    def ask() -> str:
        asked.append(time.monotonic() - began_s)
        return ""

    with status_of("plain=11.5", None, io.StringIO(), {}) as status:
        began_s = time.monotonic()
        status.start(ask)
        until(lambda: asked)
    assert asked[0] >= 1.5


def test_a_stream_that_is_none() -> None:
    with status_of("auto", None, None, {"TERM": "xterm"}) as status:
        status.start(lambda: "never")
        assert status.stderr is None
        assert not status.is_on


def test_the_screen_of_these_tests() -> None:
    screen = Screen(5)
    screen.feed("ab\r\ncdefgh\r\n\x1b[")
    screen.feed("1mxyz\x1b[0m\r\x1b[Kuv\x1b[A!")
    assert screen.lines == ["ab", "cdefg", "h !", "uv"]
