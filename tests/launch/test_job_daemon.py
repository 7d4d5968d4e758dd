"""launch.job_daemon: what it does with who comes, and what it leaves (launch/job_folders.py)."""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from waiting import until

from kolovod.errors import HostError
from kolovod.launch import job_daemon, job_folders
from kolovod.launch.agent_messages import FrameReader, split_output
from kolovod.launch.job_folders import JobFolder

LIMIT_S = 20.0


@pytest.fixture(name="kept")
def daemon_in_this_process(monkeypatch: pytest.MonkeyPatch) -> job_daemon._JobDaemon:
    """It has no job, and takes nothing of this process over that is not put back."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setattr(os, "setsid", lambda: None)
    monkeypatch.setattr(job_daemon._JobDaemon, "_take_over_descriptors", lambda self: None)
    monkeypatch.setattr(job_daemon, "_PAUSE_S", 0.0)
    made = job_daemon._JobDaemon(None)
    made._folder = cast("JobFolder", SimpleNamespace(path="a folder"))
    return made


def pair() -> tuple[socket.socket, socket.socket]:
    here, there = socket.socketpair()
    here.settimeout(LIMIT_S)
    return here, there


def shown(viewer: socket.socket, count: int) -> list[str]:
    """The texts of the next ``count`` frames of output."""
    reader, found = FrameReader(prelude=False), list[str]()
    while len(found) < count and (data := viewer.recv(1 << 16)):
        found += [
            split_output(body)[2].decode() for kind, body in reader.feed(data) if kind == b"O"
        ]
    return found


@pytest.mark.parametrize(
    "said",
    [b"\xff\xff\xff\xffJ", b"\0\0\0\1J{", b"\0\0\0\1J5", b'\0\0\0\x0eJ{"shown": "x"}'],
    ids=["too long", "no JSON", "no object", "no number"],
)
def test_a_viewer_that_makes_no_sense_is_hung_up(
    kept: job_daemon._JobDaemon, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", kept._consoles["stderr"])  # pytest has taken it again
    here, there = pair()
    with here:
        kept._begin_view(there)
        here.sendall(said)
        while here.recv(1 << 16):
            pass
    kept._spool.wait_for_view()
    again, there = pair()
    with again:
        kept._begin_view(there)
        (text,) = shown(again, 1)
    assert text.startswith("kolovod: a viewer of this job cannot be served any more: ")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_who_comes_after_a_failure_to_accept_is_served(
    kept: job_daemon._JobDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = pair()
    comes: list[Any] = [
        OSError(errno.EMFILE, "Too many open files"),
        ConnectionAbortedError(),
        there,
        SystemExit(),  # the end of the thread, for this test
    ]

    def accept(listener: socket.socket) -> socket.socket:
        first = comes.pop(0)
        if isinstance(first, BaseException):
            raise first
        assert isinstance(first, socket.socket)
        return first

    monkeypatch.setattr(job_daemon, "accept_own", accept)
    kept._spool.write("stdout", "the output")
    with socket.socket() as listener, here:
        threading.Thread(target=kept._accept, args=(listener,), daemon=True).start()
        assert shown(here, 1) == ["the output"]
    until(lambda: not comes)


def test_who_comes_while_there_are_no_threads_is_hung_up(
    kept: job_daemon._JobDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any, **more: Any) -> None:
        raise RuntimeError("can't start new thread")

    here, there = pair()
    with here, monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError):
            kept._begin_view(there)
        assert here.recv(1) == b""
    kept._spool.wait_for_view()  # nobody views


def test_a_character_that_comes_in_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_daemon, "READ_BYTES", 1)
    source, sink = os.pipe()
    with open(sink, "wb") as file:
        file.write("süß".encode() + b"\xc3")
    assert list(job_daemon.texts_from(source)) == ["s", "ü", "ß", "\N{REPLACEMENT CHARACTER}"]
    os.close(source)


def folder_in(path: Path) -> JobFolder:
    return JobFolder(path, ("train",), "2026-01-01 00:00:00", os.getpid(), "agent", ("again",))


def test_the_end_is_left_where_the_folder_was_made_without_room(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    folder.leave({"stdout": "the output"}, 3)
    assert folder.exit_code() == 3
    assert folder.left("stdout") == "the output"
    assert job_folders.read(tmp_path) == folder


def test_the_room_that_is_reserved_takes_the_exit_code(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    folder._write()
    folder.leave({}, 130)
    assert folder.exit_code() == 130
    assert (tmp_path / "exit_code").stat().st_size == len(job_folders._RESERVED)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space"), HostError("others may")])
def test_without_room_for_anything_a_job_ends_all_the_same(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: JobFolder) -> None:
        raise error

    monkeypatch.setattr(JobFolder, "_make_anew", fail)
    folder = folder_in(tmp_path / "removed")
    folder.leave({"stdout": "the output"}, 3)
    assert folder.exit_code() is None
