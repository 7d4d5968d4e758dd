"""Jobs of ``kolovod run --elastic`` that communicate seldom: killed, joined, and replayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jobs_with_deaths import SCRIPT, run
from seldom_elastic import Replay

SELDOM = Path(SCRIPT).with_name("seldom_script.py")
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


@pytest.mark.parametrize(
    "case",
    [
        "fragments",
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in ("local sgd", "diloco", "warmed up", "late")
        ),
    ],
)
def test_deaths_between_exchanges_and_in_one(case: str, tmp_path: Path) -> None:
    done = run("-np", str(FULL), script=(str(SELDOM), case, str(tmp_path)))
    assert done.returncode == 0, done.stderr
    results = results_of(tmp_path, done.stderr)
    assert done.stderr.count("was killed by signal 9") == 4, done.stderr
    replay_of(case, results)
    came = {member for _, members in results[0]["history"] for member in members}
    assert len(came) == FULL + 2
    survivor = next(result for result in results if result["slot"] == 2)
    assert survivor["moved_between"]  # it was in the next world before the next exchange
    assert len(survivor["found"]) == results[0]["steps"] + 1  # and has lost no step of its own
