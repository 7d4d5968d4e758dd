"""bench/plan.py and bench/published.py: what they make of figures, and what was published."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import plan
import planned
import published
import pytest
from netbed import unavailable
from paths import BENCH

from kolovod.planning.measured import measured


def test_published_efficiencies_of_512_gpus() -> None:
    """One parameter is fitted to them, on VGG-16; the others are within five points."""
    share, jitter = published.fit()
    assert 0.5 < share < 1
    assert 0 < jitter < 0.1
    by_model = {row["model"]: row for row in published.rows() if row["gpus"] == 512}
    assert by_model["VGG-16"]["predicted"] == pytest.approx(0.68, abs=1e-3)
    for model in ("Inception V3", "ResNet-101"):
        row = by_model[model]
        assert row["published"] == 0.9
        assert abs(row["predicted"] - row["published"]) <= published.GOAL, row


@pytest.mark.parametrize(
    ("model", "millions"), [("Inception V3", 23.8), ("ResNet-101", 44.6), ("VGG-16", 138.4)]
)
def test_models_have_their_parameters(model: str, millions: float) -> None:
    step = published.step_of(model)
    assert step.bytes / 4e6 == pytest.approx(millions, abs=0.05)
    assert step.requests[0].at_s > step.compute_s / 3  # after forward
    assert step.requests[-1].at_s == pytest.approx(step.compute_s)
    # VGG-16's three fully connected layers have most parameters, and come first in backward.
    if model == "VGG-16":
        assert sum(r.bytes for r in step.requests[:3]) > 0.89 * step.bytes


def test_the_page() -> None:
    seen = measured(planned.events())
    runs = {
        (hosts, codec): [(0.05 * hosts, seen), (0.06 * hosts, seen)]
        for hosts in plan.HOSTS
        for codec in plan.CODECS
    }
    rows = plan.compare(runs)
    assert [row["measured_ms"] for row in rows[:1]] == [100.0]
    result = {
        "command": "python bench/plan.py",
        "machine": {"date": "2026-11-25", "cpu": "x", "cores": 2, "kernel": "6", "python": "3"},
        "model": {"layers": 1, "width": 2, "batch": 3, "steps": 4, "rounds": 2},
        "load": [0.1, 0.2],
        "links": {"1G": rows},
    }
    page = plan.page(result)
    assert page.count("**no**") >= 1
    assert "4 hosts, int8" in page
    assert "2 hosts, float32 (planned from)" in page
    assert "512 GPUs, VGG-16" in page


def test_the_real_page_shows_the_real_results() -> None:
    result = json.loads((BENCH / "results" / "plan.json").read_text())
    assert (BENCH / "results" / "plan.md").read_text() == plan.page(result)


@pytest.mark.slow
@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
def test_a_run_between_namespaces(tmp_path: Path) -> None:
    options = argparse.Namespace(width=128, layers=3, batch=8, steps=8)
    step_s, seen = plan.measure(100e6, (3, "int8"), options, tmp_path)
    assert step_s > 0
    assert (seen.cluster.hosts, seen.cluster.hosts_per_machine) == (3, 3)
    assert {request.codec for request in seen.step.requests} >= {"int8"}
    assert plan.predict(seen, (3, "int8")) == pytest.approx(seen.modelled_s)
    assert plan.predict(seen, (4, "none")) > plan.predict(seen, (3, "int8"))
