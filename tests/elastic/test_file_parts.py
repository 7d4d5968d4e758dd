"""Files of a dataset in parts: each file is in one, and a part goes on in the middle of one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kolovod.elastic import FileParts
from kolovod.errors import InvalidArgumentError


def read(file: int) -> Iterator[int]:
    """Of a file, which is the number of its samples from the hundredfold on."""
    return iter(range(100 * file, 100 * file + file % 7))


@given(
    files=st.integers(0, 30),
    parts=st.integers(1, 9),
    epoch=st.integers(0, 2**40),
    seed=st.integers(),
)
def test_each_file_is_in_one_part(files: int, parts: int, epoch: int, seed: int) -> None:
    of_parts = [
        FileParts(range(files), read, part, parts, epoch, seed=seed).files for part in range(parts)
    ]
    assert sorted(file for each in of_parts for file in each) == list(range(files))
    sizes = list(map(len, of_parts))
    assert max(sizes) - min(sizes) <= 1


def test_the_order_is_the_same_everywhere_and_for_ever() -> None:
    assert FileParts(range(8), read, 0, 1, epoch=2, seed=3).files == [3, 7, 4, 0, 1, 6, 2, 5]
    assert FileParts(range(8), read, 1, 3, shuffle=False).files == [1, 4, 7]
    orders = {
        tuple(FileParts(range(20), read, 0, 1, e, seed=s).files) for e in (0, 1) for s in (0, 1)
    }
    assert len(orders) == 4


@pytest.mark.parametrize("batch_size", [None, 1, 4])
def test_it_goes_on_where_it_was(batch_size: int | None) -> None:
    def make() -> FileParts[int, int]:
        return FileParts(range(20), read, 1, 2, 3, batch_size=batch_size)

    whole = list(make())
    assert len(whole) > 5
    for taken in range(len(whole) + 1):
        files = make()
        batches = iter(files)
        assert [next(batches) for _ in range(taken)] == whole[:taken]
        state = json.loads(json.dumps(files.state_dict()))
        other = make()
        other.load_state_dict(state)
        assert other.state_dict() == files.state_dict()
        assert list(other) == whole[taken:]
        assert list(other) == whole  # from the beginning again


def test_the_samples_of_a_batch_may_be_of_two_files() -> None:
    assert list(FileParts([3, 2], read, 0, 1, shuffle=False, batch_size=2)) == [
        [300, 301],
        [302, 200],
        [201],
    ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"part": 2}, "part is 2 of 2: need 0 <= part < parts"),
        ({"part": None}, "part is None: need a whole number"),
        ({"epoch": "x"}, "epoch is 'x'"),
        ({"seed": 0.5}, "seed is 0.5"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"read": "r"}, "read is 'r': need a function"),
        ({"files": "data"}, "files is 'data': need a list"),
        ({"files": iter("ab")}, "need a list, in the same order on all ranks"),
    ],
)
def test_wrong_arguments_are_told(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        FileParts(**{"files": ["a"], "read": read, "part": 0, "parts": 2, **arguments})


def test_a_wrong_state_is_told() -> None:
    files = FileParts(range(8), read, 0, 2)
    state = files.state_dict()
    with pytest.raises(InvalidArgumentError, match="not a state of files"):
        files.load_state_dict({"file": 0})
    with pytest.raises(InvalidArgumentError, match=r"= \(8, 0, 2, 0, 0, None\), but .* \(8, 1, 2,"):
        FileParts(range(8), read, 1, 2).load_state_dict(state)
    with pytest.raises(InvalidArgumentError, match=r"of worker 0 of 2, but this is worker 0 of 1"):
        files.load_state_dict({**state, "worker": [0, 2]})


def test_it_imports_no_framework(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom kolovod.elastic import FileParts\n"
        "assert list(FileParts([1, 2], range, 0, 1, shuffle=False)) == [0, 0, 1]\n"
        "assert not {'torch', 'torchdata'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
