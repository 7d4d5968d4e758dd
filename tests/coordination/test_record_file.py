"""What a member has promised and agreed to is found when it has ended, however that came."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kolovod.coordination import record_file
from kolovod.coordination.consensus import NOTHING, Ballot, Record
from kolovod.coordination.coordinator_state import first_world
from kolovod.coordination.protocol import Left
from kolovod.coordination.record_file import Copy, RecordFile
from kolovod.errors import BootstrapError

WORLD = first_world([(0, "a"), (1, "b")])


@pytest.fixture(name="made")
def made_file() -> Iterator[tuple[int, RecordFile]]:
    fd, path = record_file.new_file()
    file = RecordFile(path)
    yield fd, file
    file.close()
    os.close(fd)


def latest(fd: int) -> Record | None:
    return record_file.parse(record_file.read(fd))


def test_the_latest_record_is_found(made: tuple[int, RecordFile]) -> None:
    fd, file = made
    assert latest(fd) is None
    for term in range(1, 6):
        record = Record(Ballot(term, -1), WORLD, WORLD)
        file.write(record)
        assert latest(fd) == record


def test_a_copy_outlives_the_process(tmp_path: Path) -> None:
    copy = tmp_path / "record"
    assert record_file.read_kept(copy) is None
    fd, path = record_file.new_file()
    kept = Copy(copy, "a job")
    file = RecordFile(path, kept)
    file.write(NOTHING)
    assert record_file.read_kept(copy) is None  # it is nobody's yet
    kept.number = 7
    for term in (1, 2):
        file.write(Record(Ballot(term, -1), WORLD, WORLD))
    file.close()
    os.close(fd)
    assert record_file.read_kept(copy) == ("a job", Left(7, Record(Ballot(2, -1), WORLD, WORLD)))
    assert [entry.name for entry in tmp_path.iterdir()] == ["record"]
    copy.write_bytes(b"{}")
    with pytest.raises(BootstrapError, match=r"cannot be read .* KOLOVOD_RECORD_DIR says where"):
        record_file.read_kept(copy)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    fd, path = record_file.new_file()
    file = RecordFile(path, Copy(tmp_path / "no" / "record", "a job", 7))
    with pytest.raises(BootstrapError, match="KOLOVOD_RECORD_DIR says where"):
        file.write(NOTHING)
    file.close()
    os.close(fd)


@pytest.mark.parametrize("written", [0, 4, 17, 60])
def test_a_record_that_was_cut_off_leaves_the_one_before(
    made: tuple[int, RecordFile], written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the process had been killed in the middle of the third."""
    fd, file = made
    file.write(NOTHING)
    before = NOTHING.told(WORLD)
    file.write(before)
    write = os.pwrite

    def cut_off(to: int, data: memoryview, at: int) -> int:
        write(to, data[:written], at)
        raise _Killed

    monkeypatch.setattr(os, "pwrite", cut_off)
    with pytest.raises(_Killed):
        file.write(Record(Ballot(9, -1), WORLD, WORLD))
    assert latest(fd) == before


class _Killed(BaseException):
    pass


def test_without_a_file_nothing_is_written() -> None:
    file = RecordFile("")
    file.write(NOTHING)
    file.close()
    file.close()


def test_a_copy_is_not_read_from_nor_written_into_what_others_have_put_there(
    tmp_path: Path,
) -> None:
    """A FIFO would be waited for, a link written through."""
    path, other = tmp_path / "a.record", tmp_path / "other"
    other.write_text("before")
    (tmp_path / "a.record.new").symlink_to(other)
    Copy(path, "a job", 7).write(Record(Ballot(2, -1), WORLD, WORLD))
    assert other.read_text() == "before"
    assert path.lstat().st_mode & 0o777 == 0o600
    assert record_file.read_kept(path) is not None
    if os.geteuid() == 0:
        tmp_path.chmod(0o1777)
        os.chown(path, 65534, 65534)
        with pytest.raises(BootstrapError, match="KOLOVOD_RECORD_DIR is to be a folder"):
            record_file.read_kept(path)
        tmp_path.chmod(0o755)  # a file server may say that it is nobody's
        assert record_file.read_kept(path) is not None
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(BootstrapError, match="is another file"):
        record_file.read_kept(path)
