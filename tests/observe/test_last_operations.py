"""The last operations of each rank, in real processes: asked for, and written out on failure."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import run_ranks
from waiting import Marks

import kolovod as kv
from kolovod.errors import RankLostError
from kolovod.testing import RankFailed


def ones() -> np.ndarray:
    return np.ones(4, np.float32)


def test_last_operations_of_a_world_of_one() -> None:
    kv.init()
    try:
        before = time.time()
        kv.allreduce(ones(), name="a")
        kv.grouped_allreduce([ones(), ones()], name="b")
        kv.barrier()
        a, b, c = kv.last_operations()
    finally:
        kv.shutdown()
    assert (a["number"], a["name"], a["verb"], a["dtype"]) == (1, "a", "allreduce", "float32")
    assert (a["tensors"], a["bytes"], a["bucket"], a["state"]) == (1, 16, 1, "done")
    assert before - 1 < a["submitted_at_s"] <= a["started_at_s"] <= a["ended_at_s"] < before + 60
    assert (b["tensors"], b["bytes"]) == (2, 32)
    assert (c["verb"], c["dtype"], c["tensors"]) == ("barrier", None, 0)


def test_a_process_sets_operations_are_its_own() -> None:
    def work(rank: int) -> tuple[list[str], list[str]]:
        kv.init()
        pair = kv.add_process_set([0, 1]) if kv.size() > 2 else kv.global_process_set
        kv.allreduce(ones(), name="world")
        names = []
        if rank < 2:
            kv.allreduce(ones(), name="pair", process_set=pair)
            names = [op["name"] for op in kv.last_operations(pair)]
        return names, [op["name"] for op in kv.last_operations()][-1:]

    results = run_ranks(3, work)
    assert results == [(["pair"], ["world"])] * 2 + [([], ["world"])]


def read_file(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    header, *records = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return header, records


def test_the_file_after_a_kill_has_what_was_pending(tmp_path: Path) -> None:
    through = Marks(tmp_path / "through")

    def work(rank: int) -> str:
        kv.init()
        for i in range(300):
            kv.allreduce(ones(), name=f"step{i % 3}")
        if rank == 1:
            kv.allreduce_async(ones(), name="only on rank 1")
            through.wait_for(0, 2)
            os.kill(os.getpid(), signal.SIGKILL)
        through.make(rank)
        with pytest.raises(RankLostError) as caught:
            kv.allreduce(ones(), name="the last \u00e9")
        return str(caught.value)

    env = {"KOLOVOD_LAST_OPERATIONS_DIR": str(tmp_path / "made")}
    results = run_ranks(3, work, env=env, keep_going=True)
    assert isinstance(results[1], RankFailed)
    files = sorted((tmp_path / "made").iterdir())
    kinds = [file.name.split("-", 2)[2] for file in files]
    assert [kind.split("-")[0] for kind in kinds] == ["rank0", "rank1", "rank2"]
    assert kinds[1] == "rank1-lost.jsonl"
    for rank in (0, 2):
        assert f"the last operations of this rank: {files[rank]}" in results[rank]
        assert files[rank].stat().st_mode & 0o777 == 0o600
        header, records = read_file(files[rank])
        assert (header["rank"], header["size"], header["epoch"]) == (rank, 3, 1)
        assert header["who"].startswith(f"rank {rank} on host localhost (pid ")
        assert header["reason"].startswith("rank 1 on host localhost")
        assert abs(header["written_at_s"] - time.time()) < 300
        # The file holds the last 256 at most; "the last" was submitted or refused at once.
        assert 250 <= len(records) <= 256
        if records[-1]["name"] == "the last \u00e9":
            assert records[-1]["state"] == "submitted"
            records.pop()
        assert (records[-1]["name"], records[-1]["state"]) == ("step2", "done")
    header, records = read_file(files[1])
    assert header["rank"] == 1
    assert (records[-1]["name"], records[-1]["state"]) == ("only on rank 1", "submitted")


def test_the_pending_operation_is_in_the_file_of_the_rank_that_waits(tmp_path: Path) -> None:
    marks = Marks(tmp_path / "marks")

    def work(rank: int) -> None:
        kv.init()
        kv.allreduce(ones(), name="before")
        if rank == 1:
            marks.wait_for("submitted")
            os.kill(os.getpid(), signal.SIGKILL)
        handle = kv.allreduce_async(ones(), name="waiting")
        marks.make("submitted")
        with pytest.raises(RankLostError):
            handle.wait()

    env = {"KOLOVOD_LAST_OPERATIONS_DIR": "", "XDG_RUNTIME_DIR": str(tmp_path)}
    run_ranks(2, work, env=env, keep_going=True)
    folder = tmp_path / "kolovod"
    assert folder.stat().st_mode & 0o777 == 0o700
    files = {file.name.split("-")[2]: read_file(file)[1] for file in folder.iterdir()}
    assert (files["rank0"][-1]["name"], files["rank0"][-1]["state"]) == ("waiting", "submitted")
    assert (files["rank1"][-1]["name"], files["rank1"][-1]["state"]) == ("before", "done")


def test_neither_a_mismatch_nor_a_clean_end_writes_a_file(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        kv.init()
        with pytest.raises(kv.errors.MismatchError):
            kv.allreduce(np.ones(2 + rank), name="t")
        kv.barrier()
        kv.shutdown()

    run_ranks(2, work, env={"KOLOVOD_LAST_OPERATIONS_DIR": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []
