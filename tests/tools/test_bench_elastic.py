"""bench/elastic.py: it counts right, and finds a job whose steps are wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import elastic as bench
import elastic_rank
import pytest
from elastic_jobs import Job, JobError, Process, TorchrunJob

from kolovod.elastic import MembershipLog
from kolovod.testing import ReplayDiffers

STEPS = 20


def notes(folder: Path, pid: int, *lines: list[Any]) -> Process:
    path = folder / f"{pid}.log"
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return Process(path)


def test_a_process_is_read_in_whole_lines(tmp_path: Path) -> None:
    process = notes(tmp_path, os.getpid(), ["born", 5, 3], ["ready", 9], ["step", 11, 0, 4, 2, 0])
    with (tmp_path / f"{os.getpid()}.log").open("a") as file:
        file.write('["step", 12, 1, ')
        file.flush()
        process.read()
        assert [step.number for step in process.steps] == [0]
        file.write("4, 2, 1]\n")
    process.read()
    assert (process.born_ns, process.ready_ns) == (3, 9)
    assert [(s.at_ns, s.size, s.rank, s.wasted) for s in process.steps] == [
        (11, 4, 2, 0),
        (12, 4, 2, 1),
    ]
    assert process.is_alive()
    assert not notes(tmp_path, 1 << 22).is_alive()


def test_the_next_step_is_one_without_the_dead_rank(tmp_path: Path) -> None:
    """Not one that it has still taken part in, nor one from before."""
    process = notes(
        tmp_path, 1, ["step", 10, 0, 3, 0, 0], ["step", 21, 1, 4, 0, 0], ["step", 30, 2, 3, 0, 0]
    )
    process.read()
    assert bench._next_step(process, 20, 4).at_ns == 30
    assert bench._next_step(process, 30, 4) is None
    again = notes(tmp_path, 2, ["step", 25, 3, 4, -1, 2])  # of torchft, whose size is as before
    again.read()
    assert bench._next_step(again, 20, 4).at_ns == 25
    assert bench._lost([process, again], [], 20, restarts=False) == 2


def test_steps_after_the_checkpoint_are_lost(tmp_path: Path) -> None:
    before = notes(tmp_path, 1, ["step", 10, 16, 4, 0, 0])
    after = notes(tmp_path, 2, ["step", 99, 10, 4, 0, 0])
    for process in (before, after):
        process.read()
    assert bench._lost([before], [after], 20, restarts=True) == 7


def logged(folder: Path, pid: int, change: float = 0.0) -> None:
    """What a rank of two leaves behind; the other one is lost in the middle."""
    model = elastic_rank.NumpyModel()
    log = MembershipLog(model.tensors, every=10)
    for step in range(STEPS):
        members = [0, 1] if step < STEPS // 2 else [1]
        parts = [model.compute(step, member)["weights"] for member in members]
        total = sum(parts[1:], parts[0]) / model.np.float32(len(members))
        model.apply({"weights": total})
        model.weights[0] += change if step == STEPS // 2 else 0
        log.follow(members, ["a"] * len(members), len(members) - 1)
        log.record(members)
    log.save(folder / f"{pid}.members")


def test_a_round_is_replayed(tmp_path: Path) -> None:
    (tmp_path / "stop").write_text(str(STEPS))
    logged(tmp_path, 1)
    assert bench.verify(tmp_path, 1, "kolovod-numpy") == STEPS
    with pytest.raises(JobError, match="1 of 2 ranks have come to the end"):
        bench.verify(tmp_path, 2, "kolovod-numpy")
    logged(tmp_path, 1, 1e-3)
    with pytest.raises(ReplayDiffers, match=f"step {STEPS - 1} of the members"):
        bench.verify(tmp_path, 1, "kolovod-numpy")
    (tmp_path / "stop").write_text(str(STEPS + 1))
    with pytest.raises(JobError, match=f"a rank has made {STEPS} steps, another {STEPS + 1}"):
        bench.verify(tmp_path, 1, "kolovod-numpy")


def test_the_replay_computes_what_backward_does() -> None:
    import torch

    model = elastic_rank.Model()
    for step, member in ((0, 0), (3, 1), (1234, 5)):
        model.optimizer.zero_grad()
        model.backward(step, member)
        known = model.compute(step, member)
        for name, parameter in model.module.named_parameters():
            assert torch.equal(parameter.grad, known[name])


def test_ranks_stop_before_the_same_step(tmp_path: Path) -> None:
    own = elastic_rank.Notes(tmp_path)
    assert not own.stops(10**9)
    (tmp_path / "stop").write_text("7")
    assert [own.stops(step) for step in (6, 7, 8)] == [False, True, True]


def kills(system: str, next_ms: float, lost: int = 0) -> dict[str, Any]:
    return {
        "system": system,
        "rank": 0,
        "next_ms": next_ms,
        "joiner_ms": 1000.0,
        "joiner_ready_ms": 50.0,
        "lost": lost,
    }


def test_goals_that_are_missed_are_in_the_table() -> None:
    found = [kills("kolovod", 80.0), kills("kolovod", 90.0), kills("kolovod", 400.0, 1)]
    found += [kills("torchft, defaults", 5000.0), {"system": "torchft, defaults", "failed": "so"}]
    found.append({"system": "torchrun, tuned", "failed": "not within 120 s; its last words:"})
    result = {
        "kills": bench.summarize(found),
        "samples": found,
        "cost": None,
        "replayed": 7,
        "interrupted": True,
    }
    assert bench.goals(result) == [
        ["kolovod: median to the next step", "90.0 ms", "100 ms", "yes"],
        ["kolovod: p99 to the next step", "400 ms", "300 ms", "no"],
        ["kolovod: steps lost", "1", "0", "no"],
        ["times faster than torchft, defaults", "55.6x", "50x", "yes"],
    ]
    text = bench.make(
        result, {"date": "d", "cpu": "c", "cores": 1, "kernel": "k", "python": "p"}, (1.0, 2.0)
    )
    assert (
        "| torchft, defaults | 5,000 | 5,000 | 5,000 | 5,000 | 1.00 | 0.05 | 0.0 (0) | 1 | 1 |"
        in text
    )
    assert "these have no row:\n\n- torchrun, tuned: not within 120 s\n\n7 steps" in text


def test_a_job_that_stands_still_is_an_error(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("elastic_jobs.LIMIT_S", 0.1)
    job = Job(2, tmp_path)
    (tmp_path / "output").write_text("[INFO] noise\nlast words\n")
    with pytest.raises(JobError, match=r"2 ranks that make steps: not within 0\.1 s.*\nlast words"):
        job.whole()
    assert not isinstance(job, TorchrunJob)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_short_run_kills_and_replays(tmp_path: Path) -> None:
    output = tmp_path / "results"
    options = ["--rounds", "1", "--kills", "1", "--peer-kills", "0", "--many", "3", "--np", "2"]
    assert bench.main([*options, "--steps", "0", "--output", str(output)]) == 0
    result = json.loads((output / "elastic.json").read_text())
    assert {one["system"] for one in result["samples"]} == {"kolovod", "kolovod, 3 ranks"}
    assert all(one["lost"] == 0 for one in result["samples"])
    assert (output / "elastic.md").read_text().startswith("# After kill -9")
