"""kolovod.core.record_files: where last operations lie, and how many files stay."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest

from kolovod.core.record_files import KEPT_FILES, file_prefix, prune
from kolovod.core.runtime_folder import runtime_folder
from kolovod.errors import InvalidArgumentError


@pytest.fixture(autouse=True)
def files_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_the_default_folder_belongs_to_the_user(tmp_path: Path) -> None:
    assert runtime_folder() == tmp_path / "kolovod"
    prefix = file_prefix("", "secret", 3)
    assert prefix.startswith(str(runtime_folder()) + "/")
    assert prefix.endswith("-epoch3-")
    assert "secret" not in prefix
    assert not runtime_folder().exists()  # it is made when it is needed
    runtime_folder().mkdir(mode=0o700)
    assert file_prefix("", "secret", 3) == prefix


def test_one_job_has_one_prefix_and_each_set_its_own() -> None:
    prefixes = {
        file_prefix("", secret, epoch, members)
        for secret in ("a", "b", "")
        for epoch in (1, 2)
        for members in ((), (0, 1), (0, 2))
    }
    assert len(prefixes) == 18
    assert f"alone{os.getpid()}" in file_prefix("", "", 1)


def test_another_folder_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert Path(file_prefix(str(folder), "s", 1)).parent == folder
    assert folder.is_dir()
    assert file_prefix("none", "s", 1) == ""


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgumentError, match=r"KOLOVOD_LAST_OPERATIONS_DIR='.*file/x'"):
        file_prefix(str(tmp_path / "file" / "x"), "s", 1)


def test_a_link_that_somebody_has_put_there_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    runtime_folder().symlink_to(tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match="not a folder that only this user"):
        assert file_prefix("", "s", 1) == ""


def test_a_link_to_files_of_ours_is_not_pruned(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for i in range(KEPT_FILES + 5):
        (tmp_path / "elsewhere" / f"{i}.jsonl").touch()
    runtime_folder().symlink_to(tmp_path / "elsewhere")
    prune()
    assert len(list((tmp_path / "elsewhere").iterdir())) == KEPT_FILES + 5


def test_only_the_newest_files_stay() -> None:
    prune()  # nothing there
    runtime_folder().mkdir(mode=0o700)
    names = [f"{i:03}.jsonl" for i in range(KEPT_FILES + 5)]
    for i, name in enumerate(names):
        (runtime_folder() / name).touch()
        os.utime(runtime_folder() / name, (i, i))
    (runtime_folder() / "of-somebody-else.txt").touch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prune()
    left = sorted(file.name for file in runtime_folder().iterdir())
    assert left == [*names[5:], "of-somebody-else.txt"]
