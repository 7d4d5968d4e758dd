"""Jobs of ``kolovod run --elastic`` that communicate seldom: killed, joined, and replayed."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import periodic_members
import periodic_replay
import pytest
from jobs_with_deaths import SCRIPT, run
from periodic_elastic import Replay
from slow import thorough_but
from test_elastic_frameworks import DEADLINE_S, QUIET

PERIODIC = Path(SCRIPT).with_name("periodic_script.py")
FULL = 3


def results_of(folder: Path, stderr: str) -> list[dict[str, Any]]:
    results = [json.loads(path.read_text()) for path in folder.iterdir()]
    assert sorted(result["slot"] for result in results) == list(range(FULL)), stderr
    for result in results:
        for fact in ("log", "history", "steps"):
            assert result[fact] == results[0][fact]
    return results


def replay_of(case: str, results: list[dict[str, Any]]) -> None:
    """One process makes the same, of all processes, given who was there."""
    log = [tuple(members) for members in results[0]["log"]]
    (_, first), *history = results[0]["history"]
    replay = Replay(case, 10, tuple(first), log)
    came = dict(history)
    for step in range(1, results[0]["steps"] + 2):
        if step <= results[0]["steps"]:
            replay.step()
        else:
            replay.synchronize()
        for result in results:
            found = result["found"].get(str(step))
            if found is not None:
                assert replay.sums(result["member"]) == found, (step, result["member"])
        if step in came:
            replay.join(tuple(came[step]))
    assert not replay.log
    final = [result["found"][str(results[0]["steps"] + 1)] for result in results]
    assert final[0] == final[1] == final[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    thorough_but(
        ("fragments", "local sgd", "late"),
        ("fragments", "local sgd", "diloco", "warmed up", "late"),
    ),
)
def test_deaths_between_exchanges_and_in_one(case: str, tmp_path: Path) -> None:
    done = run("-np", str(FULL), script=(str(PERIODIC), case, str(tmp_path)))
    assert done.returncode == 0, done.stderr
    results = results_of(tmp_path, done.stderr)
    assert done.stderr.count("was killed by signal 9") == 4, done.stderr
    replay_of(case, results)
    came = {member for _, members in results[0]["history"] for member in members}
    assert len(came) == FULL + 2
    survivor = next(result for result in results if result["slot"] == 2)
    assert survivor["moved_between"]  # it was in the next world before the next exchange
    assert len(survivor["found"]) == results[0]["steps"] + 1  # and has lost no step of its own


@pytest.mark.frameworks
@pytest.mark.slow
@pytest.mark.timeout(330)
def test_diloco_of_jax(tmp_path: Path) -> None:
    script = str(PERIODIC.with_name("periodic_jax_script.py")), str(tmp_path)
    done = run("-np", str(FULL), script=script, deadline_s=DEADLINE_S, env=QUIET)
    assert done.returncode == 0, done.stderr
    results = results_of(tmp_path, done.stderr)
    (_, first), *history = results[0]["history"]
    assert len({member for _, members in results[0]["history"] for member in members}) == FULL + 2
    log = [tuple(members) for members in results[0]["log"]]
    replay = periodic_members.Replay(
        tuple(first), log, 6, fragments=((0,), (1,), (2,)), delay=3, share=0.25
    )
    came = dict(history)
    for step in range(1, results[0]["steps"] + 2):
        is_last = step > results[0]["steps"]
        replay.synchronize() if is_last else replay.step()
        for result in results:
            found = result["found"].get(str(step))
            if found is not None:
                right = replay.common if is_last else replay.ranks[result["member"]].parameters
                for one, other in zip(found, right, strict=True):
                    np.testing.assert_allclose(one, other, 1e-11, 1e-11)
        if step in came:
            replay.join(tuple(came[step]))
    assert not replay.log


def replay_of_fit(results: list[dict[str, Any]]) -> None:
    """Local SGD in NumPy, whose members come and go."""
    (_, first), *history = results[0]["history"]
    log = [tuple(members) for members in results[0]["log"]]
    ranks = {member: periodic_replay._Rank() for member in first}
    came = dict(history)
    for step in range(results[0]["steps"] + 1):
        now = came.get(step, ())
        for member in set(now) - set(ranks):
            ranks[member] = copy.deepcopy(ranks[now[0]])
        if step == results[0]["steps"]:
            break
        for member, rank in ranks.items():
            rank.step(rank.gradients(member % 5, step))
        if (step + 1) % 4 == 0:
            who = log.pop(0)
            ranks = {member: ranks[member] for member in who}
            mean = periodic_replay._mean([rank.parameters for rank in ranks.values()])
            for rank in ranks.values():
                rank.parameters = [p.copy() for p in mean]
        for result in results:
            found = result["found"].get(str(step + 1))
            if found is not None:
                for one, other in zip(found, ranks[result["member"]].parameters, strict=True):
                    np.testing.assert_allclose(one, other, 1e-12, 1e-12)
    assert not log


@pytest.mark.frameworks
@pytest.mark.slow
@pytest.mark.timeout(330)
@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
def test_fit_with_local_sgd(backend: str, tmp_path: Path) -> None:
    env = {
        **QUIET,
        "KERAS_BACKEND": backend,
        "TF_USE_LEGACY_KERAS": "0",
    }
    script = str(PERIODIC.with_name("periodic_fit_script.py")), str(tmp_path)
    done = run("-np", "2", script=script, deadline_s=DEADLINE_S, env=env)
    assert done.returncode == 0, done.stderr
    results = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
    assert sorted(result["slot"] for result in results) == [0, 1], done.stderr
    for fact in ("log", "history", "steps", "last"):
        assert results[0][fact] == results[1][fact]
    assert len({member for _, members in results[0]["history"] for member in members}) == 3
    replay_of_fit(results)
