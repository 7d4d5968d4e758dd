"""Who is at the other end of a Unix socket: docs/security.md."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from strangers import as_nobody, needs_root, running_as_nobody

from kolovod.core import runtime_folder
from kolovod.errors import AuthenticationError, BootstrapError
from kolovod.launch import agent_line, job_folders
from kolovod.net import channel, unix_sockets
from kolovod.net.unix_sockets import OtherUserError
from kolovod.rendezvous.external.address_exchange import ask_once
from kolovod.rendezvous.segment_handover import follow

DEADLINE_S = 30.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def listening(name: str) -> Callable[[], object]:
    """Listen as another user, and note what comes."""

    def listen() -> object:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"\0{name}")
        listener.listen(4)
        return listener

    return listen


@needs_root
def test_nothing_is_said_to_a_listener_of_another_user() -> None:
    name = f"kolovod-test-{secrets.token_hex(8)}"
    by = time.monotonic() + DEADLINE_S
    with running_as_nobody(listening(name)):
        with pytest.raises(AuthenticationError, match="a process of another user"):
            channel.connect(socket.AF_UNIX, f"\0{name}", "", "test", by)
        with pytest.raises(AuthenticationError, match="another user"):
            ask_once(name, "", 1, "host", by)


@needs_root
def test_a_follower_says_nothing_to_a_leader_of_another_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The name of a leader that has ended can be taken: all names can be read."""
    from types import SimpleNamespace
    from typing import Any

    name = f"kolovod-test-{secrets.token_hex(8)}"
    leader: Any = SimpleNamespace(socket=name, pid_namespace="", pid=1, host="h", rank=0)
    joined: Any = SimpleNamespace(formation=None, is_open=False, check=lambda *_: None)
    monkeypatch.setattr(
        "kolovod.rendezvous.segment_handover.greet", lambda *_: pytest.fail("it has been greeted")
    )
    with running_as_nobody(listening(name)), pytest.raises(BootstrapError, match="another user"):
        follow(joined, leader, 1, "secret", time.monotonic() + DEADLINE_S)


@needs_root
def test_a_socket_of_another_user_at_a_path_is_not_spoken_to(folder: Path) -> None:
    """The launcher told it the job's secret, and took its word for what it runs."""
    folder.chmod(0o777)
    for above in folder.parents:
        if above.is_relative_to(tempfile.gettempdir()) and str(above) != tempfile.gettempdir():
            above.chmod(0o755)

    def listen() -> object:
        return unix_sockets.listen_at(folder / "socket")

    with running_as_nobody(listen), pytest.raises(OtherUserError):
        unix_sockets.connect_to(folder / "socket")


@needs_root
def test_an_agent_of_another_user_is_not_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(path: Path) -> socket.socket:
        raise OtherUserError("what listens there is a process of another user")

    monkeypatch.setattr(agent_line, "connect_to", connect)
    with pytest.raises(BootstrapError, match=r"agents/one: what listens .* another user"):
        agent_line.open_socket("one")


@needs_root
def test_another_user_who_connects_is_sent_away(tmp_path: Path) -> None:
    name = f"kolovod-test-{secrets.token_hex(8)}"
    with contextlib.closing(unix_sockets.listen_abstract(name, 4)) as listener:

        def knock() -> None:
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(f"\0{name}")

        assert as_nobody(knock) == 0
        assert unix_sockets.accept_own(listener) is None
        knock()
        own = unix_sockets.accept_own(listener)
        assert own is not None
        own.close()


def test_paths_may_be_long_and_taken_over(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 100) / ("y" * 50)
    path.parent.mkdir()
    for _ in range(2):
        with unix_sockets.listen_at(path) as listener, unix_sockets.connect_to(path):
            own = unix_sockets.accept_own(listener)
            assert own is not None
            assert unix_sockets.peer_process(own) == (os.getpid(), os.geteuid())
            own.close()
    link = tmp_path / "link"
    link.symlink_to(path.parent)
    with pytest.raises(OSError, match=re.escape("[Errno 20]")):
        unix_sockets.connect_to(link / path.name)


def test_what_a_job_leaves_is_for_its_user_only(folder: Path) -> None:
    """With umask 002 others of the group could rename what was in the folders."""
    before = os.umask(0)
    try:
        kept = job_folders.make(["true"], ["again"])
    finally:
        os.umask(before)
    base = folder / "kolovod"
    for path in (base, base / "jobs", kept.path):
        assert path.lstat().st_mode & 0o777 == 0o700, path
    assert [found.name for found in job_folders.found()] == [kept.name]
    base.chmod(0o770)
    assert job_folders.found() == []
    with pytest.raises(BootstrapError, match="others may write to it"):
        job_folders.make(["true"], ["again"])
    with pytest.raises(BootstrapError, match="others may write to it"):
        agent_line.open_socket("one")
    base.chmod(0o700)
    moved = base / "jobs"
    moved.rename(base / "elsewhere")
    moved.symlink_to(base / "elsewhere")
    assert job_folders.found() == []


def test_the_names_of_jobs_cannot_steer_a_terminal(folder: Path) -> None:
    job_folders.make(["a\x1b]0;owned\a"], ["again"])
    with pytest.raises(Exception, match=r"there is no job x") as caught:
        job_folders.find("x")
    assert r"a\x1b]0;owned\x07" in str(caught.value)


def test_there_is_one_folder(folder: Path) -> None:
    assert runtime_folder.runtime_folder() == folder / "kolovod"
