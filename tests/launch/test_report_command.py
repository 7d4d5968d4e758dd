"""``kolovod report``, as it is typed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import planned
import pytest

from kolovod.launch import cli


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return planned.write(tmp_path / "run.json", planned.events(machines=("m", "n")))


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What is said on standard error."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", *map(str, arguments)])
    assert ended.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def test_the_page_lies_beside_the_timeline(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(path)]) == 0
    said = capsys.readouterr().out
    made = path.with_suffix(".html").read_text(encoding="utf-8")
    assert made.startswith("<!DOCTYPE html>")
    assert made.rstrip().endswith("</html>")
    verdict, first, where = said.splitlines()
    assert verdict in made
    assert first.removeprefix("First: ").removesuffix(".") in made
    assert str(path.with_suffix(".html")) in where


def test_flags(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = path.with_name("other.html")
    flags = ["--hosts", "2,3", "--link", "10G"]
    assert cli.main(["report", str(path), "-o", str(other), *flags]) == 0
    assert str(other) in capsys.readouterr().out
    made = other.read_text(encoding="utf-8")
    assert "Links between hosts (given): 10 Gbit/s" in made
    assert not path.with_suffix(".html").exists()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--hosts", "two"], "--hosts 'two'"),
        (["--link", "fast"], "--link 'fast': expected bits per second"),
        (["-o", "/nowhere/a.html"], "'/nowhere/a.html' cannot be written: No such file"),
    ],
)
def test_wrong_flags(
    flags: list[str], says: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(capsys, path, *flags)


def test_it_does_not_overwrite_the_timeline(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = path.read_bytes()
    assert "is the timeline itself" in refused(capsys, path, "-o", path)
    assert "is the timeline itself" in refused(capsys, path.rename(path.with_suffix(".html")))
    assert path.with_suffix(".html").read_bytes() == before


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "No such file"),
        ("", "is no timeline: it is empty"),
        ("no timeline", "is no timeline"),
        ('{"traceEvents": []}', "expected an array of events"),
        ("[]", "shows no rank"),
        ('[{"name": "x", "ph": "X", "ts": 1, "dur": 2}]', "shows no rank"),
        ('[{"ph": "M", "name": "process_name", "pid": "1", "args": {"rank": 0}}]', "event 0 of"),
    ],
)
def test_files_that_will_not_do(
    text: str | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.json"
    if text is not None:
        path.write_text(text)
    said = refused(capsys, path)
    assert says in said
    assert said.count("t.json") <= 1
    assert not path.with_suffix(".html").exists()


def test_a_timeline_that_ends_in_the_middle_of_an_event(path: Path) -> None:
    text = path.read_text().replace("}, {", "},\n{")
    path.write_text(text[: -len(text) // 3])
    assert cli.main(["report", str(path)]) == 0


def test_other_commands_do_not_load_it() -> None:
    code = (
        "import sys; from kolovod.launch import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not [name for name in sys.modules if name.startswith(('kolovod.report', 'jinja2'))]"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=os.environ
    )
    assert ended.returncode == 0, ended.stderr
