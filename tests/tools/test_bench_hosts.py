"""bench/hosts.py and bench/overlap.py: what they make of figures, and small runs over a bed."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import hosts_report
import pytest
from hosts_report import MIB, Link
from netbed import unavailable
from paths import BENCH

SLOW, FAST = Link("100M", 100e6, 0), Link("unlimited", 0, 0)


def row(link, size, kolovod, gloo, bound_us=1.0):
    return {
        "hosts": 2,
        "local": 1,
        "link": link.name,
        "bytes": size,
        "bound_us": bound_us,
        "us": {"kolovod": {"median": kolovod}, "gloo": {"median": gloo}},
    }


def test_the_bound():
    assert hosts_report.bound_s(2, 1000, 500.0) == 2.0
    assert hosts_report.bound_s(4, 1000, 500.0) == 3.0


@pytest.mark.parametrize(
    ("rows", "links", "verdicts"),
    [
        ([row(SLOW, 4, 10, 20), row(SLOW, 64 * MIB, 100, 99, 95)], [SLOW], [False, True, True]),
        ([row(SLOW, 4, 10, 19), row(SLOW, 64 * MIB, 100, 100, 94)], [SLOW], [True, False, False]),
        ([row(FAST, 4, 9, 1), row(FAST, MIB, 10, 12), row(FAST, 4 * MIB, 1, 9)], [FAST], [True]),
        ([row(FAST, MIB, 10, 20), row(FAST, 4 * MIB, 10, 11.9)], [FAST], [False]),
    ],
)
def test_a_missed_goal_is_shown_as_missed(rows, links, verdicts):
    assert [goal[3] for goal in hosts_report.goal_rows(rows, links)] == verdicts


def test_goals_want_both_peers():
    alone = row(SLOW, 4, 10, 20)
    del alone["us"]["gloo"]
    assert hosts_report.goal_rows([alone], [SLOW]) == []
    assert hosts_report.over_gloo(alone) is None


@pytest.mark.slow
@pytest.mark.skipif(bool(unavailable(with_delay=True)), reason=unavailable(with_delay=True))
def test_a_small_run_writes_verified_results(tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, str(BENCH / "hosts.py"), "--hosts", "2", "--local", "1"),
            *("--links", "unlimited,100M+1ms", "--sizes", "8,65536", "--rounds", "1"),
            *("--budget-s", "0.01", "--output", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "hosts.json").read_text())
    assert result["wrong"] == {"kolovod": 0, "gloo": 0}
    assert min(result["checked"].values()) > 0
    rows = {(one["link"], one["bytes"]): one for one in result["rows"]}
    assert set(rows) == {(link, size) for link in ("unlimited", "100M+1ms") for size in (8, 65536)}
    for one in rows.values():
        assert set(one["us"]) == {"kolovod", "gloo"}
        assert all(0 < us["min"] <= us["median"] <= us["max"] for us in one["us"].values())
    # There and back again, over two links each way.
    assert rows["100M+1ms", 8]["us"]["kolovod"]["min"] > 1000
    (delayed,) = [one for one in result["rates"] if one["link"] == "100M+1ms"]
    assert all(rate < 100e6 / 8 for rate in delayed["bytes_per_s"])
    text = (tmp_path / "hosts.md").read_text()
    assert "| 2 x 1, 64 KiB |" in text
    assert "4 B, over gloo" not in text  # there was no such size
    picture = ElementTree.parse(tmp_path / "hosts.svg").getroot()
    lines = [node for node in picture.iter() if node.tag.endswith("polyline")]
    assert len(lines) > 6


def test_nothing_of_the_last_bucket_is_hidden():
    import overlap

    medians = {"forward": 10, "backward": 30, "communication": 40, "last_bucket": 5, "update": 1}
    found = {phase: {"median": ms} for phase, ms in medians.items()}
    found["step"] = {"median": 70}
    found["busy_ms"] = 0
    assert overlap.bound_ms(found) == 10 + 40 + 5 + 1
    found["communication"]["median"] = 20
    assert overlap.bound_ms(found) == 10 + 30 + 5 + 1
    found["busy_ms"] = 1000
    assert overlap.bound_ms(found) == 10 + 30 + 5 + 1
    assert overlap.cores_bound_ms(found) == (2 * 41 + 1000) / overlap.machine.cores()


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
def test_a_small_overlap_is_measured(tmp_path):
    command = [sys.executable, str(BENCH / "overlap.py"), "--quick", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    (case,) = json.loads((tmp_path / "overlap-quick.json").read_text())["cases"]
    assert case["wrong"] == 0
    assert case["step"]["samples"] == 3
    assert case["bound_ms"] > case["communication"]["median"] > 0
