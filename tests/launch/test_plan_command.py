"""``kolovod plan``, as it is typed."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import planned
import pytest

from kolovod.launch import cli


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return planned.write(tmp_path / "run.json", planned.events(machines=("m", "n")))


def test_the_command_of_the_docs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chart = path.with_name("plan.svg")
    flags = ["--hosts", "2,8,64,512", "--link", "10G", "--what-if", "compression=int8"]
    assert cli.main(["plan", str(path), *flags, "--chart", str(chart)]) == 0
    said = capsys.readouterr().out
    assert said.count("extrapolated") > 8
    for hosts in (2, 8, 64, 512):
        assert f"\n{hosts:>6} {hosts:>6} " in said
    ElementTree.parse(chart)


def test_without_flags(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(path)]) == 0
    said = capsys.readouterr().out
    assert "Links between hosts (measured)" in said
    assert "\n    16     16 " in said


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--hosts", "two"], "--hosts 'two'"),
        (["--link", "fast"], "--link 'fast': expected bits per second"),
        (["--what-if", "speed=2"], "--what-if 'speed=2': expected KEY=VALUE, one of compression="),
        (["--what-if", "compression=zip"], "none, fp16, bf16, int8, int4"),
        (["--what-if", "batch=2", "--what-if", "batch=4"], "--what-if batch= is given twice"),
        (["--chart", "/nowhere/plan.svg"], "'/nowhere/plan.svg' cannot be written: No such file"),
    ],
)
def test_wrong_flags(
    flags: list[str], says: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", str(path), *flags])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_files_that_will_not_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(name: str, *flags: str) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.main(["plan", str(tmp_path / name), *flags])
        assert ended.value.code == 2
        return " ".join(capsys.readouterr().err.split())

    assert "No such file" in said("none.json")
    (tmp_path / "text.json").write_text("no timeline")
    assert "is no timeline" in said("text.json")
    (tmp_path / "other.json").write_text('[{"name": "x", "ph": "X", "ts": 1, "dur": 2}]')
    assert "shows no rank" in said("other.json")
    planned.write(tmp_path / "short.json", planned.events(steps=3))
    assert "3 optimizer steps" in said("short.json")
    planned.write(tmp_path / "one.json", planned.events(("a", "a"), link=None))
    assert "no link was measured: say --link 10G" in said("one.json", "--hosts", "1,2")
    assert cli.main(["plan", str(tmp_path / "one.json"), "--hosts", "1"]) == 0
    assert cli.main(["plan", str(tmp_path / "one.json"), "--hosts", "2", "--link", "1G"]) == 0
