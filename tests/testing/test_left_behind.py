"""Whose files in shared memory a test is blamed for (tests/support/left_behind.py)."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import left_behind
import pytest

from kolovod.launch import orphan_reaper

pytestmark = pytest.mark.skipif(
    not left_behind.SHARED_MEMORY.is_dir(), reason="there is no /dev/shm"
)
HOLD = {
    "open": "file = open(sys.argv[1], 'r+b')",
    "mapped": "with open(sys.argv[1], 'r+b') as f: memory = mmap.mmap(f.fileno(), 10)",
}


@pytest.fixture(name="file")
def made_file() -> Iterator[Path]:
    fd, name = tempfile.mkstemp(dir=left_behind.SHARED_MEMORY, prefix="kolovod-test-")
    os.write(fd, bytes(10))
    os.close(fd)
    path = Path(name)
    yield path
    path.unlink()


def held(file: Path, how: str, mark: str) -> set[str]:
    """What ``held_elsewhere`` says while a process of that mark, and no child, has the file."""
    code = f"import mmap, sys\n{HOLD[how]}\nprint('there', flush=True)\nsys.stdin.read()"
    leave = "import os, sys; os.fork() and os._exit(0); os.setsid(); exec(sys.argv.pop(1))"
    with subprocess.Popen(
        [sys.executable, "-c", leave, code, str(file)],
        env={**os.environ, orphan_reaper.MARK_NAME: mark},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        process.wait()  # its child has the file, and is another process's child now
        found = left_behind.held_elsewhere({str(file), "thread x", "/dev/shm/none"})
        process.stdin.close()
        assert process.stdout.read() == ""
    return found


@pytest.mark.parametrize("how", HOLD)
def test_what_another_ones_process_has_is_its_own(file: Path, how: str) -> None:
    assert str(file) in left_behind.memory_files()
    assert held(file, how, "somebody else's") == {str(file)}


@pytest.mark.parametrize("how", HOLD)
def test_what_a_process_of_a_test_has_is_the_tests(file: Path, how: str) -> None:
    assert held(file, how, os.environ[orphan_reaper.MARK_NAME]) == set()


def test_what_nobody_has_is_left_behind(file: Path) -> None:
    assert str(file) in left_behind.everything()
    assert str(file) not in left_behind.held_elsewhere(left_behind.everything())
