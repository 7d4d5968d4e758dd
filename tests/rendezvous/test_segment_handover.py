"""kolovod.rendezvous.segment_handover: the shared segment, and the errors when there is none."""

from __future__ import annotations

import errno
import os

import pytest
from forked import run_ranks

import kolovod as kv
from kolovod import _native
from kolovod.config import Settings
from kolovod.errors import BootstrapError
from kolovod.rendezvous import segment_handover
from kolovod.rendezvous.mesh import describe
from kolovod.rendezvous.protocol import Member
from kolovod.rendezvous.segment_handover import make_segment

CONFIG = Settings().engine_config()


def test_the_segment_is_reserved_and_its_lack_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = _native.segment_bytes(2, 2, CONFIG)
    fd = make_segment(2, 2, CONFIG)
    assert os.fstat(fd).st_blocks * 512 >= wanted
    os.close(fd)

    def refuse(*_: object) -> int:
        raise OSError(errno.EPERM, "not in this sandbox")

    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", refuse)
        fd = make_segment(2, 2, CONFIG)
        assert os.fstat(fd).st_size == wanted
        assert os.fstat(fd).st_nlink == 0
        os.close(fd)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(BootstrapError, match=rf"no {wanted} bytes of shared memory.*CHUNK_BYTES"):
        make_segment(2, 2, CONFIG)


def test_ranks_are_described_by_both_numbers() -> None:
    assert describe(1, Member(1, "a", 17, "", "", 0)) == "rank 1 on host a (pid 17)"
    assert (
        describe(1, Member(2, "a", 17, "", "", 0))
        == "rank 1 on host a (pid 17, launched as rank 2)"
    )


def fail_to_form(rank: int) -> str:
    def sealed(*_: object) -> int:
        raise PermissionError("memory is sealed")

    if rank == 0:
        segment_handover.make_segment = sealed
    try:
        kv.init()
    except (BootstrapError, PermissionError) as error:
        return f"{type(error).__name__}: {error}"
    return "formed"


def test_whatever_the_leader_fails_of_is_told_to_all() -> None:
    first, *others = run_ranks(3, fail_to_form)
    assert first == "PermissionError: memory is sealed"
    told = "the leader of the world could not form it: PermissionError: memory is sealed"
    assert others == [f"BootstrapError: {told}"] * 2
