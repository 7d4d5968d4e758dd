"""tests/conftest.py: what a test leaves in memory fails it, what a neighbour has there does not."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import memory_files
import pytest

from kolovod.config import Settings
from kolovod.launch import guard
from kolovod.rendezvous.segment_handover import make_segment

TESTS = Path(__file__).parents[1]


@pytest.fixture
def neighbour() -> Iterator[subprocess.Popen[str]]:
    """A process of somebody else, with a file in /dev/shm and an anonymous one."""
    code = """
import os, sys, tempfile
held = os.memfd_create("kolovod-segment")
with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="kolovod-segment-00000000-") as file:
    print(file.name, flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process


def test_what_a_process_holds_and_what_bears_the_mark_is_of_the_worker(
    neighbour: subprocess.Popen[str], worker_mark: str
) -> None:
    before = memory_files.of_worker(worker_mark)
    assert neighbour.stdout is not None
    name = neighbour.stdout.readline().strip()
    assert os.path.exists(name)
    assert memory_files.of_worker(worker_mark) == before
    (named, nameless) = sorted(memory_files.of_worker(worker_mark, [neighbour.pid]) - before)
    assert f"process {neighbour.pid}: {name} (descriptor" in named
    assert f"process {neighbour.pid}: /memfd:kolovod-segment (deleted)" in nameless

    fd = os.memfd_create("kolovod-segment")
    os.ftruncate(fd, mmap.PAGESIZE)
    (held,) = memory_files.of_worker(worker_mark) - before
    assert held.endswith(f"/memfd:kolovod-segment (deleted) (descriptor {fd})")
    mapping = mmap.mmap(fd, mmap.PAGESIZE)
    mapping[0] = 1
    os.close(fd)
    # Python has a descriptor of its own for a mapping.
    assert any("(mapped, inode" in each for each in memory_files.of_worker(worker_mark) - before)
    mapping.close()
    assert memory_files.of_worker(worker_mark) == before


def test_a_segment_whose_maker_died_before_it_was_nameless_bears_the_mark(
    monkeypatch: pytest.MonkeyPatch, worker_mark: str
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EPERM, "not in this sandbox")

    def die(path: str) -> None:
        raise SystemExit(path)

    before = memory_files.of_worker(worker_mark)
    assert worker_mark in os.environ[guard.MARK_NAME]
    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(tempfile, "_O_TMPFILE_WORKS", False)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", die)
        with pytest.raises(SystemExit) as died:
            make_segment(2, 2, Settings().engine_config())
    left = str(died.value)
    assert left in memory_files.of_worker(worker_mark) - before
    os.unlink(left)
    assert memory_files.of_worker(worker_mark) == before


def test_a_test_that_leaves_memory_fails(tmp_path: Path) -> None:
    tests = """
        import os, tempfile
        import conftest

        conftest._PATIENCE_S = 0.1

        def test_leaves_a_descriptor():
            os.memfd_create("kolovod-segment")

        def test_leaves_a_name():
            mark = os.environ["KOLOVOD_JOB"].rpartition(",")[2]
            with tempfile.NamedTemporaryFile(
                dir="/dev/shm", prefix=f"kolovod-segment-{mark[:8]}-", delete=False
            ) as file:
                with open("left", "w") as note:
                    note.write(file.name)

        def test_leaves_nothing_while_a_neighbour_does():
            with open("neighbour", "w") as note:
                fd, name = tempfile.mkstemp(dir="/dev/shm", prefix="kolovod-segment-00000000-")
                note.write(name)
            os.close(fd)
        """
    (tmp_path / "test_leaving.py").write_text(textwrap.dedent(tests))
    path = os.pathsep.join([str(TESTS), str(TESTS / "support"), *filter(None, sys.path)])
    options = ["-p", "conftest", "-p", "no:cacheprovider", "-rA", "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "test_leaving.py"],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    for note in ("left", "neighbour"):
        os.unlink((tmp_path / note).read_text())
    failed = [line.split(" - ")[0] for line in done.stdout.splitlines() if "ERROR" in line]
    assert "3 passed, 2 errors" in done.stdout, done.stdout + done.stderr
    assert "ERROR test_leaving.py::test_leaves_a_descriptor" in failed
    assert "ERROR test_leaving.py::test_leaves_a_name" in failed
