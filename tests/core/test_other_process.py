"""What is read of other processes, which may be anybody's: docs/security.md."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from strangers import NOBODY, needs_root, running_as_nobody
from waiting import until

from kolovod import blame
from kolovod.coordination import record_file
from kolovod.core import stacks
from kolovod.core.other_process import OtherProcess
from kolovod.memory_files import OtherFileError, open_own_memory
from kolovod.observe.live.page import Page, PageReader, PageUnavailableError
from kolovod.printable import printable

SECRET = "nobody else's\n"


def fake_process(proc: Path, uid: int | None = None) -> Path:
    """The folder with the descriptors of process 1."""
    folder = proc / "1" / "fd"
    folder.mkdir(parents=True)
    ids = "\t".join([str(os.geteuid() if uid is None else uid)] * 4)
    (proc / "1" / "status").write_text(f"Name:\ta\nUid:\t{ids}\nGid:\t{ids}\n")
    return folder


def within(act: Callable[[], object], limit_s: float = 10.0) -> None:
    """It does not wait, for example for somebody who opens the other end of a FIFO."""
    done: list[bool] = []

    def run() -> None:
        act()
        done.append(True)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    assert done


# Pages --------------------------------------------------------------------------------------------


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A folder that others may enter, unlike those above pytest's own."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@needs_root
def test_a_bell_that_is_somebody_elses_file_is_not_written_into(reachable: Path) -> None:
    """Root's ``top`` wrote into it: its opener has no right to, and names it by ``O_PATH``."""
    target = reachable / "target"
    target.write_text(SECRET)
    target.chmod(0o600)

    def show() -> None:
        bell = os.open(target, os.O_PATH)
        fd = os.memfd_create(f"kolovod-live-{bell}")
        os.pwrite(fd, b"KOLOLIV1", 0)

    no_pipe = pytest.raises(PageUnavailableError, match="its bell is no pipe of its user")
    with running_as_nobody(show) as pid, no_pipe:
        PageReader(pid).ring()
    assert target.read_text() == SECRET


@needs_root
def test_the_page_of_another_user_is_read_with_that_users_rights() -> None:
    def show() -> Page:
        page = Page()
        page.write(['{"version": "1"}'])
        return page

    with running_as_nobody(show) as pid:
        with contextlib.closing(PageReader(pid)) as reader:
            reader.ring()
            assert reader.read() == {"version": "1"}
        with contextlib.closing(OtherProcess(pid)) as process:
            assert process.uid == NOBODY
            with process.as_its_user():
                assert (os.geteuid(), os.getegid(), os.getgroups()) == (NOBODY, NOBODY, [NOBODY])
                with pytest.raises(PermissionError):
                    os.open("/etc/shadow", os.O_RDONLY)
            assert (os.geteuid(), os.getegid()) == (0, 0)


@needs_root
def test_a_pipe_that_another_user_has_made_is_no_bell() -> None:
    source, sink = os.pipe()  # inherited, as from who has started it

    def show() -> None:
        os.memfd_create(f"kolovod-live-{sink}")

    no_pipe = pytest.raises(PageUnavailableError, match="its bell is no pipe of its user")
    try:
        with running_as_nobody(show) as pid, no_pipe:
            PageReader(pid)
    finally:
        os.close(source)
        os.close(sink)


@pytest.mark.parametrize("kind", ["fifo", "file", "device"])
def test_what_only_has_the_name_of_a_page_is_not_opened(tmp_path: Path, kind: str) -> None:
    """A mount namespace lets a process give any name to any file: devices act when opened."""
    folder = fake_process(tmp_path)
    place = folder / "kolovod-live-3"
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "file":
        place.write_bytes(b"KOLOLIV1")
    else:
        place.symlink_to("/dev/tty")
    (folder / "5").symlink_to(place.name)

    def look() -> None:
        with pytest.raises(PageUnavailableError, match=r"has not called kolovod\.init"):
            PageReader(1, proc=tmp_path)

    within(look)


def good(**changes: object) -> dict[str, object]:
    facts: dict[str, object] = {
        "rank": 0, "size": 1, "epoch": 1, "host": "h", "hosts": ["h"], "job": "ab", "slot": None,
        "at_ns": 1, "pending": [["", "n", "v", 1]], "sent_bytes": [0], "stats": {},
        "worlds": [{"epoch": 1, "size": 1}],
        "reports": [{
            "number": 1, "lost": 0, "spans": [["s", "t", 1, 2, []]],
            "operations": [["", "n", "v", "float32", 1, 4, 1, True, 1, 2, 3]],
        }],
    }  # fmt: skip
    return {**facts, **changes}


def shown(text: str) -> dict[str, object]:
    """What a reader makes of a page with this text."""
    page = Page()
    try:
        page.write([text])
        with contextlib.closing(PageReader(os.getpid())) as reader:
            return reader.read()
    finally:
        page.close()


NONSENSE = [
    "[]", "7", '"rank"', "{", "[" * 100_000, "1" * 5_000,
    *(json.dumps(good(**each)) for each in (
        {"rank": "0"}, {"rank": 1}, {"rank": True}, {"rank": -1}, {"rank": 10**30}, {"size": 1.0},
        {"job": 7}, {"job": None}, {"hosts": []}, {"hosts": "h"}, {"host": None}, {"epoch": None},
        {"slot": "0"}, {"worlds": [{}]}, {"worlds": {}}, {"reports": [{}]}, {"reports": None},
        {"pending": [["x"]]}, {"pending": 1}, {"sent_bytes": [None]}, {"stats": []},
        {"stats": {"link_bytes_per_us": float("nan")}}, {"notices": "text"}, {"whereabouts": [1]},
        {"whereabouts": ["", 1, "not hexadecimal"]}, {"at_ns": float("inf")},
    )),
]  # fmt: skip


@pytest.mark.parametrize("text", NONSENSE, ids=[text[:40] for text in NONSENSE])
def test_a_page_that_makes_no_sense_is_said_to(text: str) -> None:
    with pytest.raises(PageUnavailableError, match="makes no sense"):
        shown(text)


def test_a_page_cannot_steer_a_terminal() -> None:
    evil = "\x1b]0;owned\x07\n\x9b31m\u202e"
    reports = [{"number": 1, "lost": 0, "operations": [], "spans": [[evil, "t", 1, 2, []]]}]
    facts = shown(json.dumps(good(host=evil, hosts=[evil], notices=[evil], reports=reports)))
    written_out = r"\x1b]0;owned\x07\n\x9b31m\u202e"
    assert facts["host"] == written_out
    assert facts["hosts"] == facts["notices"] == [written_out]
    assert facts["reports"] == [{**reports[0], "spans": [[written_out, "t", 1, 2, []]]}]


def test_what_prints_stays_as_it_is() -> None:
    assert printable("Zeit: 3 µs, 日本") == "Zeit: 3 µs, 日本"
    assert printable("a\nb\tc\x7f\udc80", keep="\n") == "a\nb\\tc\\x7f\\udc80"
    assert printable("a b\N{NO-BREAK SPACE}c") == r"a b\xa0c"


# Stacks -------------------------------------------------------------------------------------------


@needs_root
def test_stacks_of_a_stranger_are_not_read_from_a_file_nor_written_to(tmp_path: Path) -> None:
    def show() -> None:
        fd = os.open("/etc/hostname", os.O_PATH)
        signum = int(signal.SIGRTMIN) + 3
        signal.signal(signum, lambda *_: None)
        os.ftruncate(os.memfd_create(f"kolovod-stacks-{signum}"), 1 << 40)
        os.memfd_create(f"kolovod-stacks-{signum}-{fd}")

    with running_as_nobody(show) as pid, pytest.raises(stacks.StacksUnavailableError):
        stacks.of_process(pid)


ENDLESS = """
import os, signal, sys
source, sink = os.pipe2(os.O_NONBLOCK)
signum = int(signal.SIGRTMIN) + 3
def write(*_):
    while True:
        try:
            os.write(sink, b"\\x1b]0;owned" * 1000)
        except BlockingIOError:
            pass
signal.signal(signum, write)
memory = os.memfd_create(f"kolovod-stacks-{signum}-{source}")
print("ready", flush=True)
signal.pause()
"""


def test_stacks_without_end_are_cut() -> None:
    with subprocess.Popen([sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == b"ready\n"
            began_s = time.monotonic()
            text = stacks.of_process(other.pid, timeout_s=0.5)
            assert time.monotonic() - began_s < 30
        finally:
            other.kill()
    assert text.startswith(r"\x1b]0;owned")
    assert text.isprintable()


def test_a_signal_that_would_end_a_process_is_not_sent() -> None:
    numbers = [0, int(signal.SIGTERM), int(signal.SIGKILL), 200, 999]
    for signum in numbers:
        script = (
            f"import os; r, w = os.pipe(); f = os.memfd_create(f'kolovod-stacks-{signum}-{{r}}');"
            "print('ready', flush=True); input()"
        )
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([sys.executable, "-S", "-c", script], **pipes) as other:
            assert other.stdout is not None
            other.stdout.readline()
            with pytest.raises(
                stacks.StacksUnavailableError, match=r"has not called kolovod\.init"
            ):
                stacks.of_process(other.pid)
            assert other.poll() is None


# Other files and processes ------------------------------------------------------------------------


def test_who_has_ended_is_not_taken_for_who_has_the_number_now() -> None:
    other = subprocess.Popen(["sleep", "60"])
    with contextlib.closing(OtherProcess(other.pid)) as process:
        assert process.uid == os.geteuid()
        other.kill()
        other.wait()
        for ask in (
            lambda: process.read("stat"),
            lambda: process.status("SigCgt"),
            lambda: process.send_signal(0),
        ):
            with pytest.raises((ProcessLookupError, FileNotFoundError)):
                ask()


def test_the_file_of_a_record_or_of_blame_is_looked_at_before_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its path is of a process that may be another one now."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    def look() -> None:
        with pytest.raises(OtherFileError):
            record_file.open_to_read(str(fifo))
        with pytest.raises(OtherFileError):
            record_file.RecordFile(str(fifo))

    within(look)
    other = os.memfd_create("another")
    path = f"/proc/{os.getpid()}/fd/{other}"
    with pytest.raises(OtherFileError):
        record_file.RecordFile(path)
    name = "kolovod-blame-00"
    named = tmp_path / name
    named.write_text("before")
    monkeypatch.setenv(blame.VARIABLE, f"{name}:{named}")
    blame.note(3)
    assert named.read_text() == "before"
    os.close(other)
    fd, given = blame.new_file()
    monkeypatch.setenv(blame.VARIABLE, given)
    blame.note(3)
    assert blame.read(fd) == 3
    os.close(fd)


@needs_root
def test_the_memory_of_another_user_is_not_taken_for_ours() -> None:
    def make() -> int:
        return os.memfd_create("kolovod-record")

    with running_as_nobody(make) as pid:
        (number,) = until(
            lambda: [
                entry.name
                for entry in Path(f"/proc/{pid}/fd").iterdir()
                if re.search("kolovod-record", os.readlink(entry))
            ]
        )
        with pytest.raises(OtherFileError):
            open_own_memory(f"/proc/{pid}/fd/{number}", "kolovod-record", os.O_RDONLY)
