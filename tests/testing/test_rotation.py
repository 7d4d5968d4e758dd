"""Which slow tests a run of CI takes (tests/support/rotation.py)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from paths import ROOT
from rotation import Change, chosen, concerned, last_change

ROWS = [f"tests/elastic/test_jobs.py::test_{i}" for i in range(60)]
ROWS += [f"tests/core/test_conformance.py::test_row[{i}]" for i in range(240)]
NOTHING: frozenset[str] = frozenset()


def test_as_many_runs_as_parts_take_every_row_once() -> None:
    parts = [chosen(ROWS, Change(commits, NOTHING), 6) for commits in range(100, 106)]
    assert sorted(row for part in parts for row in part) == sorted(ROWS)
    assert all(30 <= len(part) <= 70 for part in parts)


def test_the_same_commit_takes_the_same_rows() -> None:
    change = Change(100, frozenset({"src/kolovod/core/verbs.py"}))
    assert chosen(ROWS, change, 6) == chosen(list(reversed(ROWS)), change, 6)


def test_rows_that_a_change_concerns_are_taken_too() -> None:
    drawn = chosen(ROWS, Change(100, NOTHING), 6)
    elastic = chosen(ROWS, Change(100, frozenset({"src/kolovod/elastic/steps.py"})), 6)
    assert drawn < elastic
    more = elastic - drawn
    assert all("tests/elastic/" in row for row in more)
    assert len(more) == min(len(ROWS) // 12, 60 - sum("elastic" in row for row in drawn))


def test_a_change_of_everything_takes_half_as_many_more_at_most() -> None:
    files = frozenset({"csrc/engine/engine.cc", "src/kolovod/elastic/steps.py"})
    drawn = chosen(ROWS, Change(100, NOTHING), 6)
    assert len(chosen(ROWS, Change(100, files), 6)) == len(drawn) + len(ROWS) // 12


def test_one_part_is_all() -> None:
    assert chosen(ROWS, Change(100, NOTHING), 1) == frozenset(ROWS)


@pytest.mark.parametrize(
    ("file", "room"),
    [
        ("src/kolovod/elastic/steps.py", "tests/elastic"),
        ("src/kolovod/torch/hooks.py", "tests/frontends/torch"),
        ("src/kolovod/gradients/compression/topk.py", "tests/gradients"),
        ("src/kolovod/ray/cluster.py", "tests/clusters"),
        ("src/horovod/torch/__init__.py", "tests/horovod"),
        ("csrc/engine/engine.cc", "tests/system"),
        ("tests/elastic/test_jobs.py", "tests/elastic/test_jobs.py"),
    ],
)
def test_what_a_file_concerns(file: str, room: str) -> None:
    assert room in concerned({file})
    assert (ROOT / room).exists()


def test_documentation_and_modules_at_the_top_concern_no_slow_tests() -> None:
    assert not concerned({"docs/trip.md", "src/kolovod/version.py", "tests/support/worlds.py"})


def test_a_repository_is_read(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True)

    git("init", "--quiet")
    for number in range(13):
        (tmp_path / f"file{number}").touch()
        git("add", ".")
        git("commit", "--quiet", "-m", "one more")
    assert last_change(tmp_path) == Change(13, frozenset(f"file{i}" for i in range(3, 13)))


def test_where_there_is_no_repository_nothing_has_changed(tmp_path: Path) -> None:
    assert last_change(tmp_path) == Change(0, NOTHING)
