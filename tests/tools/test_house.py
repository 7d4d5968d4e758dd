"""scripts/house.py: what it measures is there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import house
import pytest

TRACED = {"one PyTorch step": (27, 155), "the same in an elastic job": (33, 205)}
"""Files, and changes from one to another, that a step may take: they may only become fewer."""
DATA_LINES = 5000
"""All that bench/results may have: a run's samples are summed up where they are written."""


@pytest.mark.parametrize("name", [name for name in house.MEASURES if name not in TRACED])
def test_each_measure(name: str) -> None:
    measure, _ = house.MEASURES[name]
    assert re.search(r"\d|none|Error", str(measure()))


def test_data_stays_within_its_budget() -> None:
    assert house.lines("bench/results") <= DATA_LINES


def test_docstrings_open_with_a_subject() -> None:
    count, _ = house.docstrings().split(" of ")
    assert count == "0", "see SUBJECTLESS in scripts/house.py"


def test_a_trip_notes_calls_of_ours_only(tmp_path: Path) -> None:
    pytest.importorskip("numpy")
    from kolovod.printable import printable

    path = tmp_path / "result"
    with house.Trip(True, str(path)):
        printable("text")
        re.sub("a", "b", "a")
        printable("text")
    found = json.loads(path.read_text())
    assert found == {"files": 1, "calls": 2, "changes": 0}
    with house.Trip(False, str(tmp_path / "other")):
        printable("text")
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "most"), TRACED.items(), ids=["plain", "elastic"])
def test_a_step_stays_within_its_budget(name: str, most: tuple[int, int]) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    measure, _ = house.MEASURES[name]
    found = re.fullmatch(r"(\d+) files, (\d+) changes, (\d+) calls", str(measure()))
    assert found
    files, changes, calls = map(int, found.groups())
    assert 5 < files < changes < calls
    assert files <= most[0], "a step of PyTorch's has become longer"
    assert changes <= most[1], "a step of PyTorch's has become longer"
