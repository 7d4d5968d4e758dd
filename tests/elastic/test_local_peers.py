"""Members on this host whose ends others prove."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from kolovod.coordination import record_file
from kolovod.coordination.consensus import NOTHING, Ballot, Record
from kolovod.coordination.protocol import Contact
from kolovod.elastic.local_peers import LocalPeers, pid_space


@pytest.fixture(name="record")
def made_record() -> Iterator[tuple[int, str]]:
    """Its descriptor, here and in ``process``, and where this process finds it."""
    fd, path = record_file.new_file()
    yield fd, path
    os.close(fd)


@pytest.fixture(name="process")
def made_process(record: tuple[int, str]) -> Iterator[subprocess.Popen[bytes]]:
    code = "import time; time.sleep(100)"
    process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[record[0]])
    yield process
    process.kill()
    process.wait()


def contact(process: subprocess.Popen[bytes], fd: int, space: str | None = None) -> Contact:
    path = f"/proc/{process.pid}/fd/{fd}"
    return Contact(3, "", process.pid, pid_space() if space is None else space, path)


def ended(local_peers: LocalPeers) -> list[tuple[int, Record | None]]:
    deadline = time.monotonic() + 10
    while not (proofs := local_peers.ended()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [(proof.number, proof.record) for proof in proofs]


def test_the_end_of_a_process_comes_with_its_record(
    process: subprocess.Popen[bytes], record: tuple[int, str]
) -> None:
    local_peers = LocalPeers()
    local_peers.add(contact(process, record[0]))
    local_peers.add(contact(process, record[0]))  # it is watched once
    assert len(local_peers.fds()) == 1
    assert local_peers.ended() == []
    left = Record(Ballot(7, 2))
    record_file.RecordFile(record[1]).write(left)
    process.kill()
    assert ended(local_peers) == [(3, left)]
    assert local_peers.fds() == []


def test_one_that_has_written_nothing_has_promised_nothing(
    process: subprocess.Popen[bytes], record: tuple[int, str]
) -> None:
    local_peers = LocalPeers()
    local_peers.add(contact(process, record[0]))
    process.kill()
    assert ended(local_peers) == [(3, NOTHING)]


@pytest.mark.parametrize("space", ["", "another boot pid:[4026531836]"])
def test_pids_of_other_hosts_are_not_watched(
    process: subprocess.Popen[bytes], record: tuple[int, str], space: str
) -> None:
    local_peers = LocalPeers()
    local_peers.add(contact(process, record[0], space))
    assert local_peers.fds() == []


def test_a_process_without_a_record_may_be_another_one(
    process: subprocess.Popen[bytes], record: tuple[int, str]
) -> None:
    """Which has got the pid of one that has ended."""
    local_peers = LocalPeers()
    local_peers.add(contact(process, 0))  # another file
    local_peers.add(contact(process, 77))  # none
    local_peers.add(
        contact(process, record[0])._replace(record_path=record[1])
    )  # another process's
    local_peers.add(contact(process, record[0])._replace(record_path="/etc/passwd"))
    assert local_peers.fds() == []
    before = len(os.listdir("/proc/self/fd"))
    local_peers.add(contact(process, record[0]))
    local_peers.close()
    assert len(os.listdir("/proc/self/fd")) == before
