"""examples/elastic_torch.py, whose processes end themselves, and its chart."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from types import ModuleType

import pytest
from launched import KOLOVOD
from paths import EXAMPLES


@pytest.fixture(scope="module")
def chart() -> ModuleType:
    spec = importlib.util.spec_from_file_location("elastic_chart", EXAMPLES / "elastic_chart.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_chart_shows_both_runs_and_who_was_there(chart: ModuleType) -> None:
    sizes = [3] * 10 + [2] * 20 + [3] * 10
    lines = chart.draw([2.0] * 20 + [0.5] * 20, sizes, [2.0] * 40, width=40).splitlines()
    assert lines[0] == f"  2.000 |{'8' * 20}{'.' * 20}"
    assert lines[chart.HEIGHT - 1] == f"  0.500 |{' ' * 20}{'o' * 20}"
    assert lines[-3].endswith("40")
    assert lines[-2] == f"  ranks  {'3' * 10}{'2' * 20}{'3' * 10}"
    assert lines[-1] == f"         {' ' * 10}x{' ' * 19}+"


def test_many_steps_share_a_column(chart: ModuleType) -> None:
    lines = chart.draw([4.0, 2.0, 1.0, 1.0], [2, 1, 1, 12], [], width=2).splitlines()
    assert lines[0] == "  3.000 |o "
    assert lines[chart.HEIGHT - 1] == "  1.000 | o"
    assert lines[-2:] == ["  ranks  1#", "         x+"]
    assert chart.draw([], [], []) == ""
    assert chart.draw([0.0], [1], []).count("o") == 1


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_ranks_come_back_and_no_step_is_lost() -> None:
    command = [*KOLOVOD, "run", "--elastic", "-np", "2", "--", sys.executable]
    command += [str(EXAMPLES / "elastic_torch.py"), "--kills", "2", "--compare"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=350)
    assert done.returncode == 0, done.stderr
    (steps,) = re.findall(r"all (\d+) steps are the same, bit for bit", done.stdout)
    assert int(steps) >= 300
    assert f"{steps} steps, 2 kills: " in done.stdout
    assert re.findall(r"rank (\d) of 2 ends", done.stdout) == ["1", "0"]
    assert done.stderr.count("joined on localhost") == 2
