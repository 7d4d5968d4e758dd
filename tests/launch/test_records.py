"""launch.function: the record of a rank's end, where what it has returned cannot be had here."""

from __future__ import annotations

import pickle

import pytest

from kolovod.launch import function
from kolovod.launch.death import reported
from kolovod.launch.local import Ended

MISSING = b"cno_such_module\nThing\n."
NOT_IN_MODULE = b"cos\nno_such_thing\n."


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (MISSING, "ModuleNotFoundError: No module named 'no_such_module'"),
        (NOT_IN_MODULE, "AttributeError: "),
    ],
)
def test_what_cannot_be_read_names_the_rank(data: bytes, said: str) -> None:
    record = function.read_record(data)
    assert record is not None
    failed = function._failed(1, "rank 1", Ended(1, 5, reported(0), record=None), record, "")
    assert (failed.rank, failed.exit_code) == (1, 0)
    assert f"rank 1 has returned what cannot be read in this process ({said}" in str(failed)


def test_of_a_rank_that_was_killed_its_death_is_told() -> None:
    record = function.read_record(MISSING)
    failed = function._failed(
        1, "rank 1", Ended(1, 5, reported(-9), record=None), record, "its end"
    )
    assert "has returned" not in str(failed)
    assert "its end" in str(failed)


@pytest.mark.parametrize("data", [b"", pickle.dumps({"result": "x" * 100})[:50]])
def test_a_rank_that_has_not_written_its_record(data: bytes) -> None:
    assert function.read_record(data) is None
