"""What a release says of itself in several files; and how wheels are named and found wanting."""

from __future__ import annotations

import email.message
import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import project_urls
import pytest
import recipes
import wheels
import yaml
from environments import ROOT

import kolovod
from kolovod import _native, documentation, errors


def test_one_version_everywhere() -> None:
    version = recipes.version_of((ROOT / "pyproject.toml").read_text())
    assert kolovod.__version__ == version
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"\n## {version}" in (ROOT / "docs" / "release-notes.md").read_text()


def steps_of(workflow: Path) -> list[str]:
    """What the workflow runs, with each value of its matrix."""
    lines = []
    for job in yaml.safe_load(workflow.read_text())["jobs"].values():
        matrix: dict[str, Any] = job.get("strategy", {}).get("matrix", {})
        for step in job["steps"]:
            text = step.get("run", "")
            for name, values in matrix.items():
                place = f"${{{{ matrix.{name} }}}}"
                if place in text:
                    text = "\n".join(text.replace(place, str(value)) for value in values)
            lines += text.splitlines()
    return lines


def test_workflows_call_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    called, lines = set(), set()
    for workflow in (ROOT / ".github" / "workflows").glob("*.yml"):
        lines |= set(steps_of(workflow))
        called |= {line.split()[1] for line in steps_of(workflow) if line.startswith("make ")}
    assert {"docs", "test", "thorough", "flaky", "wheels"} <= called
    assert "bash .ci/run" in lines  # which has lint and the rest
    for target in called:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_a_release_says_where_the_project_is() -> None:
    before = (ROOT / "pyproject.toml").read_text()
    text = project_urls.with_urls(before, "https://a.example/o/kolovod", "https://d.example/k")
    added = text[text.index("[project.urls]") : text.index("[project.scripts]")]
    assert text.replace(added, "") == before
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
    found = tomllib.loads(text)["project"]["urls"]
    assert found["Documentation"] == "https://d.example/k"
    assert found["Issues"] == "https://a.example/o/kolovod/issues"
    for wrong in ("http://a.example", 'https://a"b', ""):
        with pytest.raises(ValueError, match="expected an address"):
            project_urls.with_urls(before, wrong, "https://d.example")
    with pytest.raises(ValueError, match="already"):
        project_urls.with_urls(text, "https://a.example", "https://d.example")


def test_links_of_the_readme_work_elsewhere() -> None:
    before = (ROOT / "README.md").read_text()
    text = project_urls.with_links(before, "https://a.example/k", "https://d.example", "v1")
    assert "(https://d.example/repository/bench/results/allreduce.svg)" in text
    assert "[`kolovod check -- python train.py`](https://a.example/k/blob/v1/docs/check.md)" in text
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert len(links) > 40
    assert [link for link in links if not link.startswith("https://")] == []
    paths = [link.partition("/blob/v1/")[2].partition("#")[0] for link in links]
    assert [path for path in paths if not (ROOT / path).is_file() and path] == []


def test_errors_of_a_release_end_with_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    assert documentation.link("errors.md") == ""  # built from a clone
    assert documentation.linked("see docs/check.md") == "see docs/check.md"
    message = email.message.Message()
    for value in ("Issues, https://i", "Documentation, https://d.example/k/"):
        message["Project-URL"] = value
    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: message)
    address = documentation._address.__wrapped__()
    assert address == "https://d.example/k"
    monkeypatch.setattr(documentation, "_address", lambda: address)
    assert documentation.link("errors.md#k201") == "https://d.example/k/errors.html#k201"
    assert documentation.linked("see docs/check.md#data, or docs/x.py") == (
        "see https://d.example/k/check.html#data, or docs/x.py"
    )
    assert errors.from_engine(Exception(3, "text")).__notes__ == [
        "[K201] cause and cure: kolovod explain K201, or https://d.example/k/errors.html#k201"
    ]


def python(*version: int) -> wheels.Interpreter:
    return wheels.Interpreter(Path("python"), (version[0], version[1]))


def test_which_wheel_serves_which_python() -> None:
    tags = [python(3, minor).tag for minor in (10, 11, 12, 13, 14)]
    assert tags == ["cp310-cp310", "cp311-cp311", *["cp312-abi3"] * 3]
    found = [python(3, 10), python(3, 11), python(3, 12), python(3, 13)]
    by_tag = wheels.builders(found)
    assert by_tag["cp312-abi3"] is found[2]
    assert list(by_tag) == tags[:3]
    with pytest.raises(wheels.Failed, match="no Python at hand builds cp310-cp310, cp312-abi3"):
        wheels.builders(found[1:2])


def test_pythons_at_hand() -> None:
    found = wheels.interpreters([Path(sys.executable), Path("/bin/false")])
    assert sys.version_info[:2] in [each.version for each in found]
    assert len({each.version for each in found}) == len(found)


@pytest.mark.parametrize(
    ("said", "is_fine"),
    [
        ('the platform tag to "manylinux_2_17_x86_64".', True),
        ('the platform\ntag to "manylinux_2_28_x86_64".', True),
        ('the platform tag to "manylinux_2_34_x86_64".', False),
        ('the platform tag to "manylinux_2_28_aarch64".', False),
        ('the platform tag to "linux_x86_64".', False),
    ],
)
def test_what_needs_a_newer_system(
    said: str, is_fine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheels, "output_of", lambda *command: said)
    if is_fine:
        wheels.needs_at_most(Path("a.whl"), "x86_64")
    else:
        with pytest.raises(wheels.Failed, match=r"a\.whl needs more than glibc 2\.28"):
            wheels.needs_at_most(Path("a.whl"), "x86_64")


@pytest.mark.skipif(shutil.which("nm") is None, reason="binutils are not installed")
def test_the_module_shows_its_c_api_only() -> None:
    """Frameworks load their libraries for all to see: of a name that both have, theirs is taken."""
    command = ["nm", "--dynamic", "--defined-only", "--format=just-symbols", _native.__file__]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert "kolovod_submit" in names
    assert [name for name in names if not name.startswith(("kolovod_", "PyInit__native"))] == []
